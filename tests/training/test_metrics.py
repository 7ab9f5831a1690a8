"""AUC and normalized entropy of several ranks against scikit-learn and the formula, on the union of their rows."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score

from dmt.errors import InputError
from dmt.training import metrics
from dmt.training.metrics import ClickMetrics, MetricValues, StepTimer
from tests.ranks import ALL_BINS, run_ranks

Batch = tuple[list[float], list[float], list[float]]  # logits, labels, weights


def compute_on_rank(rank: int, cases: list[list[list[Batch]]]) -> list[Any]:
    """For each case the values that rank ``rank`` computes of its batches, or the message of the error."""
    found: list[Any] = []
    with patch.object(metrics, "_BINS", ALL_BINS):
        for by_rank in cases:
            of_case = ClickMetrics(dist.group.WORLD)
            for batch in by_rank[rank]:
                of_case.update(*(torch.tensor(part) for part in batch))
            try:
                found.append(of_case.compute())
            except InputError as error:
                found.append(str(error))
    return found


def draw(seed: int, rows: int, *, distinct: int | None = None, padding: int = 0) -> Batch:
    """Logits that know something of the labels; with few ``distinct`` values they tie. Padding would mislead."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(rows) < 0.3).astype(np.float32)
    logits = rng.normal(size=rows) + labels - 1.0
    if distinct:
        logits = np.round(logits * distinct) / distinct
    weights = np.ones(rows)
    if padding:
        labels, logits = np.append(labels, np.zeros(padding)), np.append(logits, np.full(padding, 9.0))
        weights = np.append(weights, np.zeros(padding))
    return logits.tolist(), labels.tolist(), weights.tolist()


def expected(by_rank: list[list[Batch]]) -> tuple[float, float, float]:
    """AUC by scikit-learn, NE and the loss by their formulas in float64, of all rows with a weight."""
    rows = np.concatenate([np.array(batch) for batches in by_rank for batch in batches], axis=1)
    logits, labels, _ = rows[:, rows[2] > 0]
    chance = 1 / (1 + np.exp(-logits))
    loss = np.mean(np.logaddexp(0, logits) - labels * logits)  # cross entropy of the sigmoid, without log(0)
    rate = labels.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return float(roc_auc_score(labels, chance)), float(loss / entropy), float(loss)


CASES = {
    "uneven ranks": [[draw(0, 50), draw(1, 7)], [draw(2, 3)], [draw(3, 200)]],
    "a rank without rows": [[draw(4, 60)], [], [draw(5, 30)]],
    "padding": [[draw(8, 60, padding=20)], [draw(9, 5, padding=100)], [draw(10, 1, padding=3)]],
    "ties": [[draw(11, 400, distinct=2)], [draw(12, 300, distinct=1)], [draw(13, 5, distinct=1)]],
    "all tied": [[([0.5] * 4, [0.0, 1.0, 1.0, 0.0], [1.0] * 4)], [], [([0.5], [0.0], [1.0])]],
    "certain and wrong": [[([40.0, -40.0], [0.0, 1.0], [1.0, 1.0])], [], [([0.0], [1.0], [1.0])]],
}
ONE_LABEL = [[([0.1, 0.2], [0.0, 0.0], [1.0, 1.0])], [], [([0.3, 0.4], [0.0, 1.0], [1.0, 0.0])]]
NAN = [[draw(14, 5)], [([math.nan], [1.0], [1.0])], [draw(15, 5)]]
NAN_IN_PADDING = [[draw(14, 5)], [([math.nan], [1.0], [0.0])], [draw(15, 5)]]
NOTHING: list[list[Batch]] = [[], [([1.0], [1.0], [0.0])], []]


@pytest.mark.ranks
def test_ranks_agree_on_the_values_of_the_union_of_their_rows() -> None:
    # One start of the ranks for all cases.
    by_rank = run_ranks(compute_on_rank, 3, [*CASES.values(), ONE_LABEL, NAN, NAN_IN_PADDING, NOTHING])
    assert str(by_rank[0]) == str(by_rank[1]) == str(by_rank[2])
    *values, one_label, diverged, of_padding, nothing = by_rank[1]
    for (name, case), found in zip(CASES.items(), values, strict=True):
        auc, ne, loss = expected(case)
        assert (found.auc, found.ne, found.loss) == pytest.approx((auc, ne, loss), abs=1e-6, rel=1e-6), name
        labels = [y for batches in case for _, ys, w in batches for y, on in zip(ys, w, strict=True) if on]
        assert (found.num_rows, found.label_rate) == (len(labels), pytest.approx(sum(labels) / len(labels), rel=1e-6))
    assert math.isnan(one_label.auc)
    assert math.isnan(one_label.ne)
    assert (one_label.num_rows, one_label.label_rate, math.isfinite(one_label.loss)) == (3, 0.0, True)
    assert diverged.startswith("The model predicts NaN or infinity: training has diverged. Lower optimizer.")
    assert isinstance(of_padding, MetricValues), "NaN in a row that only fills up must not count"
    assert nothing.startswith("There is no row to evaluate. Check data.eval_path")


@pytest.mark.parametrize(("mean", "spread"), [(-3.5, 1.0), (-9.0, 0.5), (0.0, 0.02), (0.0, 100.0)])
def test_the_area_of_a_million_rows_is_that_of_scikit_learn(
    mean: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_BINS", ALL_BINS)
    draws = torch.Generator().manual_seed(0)
    logits = mean + spread * torch.randn(1_000_000, generator=draws)
    labels = (torch.rand(len(logits), generator=draws) < torch.sigmoid(logits - logits.mean())).float()
    exact = roc_auc_score(labels.numpy(), logits.numpy())
    found = ClickMetrics()
    found.update(logits, labels, torch.ones_like(labels))
    assert found.compute().auc == pytest.approx(exact, abs=1e-6)


def test_the_time_of_steps_is_without_the_first_five_and_the_work_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([*range(7), 100, 103, 103])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))
    timer = StepTimer()
    timer.restart()
    for _ in range(6):
        timer.step()
    timer.restart()  # after an evaluation
    timer.step()
    assert (timer.steps, timer.seconds) == (2, 4.0)
