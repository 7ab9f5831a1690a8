"""Batches of a rank: partition, padding, shuffling, splits, limits, validation; then the real files."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import fingerprint, open_source
from dmt.training.data.rows import cut, spread_split

from .helpers import REAL, criteo_line, needs_real_data, numbered_lines, real_rows, write


@pytest.fixture
def log(tmp_path):
    """23 rows with I1 = 0 to 22, in two files, and 7 evaluation rows."""
    lines = numbered_lines(23)
    write(tmp_path / "train_a.tsv", lines[:9])
    write(tmp_path / "train_b.tsv", lines[9:])
    write(tmp_path / "eval.tsv", numbered_lines(7))
    return tmp_path


def config_of(log, **settings):
    paths = {"train_path": str(log / "train_*.tsv"), "eval_path": str(log / "eval.tsv")}
    return DataConfig(kind="criteo_tsv", **{**paths, "dense_transform": "none", "shuffle_rows": 0, **settings})


def test_a_fingerprint_sees_ends_and_blocks_between(tmp_path):
    file, size = tmp_path / "a.csv", 2**20
    content = np.random.default_rng(0).bytes(size)

    def of(*changed):
        changes = dict.fromkeys(changed, 0)
        file.write_bytes(bytes(255 - byte if at in changes else byte for at, byte in enumerate(content)))
        return fingerprint(str(file))

    assert of(0)[0] != of()[0] != of(size - 1)[0]
    # Blocks of 4 KiB begin every 16 KiB.
    assert of(size // 2)[0] == of()[0]
    assert of(size // 2)[1] != of()[1] != of(size // 2 + 4095)[1]
    assert of(size // 2 + 4096) == of(), "between two blocks"
    file.write_bytes(content[size // 2 :] + content[: size // 2])
    assert fingerprint(str(file))[1] != of()[1], "other order"
    for small in (content[:0], content[:5], content[: 2**18]):
        file.write_bytes(small)
        whole = fingerprint(str(file))
        file.write_bytes(small[: len(small) // 2] + b"x" + small[len(small) // 2 + 1 :])
        assert fingerprint(str(file)) != whole


def test_files_are_described_once(log):
    data = open_source(config_of(log))
    first = data.files("train")
    (log / "train_a.tsv").write_text("grown\n")
    assert data.files("train") == first != open_source(config_of(log)).files("train")
    assert [(name, size) for name, size, *_ in first][1] == ("train_b.tsv", (log / "train_b.tsv").stat().st_size)


def all_ranks(config, split, world_size, batch_size, **more):
    return [
        list(open_source(config).batches(split, rank=r, world_size=world_size, batch_size=batch_size, **more))
        for r in range(world_size)
    ]


def test_rank_r_has_rows_r_b_to_r_plus_one_b_of_each_global_batch(log):
    ranks = all_ranks(config_of(log), "train", world_size=2, batch_size=4)
    assert [[b.dense_features[:, 0].tolist() for b in batches] for batches in ranks] == [
        [[0, 1, 2, 3], [8, 9, 10, 11]],
        [[4, 5, 6, 7], [12, 13, 14, 15]],
    ]
    assert [b.labels.tolist() for b in ranks[0]] == [[0, 1, 0, 1]] * 2


@pytest.mark.parametrize(
    ("world_size", "batch_size", "shuffle_rows"),
    [
        *((*sizes, 5) for sizes in ((1, 1), (1, 23), (2, 3), (3, 2), (4, 5), (23, 1), (5, 4))),
        *((*sizes, shuffle_rows) for sizes in ((1, 23), (3, 2), (5, 4)) for shuffle_rows in (0, 1000)),
    ],
)
def test_training_rows_are_disjoint_and_complete_but_for_the_ragged_end(log, world_size, batch_size, shuffle_rows):
    ranks = all_ranks(config_of(log, shuffle_rows=shuffle_rows), "train", world_size, batch_size)
    steps = 23 // (world_size * batch_size)
    assert [len(batches) for batches in ranks] == [steps] * world_size
    assert all(len(b.labels) == batch_size for batches in ranks for b in batches)
    rows = [x for batches in ranks for x in real_rows(batches)]
    assert len(set(rows)) == len(rows) == steps * world_size * batch_size
    assert set(rows) <= set(range(23))


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 7), (1, 10), (2, 3), (3, 2), (4, 5), (2, 1)])
def test_evaluation_sees_every_row_once_and_fills_up(log, world_size, batch_size):
    ranks = all_ranks(config_of(log), "eval", world_size, batch_size)
    steps = -(-7 // (world_size * batch_size))
    assert [len(batches) for batches in ranks] == [steps] * world_size
    assert sorted(x for batches in ranks for x in real_rows(batches)) == list(range(7))
    filled = [b for batches in ranks for b in batches]
    assert sum(int((b.weights == 0).sum()) for b in filled) == steps * world_size * batch_size - 7
    for b in filled:
        assert len(b.labels) == len(b.dense_features) == b.sparse_features.stride() == batch_size
        padding = b.weights == 0
        assert not b.labels[padding].any()
        assert not b.dense_features[padding].any()
        assert not b.sparse_features["C26"].values()[padding].any()


def test_ragged_end_is_logged_by_rank_0_only(log, caplog):
    with caplog.at_level(logging.INFO):
        all_ranks(config_of(log), "train", world_size=2, batch_size=4)
    assert [r.getMessage() for r in caplog.records] == [
        "Left out the last 7 of 23 training rows: less than a global batch."
    ]


def stream(config, epoch=0, world_size=1, batch_size=1):
    """The rows in the order of the global batches."""
    ranks = all_ranks(config, "train", world_size, batch_size, epoch=epoch)
    return [x for step in zip(*ranks, strict=True) for b in step for x in b.dense_features[:, 0].tolist()]


def test_shuffling_is_a_permutation_within_blocks_the_same_on_all_ranks(log):
    config = config_of(log, shuffle_rows=10)
    order = stream(config)
    assert order != sorted(order)
    assert [sorted(order[i : i + 10]) for i in (0, 10, 20)] == [[*range(10)], [*range(10, 20)], [20, 21, 22]]
    assert stream(config, world_size=3, batch_size=2) == order[:18]
    assert stream(config) == order
    assert stream(config, epoch=1) != order
    assert stream(config_of(log, shuffle_rows=10, shuffle_seed=1)) != order


def test_only_own_rows_are_encoded(log, monkeypatch):
    encoded = []
    from dmt.training.data.encode import Encoder

    whole = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, t, y, p: encoded.append(len(y)) or whole(self, t, y, p))
    list(open_source(config_of(log, shuffle_rows=100)).batches("train", rank=1, world_size=4, batch_size=2))
    assert sum(encoded) == 6  # rows 2-3, 10-11 and 18-19 of the shuffled stream


def test_eval_fraction_spreads_rows_evenly_and_splits_exactly(log):
    config = config_of(log, eval_path=None, eval_fraction=0.2)
    kept = real_rows(all_ranks(config, "train", 1, 1)[0])
    apart = real_rows(all_ranks(config, "eval", 1, 1)[0])
    assert apart == [4, 9, 14, 19]
    assert sorted(kept + apart) == list(range(23))


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.999])
def test_share_of_rows_set_apart(fraction):
    class Fake:
        num_rows = 1000

    counts = [sum(b.num_rows for b in spread_split([Fake()] * 3, fraction, chosen=c)) for c in (True, False)]
    assert counts == [round(3000 * fraction), 3000 - round(3000 * fraction)]


def test_row_limits(log):
    config = config_of(log, max_train_rows=10, max_eval_rows=2)
    assert stream(config) == list(range(10))
    assert real_rows(all_ranks(config, "eval", 1, 2)[0]) == [0, 1]


def test_a_limit_stops_reading():
    class Fake:
        num_rows = 5

    def blocks():
        yield Fake()
        raise AssertionError("read on past the limit")

    assert [b.num_rows for b in cut(blocks(), 0, 5)] == [5]


def test_num_rows_is_known_after_a_pass(log):
    data = open_source(config_of(log))
    assert data.num_rows("eval") is None
    list(data.batches("eval", rank=0, world_size=1, batch_size=4))
    assert data.num_rows("eval") == 7
    assert data.num_rows("train") is None


def test_training_rows_are_known_after_a_check_of_all(log, tmp_path):
    def counted(config):
        data = open_source(config)
        data.validate()
        known = data.num_rows("train")
        list(data.batches("train", rank=0, world_size=1, batch_size=1))
        return known, data.num_rows("train")

    assert counted(config_of(log)) == (23, 23)
    for settings in ({"eval_fraction": 0.3}, {"group_by": "I1", "eval_fraction": 0.3}, {"max_train_rows": 5}):
        known, found = counted(config_of(log, eval_path=None, **settings))
        assert 0 < known == found < 23
    assert counted(config_of(log, validate_rows=3))[0] is None
    path = write(tmp_path / "a.csv", ["label,c,split", *(f"{i % 2},{i},{'tr' if i % 3 else 'te'}" for i in range(10))])
    names = {"split_column": "split", "train_split": "tr", "eval_split": "te", "categorical": ("c",)}
    assert counted(DataConfig(kind="columns", train_path=path, **names)) == (6, 6)
    assert counted(DataConfig(kind="columns", train_path=path, **names, validate_rows=3))[0] is None


def test_tables(log):
    data = open_source(config_of(log, num_embeddings=50, num_embeddings_per_feature={"C2": 7}), embedding_dim=16)
    assert [t.num_embeddings for t in data.tables] == [50, 7] + [50] * 24
    assert data.tables[1].name == "t_C2"
    assert data.tables[1].feature_names == ("C2",)
    assert data.dense_names == tuple(f"I{i}" for i in range(1, 14))
    with pytest.raises(InputError, match="tables needs embedding_dim"):
        _ = open_source(config_of(log)).tables


def test_ids_of_cut_tables_are_repeated_in_every_batch(log):
    splits = {"C2": (4, 8, 4), "C26": (8, 8)}
    whole, cut = (open_source(config_of(log), embedding_dim=16, column_splits=given) for given in (None, splits))
    assert cut.feature_names == whole.feature_names
    assert cut.tables == whole.tables
    for split in ("train", "eval"):
        settings = {"rank": 1, "world_size": 2, "batch_size": 4}
        batches = list(zip(whole.batches(split, **settings), cut.batches(split, **settings), strict=True))
        assert batches
        for wanted, found in batches:
            keys = found.sparse_features.keys()
            assert keys[:4] == ["C1", "C2[0:4]", "C2[4:12]", "C2[12:16]"]
            assert keys[-2:] == ["C26[0:8]", "C26[8:16]"]
            for key in keys:
                of_whole = wanted.sparse_features[key.split("[")[0]].values()
                assert torch.equal(found.sparse_features[key].values(), of_whole), key
            assert torch.equal(found.dense_features, wanted.dense_features)
            assert torch.equal(found.weights, wanted.weights)
    with pytest.raises(InputError, match=r"cuts the table of feature 'C27', .*\(26 features\)\. Did you mean"):
        open_source(config_of(log), column_splits={"C27": (8, 8)})


def test_some_of_criteo_s_columns(log):
    data = open_source(config_of(log, dense=("I2", "I1"), categorical=("C2[0-2]",)))
    assert (data.dense_names, data.feature_names) == (("I2", "I1"), ("C20", "C21", "C22"))
    with pytest.raises(InputError, match="categorical 'C27' matches no column"):
        open_source(config_of(log, categorical=("C27",)))


@pytest.mark.parametrize("arguments", [(0, 0, 1), (2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_arguments_out_of_range(log, arguments):
    rank, world_size, batch_size = arguments
    with pytest.raises(InputError, match=rf"rank={rank}, world_size={world_size}, batch_size={batch_size}"):
        open_source(config_of(log)).batches("train", rank=rank, world_size=world_size, batch_size=batch_size)
    with pytest.raises(InputError, match="split='test' is unknown"):
        open_source(config_of(log)).batches("test", rank=0, world_size=1, batch_size=1)


def test_too_few_training_rows_is_an_error_on_every_rank(log):
    for rank in range(2):
        with pytest.raises(InputError, match=r"23 rows, fewer than one global batch of .* = 2 \* 12 = 24"):
            list(open_source(config_of(log)).batches("train", rank=rank, world_size=2, batch_size=12))


def test_validation_finds_a_fault_in_either_file_and_reads_no_further_than_told(log):
    assert open_source(config_of(log)).validate().train_rows == 23
    assert open_source(config_of(log)).validate().eval_rows == 7
    write(log / "train_b.tsv", [*numbered_lines(12), "x", criteo_line()])
    with pytest.raises(InputError, match=r"train_b\.tsv, line 13: expected 40 columns"):
        open_source(config_of(log)).validate()
    assert open_source(config_of(log, validate_rows=9)).validate().train_rows == 9
    assert open_source(config_of(log, validate_rows=0)).validate().train_rows == 0
    report = open_source(config_of(log, skip_bad_lines=True, validate_rows=-1)).validate()
    assert (report.train_rows, report.eval_rows, report.bad_rows) == (22, 7, 1)
    write(log / "eval.tsv", ["y"])
    with pytest.raises(InputError, match=r"eval\.tsv, line 1"):
        open_source(config_of(log, validate_rows=9)).validate()


def test_an_empty_split_is_an_error(log):
    (log / "eval.tsv").write_text("")
    with pytest.raises(InputError, match=r"The eval split has no rows in .*eval\.tsv"):
        open_source(config_of(log)).validate()
    with pytest.raises(
        InputError, match=r"no rows in .*train_a\.tsv and 1 more\. Give more data, or change eval_fraction"
    ):
        list(
            open_source(config_of(log, eval_path=None, eval_fraction=0.01)).batches(
                "eval", rank=0, world_size=1, batch_size=1
            )
        )


def test_left_out_lines_do_not_shift_the_ranks(log):
    write(log / "train_a.tsv", [*numbered_lines(4), "bad", *numbered_lines(9)[4:]])
    config = config_of(log, skip_bad_lines=True)
    assert stream(config, world_size=2, batch_size=4) == list(range(16))
    data = open_source(config)
    list(data.batches("train", rank=0, world_size=1, batch_size=4))
    assert data.bad_lines == {str(log / "train_a.tsv"): 1, str(log / "train_b.tsv"): 0}


@needs_real_data
def test_real_criteo():
    paths = {"train_path": str(REAL / "criteo_train.tsv.gz"), "eval_path": str(REAL / "criteo_test.tsv.gz")}
    data = open_source(DataConfig(kind="criteo_tsv", **paths))
    report = data.validate()
    assert (report.train_rows, report.eval_rows, report.bad_rows) == (6381, 1619, 0)
    ranks = [list(data.batches("eval", rank=r, world_size=3, batch_size=256)) for r in range(3)]
    weights = np.concatenate([b.weights for batches in ranks for b in batches])
    labels = np.concatenate([b.labels for batches in ranks for b in batches])
    assert weights.sum() == 1619
    assert labels.sum() / weights.sum() == pytest.approx(0.22, abs=0.02)


@needs_real_data
@pytest.mark.parametrize(
    ("name", "train", "test", "categorical", "dense", "rate"),
    [
        pytest.param("flights", 262_227, 65_119, 17, 13, 0.24, marks=pytest.mark.slow),
        ("hotel", 68_903, 16_965, 16, 13, 0.28),
        pytest.param("census", 159_618, 39_905, 33, 7, 0.06, marks=pytest.mark.slow),
    ],
)
def test_real_parquet(name, train, test, categorical, dense, rate):
    settings = {"categorical": ("c_*",), "dense": ("d_*",), "split_column": "split"}
    data = open_source(DataConfig(kind="columns", train_path=str(REAL / f"{name}.parquet"), **settings))
    assert (len(data.feature_names), len(data.dense_names)) == (categorical, dense)
    # Rank 0 of 8 decodes an eighth; the number of rows in the stream is known to all.
    batches = list(data.batches("train", rank=0, world_size=8, batch_size=1024))
    list(data.batches("eval", rank=0, world_size=8, batch_size=1024))
    assert (data.num_rows("train"), data.num_rows("eval")) == (train, test)
    assert np.concatenate([b.labels for b in batches]).mean() == pytest.approx(rate, abs=0.02)
    assert all(b.dense_features.isfinite().all() for b in batches)
