"""Copies of hot rows train as their tables would, and return to them whenever somebody reads a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import run_ranks
from tests.sptt_case import Case, check_worst, parity_on_rank

FLAT = Case(towers=2, ranks=2, kind="flat", hot=True)
CASES = {
    "2x2": replace(FLAT, sizes=(9, 7, 8, 9)),
    "2x3-row-wise-multi-hot-weighted": replace(
        FLAT, ranks=3, plan=((0, 2), (3, 1)), scheme="row_wise", max_bag=3, weighted=True, sizes=(9, 7, 8, 9, 1, 6)
    ),
    "3x2-mixed-dims-weighted": replace(
        FLAT, towers=3, plan=((2,), (3, 0), (1,)), dims=(8, 16, 4, 12), max_bag=3, weighted=True
    ),
    "2x2-mixed-adagrad": replace(FLAT, scheme="mixed", dims=(8, 8, 24, 16), optimizer="adagrad"),
    "2x2-mixed-rowwise-adagrad": replace(FLAT, scheme="mixed", dims=(8, 8, 24, 16), max_bag=2),
    "2x2-sgd-in-micro-batches": replace(FLAT, optimizer="sgd", micro_batches=2),
    "1x2": replace(FLAT, towers=1, plan=((3, 1, 0, 2),), sizes=(9, 5)),
    "2x1": replace(FLAT, ranks=1, unique=True),
    "2x2-unique": replace(FLAT, unique=True, sizes=(9, 7, 8, 9)),
    "2x2-unique-multi-hot-in-micro-batches": replace(FLAT, unique=True, max_bag=2, micro_batches=3),
    "2x2-bf16": replace(FLAT, precision="bf16", optimizer="sgd"),
}


def case_on_rank(rank: int, case: Case) -> None:
    check_worst(case, parity_on_rank(rank, case))


DAILY = (
    "2x2",
    "2x3-row-wise-multi-hot-weighted",
    "2x2-unique-multi-hot-in-micro-batches",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.slow]) for name in CASES]
)
def test_hot_rows_train_as_others_do(name: str) -> None:
    run_ranks(case_on_rank, CASES[name].world, CASES[name])
