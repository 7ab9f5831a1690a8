"""Access profiles: counts, merging, and the bytes that follow from them, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.hot_rows.choice import choose_rows
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology


def table(name: str, rows: int, *features: str, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (name,))


def zipf_ids(rows: int, size: int, seed: int, exponent: float = 1.2) -> np.ndarray:
    shares = np.arange(1, rows + 1) ** -exponent
    places = np.random.default_rng(seed).choice(rows, size, p=shares / shares.sum())
    return places * 7919 % rows  # the frequent ones are not neighbors


def profile_of(ids: np.ndarray, rows: int) -> AccessProfile:
    profile = AccessProfile([table("t", rows)])
    for part in np.array_split(ids, 9):
        profile.add({"t": part}, num_samples=len(part))
    return profile


def test_distinct_rows_are_those_of_drawn_batches() -> None:
    ids = zipf_ids(500, 400_000, seed=1)
    drawn = np.mean([len(np.unique(batch)) for batch in np.random.default_rng(2).permutation(ids).reshape(-1, 200)])
    assert profile_of(ids, 500).distinct_rows(200)["t"] == pytest.approx(drawn, rel=0.01)
    shared = AccessProfile([table("t", 500, "x", "y")])
    for feature in ("x", "y"):
        shared.add({feature: ids}, num_samples=len(ids) // 2)
    assert shared.distinct_rows(200)["t"] == pytest.approx(2 * drawn, rel=0.01)


def sent_by_hand(ids: np.ndarray, hot: np.ndarray, *, towers: int, dim: int, unique: bool) -> float:
    """Returns the mean bytes of a step in which ranks have these ``ids``, [steps, ranks of the job, samples]."""
    total = copied = 0
    for step in ids:
        copied += (towers - 1) * 2 * len(np.intersect1d(step, hot)) * 4 * dim
        for rank_ids in step:
            cold = rank_ids[~np.isin(rank_ids, hot)]
            total += len(np.unique(cold) if unique else cold) * (2 * 4 * dim + 8)
    away = (towers - 1) / towers  # ranks that are not in the table's own tower, whichever that is
    return (away * total + copied) / len(ids)


def test_counts_that_are_added_are_those_of_all_ids() -> None:
    draw, total, seen = np.random.default_rng(0), RowCounts.of([]), np.empty(0, np.int64)
    for size in (0, 5, 1, 200, 3, 40):
        ids = draw.integers(-2, 30 + size, size)
        total, seen = total.merged(RowCounts.of(ids)), np.append(seen, ids)
        rows, counts = np.unique(seen, return_counts=True)
        assert (total.rows.tolist(), total.counts.tolist(), total.total) == (rows.tolist(), counts.tolist(), len(seen))


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("topology", [(2, 2), (3, 1), (4, 3)])
def test_the_rule_chooses_the_rows_that_send_least(topology: tuple[int, int], distinct: bool) -> None:
    """By hand: fewer copies send more, and more save less than the work of holding one is worth."""
    towers, ranks = topology
    rows, dim, batch, steps = 200, 16, 32, 300
    drawn = zipf_ids(rows, steps * towers * ranks * batch, seed=5).reshape(steps, towers * ranks, batch)
    spec = table("t", rows, dim=dim)
    profile = AccessProfile([spec])
    profile.add({"t": drawn}, num_samples=drawn.size)
    mesh = TowerTopology(num_towers=towers, ranks_per_tower=ranks)
    chosen = choose_rows(profile, [spec], mesh, batch_size=batch, distinct=distinct, max_bytes=1e9)
    number = len(chosen.get("t", ()))
    by_count = np.argsort(-np.bincount(drawn.ravel(), minlength=rows), kind="stable")
    sent = [
        sent_by_hand(drawn, by_count[:n], towers=towers, dim=dim, unique=distinct)
        for n in (0, max(number - 1, 0), number, number + 1)
    ]
    if ranks == 1 and distinct:
        # A distinct row is sent once at most, and so is its gradient; only the 8 bytes of the id are saved.
        assert sent[2] == pytest.approx(sent[0], rel=8 / 72)
        return
    assert 0 < number < rows
    held = 2 / 300 * (towers - 1) * 4 * dim
    # The mean of 300 steps differs from its expectation.
    assert sent[2] < sent[1] * 1.001 < sent[0]
    assert sent[2] < sent[3] * 1.001 + 2 * held


def test_bytes_are_those_between_hosts_wherever_towers_are() -> None:
    spec, profile = table("t", 200), profile_of(zipf_ids(200, 50_000, seed=1), 200)

    def chosen(towers: int, ranks: int, per_host: int | None) -> int:
        topology = TowerTopology(num_towers=towers, ranks_per_tower=ranks, ranks_per_host=per_host)
        found = choose_rows(profile, [spec], topology, batch_size=64, distinct=False, max_bytes=1e9)
        return len(found.get("t", ()))

    assert chosen(4, 2, 4) > chosen(4, 2, None) > 0, "two hosts sum gradients, not four"
    assert chosen(4, 2, 8) == 0, "nothing leaves a single host"
    assert chosen(1, 4, 2) > 0, "a tower spans two hosts"
