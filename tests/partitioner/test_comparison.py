"""Mean affinities within and between towers, beside other assignments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, tower_affinity
from dmt.partitioner.comparison import compare_towers
from dmt.plan import TowerPlan
from tests.partitioner.instances import affinity_of


def by_pairs(affinity, towers):
    """The definition, pair by pair."""
    tower_of = {name: t for t, names in enumerate(towers) for name in names}
    within, between = [], []
    for i, j in itertools.combinations(range(affinity.num_features), 2):
        a, b = affinity.features[i], affinity.features[j]
        (within if tower_of[a] == tower_of[b] else between).append(float(affinity.matrix[i, j]))
    return tuple(pytest.approx(float(np.mean(values)), abs=1e-11) if values else None for values in (within, between))


@pytest.mark.parametrize("seed", range(4))
def test_within_between_and_strided_are_means_over_pairs(seed):
    affinity = affinity_of(11, seed=seed)
    order = np.random.default_rng(seed).permutation(affinity.features).tolist()
    towers = [order[:5], order[5:6], order[6:]]
    found = compare_towers(affinity, TowerPlan.from_lists(towers))
    assert (found.within, found.between) == by_pairs(affinity, towers)
    assert (found.within, found.between) == tower_affinity(affinity, TowerPlan.from_lists(towers))
    names = list(affinity.features)
    assert found.within_strided == by_pairs(affinity, [names[0::3], names[1::3], names[2::3]])[0]


def test_random_towers_are_as_the_mean_over_all_assignments():
    affinity = affinity_of(8, seed=1)
    plan = TowerPlan.from_lists([affinity.features[:5], affinity.features[5:]])
    every = []
    for chosen in itertools.combinations(affinity.features, 5):
        rest = [name for name in affinity.features if name not in chosen]
        every.append(tower_affinity(affinity, TowerPlan.from_lists([chosen, rest]))[0])
    found = compare_towers(affinity, plan, seed=4)
    # 200 draws: four standard errors of the mean, and a fifth of the deviation.
    assert found.within_random == pytest.approx(np.mean(every), abs=4 * np.std(every) / np.sqrt(200))
    assert found.std_random == pytest.approx(np.std(every), rel=0.2)


def test_the_seed_and_nothing_else_moves_the_random_towers():
    affinity = affinity_of(9)
    plan = TowerPlan.from_lists([affinity.features[:4], affinity.features[4:7], affinity.features[7:]])
    first = compare_towers(affinity, plan, seed=1)
    assert compare_towers(affinity, plan, seed=1) == first
    assert compare_towers(affinity, plan, seed=2).within_random != first.within_random
    turned = affinity.permuted(affinity.features[::-1])
    other = compare_towers(turned, TowerPlan.from_lists(plan.to_lists()[::-1]), seed=1)
    assert (other.within, other.between) == (first.within, first.between)
    assert (other.within_random, other.std_random) == (first.within_random, first.std_random)


def test_where_there_is_no_pair_there_is_no_mean():
    affinity = affinity_of(3)
    alone = compare_towers(affinity, TowerPlan.from_lists([["f0"], ["f1"], ["f2"]]))
    assert (alone.within, alone.within_strided, alone.within_random, alone.std_random) == (None,) * 4
    assert alone.between is not None
    one = compare_towers(affinity, TowerPlan.from_lists([["f0", "f1", "f2"]]))
    assert (one.between, one.std_random) == (None, 0.0)
    assert one.within == one.within_strided == one.within_random


def test_the_diagonal_does_not_count():
    matrix = np.array([[1.0, 0.25], [0.25, 0.5]])
    affinity = FeatureAffinity(matrix=matrix, features=["a", "b"])
    assert tower_affinity(affinity, TowerPlan.from_lists([["a", "b"]])) == (0.25, None)


def test_a_plan_of_other_features_is_refused():
    with pytest.raises(InputError, match=r"missing \['f2'\], unknown \['g'\]"):
        compare_towers(affinity_of(3), TowerPlan.from_lists([["f0", "f1"], ["g"]]))
