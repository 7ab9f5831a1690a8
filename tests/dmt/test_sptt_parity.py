"""SPTT against the plain single-process module, on gloo ranks; how a case runs is in `tests.sptt_case`."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.seeds import some_slow
from tests.sptt_case import Case, check_worst, parity_on_rank

pytestmark = pytest.mark.ranks

# What the pairwise cover of test_parity_matrix.py has too is left to it.
CASES = {
    "modules": Case(towers=2, ranks=2),
    "flat": Case(towers=2, ranks=2, kind="flat"),
    "column-wise-flat-2x3": Case(
        towers=2, ranks=3, plan=((0, 2), (3, 1)), scheme="column_wise", kind="flat", dims=(24, 8, 16, 4)
    ),
    "auto-one-table-towers": Case(towers=2, ranks=2, dims=(16, 8), plan=((1,), (0,)), scheme="column_wise"),
    "one-table-towers-idle-rank": Case(towers=2, ranks=2, dims=(16, 8), plan=((1,), (0,))),
    "pass-through": Case(towers=2, ranks=2, kind="pass"),
    "frozen": Case(towers=2, ranks=2, kind="frozen"),
    "swapped": Case(towers=2, ranks=2, placement=(1, 0), dims=(8, 4, 8, 4)),
    "swapped-pass-3x2": Case(
        towers=3, ranks=2, plan=((2,), (3, 0), (1,)), placement=(2, 0, 1), kind="pass", dims=(8, 4, 12, 16)
    ),
    "two-towers-on-one-host": Case(towers=2, ranks=2, plan=((0,), (3,), (1, 2)), placement=(1, 0, 1)),
    "batch-of-one": Case(towers=2, ranks=2, sizes=(1, 1, 1, 1)),
    "uneven-flat-column-wise": Case(towers=2, ranks=2, sizes=(6, 1, 3, 2), kind="flat", scheme="column_wise"),
    "row-wise-mean-uneven-batches": Case(
        towers=2, ranks=2, scheme="row_wise", max_bag=4, pooling="MEAN", sizes=(2, 6, 1, 3), kind="flat"
    ),
    "data-parallel-weighted-uneven": Case(
        towers=2, ranks=2, scheme="data_parallel", max_bag=3, weighted=True, sizes=(1, 4, 2, 3)
    ),
    "mixed-mean": Case(
        towers=1, ranks=3, plan=((3, 2, 1, 0),), scheme="mixed", max_bag=3, pooling="MEAN", dims=(8, 16, 12, 4)
    ),
    "mixed-flat-mean-uneven": Case(
        towers=2,
        ranks=2,
        plan=((0, 5, 2, 7), (4, 1, 6, 3)),
        scheme="mixed",
        kind="flat",
        max_bag=4,
        pooling="MEAN",
        dims=(4, 8, 12, 16, 8, 4, 20, 8),
        sizes=(3, 5, 1, 4),
    ),
    "mixed-two-towers-on-one-host": Case(
        towers=2, ranks=2, plan=((0,), (3,), (1, 2)), placement=(1, 0, 1), scheme="mixed", dims=(8, 8, 16, 8)
    ),
    "a-tower-over-two-hosts-of-two": Case(towers=2, ranks=4, plan=((2, 0), (1, 3)), scheme="mixed", dims=(8, 8, 24, 8)),
    "unequal-towers": Case(
        towers=2, ranks=2, plan=((4, 1, 3, 0), (2,)), scheme="mixed", dims=(8, 4, 8, 16, 8), kind="flat"
    ),
}


# Three factors of the matrix together, of which the cover has each two; and cases that another one here contains.
SLOW = (
    "column-wise-flat-2x3",
    "swapped",
    "two-towers-on-one-host",
    "uneven-flat-column-wise",
    "row-wise-mean-uneven-batches",
    "data-parallel-weighted-uneven",
)


@pytest.mark.parametrize("name", some_slow(CASES, SLOW))
def test_sptt_equals_the_single_process_module(name: str) -> None:
    case = CASES[name]
    for worst in run_ranks(parity_on_rank, case.world, case):
        check_worst(case, worst)
