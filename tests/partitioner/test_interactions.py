"""Interactions: planted pairs and triples are found and nothing else is, and the sums are those of a plain loop."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder
from torchrec import KeyedJaggedTensor

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, TowerPartitioner, gains, tower_affinity
from dmt.partitioner.partition import judge_meaning
from dmt.partitioner.rows import Column, _dense_column, read_rows
from dmt.plan.towers import TowerPlan
from tests.partitioner.clicks import batches_of, drawn_pairs, parity_clicks, planted_clicks
from tests.seeds import seeds


def found_pairs(found):
    """Pairs of numbers of features whose gain is more than noise."""
    return {
        tuple(sorted(int(name[1:]) for name in pair.features))
        for pair in found.strongest(1000)
        if len(pair.features) == 2
    }


@pytest.mark.parametrize("seed", seeds(2, 30))
def test_planted_pairs_and_no_others_are_found(seed):
    pairs = drawn_pairs(26, 5, seed=seed)
    # At 0.5, about 3 of 60 pairs are missed, and none is made up.
    ids, labels = planted_clicks(26, pairs, rows=20_000, strength=0.7, seed=seed)
    assert found_pairs(FeatureAffinity.collect_interactions(batches_of(ids, labels), seed=seed)) == set(pairs)


def named_triples(found):
    return {tuple(sorted(int(name[1:]) for name in triple.features)) for triple in found.triples}


def test_a_parity_of_three_is_found_without_an_option_and_its_features_share_a_tower():
    ids, labels = parity_clicks(8, [(1, 4, 6)], rows=10_000, strength=0.5, seed=1)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
    assert found_pairs(found) == set()
    assert named_triples(found) == {(1, 4, 6)}
    assert found.notes == ()
    partition = TowerPartitioner(num_towers=2).partition(found)
    assert any({"f1", "f4", "f6"} <= set(tower) for tower in partition.plan.to_lists())
    assert partition.comparison.within == 1.0
    assert tower_affinity(found, TowerPlan.from_lists([["f1", "f4", "f0", "f2"], ["f6", "f3", "f5", "f7"]]))[0] == 0.0


def test_where_triples_take_more_than_a_minute_fewer_rows_are_used_or_none(monkeypatch):
    ids, labels = parity_clicks(8, [(1, 4, 6)], rows=8000, strength=1.0, seed=1)
    monkeypatch.setattr(gains, "LEAST_TRIPLE_ROWS", 2000)
    monkeypatch.setattr(gains, "TRIPLE_WORK", 56 * 4000)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
    assert named_triples(found) == {(1, 4, 6)}
    assert "The 56 triples were measured on 4,000 rows only, to take about a minute." in found.notes
    monkeypatch.setattr(gains, "TRIPLE_WORK", 56 * 1999)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
    assert (found.triples, len(found.notes)) == ((), 1)
    assert "The 56 triples of features were not measured" in found.notes[0]
    monkeypatch.setattr(gains, "PAIR_WORK", 28 * 3000)
    assert (
        "The 28 pairs were measured on 3,000 of 8,000 rows."
        in FeatureAffinity.collect_interactions(batches_of(ids, labels)).notes
    )


def test_fewer_rows_are_taken_from_the_whole_log(monkeypatch):
    early, late = (planted_clicks(8, [pair], rows=8000, strength=1.0) for pair in ((0, 1), (2, 3)))
    monkeypatch.setattr(gains, "PAIR_WORK", 28 * 8000)
    found = FeatureAffinity.collect_interactions([*batches_of(*early), *batches_of(*late)])
    assert found_pairs(found) == {(0, 1), (2, 3)}


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_labels_at_random_say_that_towers_are_arbitrary(seed):
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(0, 50, (6000, 26)), (rng.random(6000) < 0.2).astype(float)
    ids[:, :5] = rng.zipf(1.3, (6000, 5)) % 5000
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels), seed=seed)
    assert found.strongest(5) == []
    partition = TowerPartitioner(num_towers=8).partition(found)
    assert partition.comparison.within is None
    assert "the towers are arbitrary" in judge_meaning(partition)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_planted_triples_and_no_others_are_found_among_26_features():
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(26)
        triples = {tuple(sorted(order[:3].tolist())), tuple(sorted(order[3:6].tolist()))}
        ids, labels = parity_clicks(26, triples, rows=20_000, strength=0.5, seed=seed)
        found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
        assert named_triples(found) == triples


def test_pairs_and_noise_are_no_triples():
    # The first three of a chain of pairs tell more than any one pair, and nothing beyond the pairs.
    ids, labels = planted_clicks(7, [(0, 1), (1, 2)], rows=20_000, strength=1.0, values=5)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
    assert found_pairs(found) == {(0, 1), (1, 2)}
    assert named_triples(found) == set()


@pytest.mark.parametrize(("num_rows", "rate", "singles"), [(1100, 0.03, 0.0), (20_000, 0.2, 1.5)])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_rare_labels_and_strong_single_features_show_no_interaction(num_rows, rate, singles, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([3, 10, 100, 2000], 16)
    ids = rng.integers(0, sizes, (num_rows, 16))
    odds = sum(rng.normal(0, singles, size)[column] for size, column in zip(sizes, ids.T, strict=True))
    drawn = odds + rng.logistic(size=num_rows)
    labels = (drawn > np.quantile(drawn, 1 - rate)).astype(float)
    assert FeatureAffinity.collect_interactions(batches_of(ids, labels), seed=seed).strongest(5) == []


def test_a_pair_of_bags_is_found_from_any_of_their_ids():
    rng = np.random.default_rng(0)
    num = 20_000
    lengths = {name: rng.integers(0, 4, num) for name in "ab"}
    ids = {name: rng.integers(0, 6, lengths[name].sum()) for name in "ab"}
    has = {
        name: np.bincount(np.repeat(np.arange(num), lengths[name])[ids[name] == 2], minlength=num) > 0 for name in "ab"
    }
    single = rng.integers(0, 6, num)
    odds = np.where(has["a"] & has["b"], 1.5, -1.0)
    labels = (rng.random(num) < 1 / (1 + np.exp(-odds))).astype(np.float32)
    sparse = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.from_numpy(np.concatenate([ids["a"], ids["b"], single])),
        lengths=torch.from_numpy(np.concatenate([lengths["a"], lengths["b"], np.ones(num, np.int64)])),
    )
    found = FeatureAffinity.collect_interactions(
        [SimpleNamespace(sparse_features=sparse, labels=torch.from_numpy(labels))]
    )
    assert [pair.features for pair in found.strongest(10)] == [("a", "b")]
    np.testing.assert_allclose(found.pooling_factors, [*(lengths[name].mean() for name in "ab"), 1.0])


def test_dense_columns_take_part_in_the_additive_model():
    rng = np.random.default_rng(0)
    num = 20_000
    dense = rng.normal(2010, 3, (num, 2)).astype(np.float32)
    ids = rng.integers(0, 5, (num, 3))
    # What is far from its middle, or missing, is more often clicked: no line and no product says that.
    missing = rng.random(num) < 0.2
    p = np.where(missing | (np.abs(dense[:, 0] - 2010) > 3), 0.8, 0.1)
    dense[missing, 0] = np.nan
    labels = (rng.random(num) < p).astype(float)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels, dense=dense))
    best = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    # 6,000 rows are held out, whose mean loss has a standard error of 0.007.
    assert abs(found.loss - best) < 0.02
    assert FeatureAffinity.collect_interactions(batches_of(ids, labels)).loss > best + 0.1
    assert found_pairs(found) == set()


def test_a_seldom_flag_and_an_infinite_value_have_bins_of_their_own():
    for values, bins in (([0] * 98 + [1, 1], [98, 2]), ([-np.inf] * 50 + [1] * 50, [50, 50])):
        assert np.bincount(_dense_column(np.array(values, np.float32)).values).tolist() == bins


@pytest.mark.parametrize("copied", [1, 3])
def test_rows_that_a_loader_gives_again_are_noted(copied):
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 50, (2000, 4)), (rng.random(2000) < 0.3).astype(float)
    found = FeatureAffinity.collect_interactions(batches_of(np.tile(ids, (copied, 1)), np.tile(labels, copied)))
    assert [note[:34] for note in found.notes] == ["4,001 of 6,000 rows repeat another"] * (copied > 1)


def test_the_additive_model_is_the_ridge_regression_on_single_values():
    ids, labels = planted_clicks(4, [], rows=3000, singles=1.0, seed=2)
    columns = [Column(values=own.astype(np.int32), lengths=None, size=8) for own in ids.T]
    counts = np.random.default_rng(0).random(3000) < 0.9
    odds = gains.fit_additive(columns, labels.astype(float), counts)
    table = OneHotEncoder().fit_transform(ids)
    model = LogisticRegression(C=1 / gains.VALUE_PRIOR, tol=1e-8, max_iter=1000).fit(table[counts], labels[counts])
    np.testing.assert_allclose(odds, model.decision_function(table), atol=0.02)


def test_gains_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    num = 400
    lengths = rng.integers(1, 3, num)
    one = Column(values=rng.integers(0, 3, num).astype(np.int32), lengths=None, size=3)
    bag = Column(values=rng.integers(0, 4, lengths.sum()).astype(np.int32), lengths=lengths.astype(np.int32), size=4)
    labels, odds, held = (rng.random(num) < 0.4).astype(float), rng.normal(size=num), rng.random(num) < 0.3
    fit = gains.AdditiveFit(labels=labels, odds=[odds], held=[held], loss=0.0)
    for first, second in ((one, one), (one, bag), (bag, one), (bag, bag)):
        mean, error = gains.gains_of([first, second], np.array([[0, 1]]), fit)
        cells, plain = {}, []

        def values(column, row):
            starts = np.cumsum(column.lengths) - column.lengths if column.lengths is not None else None
            return [column.values[row]] if starts is None else column.values[starts[row] :][: column.lengths[row]]

        p = 1 / (1 + np.exp(-odds))
        keys = [[(a, b) for a in values(first, r) for b in values(second, r)] for r in range(num)]
        for r in np.flatnonzero(~held):
            for key in keys[r]:
                g, h = cells.get(key, (0.0, 0.0))
                share = 1 / len(keys[r])
                cells[key] = g + share * (labels[r] - p[r]), h + share * p[r] * (1 - p[r])
        for r in np.flatnonzero(held):
            steps = [cells[key][0] / (cells[key][1] + 30) if key in cells else 0.0 for key in keys[r]]
            signed = np.array([odds[r], odds[r] + np.mean(steps)]) * (1 if labels[r] else -1)
            before, after = np.log1p(np.exp(-signed))
            plain.append(before - after)
        np.testing.assert_allclose(mean, np.mean(plain), rtol=1e-9)
        np.testing.assert_allclose(error, np.std(plain) / np.sqrt(len(plain)), rtol=1e-9)


def test_features_that_cannot_interact_are_named():
    ids, labels = planted_clicks(4, [(0, 1)], rows=2000)
    ids[:, 2], ids[:, 3] = 7, np.arange(2000)
    found = FeatureAffinity.collect_interactions(batches_of(ids, labels))
    assert not found.matrix[2:].any()
    assert "2 of 4 features are constant, or each of their values occurs once ('f2', 'f3')" in found.notes[0]


def bags_of_one(rows):
    ones = torch.ones(rows, dtype=torch.long)
    return KeyedJaggedTensor(keys=["a"], values=ones, lengths=ones)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: setattr(b, "labels", b.labels * 0), "0 of them with the label 1; at least 1,000 rows with 20"),
        (lambda b: setattr(b, "labels", b.labels * 0 + 1), "a weight above 0, 3,000 of them with the label 1"),
        (lambda b: setattr(b, "labels", b.labels * np.nan), "batch 0 has the label nan; labels must be 0 or 1"),
        (lambda b: setattr(b, "weights", b.labels * 0), "batches have 0 rows with a weight above 0"),
        (lambda b: delattr(b, "labels"), "batch 0 is a SimpleNamespace without labels"),
        (lambda b: setattr(b, "labels", b.labels[:, None]), "batch 0 has labels of shape [1000, 1], weights of"),
        (lambda b: setattr(b, "dense_features", b.labels[5:, None]), "dense features of [995, 1]. Give labels [B]"),
        (lambda b: setattr(b, "sparse_features", [1]), "sparse_features is [1]; give a KeyedJaggedTensor"),
        (lambda b: setattr(b, "sparse_features", {}), "is {}; give a KeyedJaggedTensor, or a non-empty dict"),
        (lambda b: b.sparse_features.update(f0=b.labels), "batch 0, feature 'f0' is float32 of shape [1000]; give"),
        (
            lambda b: b.sparse_features.update({f"x{b.labels.sum()}": b.sparse_features["f0"]}),
            "batch 1 and the first batch differ in their columns (x",
        ),
        (lambda b: setattr(b, "sparse_features", bags_of_one(rows=3)), "1000 labels, but feature 'a' has 3 bags"),
    ],
)
def test_input_that_says_nothing_is_refused(change, message):
    ids, labels = planted_clicks(3, [], rows=3000)
    batches = list(batches_of(ids, labels))
    for batch in batches:
        change(batch)
    with pytest.raises(InputError, match=re.escape(message)):
        FeatureAffinity.collect_interactions(batches)


def test_long_bags_count_by_their_first_ids_and_empty_ones_by_a_value():
    sparse = KeyedJaggedTensor(
        keys=["a"], values=torch.tensor([*range(7), *range(7), 5]), lengths=torch.tensor([0, 7, 7, 1])
    )
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    batch = SimpleNamespace(sparse_features=sparse, labels=torch.tensor([0, 1, 0, 1]), weights=weights)
    rows = read_rows([batch], max_rows=100, seed=0)
    column = rows.columns[0]
    assert column.lengths.tolist() == [1, 5, 5]
    # The empty bag's value is seen once, like everything that is: 0.
    assert column.values.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert rows.pooling_factors == (14 / 3,)
    assert column.only(np.array([True, True, False])).values.tolist() == [0, 1, 2, 3, 4, 5]


def test_hashed_cells_and_ids_still_show_the_pair(monkeypatch):
    ids, labels = planted_clicks(6, [(1, 4)], rows=20_000, strength=1.0)
    monkeypatch.setattr(gains, "MOST_CELLS", 2**5)
    assert found_pairs(FeatureAffinity.collect_interactions(batches_of(ids + 2**40, labels))) == {(1, 4)}


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("max_rows", 10)])
def test_settings_out_of_range_are_refused(name, value):
    ids, labels = planted_clicks(3, [], rows=1000)
    with pytest.raises(InputError, match=f"{name}={value} must be at least"):
        FeatureAffinity.collect_interactions(batches_of(ids, labels), **{name: value})
