"""`dmt prepare`: every format, ids by frequency, rejected rows, folders that are whole or not there."""

from __future__ import annotations

import csv
import errno
import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import time
import tomllib
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.testing.ranks import RanksFailedError
from dmt.training.access import load_profile
from dmt.training.commands import prepare as command
from dmt.training.data import prepare as module
from dmt.training.data import raw as raw_module
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.data.files import Manifest
from dmt.training.data.hash import deal_rows, hash_rows
from dmt.training.data.prepare import prepare, prepare_once
from dmt.training.job import open_unsharded
from tests.ranks import run_ranks
from tests.training.small import dmt, small

from .helpers import numbered_lines, write

NAMES: dict[str, Any] = {"categorical": ("c", "tags"), "dense": ("d",), "multi_hot": ("tags",), "timestamps": ("t",)}
LABELS, DENSE = [1, 0, 0, 1], [np.log1p(3.5), 0.0, -np.log1p(2.0), 0.0]
HOURS, WEEKDAYS = [20, 0, 19, 1], [7, 0, 7, 1]
WORDS, TAGS = ["ann", "b,ob", None, "12"], [["x", "y"], [], ["x"], []]


def prepared(tmp_path: Path, config: DataConfig, part: str = "train", **options: Any) -> tuple[pa.Table, Manifest]:
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    record = prepare(config, out, **options)
    return pq.read_table(out / part), record


