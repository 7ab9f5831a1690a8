"""The generator: determinism, marginals, and that the planted groups are there to be found."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig, SyntheticConfig
from dmt.training.data.synthetic import SyntheticClicks

CONFIG = SyntheticConfig(num_features=9, num_groups=3, rows_per_table=40, num_multi_hot=2)
SINGLE = CONFIG.model_copy(update={"num_multi_hot": 0})


def draw(config: SyntheticConfig, blocks: int) -> pa.Table:
    clicks = SyntheticClicks(config)
    return pa.concat_tables([clicks.draw("train", block) for block in range(blocks)])


def test_a_block_depends_on_seed_split_and_index_only() -> None:
    clicks = SyntheticClicks(CONFIG)
    clicks.draw("train", 0)
    block = clicks.draw("train", 5)
    assert block.equals(SyntheticClicks(CONFIG).draw("train", 5))
    assert not block.equals(clicks.draw("train", 6))
    assert not block.equals(clicks.draw("eval", 5))
    assert not block.equals(SyntheticClicks(CONFIG.model_copy(update={"seed": 1})).draw("train", 5))


def test_ids_follow_zipf_and_labels_the_base_rate() -> None:
    rows = draw(CONFIG, 30)
    assert np.mean(rows["label"]) == pytest.approx(0.25, abs=0.02)
    assert min(np.min(rows[f"I{i}"]) for i in range(1, 14)) == 0
    bags = rows["C9"].combine_chunks()
    assert np.unique(np.diff(bags.offsets)).tolist() == [0, 1, 2, 3]
    assert 0 <= bags.flatten().to_numpy().min() <= bags.flatten().to_numpy().max() < 40
    counts = np.sort(np.bincount(rows["C1"], minlength=40))[::-1]
    share = np.arange(1, 41) ** -1.05
    np.testing.assert_allclose(counts / counts.sum(), share / share.sum(), atol=0.01)


def test_ids_tell_of_each_other_within_groups_only() -> None:
    clicks, rows = SyntheticClicks(SINGLE), draw(SINGLE, 30)
    assert sorted(f for group in clicks.planted_groups for f in group) == sorted(f"C{i}" for i in range(1, 10))
    assert {len(group) for group in clicks.planted_groups} == {3}
    scores = np.array([clicks._scores[j][rows[name]] for j, name in enumerate(clicks.feature_names)])
    correlation = np.corrcoef(scores)
    group = np.array([next(i for i, g in enumerate(clicks.planted_groups) if f in g) for f in clicks.feature_names])
    together = group[:, None] == group
    assert correlation[together].min() > 0.4
    assert abs(correlation[~together]).max() < 0.03  # 1 / sqrt(30,720) = 0.006 is the standard error


def test_labels_depend_on_products_within_groups() -> None:
    clicks, rows = SyntheticClicks(SINGLE), draw(SINGLE, 60)
    for group in clicks.planted_groups:
        a, b = (clicks.feature_names.index(f) for f in group[:2])
        product = clicks._scores[a][rows[group[0]]] * clicks._scores[b][rows[group[1]]]
        assert np.corrcoef(product, rows["label"])[0, 1] > 0.05


def test_source_of_synthetic_data() -> None:
    synthetic = CONFIG.model_copy(update={"num_rows": 3000, "num_eval_rows": 1500})
    data = ClickData(DataConfig(synthetic=synthetic))
    assert (data.num_rows("train"), data.num_rows("eval")) == (3000, 1500)
    whole = draw(synthetic, 3).slice(0, 3000)
    batches = list(data.batches("train", rank=0, world_size=1, batch_size=1000))
    np.testing.assert_array_equal(np.concatenate([b.labels for b in batches]), whole["label"])
    dense = np.concatenate([b.dense_features for b in batches])
    np.testing.assert_array_equal(dense[:, 12], whole["I13"])
    for name in ("C1", "C9"):
        ids = whole[name].combine_chunks()
        ids = ids.flatten() if name == "C9" else ids
        np.testing.assert_array_equal(np.concatenate([b.sparse_features[name].values() for b in batches]), ids)
