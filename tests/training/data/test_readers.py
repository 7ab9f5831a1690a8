"""Named columns in Parquet and CSV: exact values, list columns, and every error with its place."""

from __future__ import annotations

import gzip
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import open_source
from dmt.training.data.schema import expand_path, resolve_columns

from .helpers import write


def config_of(path, **settings):
    defaults = {"categorical": ("c_*",), "dense": ("d_*",), "eval_path": str(path), "id_mode": "index"}
    more = {"dense_transform": "none", "num_embeddings": 100, "shuffle_rows": 0}
    return DataConfig(kind="columns", train_path=str(path), **{**defaults, **more, **settings})


def one_batch(config, rows):
    """All rows of a small file in one batch."""
    batches = list(open_source(config).batches("eval", rank=0, world_size=1, batch_size=rows))
    assert len(batches) == 1
    return batches[0]


def parquet(path, columns, **types):
    arrays = {k: pa.array(v, types[k]) if k in types else pa.array(v) for k, v in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


CSV = ["label,d_1,c_1,other,d_2,c_2", "1,0.5,3,x,,7", '0,-2e1,,"a,b",NaN,99', "1.0,.25,0,,NA,1"]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv"])
def test_exact_values_of_csv(tmp_path, suffix):
    lines = [line.replace('"a,b"', "ab").replace(",", "\t") for line in CSV] if suffix == ".tsv" else CSV
    path = tmp_path / f"a{suffix}"
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    batch = one_batch(config_of(path), 3)
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.dense_features.tolist() == [[0.5, 0], [-20, 0], [0.25, 0]]
    assert batch.sparse_features.keys() == ["c_1", "c_2"]
    assert batch.sparse_features.values().tolist() == [3, 0, 0, 7, 99, 1]
    assert batch.sparse_features.lengths().tolist() == [1] * 6


@pytest.mark.parametrize("label", [[1, 0], [True, False], [1.0, 0.0], pa.array([1, 0], pa.int8())], ids=str)
@pytest.mark.parametrize(
    "ids",
    [[3, None], [3.0, None], pa.array([3, None], pa.float16()), ["3", None], pa.array(["3", None]).dictionary_encode()],
    ids=str,
)
def test_parquet_types(tmp_path, label, ids):
    path = parquet(tmp_path / "a.parquet", {"label": label, "d": [True, None], "c": ids})
    batch = one_batch(config_of(path, categorical=("c",), dense=("d",)), 2)
    assert batch.labels.tolist() == [1, 0]
    assert batch.dense_features.tolist() == [[1], [0]]
    assert batch.sparse_features.values().tolist() == [3, 0]


def test_csv_and_parquet_hash_alike(tmp_path):
    values = ["blue", '\u00e9"x"', "12", None]
    path = parquet(tmp_path / "a.parquet", {"label": [0, 1, 0, 1], "c": values})
    lines = ["label,c", "0,blue", '1,"\u00e9""x"""', "0,12", "1,"]
    text = write(tmp_path / "a.csv", lines)
    settings = {"categorical": ("c",), "dense": (), "id_mode": "hash"}
    a, b = (one_batch(config_of(p, **settings), 4).sparse_features.values().tolist() for p in (path, text))
    assert a == b
    assert a[3] == 0
    assert 0 not in a[:3]


def test_signed_log1p(tmp_path):
    path = write(tmp_path / "a.csv", ["label,d_1,c_1", "0,-3,1", "1,,1", "0,0,1", "1,7,1"])
    dense = one_batch(config_of(path, dense_transform="signed_log1p"), 4).dense_features[:, 0]
    np.testing.assert_array_equal(dense, np.array([-np.log(4), 0, 0, np.log(8)], np.float32))


LISTS = [[1, 2], [], None, [3], [None, 4]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(LISTS),
        pa.array(LISTS, pa.large_list(pa.int32())),
        pa.array([None if v is None else [None if x is None else str(x) for x in v] for v in LISTS]),
        pa.array([None if v is None else [None if x is None else float(x) for x in v] for v in LISTS]),
        pa.array(["1|2", "", None, "3|", "|4"]),
    ],
    ids=lambda c: str(c.type),
)
def test_lists_become_bags(tmp_path, column):
    path = parquet(tmp_path / "a.parquet", {"label": [0] * 5, "c_a": [9, 8, 7, 6, 5], "c_tags": column})
    multi_hot = ("c_tags",) if pa.types.is_string(column.type) else ()
    batch = one_batch(config_of(path, dense=(), multi_hot=multi_hot), 7)  # two filling rows
    assert batch.sparse_features["c_tags"].lengths().tolist() == [2, 0, 0, 1, 1, 0, 0]
    assert batch.sparse_features["c_tags"].values().tolist() == [1, 2, 3, 4]
    assert batch.sparse_features["c_a"].values().tolist() == [9, 8, 7, 6, 5, 0, 0]
    assert batch.weights.tolist() == [1] * 5 + [0] * 2