def config_of(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(**{"kind": "columns", "train_path": str(path), "eval_path": str(path), **NAMES, **settings})


CSV = """label,c,d,tags,t
1,ann,3.5,x|y,2026-11-22T19:15:00
0,"b,ob",nan,,
0,,-2,x,"2026-11-22 20:30+02:00"
1,12,,|,2024-01-01
"""
JSON = "\n".join(
    [
        '{"label": 1, "c": "ann", "d": 3.5, "tags": ["x", "y"], "t": "2026-11-22T19:15:00"}',
        '{"t": null, "label": 0, "c": "b,ob", "d": "NaN"}',
        '{"label": false, "c": null, "d": -2, "tags": ["x", null], "t": "2026-11-22T18:30:00Z"}',
        '{"label": "1", "c": 12, "tags": [], "t": "2024-01-01"}',
    ]
)


def write_parquet(path: Path) -> None:
    times = ["2026-11-22T19:15:00.000000001", None, "2026-11-22T18:30:00", "2024-01-01T00:00:00"]
    table = {
        "label": [True, False, False, True],
        "c": pa.array([word or "" for word in WORDS]).dictionary_encode(),
        "d": pa.array([3.5, np.nan, -2.0, None], pa.float64()),
        "tags": pa.array([["x", "y"], None, ["x", None], []]),
        "t": pa.array(times).cast(pa.timestamp("ns")),
    }
    pq.write_table(pa.table(table), path)


@pytest.mark.parametrize("id_mode", ["hash", "frequency", "index"])
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_sequences_keep_their_order_and_share_the_table_of_their_target(
    ending: str, id_mode: Any, tmp_path: Path
) -> None:
    items, histories = [3, 5, 4, 3], [[5, 3, 5, 4], [], [4, 3], [3, 3, 3, 4, 5]]
    path = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        pq.write_table(pa.table({"label": [0, 1, 0, 1], "c": items, "tags": histories}), path)
    elif ending == ".csv":
        lists = ["|".join(map(str, history)) for history in histories]
        write(path, ["label,c,tags", *(f"0,{c},{h}" for c, h in zip(items, lists, strict=True))])
    else:
        write(path, [json.dumps({"label": 0, "c": c, "tags": h}) for c, h in zip(items, histories, strict=True)])
    sequences = {"dense": (), "timestamps": (), "sequences": {"tags": "c"}, "id_mode": id_mode, "num_embeddings": 50}
    whole, record = prepared(tmp_path, config_of(path, **sequences))
    ids = dict(zip(items, whole["c"].to_pylist(), strict=True))
    assert whole["tags"].to_pylist() == [[ids[item] for item in history] for history in histories]
    assert [(f.table, f.target) for f in record.features] == [("c", None), ("c", "c")]
    last, record = prepared(tmp_path, config_of(path, **sequences, max_length=3))
    assert last["tags"].to_pylist() == [[ids[item] for item in history[-3:]] for history in histories]
    assert record.raw["max_length"] == 3
    data = ClickData(DataConfig(prepared=str(tmp_path / "out1")))
    assert data.columns.features[1].target == "c"


@pytest.mark.parametrize(
    "ending", [".csv", ".csv.gz", "-crlf.csv", "-bom.csv", ".tsv", ".jsonl", ".json.gz", ".parquet"]
)
def test_every_format_gives_the_same_rows(ending: str, tmp_path: Path) -> None:
    path, text = tmp_path / f"rows{ending}", JSON if "json" in ending else CSV
    if ending == ".tsv":
        text = text.replace('"b,ob"', "b;ob").replace(",", "\t").replace("b;ob", "b,ob")
    text = text.replace("\n", "\r\n") if "crlf" in ending else "\ufeff" + text if "bom" in ending else text
    if ending == ".parquet":
        write_parquet(path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    table, record = prepared(tmp_path, config_of(path, num_embeddings=1000))
    assert table["label"].to_pylist() == LABELS
    assert table["d"].to_pylist() == pytest.approx(DENSE)
    assert table["c"].to_pylist() == hash_rows(pa.array(WORDS), feature="c", num_embeddings=1000).tolist()
    tags = [hash_rows(pa.array(bag, pa.string()), feature="tags", num_embeddings=1000).tolist() for bag in TAGS]
    assert table["tags"].to_pylist() == tags
    # 20:30+02:00 is 18:30 in UTC: hour h is row h + 1, Sunday row 7.
    assert (table["t_hour"].to_pylist(), table["t_weekday"].to_pylist()) == (HOURS, WEEKDAYS)
    assert table.schema.field("c").type == pa.int32()
    assert table.schema.field("d").type == pa.float32()
    assert record.rows == {"train": 4, "eval": 4}
    assert record.summary["dense"]["d"] == {"missing": 2}  # of the training rows, as for categories
    assert record.summary["features"]["c"]["missing"] == 1


def test_the_planner_knows_the_mean_length_of_lists_and_a_note_gives_toml_for_smaller_tables(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    _, record = prepared(tmp_path, config_of(tmp_path / "rows.csv", num_embeddings=1000))
    assert record.summary["features"]["tags"]["ids_per_row"] == 0.75
    *_, note = record.summary["notes"]
    assert tomllib.loads(note.split("`")[1]) == {"num_embeddings_per_feature": {"c": 30, "tags": 20}}
    data = DataConfig(kind="prepared", prepared=str(*tmp_path.glob("out*")))
    for given, found in (({}, {"tags": 0.75}), ({"tags": 3.0, "c": 2.0}, {"tags": 3.0, "c": 2.0})):
        config = small(sharding={"pooling_factors": given})
        assert open_unsharded(config.model_copy(update={"data": data})).config.sharding.pooling_factors == found


def test_a_note_on_many_columns_is_cut_where_it_is_shown(tmp_path: Path) -> None:
    """With 3,900 columns, dmt prepare, dmt plan and each start of a training printed a line of 66,000 letters."""
    names = [f"c  {i}" for i in range(100)]
    write(tmp_path / "rows.csv", [",".join(["label", *names]), ",".join("1" * 101), ",".join("0" * 101)])
    config = config_of(tmp_path / "rows.csv", categorical=("c *",), dense=(), multi_hot=(), timestamps=())
    _, record = prepared(tmp_path, config.model_copy(update={"eval_path": None}))
    (out,) = tmp_path.glob("out*")
    assert '"c  99" = 20 }' in record.summary["notes"][0]
    cut = f"{record.summary['notes'][0][:1000]} ..."
    *_, first, second, _ = command._show(vars(record), out).lines
    assert [first, second] == [f"- {cut}", f"- 1 note in full: see summary.notes in {out / 'manifest.json'}"]
    assert ClickData(DataConfig(prepared=str(out))).notes == f"{cut} (summary in {out / 'manifest.json'})"


def test_times_of_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["2024-01-01T23:59:59.5", "2024-01-01 23:59:59.500", "2024-01-01T23:59:59.500000000Z"]
    values += [" 2024-01-02T05:29:59.5+05:30", "NaT"]
    write(tmp_path / "a.csv", ["label,c,time,time_hour", *(f"0,x,{value},unused" for value in values)])
    settings = {"timestamps": ("time",), "categorical": ("c",), "dense": (), "multi_hot": ()}
    # A time without a zone is taken as it is, whatever the zone of this machine.
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        table, _ = prepared(tmp_path, config_of(tmp_path / "a.csv", **settings))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [table[f"time_{part}"].to_pylist() for part in ("hour", "weekday")] == [[24] * 4 + [0], [1] * 4 + [0]]
    rows = pa.table({"label": [0], "c": ["x"], "time": [datetime(9999, 12, 31, 23)]})
    pq.write_table(rows, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)  # as Spark does
    table, _ = prepared(tmp_path, config_of(tmp_path / "a.parquet", **settings))
    assert [table[f"time_{part}"].to_pylist() for part in ("hour", "weekday")] == [[24], [5]]


GOOD = "0,good,1,x,2026-11-22"
REJECTED = [
    ("2,a,1,x,", "label", "expected 0 or 1, found 2"),
    (",a,1,x,", "label", "expected 0 or 1, found nothing"),
    ("0,a,12x,x,", "d", "expected a finite number, found 12x"),
    ("0,a,1_0,x,", "d", "expected a finite number, found 1_0"),
    ("0,a,inf,x,", "d", "expected a finite number, found inf"),
    ("0,a,1,x,22-11-26", "t", "expected a date or time"),
    ("0,a,1,x,2026-11-22T25:00", "t", "expected a date or time"),
    ("0,a,1,x,1700000000", "t", "expected a date or time"),
    ("0,a,1", "", "expected 5 columns, found 3"),
    ("0,a,1,x,,", "", "expected 5 columns, found 6"),
    ("", "", "expected 5 columns, found 1"),
    ('0,"open,1,x,', "", "a closing quote at the end of"),
    ('0,"open"",1,x,', "", "a closing quote at the end of"),
    ('0,"open,1"x,x,', "", "a closing quote at the end of each quoted column"),
    ("0,a\udcffb,1,x,", "", "expected UTF-8 text"),
]


@pytest.mark.parametrize(("line", "column", "reason"), REJECTED, ids=[reason for *_, reason in REJECTED])
def test_a_row_that_cannot_be_used_is_named_or_listed_and_no_other_is_lost(
    line: str, column: str, reason: str, tmp_path: Path
) -> None:
    path, text = tmp_path / "a.csv", "\n".join(["label,c,d,tags,t", GOOD, GOOD, line, GOOD, GOOD]) + "\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    place = f"a.csv, line 4: {f'column {column!r}: ' if column else ''}"
    with pytest.raises(InputError, match=place) as error:
        prepared(tmp_path, config_of(path))
    assert reason in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"], "nothing is left"
    with pytest.raises(InputError, match="so far: 2"):  # of both parts together
        prepared(tmp_path, config_of(path), max_rejects=1)
    out = tmp_path / "out"
    record = prepare(config_of(path), out, max_rejects=2)
    assert record.rejects == 2
    assert pq.read_table(out / "train")["label"].to_pylist() == [0] * 4
    with (out / "rejects.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["source"], row["line"], row["column"]) for row in rows] == [(str(path), "4", column)] * 2
    assert reason in rows[0]["reason"]


def test_of_a_thousand_damaged_lines_each_is_right_or_listed(tmp_path: Path) -> None:
    """Python's own csv says what each line means by itself."""
    draw = random.Random(0)
    tokens = [b"", b'"', b'""', b",", b",,", b"\xff", b"\xc3\xa9", b"\0", b"-", b"1e9", b"x", b" ", b"\r", b"|"]
    tokens += [b"nan", b"_"]
    lines = []
    for number in range(1000):
        line = f'{number % 2},"w{number}, {number % 7}",{number},x|y,2026-11-22'.encode()
        for _ in range(draw.choice([0, 1, 1, 2])):
            at = draw.randrange(len(line))
            line = line[:at] + draw.choice(tokens) + line[at + draw.choice([0, 1, 1, 3]) :]
        lines.append(line)
    (tmp_path / "a.csv").write_bytes(b"label,c,d,tags,t\n" + b"\n".join(lines) + b"\n")
    settings = {"eval_path": None, "eval_fraction": 1e-9, "dense_transform": "none", "timestamps": ()}
    table, record = prepared(tmp_path, config_of(tmp_path / "a.csv", **settings), max_rejects=1000)
    with next(tmp_path.glob("out*/rejects.csv")).open(encoding="utf-8", newline="") as stream:
        rejected = {int(row["line"]) for row in csv.DictReader(stream)}
    kept = [line.removesuffix(b"\r").decode() for at, line in enumerate(lines, start=2) if at not in rejected]
    rows = [next(csv.reader([line], strict=True)) if '"' in line else line.split(",") for line in kept]
    assert (record.rejects, len(rows)) == (len(rejected), table.num_rows)
    assert 500 < len(rows) < 1000
    assert table["label"].to_pylist() == [float(row[0]) for row in rows]
    words = pa.array([row[1] or None for row in rows])
    assert table["c"].to_pylist() == hash_rows(words, feature="c", num_embeddings=100_000).tolist()
    numbers = [0.0 if row[2].strip() in ("", "nan") else float(row[2]) for row in rows]
    assert table["d"].to_pylist() == pytest.approx(numbers, rel=1e-6)
    bags = [pa.array([tag for tag in row[3].split("|") if tag], pa.string()) for row in rows]
    assert table["tags"].to_pylist() == [
        hash_rows(bag, feature="tags", num_embeddings=100_000).tolist() for bag in bags
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "Begin the file with a line of column names"),
        ("a.csv", "0,a,1,x,2026-11-22\n0,b,1,x,2026-11-22\n", "label 'label' matches no column"),
        ("a.csv", "label,c,d,tags,t,c\n", "2 columns have the name 'c'"),
        ("a.csv", CSV.encode("utf-16"), "cannot be read as column names"),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:-9], "gzip file is cut off or damaged"),
        ("a.jsonl", "[1]\n", r"no JSON object in its first lines \(1 read\)"),
        ("a.jsonl", '{"d": 1, "D": 2}', "keys 'd' and 'D' differ only in case"),
        ("a.jsonl", JSON + "\n[1]\n", "line 5: expected a JSON object"),
        ("a.jsonl", 250 * f"{JSON}\n" + '{"label": 1, "c": ["x"]}', "line 1001: column 'c': expected a list .* ARRAY"),
        ("a.jsonl", JSON + '\n{"label": 1, "tags": "x"}', "line 5: column 'tags': expected a list .* found VARCHAR"),
        ("a.xls", "", "unknown ending"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_are_none_are_refused(name: str, text: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, config_of(tmp_path / name))


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_true_and_false_are_numbers(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        pq.write_table(pa.table({"label": [True, False], "c": ["a", "b"], "d": [True, False]}), path)
    else:
        json_lines = ['{"label": true, "c": "a", "d": true}', '{"label": false, "c": "b", "d": false}']
        write(path, json_lines if ending == ".jsonl" else ["label,c,d", "True,a,True", "False,b,False"])
    table, _ = prepared(
        tmp_path, config_of(path, multi_hot=(), timestamps=(), categorical=("c",), dense_transform="none")
    )
    assert (table["label"].to_pylist(), table["d"].to_pylist()) == ([1, 0], [1.0, 0.0])


def test_files_with_columns_in_another_order_are_read_and_those_without_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.csv", ["label,c,d", "1,a,1"])
    write(tmp_path / "b.csv", ["dmore,d,c,label", "?,2,b,0"])
    write(tmp_path / "d.csv", ["dmore,d,c,label", "?,2,b,0"])
    write(tmp_path / "c.csv.zst", ["?"])
    settings: dict[str, Any] = {"categorical": ("c",), "dense": ("d*",), "multi_hot": (), "timestamps": ()}
    table, manifest = prepared(tmp_path, config_of(tmp_path / "?.csv*", dense_transform="none", **settings))
    noted = [note for note in manifest.summary["notes"] if "dmore" in note]
    assert noted == [f"{tmp_path / 'b.csv'}: columns not in {tmp_path / 'a.csv'} are not read: dmore."], "once"
    assert (table["label"].to_pylist(), table["d"].to_pylist()) == ([1, 0, 0], [1.0, 2.0, 2.0])
    assert f"files with unknown endings are not read: {tmp_path / 'c.csv.zst'}" in caplog.text
    write(tmp_path / "b.csv", ["d,label", "2,0"])
    with pytest.raises(InputError, match=r"b\.csv: column 'c' is missing"):
        prepared(tmp_path, config_of(tmp_path / "?.csv", **settings))
    write(tmp_path / "b.jsonl", [json.dumps({"d": 2, "label": 0, "c": ["a", "b"]})])
    settings["eval_path"] = str(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match=r"b\.jsonl: column 'c' has lists, but single values in .*a\.csv\."):
        prepared(tmp_path, config_of(tmp_path / "a.csv", **settings))


def test_keys_of_json_may_hold_any_letters(tmp_path: Path) -> None:
    """A glob finds a key of the last of the first 1,000 lines; a note names later ones."""
    names: dict[str, Any] = {"categorical": ("c/~'\"", "late*"), "dense": ("d{[x]}",), "timestamps": ("t{x}",)}
    row = {"label": 1, "c/~'\"": "a", "d{[x]}": "0" * 99, "t{x}": "2026-11-22"}
    late = [row | {"late": ["b"]}, row | {"later": 1, "unused": 2}]
    write(tmp_path / "a.jsonl", [*map(json.dumps, [*[row] * 999, *late])])
    table, manifest = prepared(tmp_path, config_of(tmp_path / "a.jsonl", multi_hot=(), **names))
    assert [len(ids) for ids in table["late"].to_pylist()] == [*[0] * 999, 1, 0]
    assert "a.jsonl: columns not in its first 1,000 lines are not read: later." in " ".join(manifest.summary["notes"])


def test_lines_are_whole_wherever_a_block_ends(tmp_path: Path) -> None:
    for text in (b"label,c\r\n1,ab\r\n", b"label,c\n1,ab"):
        (tmp_path / "a.csv").write_bytes(text)
        for size in range(1, 20):
            blocks = [lines for _, lines, _ in raw_module._lines(str(tmp_path / "a.csv"), size)]
            assert [line for lines in blocks for line in lines] == [b"label,c", b"1,ab"], size
    names = [f"c_{'x' * 300}{number}" for number in range(400)]
    write(tmp_path / "wide.csv", [",".join(["label", *names]), ",".join(["1"] * 401)])
    wide: dict[str, Any] = {"categorical": ("c_*0",), "dense": (), "multi_hot": (), "timestamps": ()}
    assert prepared(tmp_path, config_of(tmp_path / "wide.csv", **wide))[0].num_columns == 41


def test_criteo_files_without_and_with_a_line_of_names(tmp_path: Path) -> None:
    config = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"), eval_fraction=0.4)
    write(tmp_path / "a.tsv", numbered_lines(10))
    table, record = prepared(tmp_path, config, group_rows=4)
    assert record.rows == {"train": 6, "eval": 4}
    assert np.expm1(table["I1"].to_numpy()).round().tolist() == [0, 1, 3, 5, 6, 8], "rows are set apart evenly"
    names = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
    write(tmp_path / "a.tsv", [names, *numbered_lines(3)])
    with pytest.raises(InputError, match="line 1: column 'label': expected 0 or 1, found label"):
        prepared(tmp_path, config)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [(["3", "12", "6", ""], "12"), (["3", "-1"], "-1"), (["3", "x"], "x"), ([3, 12], 12), ([3.0, 1.5], 1.5)],
)
def test_row_numbers_are_checked(
    values: list[Any], wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_module, "_BLOCK_ROWS", 1)
    settings: dict[str, Any] = {"categorical": ("n",), "multi_hot": (), "timestamps": (), "dense": ()}
    config = config_of(tmp_path / "a.parquet", id_mode="index", num_embeddings=7, **settings)
    pq.write_table(pa.table({"label": [0] * len(values), "n": values}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"row {values.index(wrong) + 1}: column 'n'.*t_n, 0 to 6, .*found {wrong}"):
        prepared(tmp_path, config)
    table, record = prepared(tmp_path, config, max_rejects=2)
    assert command._show(vars(record), tmp_path).headers[2] == "missing or id 0"
    assert table["n"].to_pylist() == [int(float(value or 0)) for value in values if value != wrong]


USERS = ["b"] * 9 + ["a"] * 7 + ["c"] * 5 + ["d"] * 3 + ["e", "f", None, None]


def clicks(path: Path, users: list[Any] = USERS, *, test: tuple[Any, ...] = ("a", "new", None)) -> DataConfig:
    rows = [*users, *test]
    table = {
        "label": [i % 2 for i in range(len(rows))],
        "user": rows,
        "friend": [None if user is None else [user, "z"] for user in rows],
        "split": ["train"] * len(users) + ["test"] * len(test),
    }
    pq.write_table(pa.table(table), path)
    names: dict[str, Any] = {"categorical": ("user", "friend"), "split_column": "split", "num_embeddings": 100}
    return DataConfig(kind="columns", train_path=str(path), **names)


@pytest.mark.parametrize(("number", "exponent"), [(100, 0.6), (10_007, 1.05), (300_000, 1.3)])
def test_contiguous_shards_of_dealt_rows_are_read_alike(number: int, exponent: float) -> None:
    """Values by their frequency, the most frequent first."""
    shares = 1 / np.arange(1, number + 1) ** exponent
    shares /= shares.sum()
    rows = deal_rows(number)
    assert np.array_equal(np.sort(rows), np.arange(number))
    reads = np.zeros(2 + number)
    reads[2 + rows] = shares
    for ranks in (2, 3, 4, 8, 16, 64):
        block = -(-len(reads) // ranks)  # TorchRec's row-wise shards
        by_rank = [reads[start : start + block].sum() for start in range(0, len(reads), block)]
        assert max(by_rank) <= 1.1 / ranks + shares[0], f"{ranks} ranks"


def test_ids_are_dealt_by_frequency_and_rare_ones_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = by_frequency(clicks(tmp_path / "clicks.parquet"))
    record = prepare(config, tmp_path / "all", group_rows=16)
    # By frequency; those that come once in the order of their hashes.
    b, a, c, d, *once = (2 + deal_rows(6)).tolist()
    order = {"b": b, "a": a, "c": c, "d": d, None: 0}
    rows = pq.read_table(tmp_path / "all" / "train")["user"].to_pylist()
    assert [order.get(user, 99) for user in USERS] == [99 if row in once else row for row in rows]
    assert {rows[24], rows[25]} == set(once)
    assert pq.read_table(tmp_path / "all" / "eval")["user"].to_pylist() == [a, 1, 0]
    assert not record.summary["notes"]
    assert record.summary["features"]["user"]["rows_in_use"] == 6
    assert record.summary["features"]["user"]["most_frequent_share"] == pytest.approx(9 / 28, abs=1e-5)

    monkeypatch.setattr(module, "_MOST_QUERIES", 1)  # one for all columns, as for parts of thousands
    record = prepare(config, tmp_path / "two", min_count=4)
    train = pq.read_table(tmp_path / "two" / "train")
    b, a, c = (2 + deal_rows(3)).tolist()
    order = {"b": b, "a": a, "c": c, None: 0}
    assert train["user"].to_pylist() == [order.get(user, 1) for user in USERS]
    assert {f.name: f.rows for f in record.features} == {"user": 5, "friend": 6}
    # "z" is in every list, so that it is the most frequent value; a missing list is an empty bag.
    z, *others = (2 + deal_rows(4)).tolist()
    friends = dict(zip("bac", others, strict=True))
    assert train["friend"].to_pylist() == [[] if user is None else [friends.get(user, 1), z] for user in USERS]
    counts = load_profile(tmp_path / "two" / "access.parquet")["t_user"]
    assert dict(zip(counts.rows.tolist(), counts.counts.tolist(), strict=True)) == Counter(train["user"].to_pylist())

    # Features that share a table share its ids.
    shared = config.model_copy(update={"shared_tables": {"people": ("user", "friend")}})
    record = prepare(shared, tmp_path / "one")
    assert [(f.table, f.rows) for f in record.features] == [("people", 9)] * 2
    train = pq.read_table(tmp_path / "one" / "train")
    assert [bag[0] for bag in train["friend"].to_pylist() if bag] == [row for row in train["user"].to_pylist() if row]

    # No more rows than the config says, and other rows with the same ids.
    table, _ = prepared(tmp_path, config.model_copy(update={"num_embeddings_per_feature": {"us*": 4}}))
    assert max(table["user"].to_pylist()) == 3
    later = clicks(tmp_path / "later.parquet", ["c", "new", "f", "a", None], test=("b",))
    folder = str(tmp_path / "two")
    table, record = prepared(tmp_path, later.model_copy(update={"id_mode": "frequency", "vocabulary": folder}))
    assert table["user"].to_pylist() == [c, 1, 1, a, 0]
    assert {f.name: f.rows for f in record.features} == {"user": 5, "friend": 6}


def by_frequency(config: DataConfig, **settings: Any) -> DataConfig:
    return config.model_copy(update={"id_mode": "frequency", **settings})


def test_raw_rows_get_the_ids_of_their_vocabulary_or_none(tmp_path: Path) -> None:
    config = by_frequency(clicks(tmp_path / "clicks.parquet"))
    raw = DataConfig.model_validate(prepare(config, tmp_path / "out#1").raw)
    unlabeled = raw.model_copy(update={"train_path": config.train_path, "label": None})
    table, _ = prepared(tmp_path, unlabeled, eval_only=True, part="eval")
    both = [*pq.read_table(tmp_path / "out#1" / "train")["user"].to_pylist()]
    assert table["user"].to_pylist()[: len(both)] == both
    (tmp_path / "out#1").rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"data.vocabulary=.*cannot be read .*Restore it to this path"):
        prepared(tmp_path, raw)
    prepare(by_frequency(clicks(tmp_path / "clicks.parquet", ["z", "b"])), tmp_path / "out#1")
    with pytest.raises(InputError, match=r"vocabulary\.parquet is not the file used in training"):
        prepared(tmp_path, raw)


def test_raw_rows_are_prepared_again_for_another_vocabulary_at_the_same_path(tmp_path: Path) -> None:
    config, folders = clicks(tmp_path / "clicks.parquet"), list[Path]()
    for users in (["z", "b"], USERS):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        prepare(by_frequency(clicks(tmp_path / "words.parquet", users)), tmp_path / "out")
        using = by_frequency(config, vocabulary=str(tmp_path / "out"))
        folders += [prepare_once(using, tmp_path / "cache") for _ in range(2)]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert prepare_once(using, tmp_path / "cache", eval_only=True) not in folders


def test_row_groups_have_one_size_and_an_empty_part_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(module, "fsync_path", lambda path: synced.append(path.name))
    write(tmp_path / "a.tsv", numbered_lines(70))
    config = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"))
    prepare(config, tmp_path / "out", group_rows=16, eval_only=True)
    groups = pq.read_metadata(tmp_path / "out" / "eval" / "part-00000.parquet")
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [16, 16, 16, 16, 6]
    assert pq.read_table(tmp_path / "out" / "train").num_rows == 0
    assert synced == ["access.parquet", *["part-00000.parquet"] * 2, "manifest.json", tmp_path.name], "in this order"


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.tsv", numbered_lines(40))
    config, out = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv")), tmp_path / "out"
    prepare(config, out, group_rows=8)
    with pytest.raises(InputError, match="exists and is never overwritten"):
        prepare(config, out)

    def full(rows: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_grouped", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        prepare(config, tmp_path / "other")

    def interrupted(rows: Any) -> None:
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr(module, "_grouped", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "out"]

    def unlocked(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unlocked)
    with pytest.raises(InputError, match=r"'.*cache' cannot be locked \(No locks available\)"):
        prepare_once(config, tmp_path / "cache")


def prepare_until_killed(rank: int, config: DataConfig, out: Path) -> None:
    """Kills this process when all but the manifest is written, and another one has been kept out."""

    def end(*more: Any) -> None:
        with pytest.raises(InputError, match="Another `dmt prepare` is writing"):
            prepare(config, out)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_seal", end)
        prepare(config, out)


@pytest.mark.ranks
def test_a_killed_prepare_leaves_nothing_that_looks_finished_and_the_next_one_starts_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", numbered_lines(40))
    config, out = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv")), tmp_path / "out"
    with pytest.raises(RanksFailedError, match="died with exit code -9"):
        run_ranks(prepare_until_killed, 1, config, out, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.work", "a.tsv"]
    assert prepare(config, out).rows == {"train": 36, "eval": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "out"]


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"min_count": 2}, "--min-count 2 needs ids by frequency, counted in"),
        ({"id_mode": "frequency", "vocabulary": "counted"}, {"min_count": 2}, "--min-count 2 needs .* counted in"),
        ({"id_mode": "frequency", "vocabulary": "hashed"}, {}, "has no vocabulary. Prepare that fol"),
        ({"categorical": ("user",), "id_mode": "frequency", "vocabulary": "counted"}, {}, "tables: 'friend' differs"),
        ({"id_mode": "frequency"}, {"eval_only": True}, "id_mode=.frequency. needs data.vocabulary"),
        ({"label": None}, {}, "data.label is not set"),
        ({"kind": "synthetic"}, {}, "has no raw files"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradicting_options_are_refused(
    settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = clicks(tmp_path / "clicks.parquet")
    prepare(config, tmp_path / "hashed")
    prepare(by_frequency(config), tmp_path / "counted")
    if "vocabulary" in settings:
        settings = settings | {"vocabulary": str(tmp_path / settings["vocabulary"])}
    with pytest.raises(InputError, match=message):
        prepare(config.model_copy(update=settings), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_ranks_that_have_waited_report_the_error_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.csv", ["label,c", "7,a"])
    config = DataConfig(kind="columns", train_path=str(tmp_path / "a.csv"), categorical=("c",))
    words = pytest.raises(InputError, match="line 2: column 'label': expected 0 or 1, found 7")
    with words:
        prepare_once(config, tmp_path / "cache")
    (lock,) = (tmp_path / "cache").glob(".*.lock")
    # An error of an earlier attempt does not count, even if the clock of its host was ahead.
    os.utime(lock, (2**32, 2**32))
    monkeypatch.setattr(module, "prepare", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        prepare_once(config, tmp_path / "cache")
    # One that comes while this rank waits for the lock does.
    text = lock.read_text()
    monkeypatch.setattr(module.fcntl, "flock", lambda *_: lock.write_text(text))
    with words:
        prepare_once(config, tmp_path / "cache")


def test_leftovers_go_and_prepared_rows_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = clicks(tmp_path / "clicks.parquet"), tmp_path / "cache"
    for name in ("killed", "busy"):
        (cache / f".{name}.work").mkdir(parents=True)
        (cache / f".{name}.lock").touch()
    with (cache / ".busy.lock").open() as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        folder = prepare_once(config, cache)
    assert [path.name for path in cache.glob(".*.work")] == [".busy.work"]
    monkeypatch.setattr(module, "check_output", lambda *_, **__: 1 // 0)
    assert prepare_once(config, cache) == folder


def test_the_command_prints_a_summary_and_the_trainer_takes_the_folder(tmp_path: Path) -> None:
    clicks(tmp_path / "clicks.parquet")
    names = 'categorical = ["user", "friend"]\nsplit_column = "split"'
    (tmp_path / "run.toml").write_text(f'[data]\nkind = "columns"\ntrain_path = "{tmp_path}/clicks.parquet"\n{names}\n')
    out = tmp_path / "out"
    ran = dmt("prepare", tmp_path / "run.toml", "--out", out, "--ids", "frequency", "--json")
    assert json.loads(ran.stdout)["rows"] == {"train": 28, "eval": 3}
    config = DataConfig.model_validate({"prepared": str(out)})
    assert {feature.name: feature.rows for feature in ClickData(config).columns.features} == {"user": 8, "friend": 9}
    for options, text in (([out], "never overwritten"), (["o", "--memory-gib", "nan"], "nan")):
        assert text in dmt("prepare", tmp_path / "run.toml", "--out", *options, code=2).output
