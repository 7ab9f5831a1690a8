"""SPTT against the plain single-process module, on gloo ranks; how a case runs is in `tests.sptt_case`."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.sptt_case import Case, check_worst, parity_on_rank

pytestmark = pytest.mark.ranks

TOPOLOGIES = {
    (1, 2): ((0, 1, 2, 3),),
    (2, 1): ((3, 0), (1, 2)),
    (2, 2): ((0, 2), (1, 3)),
    (2, 3): ((3, 1, 0), (2,)),
    (3, 2): ((2,), (3, 0), (1,)),
}
CASES = {
    **{
        f"{k}-{t}x{r}": Case(towers=t, ranks=r, plan=p, kind=k)
        for (t, r), p in TOPOLOGIES.items()
        for k in ("modules", "flat")
    },
    "column-wise": Case(towers=2, ranks=2, scheme="column_wise", dims=(8, 16, 24, 8)),
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
    "multi-hot": Case(towers=2, ranks=2, max_bag=4),
    "multi-hot-mean": Case(towers=2, ranks=2, max_bag=4, pooling="MEAN"),
    "multi-hot-mean-flat": Case(towers=2, ranks=2, max_bag=4, pooling="MEAN", kind="flat", scheme="column_wise"),
    "weighted": Case(towers=2, ranks=2, max_bag=4, weighted=True),
    "weighted-flat": Case(towers=2, ranks=2, max_bag=3, weighted=True, kind="flat"),
    "mixed-dims": Case(towers=2, ranks=2, dims=(4, 8, 12, 16), max_bag=2),
    "mixed-dims-flat": Case(towers=2, ranks=2, dims=(4, 8, 12, 16), max_bag=2, kind="flat"),
    "batch-of-one": Case(towers=2, ranks=2, sizes=(1, 1, 1, 1)),
    "uneven": Case(towers=2, ranks=2, sizes=(2, 3, 4, 5), max_bag=3),
    "uneven-flat-column-wise": Case(towers=2, ranks=2, sizes=(6, 1, 3, 2), kind="flat", scheme="column_wise"),
    "row-wise": Case(towers=2, ranks=2, scheme="row_wise", max_bag=3),
    "row-wise-flat-2x3": Case(towers=2, ranks=3, plan=((0, 2), (3, 1)), scheme="row_wise", kind="flat"),
    "row-wise-mean-uneven-batches": Case(
        towers=2, ranks=2, scheme="row_wise", max_bag=4, pooling="MEAN", sizes=(2, 6, 1, 3), kind="flat"
    ),
    "data-parallel": Case(towers=2, ranks=2, scheme="data_parallel", max_bag=3),
    "data-parallel-flat-3x2": Case(towers=3, ranks=2, plan=((2,), (3, 0), (1,)), scheme="data_parallel", kind="flat"),
    "data-parallel-weighted-uneven": Case(
        towers=2, ranks=2, scheme="data_parallel", max_bag=3, weighted=True, sizes=(1, 4, 2, 3)
    ),
    "mixed": Case(towers=1, ranks=2, plan=((0, 1, 2, 3),), scheme="mixed", max_bag=3, dims=(8, 16, 12, 4)),
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
    "mixed-weighted": Case(
        towers=2, ranks=2, plan=((0, 1), (2, 3)), scheme="mixed", max_bag=3, weighted=True, dims=(8, 4, 24, 16)
    ),
    "mixed-two-towers-on-one-host": Case(
        towers=2, ranks=2, plan=((0,), (3,), (1, 2)), placement=(1, 0, 1), scheme="mixed", dims=(8, 8, 16, 8)
    ),
    "mixed-adagrad": Case(towers=2, ranks=2, scheme="mixed", optimizer="adagrad", max_bag=3, dims=(8, 16, 12, 4)),
    "mixed-sgd": Case(towers=2, ranks=2, scheme="mixed", optimizer="sgd", max_bag=3, dims=(8, 16, 12, 4)),
    "a-tower-over-two-hosts-of-two": Case(towers=2, ranks=4, plan=((2, 0), (1, 3)), scheme="mixed", dims=(8, 8, 24, 8)),
    "unequal-towers": Case(
        towers=2, ranks=2, plan=((4, 1, 3, 0), (2,)), scheme="mixed", dims=(8, 4, 8, 16, 8), kind="flat"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sptt_equals_the_single_process_module(name: str) -> None:
    case = CASES[name]
    for worst in run_ranks(parity_on_rank, case.world, case):
        check_worst(case, worst)
