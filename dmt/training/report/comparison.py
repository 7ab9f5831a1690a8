"""Comparison of two runs: the difference of AUC against its noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["NOT_KNOWN", "RunComparison", "auc_standard_error", "compare_runs", "ratio"]

NOT_KNOWN = "a model has diverged, or the evaluation rows have one label only"
"""The reason why an AUC may be NaN."""
# Below this number of standard errors, a difference of two single runs is called a hint only.
_CLEAR = 2.0


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
        return not _shows(self.auc_difference, self.auc_noise)


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
    (first_name, first), (second_name, second) = runs.items()
    aucs = (first["eval_auc"], second["eval_auc"])
    noise = float(np.max([_standard_error(run) for run in (first, second)]))  # NaN if either is
    return RunComparison(
        auc_difference=math.nan if math.isnan(noise) else aucs[1] - aucs[0],
        auc_noise=noise,
        accuracy=_accuracy((first_name, second_name), aucs, noise) + _chance(runs),
    )


def _standard_error(run: Mapping[str, Any]) -> float:
    return auc_standard_error(run["eval_auc"], num_rows=run["eval_num_rows"], label_rate=run["eval_label_rate"])


def _accuracy(names: tuple[str, str], aucs: tuple[float, float], noise: float) -> str:
    values = f"{names[1]} has AUC {aucs[1]:.4f} and {names[0]} {aucs[0]:.4f}"
    if math.isnan(noise):
        return f"{values}; the two cannot be compared: {NOT_KNOWN}."
    difference = aucs[1] - aucs[0]
    if not _shows(difference, noise):
        return (
            f"{values}: the difference of {difference:+.4f} is within the noise of the evaluation (one standard error "
            f"is {_small(noise)}), so neither is better by this measure."
        )
    word = "higher" if difference > 0 else "lower"
    if noise == 0:
        return f"{values}: {word} by {_small(abs(difference))}, with no noise from the choice of evaluation rows."
    times = abs(difference) / noise
    weight = (
        "more than the choice of evaluation rows explains, though another seed may move it"
        if times >= _CLEAR
        else "which one run each does not settle"
    )
    return f"{values}: {word} by {_small(abs(difference))}, {times:.1f} standard errors ({_small(noise)}), {weight}."


def _shows(difference: float, noise: float) -> bool:
    """True if a difference is at least one standard error; False for NaN, and for 0."""
    return difference != 0 and abs(difference) >= noise


def _chance(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A further sentence about runs that have learned nothing that shows, or an empty string."""
    idle = [name for name, run in runs.items() if abs(run["eval_auc"] - 0.5) < _CLEAR * _standard_error(run)]
    return f" On these rows, {' and '.join(idle)} cannot be told from chance (0.5)." if idle else ""


def _small(value: float) -> str:
    """Four decimals, or two digits of what would then read as zero."""
    return f"{value:.4f}" if value >= 5e-5 or value == 0 else f"{value:.1e}"
