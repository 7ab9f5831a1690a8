"""The statistics of the tower study, against values worked out by hand or by enumeration."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.towers.statistics import compare_arms, holm, mean_correlation, mean_rand_index, pair_effects
from dmt.errors import InputError

ARM = {0: 0.7712, 1: 0.7733, 2: 0.7721, 3: 0.7705, 4: 0.7740, 5: 0.7729}
BASELINE = {0: 0.7701, 1: 0.7719, 2: 0.7724, 3: 0.7698, 4: 0.7715, 5: 0.7711}


def test_medians_differences_and_effect() -> None:
    found = compare_arms(ARM, BASELINE)
    assert found.num_seeds == 6
    assert found.median == pytest.approx((0.7721 + 0.7729) / 2)
    assert found.baseline_median == pytest.approx((0.7711 + 0.7715) / 2)
    # Seed by seed: 11, 14, -3, 7, 25, 18 (1e-4); the difference of the medians would be 12.
    assert found.median_difference == pytest.approx(12.5e-4)
    assert found.num_better == 5
    spread = np.sqrt((np.var(list(ARM.values()), ddof=1) + np.var(list(BASELINE.values()), ddof=1)) / 2)
    assert found.effect == pytest.approx(12.5e-4 / spread)


def test_mann_whitney_is_the_share_of_all_ways_to_split_the_values() -> None:
    ours, theirs = list(ARM.values()), list(BASELINE.values())
    values = ours + theirs

    def statistic(chosen: tuple[int, ...]) -> float:
        rest = [i for i in range(len(values)) if i not in chosen]
        return abs(sum(values[i] > values[j] for i in chosen for j in rest) - len(chosen) * len(rest) / 2)

    observed = statistic(tuple(range(len(ours))))
    splits = list(combinations(range(len(values)), len(ours)))
    expected = np.mean([statistic(split) >= observed for split in splits])
    assert compare_arms(ARM, BASELINE).mann_whitney_p == pytest.approx(expected)


def test_wilcoxon_is_the_share_of_all_signs_of_the_differences() -> None:
    difference = np.array([ARM[seed] - BASELINE[seed] for seed in ARM])
    ranks = np.argsort(np.argsort(np.abs(difference))) + 1
    middle = ranks.sum() / 2
    observed = abs(ranks[difference > 0].sum() - middle)
    signs = np.array(list(product([0, 1], repeat=len(ranks))))
    expected = np.mean(np.abs(signs @ ranks - middle) >= observed)
    assert compare_arms(ARM, BASELINE).wilcoxon_p == pytest.approx(expected)


def test_seeds_are_paired_by_number_not_by_order() -> None:
    shuffled = dict(sorted(BASELINE.items(), reverse=True))
    assert compare_arms(ARM, shuffled) == compare_arms(ARM, BASELINE)


def test_swapping_the_arms_turns_the_sign_and_nothing_else() -> None:
    one, other = compare_arms(ARM, BASELINE), compare_arms(BASELINE, ARM)
    assert other.effect == pytest.approx(-one.effect)
    assert (other.mann_whitney_p, other.wilcoxon_p) == pytest.approx((one.mann_whitney_p, one.wilcoxon_p))
    assert other.num_better == 1


def test_equal_arms_are_no_evidence() -> None:
    found = compare_arms(ARM, ARM)
    assert (found.median_difference, found.effect, found.num_better) == (0.0, 0.0, 0)
    assert found.wilcoxon_p == 1.0
    assert found.mann_whitney_p == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("baseline", [{0: 0.5}, {**BASELINE, 9: 0.5}, {}])
def test_arms_of_different_seeds_are_refused(baseline: dict[int, float]) -> None:
    with pytest.raises(InputError, match="must be the same two or more"):
        compare_arms(ARM, baseline)


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .03 .9 are multiplied by 4 3 2 1, and none may fall below the one before.
    assert holm([0.03, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_rand_index_of_equal_opposite_and_three_partitions() -> None:
    rows, columns = [["a", "b"], ["c", "d"]], [["a", "c"], ["b", "d"]]
    assert mean_rand_index([rows, rows[::-1]]) == 1.0
    assert mean_rand_index([rows, columns]) == pytest.approx(-0.5)
    assert mean_rand_index([rows, rows, columns]) == pytest.approx(0.0)


def test_correlation_is_the_mean_over_pairs() -> None:
    up, down = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    assert mean_correlation([up, up, down]) == pytest.approx((1 - 1 - 1) / 3)


def test_the_pair_that_matters_comes_first_and_rare_pairs_are_left_out() -> None:
    rng = np.random.default_rng(0)
    plans = [rng.permutation(list("abcdef")).reshape(3, 2).tolist() for _ in range(60)]
    together = [any({"a", "b"} == set(tower) for tower in plan) for plan in plans]
    found = pair_effects(plans, rng.normal(scale=0.1, size=60) + together)
    assert found[0]["features"] == ["a", "b"]
    assert found[0]["median_together"] - found[0]["median_apart"] == pytest.approx(1.0, abs=0.15)
    assert found[0]["num_together"] == sum(together)
    assert found[0]["p_holm"] == pytest.approx(found[0]["p"] * 15)
    assert found[1]["p_holm"] > 0.05
    assert pair_effects(plans, [0.0] * 60, at_least=31) == []
