"""The parity matrix: scheme x pooling x weighted x dims x topology x id route x precision, against the plain module.

`make test` runs a pairwise cover: every value of a factor meets every value of each other one in some case. `make
parity` runs all cases. Batches are even and uneven in turn, optimizers take turns too. What the global route refuses
(data-parallel and row-wise tables) is tested in test_id_routes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from itertools import combinations, product

import pytest

from dmt import TowerMesh, TowerTopology
from tests.ranks import run_ranks
from tests.sptt_case import MIXES, OPTIMIZERS, PRECISIONS, Case, check_worst, parity_on_rank

pytestmark = pytest.mark.ranks
SCHEMES = ("table_wise", "row_wise", "column_wise", "data_parallel", *MIXES)
TOPOLOGIES = {
    (1, 2): ((0, 1, 2, 3),),
    (2, 1): ((3, 0), (1, 2)),
    (2, 2): ((0, 2), (1, 3)),
    (2, 3): ((3, 1, 0), (2,)),
    (3, 2): ((2,), (3, 0), (1,)),
    (2, 4): ((1, 0, 3), (2,)),  # towers of four ranks: two hosts each
}


def carried(case: Case) -> bool:
    """Whether the case's id route carries its tables."""
    schemes = MIXES.get(case.scheme, (case.scheme,)) if case.ranks > 1 else ("table_wise",)
    return case.id_route == "peer" or not {"data_parallel", "row_wise"} & set(schemes)


def cases_of(towers: int, ranks: int) -> list[Case]:
    cases = []
    for i, (kind, scheme, (pooling, weighted, max_bag), dims, route, precision) in enumerate(
        product(
            ("modules", "flat"),
            SCHEMES,
            (("SUM", False, 1), ("SUM", False, 3), ("MEAN", False, 3), ("SUM", True, 3)),
            ((8, 8, 8, 8), (8, 16, 4, 12)),
            ("peer", "global"),
            PRECISIONS,
        )
    ):
        case = Case(
            towers=towers,
            ranks=ranks,
            plan=TOPOLOGIES[towers, ranks],
            kind=kind,
            scheme=scheme,
            pooling=pooling,
            weighted=weighted,
            max_bag=max_bag,
            dims=dims,
            id_route=route,
            precision=precision,
            optimizer=list(OPTIMIZERS)[i % 3] if precision == "fp32" else "sgd",
            sizes=tuple(3 + (rank * 2) % 5 for rank in range(towers * ranks)) if i % 5 % 2 else (),
            unique=route == "peer" and i % 7 % 2 == 1,
        )
        if carried(case):
            cases.append(case)
    return cases


# What a case has of each factor.
FACTORS: dict[str, Callable[[Case], Hashable]] = {
    "topology": lambda case: (case.towers, case.ranks),
    "kind": lambda case: case.kind,
    "scheme": lambda case: case.scheme,
    "bags": lambda case: (case.pooling, case.weighted, case.max_bag),
    "dims": lambda case: case.dims,
    "route": lambda case: case.id_route,
    "unique": lambda case: case.unique,
    "precision": lambda case: case.precision,
    "optimizer": lambda case: case.optimizer,
    "even": lambda case: not case.sizes,
}


def pairs(case: Case) -> set[tuple[tuple[str, Hashable], ...]]:
    """Each two factors with what the case has of them."""
    return set(combinations(((name, value(case)) for name, value in FACTORS.items()), 2))


@cache
def pairwise_cover() -> list[Case]:
    """Some cases of the matrix that have every pair of values which any case has; greedily, small worlds first."""
    left = {case: pairs(case) for topology in TOPOLOGIES for case in cases_of(*topology)}
    missing, cover = set().union(*left.values()), []
    while missing:
        best = max(left, key=lambda case: (len(left[case] & missing), -case.world))
        missing -= left.pop(best)
        cover.append(best)
    return cover


def matrix_on_rank(rank: int, towers: int, ranks: int, cases: list[Case]) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))
    for case in cases:
        try:
            check_worst(case, parity_on_rank(rank, case, mesh))
        except Exception as error:
            error.add_note(f"in {case}")
            raise


@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_a_pairwise_cover_of_the_parity_matrix(towers: int, ranks: int) -> None:
    cases = [case for case in pairwise_cover() if (case.towers, case.ranks) == (towers, ranks)]
    assert cases
    run_ranks(matrix_on_rank, towers * ranks, towers, ranks, cases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_the_whole_parity_matrix(towers: int, ranks: int, part: int) -> None:
    run_ranks(matrix_on_rank, towers * ranks, towers, ranks, cases_of(towers, ranks)[part::8], timeout_s=1200)


def test_the_matrix_is_as_large_as_it_claims() -> None:
    assert sum(len(cases_of(*topology)) for topology in TOPOLOGIES) > 2000


def test_the_cover_has_every_pair_of_factors() -> None:
    everything = [case for topology in TOPOLOGIES for case in cases_of(*topology)]
    assert set(pairwise_cover()) <= set(everything)
    wanted = set().union(*map(pairs, everything))
    assert {(one, other) for (one, _), (other, _) in wanted} == set(combinations(FACTORS, 2))
    assert set().union(*map(pairs, pairwise_cover())) == wanted
    assert len(pairwise_cover()) < len(everything) / 20
