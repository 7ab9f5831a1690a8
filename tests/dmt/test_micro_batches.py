"""Micro-batches against the plain module in one process, and against the same model run on whole batches."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.sptt_case import Case, check_worst, parity_on_rank

pytestmark = pytest.mark.ranks
THREE_TOWERS = ((0, 2), (1, 3), (4,))

CASES = {
    "modules": Case(towers=2, ranks=2, micro_batches=2),
    "more micro-batches than samples": Case(towers=2, ranks=2, micro_batches=4, sizes=(1, 2, 3, 7)),
    "flat": Case(towers=2, ranks=2, kind="flat", micro_batches=3),
    "pass-through": Case(towers=2, ranks=2, kind="pass", micro_batches=3),
    "frozen": Case(towers=2, ranks=2, kind="frozen", micro_batches=2),
    "multi-hot, weighted": Case(towers=2, ranks=2, max_bag=4, weighted=True, micro_batches=3),
    "mean pooling, row-wise, uneven batches": Case(
        towers=2, ranks=3, scheme="row_wise", pooling="MEAN", max_bag=4, sizes=(4, 5, 6, 7, 8, 9), micro_batches=4
    ),
    "three towers, mixed schemes": Case(
        towers=3, ranks=2, dims=(8, 4, 8, 12, 16), plan=THREE_TOWERS, scheme="mixed", micro_batches=3
    ),
    "placed elsewhere": Case(
        towers=2, ranks=1, dims=(8, 4, 8, 12, 16), plan=THREE_TOWERS, placement=(1, 0, 1), micro_batches=2
    ),
    "one tower": Case(towers=1, ranks=2, plan=((0, 1, 2, 3),), micro_batches=2),
    "FP16": Case(towers=2, ranks=2, precision="fp16", optimizer="sgd", micro_batches=3),
    "INT8": Case(towers=2, ranks=2, precision="int8-bf16", optimizer="sgd", micro_batches=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_equals_the_plain_module(case: Case) -> None:
    for worst in run_ranks(parity_on_rank, case.world, case):
        check_worst(case, worst)
