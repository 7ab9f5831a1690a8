"""Access profiles: exact and bounded counts, merging, and the bytes that follow from them, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.hot_rows.costs import TableBytes, table_bytes
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology


def table(name: str, rows: int, *features: str, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (name,))


def zipf_ids(rows: int, size: int, seed: int, exponent: float = 1.2) -> np.ndarray:
    shares = np.arange(1, rows + 1) ** -exponent
    places = np.random.default_rng(seed).choice(rows, size, p=shares / shares.sum())
    return places * 7919 % rows  # the frequent ones are not neighbours


def profile_of(ids: np.ndarray, rows: int, **options: int) -> AccessProfile:
    profile = AccessProfile([table("t", rows)], **options)
    for part in np.array_split(ids, 9):
        profile.add({"t": part}, num_samples=len(part))
    return profile


def test_counts_are_exact_where_there_is_room() -> None:
    ids = zipf_ids(500, 20_000, seed=0)
    found = profile_of(ids, 500, most_rows=500)["t"]
    expected = np.bincount(ids, minlength=500)
    assert found.missed == 0
    assert found.total == 20_000
    assert found.rows.tolist() == np.flatnonzero(expected).tolist()
    assert found.counts.tolist() == expected[expected > 0].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_bounded_counts_are_within_what_they_say(seed: int) -> None:
    ids = zipf_ids(5_000, 30_000, seed)
    found, true = profile_of(ids, 5_000, most_rows=200)["t"], np.bincount(ids, minlength=5_000)
    assert len(found.rows) <= 200
    assert found.total == 30_000
    assert 0 < found.missed <= 30_000 / 201, "Misra and Gries' bound"
    counted = np.zeros(5_000, np.int64)
    counted[found.rows] = found.counts
    assert ((counted <= true) & (true <= counted + found.missed)).all()
    frequent = np.argsort(-true)[:20]
    assert np.isin(frequent, found.rows).all()


def test_profiles_of_ranks_add_up() -> None:
    tables = [table("a", 90, "x", "y"), table("b", 40)]
    parts, whole = [AccessProfile(tables) for _ in range(3)], AccessProfile(tables)
    random = np.random.default_rng(0)
    for step in range(4):
        for rank, part in enumerate(parts):
            size = 5 + step + rank
            ids = {
                "x": random.integers(0, 90, size),
                "y": random.integers(0, 90, 2 * size),
                "b": random.integers(0, 40, 3),
            }
            part.add(ids, num_samples=size)
            whole.add(ids, num_samples=size)
    for part in parts[1:]:
        parts[0].merge(part)
    assert parts[0].num_samples == whole.num_samples
    for spec in tables:
        assert parts[0][spec.name].counts.tolist() == whole[spec.name].counts.tolist()
        assert parts[0].ids_per_sample(spec) == whole.ids_per_sample(spec)
    # 84 samples, of which x has one id each and y two.
    assert whole.ids_per_sample(tables[0]) == 1.5


def test_top_rows_and_expected_distinct_ids() -> None:
    ids = zipf_ids(300, 40_000, seed=3)
    counts = RowCounts.of(ids)
    assert counts.top_share(3) == np.sort(np.bincount(ids))[-3:].sum() / 40_000
    random = np.random.default_rng(1)
    drawn = [len(np.unique(random.choice(ids, 256))) for _ in range(400)]
    # The mean of 400 draws with a standard deviation of about 6; five of its own.
    assert counts.expected_distinct(256) == pytest.approx(np.mean(drawn), abs=5 * np.std(drawn) / 20)


def test_rows_that_are_not_counted_are_taken_for_distinct_ones() -> None:
    counts = RowCounts(np.array([4]), np.array([6]), total=10)
    assert counts.expected_distinct(5) == pytest.approx(1 - 0.4**5 + 5 * 0.4)


def sent_by_hand(ids: np.ndarray, hot: np.ndarray, *, towers: int, dim: int, unique: bool) -> float:
    """Bytes of steps in which every rank has one row of ``ids``, [steps, ranks of the job, samples], in the mean."""
    total = copied = 0
    for step in ids:
        if towers == 2:
            sent = [len(np.intersect1d(of_host, hot)) for of_host in np.split(step, towers)]
        else:
            sent = [2 * len(np.intersect1d(step, hot))]
        copied += (towers - 1) * sum(sent) * 4 * dim
        for rank_ids in step:
            cold = rank_ids[~np.isin(rank_ids, hot)]
            total += len(np.unique(cold) if unique else cold) * (2 * 4 * dim + 8)
    away = (towers - 1) / towers  # ranks that are not in the table's own tower, whichever that is
    return (away * total + copied) / len(ids)


@pytest.mark.parametrize("topology", [(2, 2), (3, 1), (4, 3)])
def test_bytes_are_those_of_drawn_steps(topology: tuple[int, int]) -> None:
    towers, ranks = topology
    rows, dim, batch, steps = 200, 16, 32, 300
    drawn = zipf_ids(rows, steps * towers * ranks * batch, seed=5).reshape(steps, towers * ranks, batch)
    profile = AccessProfile([table("t", rows, dim=dim)])
    profile.add({"t": drawn}, num_samples=drawn.size)
    (found,) = table_bytes(profile, TowerTopology(num_towers=towers, ranks_per_tower=ranks), batch_size=batch)
    by_count = np.argsort(-np.bincount(drawn.ravel(), minlength=rows), kind="stable")
    sizes = {"towers": towers, "dim": dim}
    none, hot, distinct_hot = by_count[:0], by_count[: found.hot_rows], by_count[: found.unique_hot_rows]
    # Draws of 300 steps differ from what is expected of them by about 1 / sqrt(300 * distinct ids of a step).
    assert found.plain == pytest.approx(sent_by_hand(drawn, none, **sizes, unique=False), rel=1e-9)
    assert found.unique == pytest.approx(sent_by_hand(drawn, none, **sizes, unique=True), rel=0.01)
    of_hosts = drawn.reshape(steps, towers, ranks * batch)
    assert found.unique_host == pytest.approx(sent_by_hand(of_hosts, none, **sizes, unique=True), rel=0.01)
    assert found.hot == pytest.approx(sent_by_hand(drawn, hot, **sizes, unique=False), rel=0.01)
    assert found.unique_hot == pytest.approx(sent_by_hand(drawn, distinct_hot, **sizes, unique=True), rel=0.01)
    assert found.data_parallel == 2 * (towers - 1) * rows * dim * 4
    # The rule chooses the best number of rows: fewer send more, and more save less than the work of a copy is worth.
    assert 0 < found.hot_rows < rows or towers == 2
    of_hot = sent_by_hand(drawn, hot, **sizes, unique=False)
    assert of_hot < sent_by_hand(drawn, by_count[: found.hot_rows - 1], **sizes, unique=False)
    held = 2 / 300 * (towers - 1) * 4 * dim
    assert of_hot < sent_by_hand(drawn, by_count[: found.hot_rows + 1], **sizes, unique=False) + 2 * held
    if ranks > 1:
        assert found.unique_hot < found.unique < found.plain
        assert found.unique_host < found.unique


def test_a_lone_rank_of_a_tower_gains_nothing_from_hot_rows_on_top_of_unique_ids() -> None:
    """It sends a distinct row once at most, and so it would its gradient; only the 8 bytes of the id are saved."""
    ids = zipf_ids(200, 50_000, seed=1)
    (found,) = table_bytes(profile_of(ids, 200), TowerTopology(num_towers=3, ranks_per_tower=1), batch_size=64)
    assert found.unique_hot == pytest.approx(found.unique, rel=8 / 72)


def test_bytes_are_those_between_hosts_wherever_towers_are() -> None:
    ids = zipf_ids(200, 50_000, seed=1)

    def of(towers: int, ranks: int, per_host: int | None) -> TableBytes:
        topology = TowerTopology(num_towers=towers, ranks_per_tower=ranks, ranks_per_host=per_host)
        return table_bytes(profile_of(ids, 200), topology, batch_size=64)[0]

    # Two towers on a host: of the three other towers, two are on the other one; two hosts sum gradients, not four.
    apart, shared = of(4, 2, None), of(4, 2, 4)
    assert shared.plain == pytest.approx(apart.plain * 2 / 3)
    assert shared.data_parallel == apart.data_parallel / 3
    assert shared.hot_rows > apart.hot_rows
    # A tower on two hosts, as of two: a bag comes to the tower on its own host, and half of the time goes on to the
    # other. Everything on one host: nothing leaves it.
    assert of(1, 4, 2).plain == pytest.approx(of(2, 2, None).plain)
    assert of(1, 4, 2).unique_host is None
    one = of(4, 2, 8)
    assert (one.plain, one.hot, one.hot_rows) == (0, 0, 0)


def test_empty_bags_do_not_hide_single_ids() -> None:
    profile = AccessProfile([table("t", 50)])
    profile.add({"t": np.repeat([1, 2], [6000, 2000])}, num_samples=10_000)
    (found,) = table_bytes(profile, TowerTopology(num_towers=2, ranks_per_tower=2), batch_size=10)
    sent, copied = 2 * (2 * 8 * 4 + 8), 2 * 8 * 4  # of an id from the two ranks of the other host; of a copy
    assert found.hot_rows == 2
    touched = sum(1 - (1 - share) ** 16 for share in (0.75, 0.25))  # by a host of two ranks with 8 ids each
    assert found.hot == pytest.approx(touched * copied)
    # A row that a host reads once in 500 steps saves its id of 8 bytes, and is not worth the work.
    profile.add({"t": [3]}, num_samples=1)
    (found,) = table_bytes(profile, TowerTopology(num_towers=2, ranks_per_tower=2), batch_size=10)
    assert found.hot_rows == 2
    assert found.hot == pytest.approx(touched * copied + sent * 10 / 10_001, rel=1e-3)


def test_bags_of_several_ids_are_left_alone() -> None:
    profile = AccessProfile([table("t", 50)])
    profile.add({"t": np.arange(30)}, num_samples=10)
    (found,) = table_bytes(profile, TowerTopology(num_towers=2, ranks_per_tower=2), batch_size=10)
    assert (found.unique, found.hot, found.unique_hot, found.hot_rows) == (None, None, None, 0)
    assert found.plain == 2 * 10 * (2 * 8 * 4 + 3 * 8)
    assert found.best == "plain"


def test_the_best_way_is_the_least_and_the_simplest_of_equals() -> None:
    def bytes_of(**values: float) -> TableBytes:
        base = {"plain": 9, "unique": 9, "unique_host": 9, "data_parallel": 9, "hot": 9, "unique_hot": 9}
        return TableBytes(name="t", hot_rows=0, unique_hot_rows=0, **{**base, **values})

    assert bytes_of().best == "plain"
    assert bytes_of(unique=8, unique_hot=8).best == "unique"
    assert bytes_of(unique=8, unique_hot=7).best == "unique_hot"


def test_faults() -> None:
    profile = AccessProfile([table("t", 5, "f")])
    with pytest.raises(InputError, match=r"feature 'f' has the id 5, but table 't' has 5 rows"):
        profile.add({"f": [1, 5]}, num_samples=2)
    with pytest.raises(InputError, match=r"feature 'f' has the id -1"):
        profile.add({"f": [-1]}, num_samples=1)
    with pytest.raises(InputError, match=r"feature 'g' looks up in none of the 1 tables"):
        profile.add({"g": [1]}, num_samples=1)
    assert profile["t"].total == profile.num_samples == 0, "a refused batch leaves no trace"
    with pytest.raises(InputError, match=r"most_rows=0 must be at least 1"):
        AccessProfile([], most_rows=0)
    with pytest.raises(InputError, match=r"profiles of 1 and 1 tables do not add up, or their tables differ"):
        profile.merge(AccessProfile([table("t", 6, "f")]))
    topology = TowerTopology(num_towers=2, ranks_per_tower=2)
    with pytest.raises(InputError, match=r"the profile has counted no sample yet"):
        table_bytes(profile, topology, batch_size=4)
    with pytest.raises(InputError, match=r"batch_size=0 must be at least 1"):
        table_bytes(profile, topology, batch_size=0)
