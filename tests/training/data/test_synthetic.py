"""The generator: determinism, marginals, and that the planted groups are there to be found."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dmt.training.data.clicks import open_source
from dmt.training.data.config import DataConfig, SyntheticConfig
from dmt.training.data.rows import Bags
from dmt.training.data.synthetic import DrawnRows, SyntheticClicks

CONFIG = SyntheticConfig(num_features=9, num_groups=3, rows_per_table=40, num_multi_hot=2)


def draw(config, blocks, split="train"):
    clicks = SyntheticClicks(config)
    drawn = [clicks.draw(split, i) for i in range(blocks)]
    bags = tuple(Bags.concat([rows.bags[j] for rows in drawn]) for j in range(len(drawn[0].bags)))
    return DrawnRows(np.concatenate([r.labels for r in drawn]), np.concatenate([r.dense for r in drawn]), bags)


def same(a, b):
    ids = all(np.array_equal(x.values, y.values) for x, y in zip(a.bags, b.bags, strict=True))
    return ids and np.array_equal(a.labels, b.labels) and np.array_equal(a.dense, b.dense)


def test_a_block_depends_on_seed_split_and_index_only():
    clicks = SyntheticClicks(CONFIG)
    clicks.draw("train", 0)
    assert same(clicks.draw("train", 5), SyntheticClicks(CONFIG).draw("train", 5))
    assert not same(clicks.draw("train", 5), clicks.draw("train", 6))
    assert not same(clicks.draw("train", 5), clicks.draw("eval", 5))
    assert not same(clicks.draw("train", 5), SyntheticClicks(CONFIG.model_copy(update={"seed": 1})).draw("train", 5))


def test_shapes_and_rates():
    rows = draw(CONFIG, 30)
    assert rows.dense.shape == (30 * 1024, 13)
    assert rows.dense.dtype == rows.labels.dtype == np.float32
    assert rows.dense.min() >= 0
    assert rows.labels.mean() == pytest.approx(0.25, abs=0.02)
    assert [b.offsets is None for b in rows.bags] == [True] * 7 + [False] * 2
    assert np.unique(np.diff(rows.bags[8].offsets)).tolist() == [0, 1, 2, 3]
    for bags in rows.bags:
        assert bags.values.dtype == np.int64
        assert bags.values.min() >= 0
        assert bags.values.max() < 40


def test_ids_follow_zipf():
    counts = np.sort(np.bincount(draw(CONFIG, 30).bags[0].values, minlength=40))[::-1]
    share = np.arange(1, 41) ** -1.05
    np.testing.assert_allclose(counts / counts.sum(), share / share.sum(), atol=0.01)


def test_every_feature_is_in_one_group_of_equal_size():
    groups = SyntheticClicks(CONFIG).planted_groups
    assert sorted(f for group in groups for f in group) == sorted(f"C{i}" for i in range(1, 10))
    assert {len(group) for group in groups} == {3}


def test_ids_tell_of_each_other_within_groups_only():
    config = CONFIG.model_copy(update={"num_multi_hot": 0})
    clicks, rows = SyntheticClicks(config), draw(config, 30)
    scores = np.array([clicks._scores[j][bags.values] for j, bags in enumerate(rows.bags)])
    correlation = np.corrcoef(scores)
    group = np.array([next(i for i, g in enumerate(clicks.planted_groups) if f in g) for f in clicks.feature_names])
    together = group[:, None] == group
    assert correlation[together].min() > 0.4
    assert abs(correlation[~together]).max() < 0.03  # 1 / sqrt(30,720) = 0.006 is the standard error


def test_labels_depend_on_products_within_groups():
    config = CONFIG.model_copy(update={"num_multi_hot": 0})
    clicks, rows = SyntheticClicks(config), draw(config, 60)
    for group in clicks.planted_groups:
        a, b = (clicks.feature_names.index(f) for f in group[:2])
        product = clicks._scores[a][rows.bags[a].values] * clicks._scores[b][rows.bags[b].values]
        assert np.corrcoef(product, rows.labels)[0, 1] > 0.05


def best_auc(signal):
    """The AUC of the best possible model, which ranks rows by their noise-free logit."""
    clicks = SyntheticClicks(CONFIG.model_copy(update={"signal": signal}))
    rows, logits = clicks._draw(np.random.default_rng(0), 30_000)
    return roc_auc_score(rows.labels, logits)


def test_the_best_auc_follows_the_signal():
    assert 0.5 < best_auc(0.3) < 0.65 < 0.8 < best_auc(2.0) < 1.0
    assert best_auc(0.0) == pytest.approx(0.5, abs=0.02)


def test_edge_sizes_work():
    config = SyntheticConfig(num_dense=0, num_features=1, num_groups=1, rows_per_table=2, noise=0.0, zipf_exponent=0.0)
    rows = draw(config, 2)
    assert rows.dense.shape == (2048, 0)
    assert np.bincount(rows.bags[0].values).tolist() == pytest.approx([1024, 1024], abs=150)


def test_source_of_synthetic_data():
    synthetic = CONFIG.model_copy(update={"num_rows": 3000, "num_eval_rows": 2000})
    data = open_source(DataConfig(synthetic=synthetic, max_eval_rows=1500), embedding_dim=4)
    assert (data.num_rows("train"), data.num_rows("eval")) == (3000, 1500)
    assert data.planted_groups == SyntheticClicks(synthetic).planted_groups
    whole = draw(synthetic, 3)
    batches = list(data.batches("train", rank=0, world_size=1, batch_size=1000))
    np.testing.assert_array_equal(np.concatenate([b.labels for b in batches]), whole.labels[:3000])
    np.testing.assert_array_equal(np.concatenate([b.dense_features for b in batches]), np.log1p(whole.dense[:3000]))
    assert batches[0].sparse_features["C9"].values().tolist() == whole.bags[8].slice(0, 1000).values.tolist()
    assert batches[0].sparse_features["C1"].values().tolist() == whole.bags[0].values[:1000].tolist()
