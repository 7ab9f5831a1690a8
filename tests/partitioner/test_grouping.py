"""`group_blocks` against trying every assignment."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import cluster
from dmt.partitioner.assignment import Bounds, objective_of
from dmt.partitioner.cluster import group_blocks
from tests.partitioner.instances import best_by_trying, random_bounds, random_labels, random_squares
from tests.seeds import seeds

# The refinement is a local search, so not always the optimum; of 246 random cases it missed it in one.
FACTOR = 1.6


@pytest.mark.parametrize("seed", seeds(16, 40))
def test_feasible_exactly_where_trying_all_assignments_says_so_and_close_to_the_best(seed):
    rng = np.random.default_rng(seed)
    num_blocks, num_towers = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    num_towers = min(num_towers, num_blocks)
    options = random_bounds(rng, num_blocks, num_towers, slack=(1.0, 1.2, 1.5, 1.5, 9.0))
    squared = random_squares(rng, num_blocks)
    least = best_by_trying(squared, num_towers, options)
    arguments = {"distance": np.sqrt(squared), "num_towers": num_towers, "options": options, "seed": seed}
    points = rng.normal(size=(num_blocks, 2))
    if np.isinf(least):
        with pytest.raises(InputError, match=f"No assignment of the features to {num_towers} towers holds all limits"):
            group_blocks(points, **arguments)
        return
    found = group_blocks(points, **arguments)
    assert len(set(found.labels.tolist())) == num_towers
    assert any(bounds.violation(found.labels, num_towers) == 0 for bounds in options)
    assert least - 1e-9 <= objective_of(squared, options[0].weights, found.labels) <= FACTOR * least + 1e-9


def test_nearly_always_the_best_of_all():
    ratios = []
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        squared = random_squares(rng, 6)
        bounds = Bounds(loads=np.ones((3, 6)), lower=np.array([2.0, 0, 0]), upper=np.array([2.0, 6, 6]))
        found = group_blocks(rng.normal(size=(6, 2)), distance=np.sqrt(squared), num_towers=3, options=[bounds], seed=0)
        ratios.append(objective_of(squared, np.ones(6), found.labels) / best_by_trying(squared, 3, [bounds]))
    assert sorted(ratios)[-2] == pytest.approx(1.0)


def sized(loads, lower, upper, most_bytes=np.inf):
    loads = np.stack([np.ones(len(loads)), np.zeros(len(loads)), np.array(loads, dtype=float)])
    return Bounds(loads=loads, lower=np.array([lower, 0.0, 0.0]), upper=np.array([upper, np.inf, most_bytes]))


def test_of_several_sets_of_limits_any_one_may_be_the_one_that_is_held(monkeypatch):
    # The large table leaves room for one more, which towers of 3 to 9 features do not allow and those of 2 to 6 do.
    num_bytes = [9, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    options = [sized(num_bytes, 3, 9, 10), sized(num_bytes, 2, 6, 10)]
    squared = random_squares(np.random.default_rng(0), 10)
    points = np.random.default_rng(1).normal(size=(10, 2))
    broken = random_labels(np.random.default_rng(0), 10, 3)

    def group():
        return group_blocks(points, distance=np.sqrt(squared), num_towers=3, options=options, seed=0)

    assert options[1].violation(group().labels, 3) == 0
    # Also where only the exact search finds it: the first set is then no proof against the second.
    monkeypatch.setattr(cluster, "search_clusters", lambda *_, **__: np.where(np.arange(10) < 4, 0, broken))
    monkeypatch.setattr(cluster, "greedy_start", lambda *_: broken)
    assert options[1].violation(group().labels, 3) == 0


def test_without_refinement_the_points_decide():
    points = np.array([[0.0], [0.1], [5.0], [5.1]])
    # The distances say otherwise: 0 belongs to 2 and 1 to 3.
    distance = np.array([[0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]], dtype=float)
    arguments = {"distance": distance, "num_towers": 2, "options": [sized([0] * 4, 2, 2)], "seed": 0}
    plain, refined = group_blocks(points, refine=False, **arguments), group_blocks(points, **arguments)
    assert (plain.labels == plain.labels[[1, 0, 3, 2]]).all()
    assert (refined.labels == refined.labels[[2, 3, 0, 1]]).all()
    assert (plain.num_refined, refined.num_refined) == (0, 2)


def test_the_refusal_names_what_the_closest_answer_breaks():
    points = np.random.default_rng(0).normal(size=(3, 2))
    arguments = {"distance": np.ones((3, 3)) - np.eye(3), "num_towers": 2, "seed": 0}
    message = r"to 2 towers holds all limits\. The closest found has a tower with 12,000 bytes "
    with pytest.raises(InputError, match=message + r"where the limit is 10,000\. Raise balance_ratio or the limits"):
        group_blocks(points, options=[sized([6_000, 6_000, 6_000], 1, 3, 10_000)], **arguments)
    apart = np.ones((3, 3), dtype=bool) & ~np.eye(3, dtype=bool)
    bounds = Bounds(loads=np.ones((3, 3)), lower=np.ones(3), upper=np.full(3, 3.0), apart=apart)
    with pytest.raises(InputError, match="a tower with features that are to be apart"):
        group_blocks(points, options=[bounds], **arguments)