def test_multi_hot_text_in_csv(tmp_path):
    path = write(tmp_path / "a.csv", ["label,c_tags", "1,a;b;a", "0,", "1,b"])
    settings = {"dense": (), "multi_hot": ("c_*",), "list_separator": ";", "id_mode": "hash"}
    bags = one_batch(config_of(path, **settings), 3).sparse_features["c_tags"]
    assert bags.lengths().tolist() == [3, 0, 1]
    a, b, again, alone = bags.values().tolist()
    assert a == again != b == alone


def test_bags_keep_their_rows_when_shuffled(tmp_path):
    path = parquet(
        tmp_path / "a.parquet",
        {
            "label": [0] * 60,
            "c_a": list(range(60)),
            "c_tags": [[i] * (i % 4) for i in range(60)],
        },
    )
    config = config_of(path, dense=(), shuffle_rows=25)
    seen = []
    for rank in range(2):
        for batch in open_source(config).batches("train", rank=rank, world_size=2, batch_size=7):
            for i, bag in zip(
                batch.sparse_features["c_a"].to_dense(), batch.sparse_features["c_tags"].to_dense(), strict=True
            ):
                assert bag.tolist() == [int(i)] * (int(i) % 4)
                seen.append(int(i))
    assert len(set(seen)) == len(seen) == 56
    assert seen != sorted(seen)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2,1,1", r"label column 'label': expected 0 or 1, found '2'"),
        (",1,1", r"label column 'label': expected 0 or 1, found nothing"),
        ("yes,1,1", r"label column 'label': expected 0 or 1, found 'yes'"),
        ("", r"label column 'label': expected 0 or 1, found nothing"),
        ("1,abc,1", r"dense column 'd_1': expected a number, found 'abc'"),
        ("1,0x1F,1", r"dense column 'd_1': expected a number, found '0x1F'"),
        ("1,1", r"expected 3 columns \(as in line 1\), found 2"),
        ("1,1,1,1", r"expected 3 columns \(as in line 1\), found 4"),
        ('1,1,"1', r"expected quotes in pairs, found an open quote"),
    ],
)
def test_malformed_csv_lines(tmp_path, line, reason):
    path = write(tmp_path / "bad.csv", ["label,d_1,c_1", "1,2.5,3", "0,,4", line, "1,-1,5"])
    with pytest.raises(InputError, match=rf"bad\.csv, line 4: {reason}"):
        one_batch(config_of(path), 3)
    data = open_source(config_of(path, skip_bad_lines=True))
    (batch,) = data.batches("eval", rank=0, world_size=1, batch_size=3)
    assert batch.sparse_features.values().tolist() == [3, 4, 5]
    assert batch.dense_features[:, 0].tolist() == [2.5, 0, -1]
    assert data.bad_lines == {path: 1}


