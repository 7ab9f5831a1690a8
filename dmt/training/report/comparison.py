"""Comparison of two runs: the difference of AUC against its noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOT_KNOWN", "RunComparison", "auc_standard_error", "compare_runs", "ratio"]

NOT_KNOWN = "a model has diverged, or the evaluation rows have one label only"
"""The reason why an AUC may be NaN."""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Difference of AUC of a second run and a first one, against its noise."""

    auc_difference: float
    """AUC of the second run minus that of the first; NaN where one of them is not known."""
    auc_noise: float
    """The larger standard error of the two AUCs (`auc_standard_error`); NaN as above."""
    accuracy: str
    """A sentence about AUC that claims no more than the noise allows."""

    @property
    def within_noise(self) -> bool:
        """True if the AUCs differ by less than one standard error, or cannot be compared at all."""
        return not (self.auc_difference != 0 and abs(self.auc_difference) >= self.auc_noise)


def auc_standard_error(auc: float, *, num_rows: int, label_rate: float) -> float:
    """Standard error of an AUC measured on a finite sample of rows.

    Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve",
    Radiology 143 (1982), equation (1): with A the AUC, n1 positive and n0 negative rows,
    SE^2 = (A (1 - A) + (n1 - 1) (Q1 - A^2) + (n0 - 1) (Q2 - A^2)) / (n1 n0), Q1 = A / (2 - A), Q2 = 2 A^2 / (1 + A).
    It is about which rows happen to be in the sample; it does not know how much another training seed would move A.

    Args:
        auc: in [0, 1].
        num_rows: n1 + n0.
        label_rate: share of positive rows, n1 / (n1 + n0).

    Returns:
        The standard error, in units of AUC; NaN where the AUC is NaN or one of the classes has no row.

    Example:
        >>> round(auc_standard_error(0.8, num_rows=200, label_rate=0.5), 4)
        0.0314
        >>> round(auc_standard_error(0.8, num_rows=65_536, label_rate=0.25), 4)
        0.0022
    """
    positive = label_rate * num_rows
    negative = num_rows - positive
    # Less than half a row is the rounding of a rate that means none.
    if math.isnan(auc) or min(positive, negative) < 0.5:
        return math.nan
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (positive - 1) * (q1 - auc**2) + (negative - 1) * (q2 - auc**2)
    # A perfect AUC has no spread at all; rounding must not make it negative.
    return math.sqrt(max(0.0, spread) / (positive * negative))


def ratio(first: Any, second: Any) -> float | None:
    """``second / first``; None if a value is absent or not finite, or the first one is 0."""
    values = (first, second)
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values) or not first:
        return None
    return float(second / first)


def compare_runs(runs: Mapping[str, Mapping[str, Any]]) -> RunComparison:
    """Compares the second of two finished runs with the first.

    An AUC is called higher or lower only where the difference is at least one standard error of the AUC.

    Args:
        runs: the ``result.json`` of two runs, by the name to show, the baseline first; both evaluated on the same rows.
    """
    names, (first, second) = list(runs), runs.values()
    errors = [
        auc_standard_error(run["eval_auc"], num_rows=run["eval_num_rows"], label_rate=run["eval_label_rate"])
        for run in (first, second)
    ]
    noise = math.nan if any(map(math.isnan, errors)) else max(errors)
    difference = second["eval_auc"] - first["eval_auc"] + 0 * noise  # NaN with it
    text = f"{names[1]} has AUC {second['eval_auc']:.4f} and {names[0]} {first['eval_auc']:.4f}"
    if math.isnan(noise):
        text += f"; the two cannot be compared: {NOT_KNOWN}."
    elif difference == 0 or abs(difference) < noise:
        text += (
            f": the difference of {difference:+.4f} is within the noise of the evaluation (one standard error is "
            f"{noise:.4f}), so neither is better by this measure."
        )
    else:
        text += (
            f": {'higher' if difference > 0 else 'lower'} by {abs(difference):.4f}, where one standard error of the "
            f"evaluation is {noise:.4f}. Another seed of the training may move it, too."
        )
    return RunComparison(auc_difference=difference, auc_noise=noise, accuracy=text)
