"""The rest of a pass: bit for bit what the whole pass gives, and each row once under another cut."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.training.data.config import DataConfig, SyntheticConfig
from dmt.training.data.dataset import open_source
from dmt.training.data.encode import Encoder
from dmt.training.data.synthetic import BLOCK_ROWS, SyntheticClicks

from .helpers import numbered_lines, write

# The last global batches of 2 ranks are a whole one and a ragged one.
ROWS = {"synthetic": 2 * BLOCK_ROWS + 42, "criteo": 87, "criteo_split": 87, "parquet": 87, "csv": 87}
# Rows of a batch are so many times those of the small files: two thousand rows in batches of four would take long.
SCALE = {"synthetic": 10}


def criteo(folder, **settings):
    write(folder / "a.tsv", numbered_lines(40))
    write(folder / "b.tsv", [*numbered_lines(87)[40:60], "malformed", *numbered_lines(87)[60:]])
    paths = {"train_path": str(folder / "?.tsv"), "skip_bad_lines": True, "dense_transform": "none"}
    return DataConfig(kind="criteo_tsv", **paths, **settings)


def columns(path, **settings):
    names = {"dense": ("d",), "categorical": ("c", "bag"), "eval_path": str(path), "dense_transform": "none"}
    return DataConfig(kind="columns", train_path=str(path), **names, **settings)


def config_of(kind, folder, **settings):
    numbers = range(87)
    if kind == "synthetic":
        sizes = {"num_rows": ROWS[kind], "num_features": 4, "num_groups": 2, "num_multi_hot": 1}
        return DataConfig(synthetic=SyntheticConfig(rows_per_table=500, **sizes), **settings)
    if kind == "criteo":
        return criteo(folder, eval_path=str(folder / "a.tsv"), **settings)
    if kind == "criteo_split":  # 116 rows, a quarter of them apart
        config = criteo(folder, eval_fraction=0.25, **settings)
        write(folder / "c.tsv", numbered_lines(116)[87:])
        return config
    if kind == "parquet":
        bags = [[f"x{i}"] * (i % 3) for i in numbers]
        table = pa.table({"label": [i % 2 for i in numbers], "d": numbers, "c": [str(i) for i in numbers], "bag": bags})
        pq.write_table(table, folder / "a.parquet", row_group_size=30)
        return columns(folder / "a.parquet", **settings)
    lines = [f"{i % 2},{i},v{i},{'|'.join(['x'] * (i % 3))}" for i in numbers]
    return columns(write(folder / "a.csv", ["label,d,c,bag", *lines]), multi_hot=("bag",), **settings)


def batches(config, world_size=2, batch_size=4, **more):
    """All batches of every rank."""
    sizes = {"world_size": world_size, "batch_size": batch_size, **more}
    return [list(open_source(config).batches("train", rank=r, **sizes)) for r in range(world_size)]


def stream(config, world_size=1, batch_size=1, **more):
    """The rows in the order of the global batches, each as (dense values, ids and lengths of every feature)."""
    rows = []
    for step in zip(*batches(config, world_size, batch_size, **more), strict=True):
        for batch in step:
            features = [bags.to_dense() for bags in batch.sparse_features.to_dict().values()]
            for i, (label, dense) in enumerate(zip(batch.labels, batch.dense_features, strict=True)):
                ids = tuple(tuple(bags[i].tolist()) for bags in features)
                rows.append((label.item(), tuple(dense.tolist()), ids))
    return rows


def same(wanted, found):
    wanted_ids, found_ids = wanted.sparse_features, found.sparse_features
    return (
        wanted.labels.equal(found.labels)
        and wanted.weights.equal(found.weights)
        and wanted.dense_features.equal(found.dense_features)
        and wanted_ids.keys() == found_ids.keys()
        and wanted_ids.values().equal(found_ids.values())
        and wanted_ids.lengths().equal(found_ids.lengths())
    )


@pytest.mark.parametrize(
    ("kind", "shuffle_rows"),
    # Daily, each kind with two numbers, and each number with two kinds or three.
    [
        pytest.param(kind, rows, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, kind in enumerate(ROWS)
        for j, rows in enumerate((0, 16, 23, 10_000))
    ],
)
def test_the_rest_of_a_pass_is_bit_for_bit_that_of_the_whole_one(kind, shuffle_rows, tmp_path):
    config = config_of(kind, tmp_path, shuffle_rows=shuffle_rows)
    batch_size = 4 * SCALE.get(kind, 1)
    whole = batches(config, batch_size=batch_size, epoch=1)
    steps = ROWS[kind] // (2 * batch_size)
    assert [len(rank) for rank in whole] == [steps, steps]
    assert not any(same(a, b) for a, b in zip(whole[0], whole[0][1:], strict=False))
    # Within a chunk or block, at a chunk's border (16 rows), on both sides of a block's, in the last whole batch, at
    # the end.
    border = BLOCK_ROWS // (2 * batch_size)
    for first in sorted({0, 1, 2, 3, 5, min(border, steps), min(border + 1, steps), steps - 1, steps}):
        rest = batches(config, batch_size=batch_size, epoch=1, start_row=2 * batch_size * first)
        for wanted, found in zip(whole, rest, strict=True):
            assert len(found) == steps - first
            assert all(same(a, b) for a, b in zip(wanted[first:], found, strict=True)), first


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("start_row", [24, 29])
def test_another_number_of_ranks_or_batch_size_has_each_remaining_row_once(kind, start_row, tmp_path):
    config = config_of(kind, tmp_path, shuffle_rows=16)
    scale = SCALE.get(kind, 1)
    whole = stream(config, batch_size=scale)
    assert len(whole) == len(set(whole)) == ROWS[kind]
    for world_size, batch_size in ((1, scale), (3, 2 * scale), (1, 7 * scale), (4, 5 * scale)):
        rest = stream(config, world_size, batch_size, start_row=start_row)
        global_batch = world_size * batch_size
        assert len(rest) == (ROWS[kind] - start_row) // global_batch * global_batch
        assert rest == whole[start_row : start_row + len(rest)]


@pytest.mark.parametrize("kind", ["synthetic", "criteo", "parquet"])
def test_an_epoch_that_is_over_has_no_batch_and_is_no_error(kind, tmp_path):
    config = config_of(kind, tmp_path)
    for start_row in (ROWS[kind] - 7, ROWS[kind], ROWS[kind] + 1, 10**9):
        data = open_source(config)
        assert next(data.batches("train", rank=1, world_size=2, batch_size=4, start_row=start_row), None) is None
        assert data.num_rows("train") == ROWS[kind]


def test_the_limit_counts_rows_of_the_whole_pass(tmp_path):
    config = config_of("criteo", tmp_path, shuffle_rows=0, max_train_rows=50)
    assert [dense[0] for _, dense, _ in stream(config, start_row=45)] == [45, 46, 47, 48, 49]


def test_rows_left_out_are_not_decoded(tmp_path, monkeypatch):
    encoded, drawn = [], []
    encode, draw = Encoder.encode, SyntheticClicks.draw
    monkeypatch.setattr(Encoder, "encode", lambda self, t, y, p: encoded.append(len(y)) or encode(self, t, y, p))
    monkeypatch.setattr(SyntheticClicks, "draw", lambda self, s, i: drawn.append(i) or draw(self, s, i))
    for shuffle_rows in (0, 16, 10_000):
        encoded.clear()
        batches(config_of("criteo", tmp_path, shuffle_rows=shuffle_rows), start_row=48)
        assert sum(encoded) == 87 - 48
    data = open_source(config_of("synthetic", tmp_path))
    list(data.batches("train", rank=0, world_size=1, batch_size=4, start_row=BLOCK_ROWS + 4))
    assert drawn == [1, 2]


def test_malformed_lines_before_the_start_are_counted(tmp_path):
    data = open_source(config_of("criteo", tmp_path))
    list(data.batches("train", rank=0, world_size=1, batch_size=4, start_row=80))
    assert data.bad_lines == {str(tmp_path / "a.tsv"): 0, str(tmp_path / "b.tsv"): 1}


def test_what_is_left_out_at_the_end_is_counted_from_the_start_row(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        batches(config_of("synthetic", tmp_path), world_size=1, batch_size=10, start_row=2 * BLOCK_ROWS + 4)
    assert [r.getMessage() for r in caplog.records] == [
        "Left out the last 8 of 2090 training rows: less than a global batch."
    ]


@pytest.mark.parametrize(("split", "start_row"), [("train", -1), ("eval", 8), ("eval", -8)])
def test_a_start_row_that_cannot_be(split, start_row, tmp_path):
    data = open_source(config_of("synthetic", tmp_path))
    with pytest.raises(InputError, match=rf"start_row={start_row} with split='{split}': training starts at"):
        data.batches(split, rank=0, world_size=1, batch_size=4, start_row=start_row)