def test_wrong_label_in_parquet_names_the_row(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0, 1, None, 3], "c_1": [1, 2, 3, 4]})
    with pytest.raises(InputError, match=r"a\.parquet, row 3: label column 'label': expected 0 or 1, found nothing"):
        one_batch(config_of(path, dense=()), 4)
    data = open_source(config_of(path, dense=(), skip_bad_lines=True))
    assert [b.weights.tolist() for b in data.batches("eval", rank=0, world_size=1, batch_size=4)] == [[1, 1, 0, 0]]
    assert data.bad_lines == {str(path): 2}


def test_index_out_of_range(tmp_path):
    path = write(tmp_path / "a.csv", ["label,c_1,c_2", "0,1,99", "0,1,120"])
    text = (
        r"Feature 'c_2': id 120 is outside the table t_c_2 of 100 rows \(.*a\.csv, line 3\)\. Set num_embeddings_per_f"
    )
    with pytest.raises(InputError, match=text):
        open_source(config_of(path, dense=())).validate()
    config = config_of(path, dense=(), num_embeddings_per_feature={"c_2": 121})
    assert one_batch(config, 2).sparse_features.values().tolist() == [1, 1, 99, 120]


def test_index_of_a_bag_names_the_bag_s_row(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0] * 4, "c_1": [[1, 2], [], [3, -1], [1]]})
    with pytest.raises(InputError, match=r"id -1 is outside .*a\.parquet, row 3"):
        one_batch(config_of(path, dense=()), 4)


@pytest.mark.parametrize(("value", "shown"), [("7x", "'7x'"), ("1.5", "'1.5'")])
def test_index_that_is_no_number(tmp_path, value, shown):
    path = write(tmp_path / "a.csv", ["label,c_1", "0,1", f"0,{value}"])
    with pytest.raises(
        InputError, match=rf"a\.csv, line 3: column 'c_1' has {shown}, expected the number of a table row"
    ):
        one_batch(config_of(path, dense=()), 2)


def test_infinite_dense_value_and_fractional_category(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0, 1], "d_1": [0.0, float("inf")], "c_1": [1.0, 1.5]})
    with pytest.raises(InputError, match=r"a\.parquet, row 2: dense column 'd_1' is infinite"):
        one_batch(config_of(path), 2)
    for kind in (pa.float64(), pa.float16()):
        parquet(path, {"label": [0, 1], "c_1": [1.0, 1.5]}, c_1=kind)
        with pytest.raises(InputError, match=r"a\.parquet, row 2: Feature 'c_1': category 1\.5 is not a whole number"):
            one_batch(config_of(path, dense=(), id_mode="hash"), 2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"label": "lable"}, r"label 'lable' matches no column\. Did you mean 'label'\?"),
        ({"categorical": ("c_nums",)}, r"categorical 'c_nums' matches no column\. Did you mean 'c_num'\?"),
        ({"dense": ("x_*",)}, r"dense 'x_\*' matches no column"),
        ({"split_column": "splt", "eval_path": None}, r"split_column 'splt' matches no column\. Did you mean 'split'"),
        ({"dense": ("c_num",)}, r"'c_num' is in dense and in categorical"),
        ({"dense": ("split",)}, r"dense column 'split' has type string, expected a number"),
        ({"dense": ("c_list",), "categorical": ("c_num",)}, r"dense column 'c_list' is a list .*only be categorical"),
        ({"categorical": ("when",)}, r"categorical column 'when' has type timestamp"),
        ({"multi_hot": ("c_num",)}, r"multi_hot column 'c_num' has type int64, expected a list or text"),
        ({"num_embeddings_per_feature": {"c_nun": 5}}, r"'c_nun' is not a categorical feature\. Did you mean 'c_num'"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, settings, text):
    columns = {"label": [0], "d_1": [1.0], "c_num": [1], "c_list": [[1]], "split": ["train"]}
    path = parquet(tmp_path / "a.parquet", {**columns, "when": pa.array([0], pa.timestamp("s"))})
    with pytest.raises(InputError, match=text):
        open_source(config_of(path, **settings))


