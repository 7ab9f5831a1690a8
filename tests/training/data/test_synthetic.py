"""The generator: determinism, marginals, and that the planted groups are there to be found."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dmt.training.data.clicks import open_source
from dmt.training.data.config import DataConfig, SyntheticConfig
from dmt.training.data.deal import Rows
from dmt.training.data.synthetic import SyntheticClicks

CONFIG = SyntheticConfig(num_features=9, num_groups=3, rows_per_table=40, num_multi_hot=2)
SINGLE = CONFIG.model_copy(update={"num_multi_hot": 0})


def draw(config, blocks):
    clicks = SyntheticClicks(config)
    return Rows.concat([clicks.draw("train", block) for block in range(blocks)])


def same(a, b):
    bags = all(
        np.array_equal(x, y) for one, two in zip(a.bags, b.bags, strict=True) for x, y in zip(one, two, strict=True)
    )
    return bags and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "labels", "dense"))


def test_a_block_depends_on_seed_split_and_index_only():
    clicks = SyntheticClicks(CONFIG)
    clicks.draw("train", 0)
    assert same(clicks.draw("train", 5), SyntheticClicks(CONFIG).draw("train", 5))
    assert not same(clicks.draw("train", 5), clicks.draw("train", 6))
    assert not same(clicks.draw("train", 5), clicks.draw("eval", 5))
    assert not same(clicks.draw("train", 5), SyntheticClicks(CONFIG.model_copy(update={"seed": 1})).draw("train", 5))


def test_shapes_and_rates():
    rows = draw(CONFIG, 30)
    assert rows.dense.shape == (13, 30 * 1024)
    assert rows.dense.dtype == rows.labels.dtype == np.float32
    assert rows.dense.min() >= 0
    assert rows.labels.mean() == pytest.approx(0.25, abs=0.02)
    assert np.unique(np.diff(rows.bags[1][1])).tolist() == [0, 1, 2, 3]
    for ids in (*rows.ids, *(values for values, _ in rows.bags)):
        assert (ids.dtype, 0 <= ids.min() <= ids.max() < 40) == (np.int64, True)


def test_ids_follow_zipf():
    counts = np.sort(np.bincount(draw(CONFIG, 30).ids[0], minlength=40))[::-1]
    share = np.arange(1, 41) ** -1.05
    np.testing.assert_allclose(counts / counts.sum(), share / share.sum(), atol=0.01)


def test_every_feature_is_in_one_group_of_equal_size():
    groups = SyntheticClicks(CONFIG).planted_groups
    assert sorted(f for group in groups for f in group) == sorted(f"C{i}" for i in range(1, 10))
    assert {len(group) for group in groups} == {3}


def test_ids_tell_of_each_other_within_groups_only():
    clicks, rows = SyntheticClicks(SINGLE), draw(SINGLE, 30)
    scores = np.array([clicks._scores[j][ids] for j, ids in enumerate(rows.ids)])
    correlation = np.corrcoef(scores)
    group = np.array([next(i for i, g in enumerate(clicks.planted_groups) if f in g) for f in clicks.feature_names])
    together = group[:, None] == group
    assert correlation[together].min() > 0.4
    assert abs(correlation[~together]).max() < 0.03  # 1 / sqrt(30,720) = 0.006 is the standard error


def test_labels_depend_on_products_within_groups():
    clicks, rows = SyntheticClicks(SINGLE), draw(SINGLE, 60)
    for group in clicks.planted_groups:
        a, b = (clicks.feature_names.index(f) for f in group[:2])
        product = clicks._scores[a][rows.ids[a]] * clicks._scores[b][rows.ids[b]]
        assert np.corrcoef(product, rows.labels)[0, 1] > 0.05


def best_auc(signal):
    """The AUC of the best possible model, which ranks rows by their noise-free logit."""
    rows, logits = SyntheticClicks(CONFIG, signal=signal)._draw(np.random.default_rng(0), 30_000)
    return roc_auc_score(rows.labels, logits)


def test_the_best_auc_follows_the_signal():
    assert 0.5 < best_auc(0.3) < 0.65 < 0.8 < best_auc(2.0) < 1.0
    assert best_auc(0.0) == pytest.approx(0.5, abs=0.02)


def test_source_of_synthetic_data():
    synthetic = CONFIG.model_copy(update={"num_rows": 3000, "num_eval_rows": 1500})
    data = open_source(DataConfig(synthetic=synthetic), embedding_dim=4)
    assert (data.num_rows("train"), data.num_rows("eval")) == (3000, 1500)
    assert data.planted_groups == SyntheticClicks(synthetic).planted_groups
    whole = draw(synthetic, 3)
    batches = list(data.batches("train", rank=0, world_size=1, batch_size=1000))
    np.testing.assert_array_equal(np.concatenate([b.labels for b in batches]), whole.labels[:3000])
    np.testing.assert_array_equal(
        np.concatenate([b.dense_features for b in batches]), np.log1p(whole.dense[:, :3000].T)
    )
    assert batches[0].sparse_features["C9"].values().tolist() == whole.slice(0, 1000).bags[1][0].tolist()
    assert batches[0].sparse_features["C1"].values().tolist() == whole.ids[0, :1000].tolist()
