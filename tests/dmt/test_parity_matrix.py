"""The parity matrix: scheme x pooling x weighted x dims x topology x id route x precision, against the plain module.

`make test` runs every 37th case; `make parity` runs them all. Batches are even and uneven in turn, optimizers take
turns too. What the global route refuses (data-parallel tables, mean-pooled row-wise ones) is tested in
test_id_routes.py.
"""

from __future__ import annotations

from itertools import product

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
    return case.id_route == "peer" or not (
        "data_parallel" in schemes or (case.pooling == "MEAN" and "row_wise" in schemes)
    )


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
        )
        if carried(case):
            cases.append(case)
    return cases


def matrix_on_rank(rank: int, towers: int, ranks: int, cases: list[Case]) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))
    for case in cases:
        try:
            check_worst(case, parity_on_rank(rank, case, mesh))
        except Exception as error:
            error.add_note(f"in {case}")
            raise


@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_a_part_of_the_parity_matrix(towers: int, ranks: int) -> None:
    run_ranks(matrix_on_rank, towers * ranks, towers, ranks, cases_of(towers, ranks)[::37])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_the_whole_parity_matrix(towers: int, ranks: int, part: int) -> None:
    run_ranks(matrix_on_rank, towers * ranks, towers, ranks, cases_of(towers, ranks)[part::8], timeout_s=600)


def test_the_matrix_is_as_large_as_it_claims() -> None:
    assert sum(len(cases_of(*topology)) for topology in TOPOLOGIES) > 2000