def test_order_of_columns_and_unused_ones(tmp_path, caplog):
    path = write(tmp_path / "a.csv", ["c_3,label,c_1,c_2,rest,split"])
    config = config_of(path, categorical=("c_2", "c_*"), dense=(), eval_path=None, split_column="split")
    with caplog.at_level(logging.INFO):
        assert resolve_columns(config, path).categorical == ("c_2", "c_3", "c_1")
    assert "columns not used: rest." in caplog.text


def test_files_must_agree(tmp_path):
    parquet(tmp_path / "1.parquet", {"label": [0], "c_1": [1]})
    parquet(tmp_path / "2.parquet", {"label": [0], "c_1": [[1]]})
    with pytest.raises(InputError, match=r"2\.parquet: column 'c_1' is a list .*not in the first file"):
        one_batch(config_of(tmp_path, dense=()), 2)
    parquet(tmp_path / "2.parquet", {"c_1": [1], "click": [1]})
    with pytest.raises(InputError, match=r"2\.parquet: column 'label' is missing"):
        one_batch(config_of(tmp_path, dense=()), 2)


def test_split_column(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0, 1] * 3, "c_1": range(6), "part": list("xyxyxx")})
    settings = {"dense": (), "split_column": "part", "eval_path": None, "train_split": "x", "eval_split": "y"}
    data = open_source(config_of(path, **settings))
    for split, ids in (("train", [0, 2, 4, 5]), ("eval", [1, 3])):
        (batch,) = data.batches(split, rank=0, world_size=1, batch_size=len(ids))
        assert batch.sparse_features.values().tolist() == ids
    text = r"The eval split has no rows in .*a\.parquet. None has part == 'z' \(values met: 'x', 'y'\)\. Set eval_split"
    with pytest.raises(InputError, match=text):
        open_source(config_of(path, **{**settings, "eval_split": "z"})).validate()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "found no line"),
        (b"\nx\n", "found an empty line"),
        (b"label,c,c\n", "column 'c' is named 2 times"),
        (b"\xff\xfel\x00", "line 1: expected text in UTF-8"),
    ],
)
def test_header_faults(tmp_path, content, text):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError, match=text):
        open_source(config_of(tmp_path / "a.csv"))


def test_no_rows(tmp_path):
    path = write(tmp_path / "a.csv", ["label,c_1"])
    for call in (open_source(config_of(path, dense=())).validate, lambda: one_batch(config_of(path, dense=()), 1)):
        with pytest.raises(InputError, match=r"The (train|eval) split has no rows in .*a\.csv"):
            call()


def test_damaged_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0, 1], "c_1": ["a", "b"]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet"):
        open_source(config_of(path))


def test_paths(tmp_path):
    for name in ("day_2.csv", "day_1.parquet", "_SUCCESS", ".hidden.csv", "notes.txt"):
        (tmp_path / name).touch()
    names = lambda found: [path.rsplit("/", 1)[1] for path in found]  # noqa: E731
    assert names(expand_path("train_path", str(tmp_path), columns=True)) == ["day_1.parquet", "day_2.csv"]
    assert names(expand_path("train_path", str(tmp_path / "day_*"), columns=True)) == ["day_1.parquet", "day_2.csv"]
    with pytest.raises(InputError, match=r"train_path='.*nothing_\*' matches no file"):
        expand_path("train_path", str(tmp_path / "nothing_*"), columns=True)
    (tmp_path / "day_\udcff.csv").touch()
    with pytest.raises(InputError, match=r"train_path: the name of '.*day_\\udcff\.csv' is not UTF-8\. Rename"):
        expand_path("train_path", str(tmp_path), columns=True)
    with pytest.raises(InputError, match=r"eval_path: .*notes\.txt has an unknown ending; expected one of \.parquet"):
        expand_path("eval_path", str(tmp_path / "notes.txt"), columns=True)


def invalid_text(*rows):
    """A column of text as a careless writer leaves it: bytes that are not checked."""
    return pa.Array.from_buffers(pa.string(), len(rows), pa.array(rows, pa.binary()).buffers())


