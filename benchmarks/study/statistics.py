"""Statistics of the studies: comparison of two arms over seeds, and correction for multiple comparisons.

Table 6 of the DMT paper (section 5.2.3) gives medians, standard deviations and Mann-Whitney U tests. Here, a seed sets
the initial weights and the order of rows of both arms, so a paired test is given as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu, wilcoxon

from dmt.errors import InputError

__all__ = ["Comparison", "compare_arms", "holm"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of an arm with a baseline over the same seeds, in units of the metric."""

    num_seeds: int
    median: float
    std: float
    """Standard deviation over seeds, with n - 1."""
    baseline_median: float
    baseline_std: float
    median_difference: float
    """Median over seeds of the difference, arm minus baseline, of each seed."""
    effect: float
    """`median_difference` divided by the root mean square of the two standard deviations over seeds."""
    num_better: int
    """Number of seeds in which the arm is above the baseline."""
    mann_whitney_p: float
    """p-value of the paper's test, two-sided, exact without ties: are both arms drawn from one distribution?"""
    wilcoxon_p: float
    """p-value of the two-sided signed-rank test of each seed's differences."""


def compare_arms(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    """Compares an arm with a baseline.

    Args:
        arm: AUC, or another metric, by seed.
        baseline: the same metric for the same seeds.

    Raises:
        InputError: the seeds differ, or there are fewer than two.

    Example:
        >>> found = compare_arms({0: 0.72, 1: 0.73, 2: 0.74}, {0: 0.70, 1: 0.70, 2: 0.70})
        >>> found.num_better, round(found.median_difference, 3), round(found.mann_whitney_p, 3), found.wilcoxon_p
        (3, 0.03, 0.064, 0.25)
    """
    if set(arm) != set(baseline) or len(arm) < 2:
        raise InputError(
            f"compare_arms: seeds {sorted(arm)} of the arm and {sorted(baseline)} of the baseline must be the same two "
            "or more, because they are compared in pairs. Finish the study first."
        )
    ours, theirs = (np.array([auc[seed] for seed in sorted(auc)]) for auc in (arm, baseline))
    difference = ours - theirs
    spread = float(np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / 2))
    middle = float(np.median(difference))
    return Comparison(
        num_seeds=len(ours),
        median=float(np.median(ours)),
        std=float(ours.std(ddof=1)),
        baseline_median=float(np.median(theirs)),
        baseline_std=float(theirs.std(ddof=1)),
        median_difference=middle,
        effect=middle / spread if spread > 0 else 0.0,
        num_better=int((difference > 0).sum()),
        mann_whitney_p=float(mannwhitneyu(ours, theirs, alternative="two-sided", method=_exact(ours, theirs)).pvalue),
        # The test is undefined if both arms are equal in every seed: no evidence of a difference.
        wilcoxon_p=float(wilcoxon(difference).pvalue) if difference.any() else 1.0,
    )


def _exact(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> str:
    """Returns the method of the U test: asymptotic with ties, which the exact one does not support; else exact."""
    values = np.concatenate([ours, theirs])
    return "exact" if len(np.unique(values)) == len(values) else "asymptotic"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values by Holm's step-down correction (S. Holm, 1979), for any number of comparisons at one level.

    Args:
        p_values: p-values of all comparisons, in any order.

    Returns:
        The adjusted p-values in the same order.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    count = len(order)
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(count, 0, -1))
    return [float(p) for p in np.minimum(adjusted, 1.0)]
