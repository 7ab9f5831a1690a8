"""OPER's planner: partitions, placement, Algorithm 1 and replicas for training, against equations 1 to 3 by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.oper_placement import (
    Partitions,
    Placement,
    partition_rows,
    place,
    replicate_for_inference,
    replicate_for_training,
)
from dmt.errors import InputError


def skewed(rows: int, exponent: float = 1.1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(100 * np.arange(1, rows + 1) ** -exponent)


@pytest.mark.parametrize("threshold", [1.0, 0.3, 0.05, 0.01])
def test_partitions_keep_their_bounds(threshold: float) -> None:
    access, size = skewed(3_000), np.random.default_rng(1).choice([64.0, 256.0], 3_000)
    found = partition_rows(access, size, threshold=threshold)
    assert sorted(found.order.tolist()) == list(range(3_000))
    assert (np.diff(access[found.order]) <= 0).all()
    pieces = [found.order[a:b] for a, b in itertools.pairwise(found.starts)]
    whole_bytes, whole_traffic = size.sum(), (size * access).sum()
    for k, piece in enumerate(pieces):
        assert found.num_bytes[k] == pytest.approx(size[piece].sum())
        assert found.traffic[k] == pytest.approx((size * access)[piece].sum())
        assert len(piece) == 1 or found.num_bytes[k] <= threshold * whole_bytes * (1 + 1e-6)
        assert len(piece) == 1 or found.traffic[k] <= threshold * whole_traffic * (1 + 1e-6)
    # Each ends where the next row would break a bound, and says which.
    for k, (piece, after) in enumerate(itertools.pairwise(pieces)):
        with_next = [*piece, after[0]]
        breaks_traffic = (size * access)[with_next].sum() > threshold * whole_traffic
        assert breaks_traffic or size[with_next].sum() > threshold * whole_bytes
        assert not found.by_access[k] or breaks_traffic


def brute(placement: Placement, latency: np.ndarray) -> tuple[list[float], list[float], np.ndarray]:
    """Equations 1, 2 and 3 as they are printed, with the matrices P_k."""
    parts, ranks = placement.partitions, placement.num_ranks
    memory, lookups, links = [0.0] * ranks, [0.0] * ranks, np.zeros((ranks, ranks))
    for k in range(len(parts.traffic)):
        matrix = np.zeros((ranks, ranks))
        matrix[np.arange(ranks), placement.source[k]] = 1
        for j in range(ranks):
            memory[j] += parts.num_bytes[k] * (matrix[:, j].sum() > 0)
            lookups[j] += parts.traffic[k] * matrix[:, j].sum()
            links[:, j] += parts.traffic[k] * matrix[:, j] * latency[:, j]
    return memory, lookups, links


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_costs_are_the_papers_equations(ranks: int) -> None:
    placement = place(partition_rows(skewed(400), 32, threshold=0.02), ranks)
    random = np.random.default_rng(0)
    copied = random.integers(0, ranks, placement.source.shape)
    latency = random.random((ranks, ranks))
    for one in (placement, Placement(partitions=placement.partitions, source=copied)):
        memory, lookups, links = brute(one, latency)
        np.testing.assert_allclose(one.memory(), memory)
        np.testing.assert_allclose(one.lookups(), lookups)
        np.testing.assert_allclose(one.communication(latency), links)
    assert placement.memory().sum() == pytest.approx(32 * 400)


@pytest.mark.parametrize(("ranks", "exponent"), [(8, 1.1), (8, 0.6), (5, 0.9), (16, 0.0)])
def test_memory_and_lookups_are_balanced(ranks: int, exponent: float) -> None:
    placement = place(partition_rows(skewed(50_000, exponent), 64, threshold=0.001), ranks)
    memory = placement.memory()
    # Partitions have a thousandth of all: a rank may have one more or less. One row may be more than a rank's share.
    lookups, largest = placement.lookups(), ranks * placement.partitions.traffic.max()
    assert placement.balance > 1 - 0.002 * ranks or largest > lookups.mean()
    assert memory.min() > (1 - 0.004 * ranks) * memory.max()


def test_algorithm_1_on_a_case_by_hand() -> None:
    """Two nodes of two ranks; rank 0 owns all. Each copy on a node serves its neighbour too."""
    parts = Partitions(
        order=np.arange(2),
        starts=np.arange(3),
        num_bytes=np.array([10.0, 10.0]),
        traffic=np.array([100.0, 50.0]),
        by_access=np.ones(2, dtype=bool),
    )
    latency = np.array([[1, 2, 8, 8], [2, 1, 8, 8], [8, 8, 1, 2], [8, 8, 2, 1]])
    start = Placement(partitions=parts, source=np.zeros((2, 4), np.int64))
    found = replicate_for_inference(start, [0, 0, 10, 0], latency)
    assert found.source.tolist() == [[0, 0, 2, 2], [0, 0, 0, 0]]
    found = replicate_for_inference(start, [0, 0, 10, 10], latency)
    # Rank 3 takes the second part: over its link to rank 0 it still waits longest. Rank 2 then reads it there.
    assert found.source.tolist() == [[0, 0, 2, 2], [0, 0, 3, 3]]
    everywhere = replicate_for_inference(start, 20, latency)
    assert everywhere.source.tolist() == [[0, 1, 2, 3]] * 2
    assert start.source.tolist() == [[0] * 4] * 2, "the argument is not changed"


@pytest.mark.parametrize("extra", [0.0, 0.01, 0.1, 1.0])
def test_copies_for_serving_never_cost_more_and_fit(extra: float) -> None:
    start = place(partition_rows(skewed(2_000), 64, threshold=0.005), 4)
    near, far = 1.0, 4.0
    latency = np.full((4, 4), far)
    latency[:2, :2] = latency[2:, 2:] = 2.0
    np.fill_diagonal(latency, near)
    room = extra * 64 * 2_000 / 4
    found = replicate_for_inference(start, room, latency)
    assert (found.memory() <= start.memory() + room * (1 + 1e-9)).all()
    before, after = start.communication(latency).sum(axis=1), found.communication(latency).sum(axis=1)
    assert (after <= before * (1 + 1e-9)).all()
    assert (after < 0.8 * before).all() or extra < 0.01


def test_copies_for_training_are_rows_that_every_rank_reads_more_than_once() -> None:
    access = skewed(1_000)
    start = place(partition_rows(access, 4, threshold=0.001), 3)
    found = replicate_for_training(start, 1e9)
    copied = (found.source == np.arange(3)).all(axis=1)
    parts = start.partitions
    density = parts.traffic / parts.num_bytes
    assert copied.tolist() == (density > 1).tolist()
    assert 0 < copied.sum() < len(copied)
    halved = replicate_for_training(start, 1e9, p2p_over_all_reduce=2.0)
    assert (halved.source == np.arange(3)).all(axis=1).tolist() == (density > 2).tolist()
    few = replicate_for_training(start, 40)
    assert (few.memory() <= start.memory() + 40).all()
    assert (few.source == np.arange(3)).all(axis=1).sum() >= 10


def test_faults() -> None:
    with pytest.raises(InputError, match=r"accesses must be at least one number, finite and not negative"):
        partition_rows([1, float("nan")], 4, threshold=0.1)
    with pytest.raises(InputError, match=r"row_bytes must be at least one number, finite"):
        partition_rows([1, 2], -4, threshold=0.1)
    with pytest.raises(InputError, match=r"threshold=0 must lie above 0 and at most be 1"):
        partition_rows([1], 4, threshold=0)
    parts = partition_rows([3, 2, 1], 4, threshold=0.5)
    with pytest.raises(InputError, match=r"num_ranks=0 must be at least 1"):
        place(parts, 0)
    with pytest.raises(InputError, match=r"latency must be \[2, 2\] with each rank nearest to itself; it is \[2, 3\]"):
        replicate_for_inference(place(parts, 2), 0, np.ones((2, 3)))
    with pytest.raises(InputError, match=r"each rank nearest to itself"):
        replicate_for_inference(place(parts, 2), 0, [[2, 1], [1, 2]])