def test_numbers_beyond_exact_floats_are_rounded(tmp_path):
    numbers = [1, 2**53 + 1, -(2**62) - 1, None]
    columns = {"label": [0, 1, 0, 1], "c_1": [1] * 4, "d_1": numbers, "d_2": pa.array([2**64 - 1] * 4, pa.uint64())}
    path = parquet(tmp_path / "a.parquet", columns)
    batch = one_batch(config_of(path), 4)
    assert batch.dense_features[:, 0].tolist() == [1, 2.0**53, -(2.0**62), 0]
    assert batch.dense_features[:, 1].tolist() == [2.0**64] * 4


@pytest.mark.parametrize(
    "values", [[3.0, 4.0, 4.5], [3.0, None, 1e300], [3.0, 4.0, float("nan")], ["3", None, "0x"], ["3", "4", " 5"]]
)
def test_an_index_that_is_no_number_is_found_in_its_row(tmp_path, values):
    path = parquet(tmp_path / "a.parquet", {"label": [0] * 3, "c_1": values})
    with pytest.raises(InputError, match=r"a\.parquet, row 3: column 'c_1' has .*, expected the number of a table row"):
        one_batch(config_of(path, dense=()), 3)


@pytest.mark.parametrize("name", ["label", "c_1", "c_tags", "c_list", "split"])
def test_text_that_is_not_utf8_in_parquet(tmp_path, name):
    columns = {"label": ["1", "0", "1"], "c_1": list("abc"), "c_tags": ["a|b", None, "c"], "split": ["train"] * 3}
    columns = {key: pa.array(values) for key, values in columns.items()} | {"c_list": pa.array([["a"], [], ["b"]])}
    bad = invalid_text(b"1", b"\xff", b"1")
    columns[name] = bad if name != "c_list" else pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), bad)
    path = parquet(tmp_path / "a.parquet", columns)
    settings = {"dense": (), "id_mode": "hash", "multi_hot": ("c_tags",)}
    if name == "split":
        settings |= {"eval_path": None, "split_column": "split", "train_split": "1", "eval_split": "1"}
    with pytest.raises(InputError, match=rf"a\.parquet, row 2: column '{name}': expected text in UTF-8"):
        one_batch(config_of(path, **settings), 3)
    data = open_source(config_of(path, skip_bad_lines=True, **settings))
    assert [int(b.weights.sum()) for b in data.batches("eval", rank=0, world_size=1, batch_size=3)] == [2]
    assert data.bad_lines == {str(path): 1}


def test_columns_without_a_single_value(tmp_path):
    path = parquet(
        tmp_path / "a.parquet", {"label": [0], "c_1": [1], "split": [["train"]], "labels": [[0]], "bytes": [b"0"]}
    )
    for settings, text in (
        (
            {"split_column": "split", "eval_path": None},
            r"split_column 'split' has type list.*expected text or a number",
        ),
        ({"label": "labels"}, r"label 'labels' has type list.*expected text or a number"),
        (
            {"split_column": "bytes", "eval_path": None},
            r"split_column 'bytes' has type binary, expected text or a number",
        ),
        ({"label": "bytes"}, r"label 'bytes' has type binary, expected text or a number"),
    ):
        with pytest.raises(InputError, match=text):
            open_source(config_of(path, dense=(), **settings))


def test_column_names_that_are_not_utf8(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"label": [0], "c_1": [1], "c_x": [1]})
    path.write_bytes(path.read_bytes().replace(b"c_x", b"c_\xff"))
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as Parquet \(.*utf-8"):
        open_source(config_of(path, dense=()))


def test_a_header_of_one_long_name(tmp_path):
    path = write(tmp_path / "a.csv", ["label,c_" + "1" * 131_073, "0,1"])
    with pytest.raises(InputError, match=r"a\.csv, line 1: .*field larger than field limit"):
        open_source(config_of(path))
