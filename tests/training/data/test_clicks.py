"""Reading: batches of prepared rows, for any number of ranks, resumed at any row, from this machine or from a store."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.errors import InputError
from dmt.training.commands.demo import demo_settings
from dmt.training.data import raw
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData, prefetched
from dmt.training.data.columns import Columns, Feature
from dmt.training.data.config import DataConfig, with_files
from dmt.training.data.deal import Deal, Span, rank_batch
from dmt.training.data.files import expand_path, matching_files
from dmt.training.data.hash import hash_rows
from dmt.training.data.prepare import prepare

from .helpers import criteo_line, numbered_lines, parquet, real_rows, write


def opened(config: DataConfig) -> ClickData:
    """Prepares rows in small row groups beside their files, and opens them."""
    folder = Path(config.train_path or "").parent
    out = folder / f"prepared{len(list(folder.iterdir()))}"
    prepare(config, out, group_rows=8)
    return ClickData(config.model_copy(update={"kind": "prepared", "prepared": str(out)}))


NAMES: dict[str, Any] = {"dense": ("d",), "categorical": ("c", "n", "bag"), "dense_transform": "none"}


def config_of(path: str, **settings: Any) -> DataConfig:
    defaults = {"kind": "columns", "train_path": path, "eval_path": path, "num_embeddings": 50, **NAMES}
    return DataConfig(**{**defaults, **settings})


def on_ranks(data: ClickData, world_size: int, lanes: int, batch_size: int, **where: Any) -> list[list[Any]]:
    """The batches of every rank, step by step."""
    options = {"world_size": world_size, "batch_size": rank_batch(lanes, world_size, batch_size), "lanes": lanes}
    ranks = [list(data.batches("train", rank=rank, **options, **where)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    return list(map(list, zip(*ranks, strict=True)))


def test_values_become_inputs(tmp_path: Path) -> None:
    data = opened(config_of(parquet(tmp_path / "a.parquet", range(20)), shuffle_rows=0))
    (batch,) = data.batches("train", rank=0, world_size=1, batch_size=20)
    assert batch.labels.tolist() == [i % 2 for i in range(20)]
    assert batch.dense_features[:, 0].tolist() == list(map(float, range(20)))
    words = pa.array([None if i % 9 == 0 else f"v{i}" for i in range(20)])
    ids = batch.sparse_features
    assert ids["c"].values().tolist() == hash_rows(words, feature="c", num_embeddings=50).tolist()
    numbers = pa.array([str(i % 5) for i in range(20)])
    assert ids["n"].values().tolist() == hash_rows(numbers, feature="n", num_embeddings=50).tolist()
    bags = [[] if i % 4 == 0 else [w for w in [f"x{i}", None, "y"][: i % 3] if w] for i in range(20)]
    assert ids["bag"].lengths().tolist() == list(map(len, bags))
    flat = pa.array([word for bag in bags for word in bag])
    assert ids["bag"].values().tolist() == hash_rows(flat, feature="bag", num_embeddings=50).tolist()
    parts = [part.sparse_features["bag"] for part in data.batches("eval", rank=0, world_size=1, batch_size=6)]
    assert torch.cat([part.lengths() for part in parts]).tolist() == [*map(len, bags), *[0] * 4]
    assert torch.equal(torch.cat([part.values() for part in parts]), ids["bag"].values())
    assert [(feature.table, feature.rows) for feature in data.columns.features] == [("c", 50), ("n", 50), ("bag", 50)]
    assert data.num_rows("train") == data.num_rows("eval") == 20


@pytest.mark.parametrize(
    "settings", [{}, {"shuffle_pieces": True, "shuffle_rows": 0}, {"group_by": "user"}, {"shuffle_rows": 0}], ids=str
)
@pytest.mark.parametrize("rows", [16, 103, 400])
def test_global_batches_do_not_depend_on_the_ranks(rows: int, settings: dict[str, Any], tmp_path: Path) -> None:
    for i, part in enumerate(np.array_split(np.arange(rows), 3)):
        parquet(tmp_path / f"{i}.parquet", range(part[0], part[-1] + 1), 7 + i)
    data = opened(config_of(f"{tmp_path}/?.parquet", **{"shuffle_rows": 150, **settings}))
    orders = []
    for epoch in range(2):
        wanted: list[list[float]] | None = None
        for world_size in (1, 2, 4, 8):
            steps = [real_rows(step) for step in on_ranks(data, world_size, 8, 2, epoch=epoch)]
            wanted = wanted or steps
            assert wanted == steps
        assert wanted is not None
        used = [row for step in wanted for row in step]
        assert len(used) == rows // 16 * 16, "less than a global batch is left out"
        assert set(Counter(used).values()) == {1}
        orders.append(used)
    if rows > 16:
        assert (orders[0] != orders[1]) == (settings != {"shuffle_rows": 0})


@pytest.mark.parametrize("settings", [{}, {"shuffle_pieces": True}, {"shuffle_rows": 0}], ids=str)
def test_a_run_goes_on_at_any_step_and_on_other_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    data = opened(config_of(parquet(tmp_path / "a.parquet", range(500)), **{"shuffle_rows": 60, **settings}))
    whole = on_ranks(data, 4, 4, 3, epoch=1)
    for done in range(0, len(whole) + 1, 11):
        for world_size in (4, 2, 1):
            rest = on_ranks(data, world_size, 4, 3, epoch=1, rows=12 * done)
            assert [real_rows(step) for step in rest] == [real_rows(step) for step in whole[done:]]
    # 4, 2 and then 3 ranks: every row of the epoch once, but for less than a global batch.
    used = [row for step in on_ranks(data, 4, 4, 3)[:11] for row in real_rows(step)]
    used += [row for step in on_ranks(data, 2, 4, 3, rows=len(used))[:9] for row in real_rows(step)]
    used += [row for step in on_ranks(data, 3, 4, 3, rows=len(used)) for row in real_rows(step)]
    assert (len(used), set(Counter(used).values())) == (240 + 260 // 9 * 9, {1})
    assert on_ranks(data, 2, 4, 3, rows=495) == []


def test_evaluation_sees_each_row_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    data = opened(config_of(parquet(tmp_path / "a.parquet", range(100))))
    assert real_rows(data.batches("eval", rank=0, world_size=1, batch_size=7)) == list(range(100))
    for world_size in (2, 3, 8):
        ranks = [list(data.batches("eval", rank=r, world_size=world_size, batch_size=6)) for r in range(world_size)]
        assert {len(batches) for batches in ranks} == {-(-100 // (6 * world_size))}
        assert all(len(batch.labels) == 6 for batches in ranks for batch in batches)
        assert sorted(row for batches in ranks for row in real_rows(batches)) == list(range(100))
    few = config_of(parquet(tmp_path / "b.parquet", range(3)))
    ranks = [list(opened(few).batches("eval", rank=r, world_size=8, batch_size=6)) for r in range(8)]
    assert sorted(row for batches in ranks for row in real_rows(batches)) == [0.0, 1.0, 2.0]
    assert {len(batches) for batches in ranks} == {1}


@pytest.mark.parametrize("settings", [{}, {"split_column": "part"}, {"group_by": "user"}], ids=str)
def test_rows_are_divided_into_parts(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_BLOCK_ROWS", 7)
    path = parquet(tmp_path / "a.parquet", range(300))
    settings = settings | {"eval_path": None, "eval_fraction": 0.2, "shuffle_rows": 40, "categorical": ("[bclp]*",)}
    data = opened(config_of(path, **settings))
    assert data.columns.feature_names == ("c", "bag", "part")[: 2 if "split_column" in settings else 3], "not the label"
    parts = {split: real_rows(data.batches(split, rank=0, world_size=1, batch_size=1)) for split in ("train", "eval")}  # type: ignore[arg-type]
    assert sorted([*parts["train"], *parts["eval"]]) == list(range(300))
    assert {split: len(rows) for split, rows in parts.items()} == {s: data.num_rows(s) for s in ("train", "eval")}  # type: ignore[arg-type]
    if "split_column" in settings:
        assert parts["eval"] == list(range(0, 300, 5))
    elif "group_by" not in settings:
        assert parts["eval"] == list(range(4, 300, 5))
    else:
        users = {split: {int(row) // 3 % 11 for row in rows if row % 7} for split, rows in parts.items()}
        assert users["train"].isdisjoint(users["eval"])


def test_requests_meet_in_a_batch(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", range(330))
    data = opened(config_of(path, group_by="user", shuffle_rows=330))
    rows = [int(row) for row in real_rows(data.batches("train", rank=0, world_size=1, batch_size=1))]
    users = [f"u{row // 3 % 11}" if row % 7 else f"alone {row}" for row in rows]
    runs = [user for i, user in enumerate(users) if i == 0 or users[i - 1] != user]
    assert len(runs) == len(set(runs)), "every request is one run of rows"
    assert rows != sorted(rows)
    by_user = [row for row, user in zip(rows, users, strict=True) if user == "u3"]
    assert by_user == sorted(by_user), "in the order of the files"


def test_each_row_without_a_request_is_one_by_itself(tmp_path: Path) -> None:
    """pandas and Spark write NaN where a number is missing."""
    users = [[1.0, math.nan, math.nan, None, 1.0, 2.5], [1, 2, 3, 4, 5, 6]]
    for file, values in zip("ab", users, strict=True):
        pq.write_table(pa.table({"label": [0] * 6, "c": [0] * 6, "user": values}), tmp_path / f"{file}.parquet")
    config = config_of(str(tmp_path / "?.parquet"), dense=(), categorical=("c",), group_by="user")
    prepare(config, tmp_path / "out")
    assert len(set(pq.read_table(tmp_path / "out" / "train")["#request"].to_pylist())) == 10  # 1.0 is 1


def test_prepared_rows_are_read_from_their_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = config_of(parquet(tmp_path / "a.parquet", range(100)), eval_path=None, split_column="part", group_by="user")
    prepare(raw, tmp_path / "out", group_rows=16)
    shutil.copyfile(tmp_path / "out" / "train" / "part-00000.parquet", tmp_path / "out" / "eval" / "other.parquet")
    folder = ClickData(DataConfig.model_validate({"prepared": str(tmp_path / "out"), "shuffle_rows": 0}))
    assert "files that it does not list are not read: " in caplog.text
    assert sorted(real_rows(folder.batches("eval", **RANK))) == list(range(0, 100, 5))
    assert (folder.raw.id_mode, folder.raw.categorical) == ("hash", NAMES["categorical"])
    (tmp_path / "out" / "eval" / "part-00000.parquet").write_bytes(b"x")
    with pytest.raises(InputError, match="has 1 bytes, not"):
        ClickData(folder.config)


def test_an_id_without_a_row_is_noticed(tmp_path: Path) -> None:
    prepare(config_of(parquet(tmp_path / "a.parquet", range(100))), tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows": 50', '"rows": 7'))
    with pytest.raises(InputError, match=r"part-00000\.parquet: column 'c' has .*, outside 0 to 6, the rows"):
        list(ClickData(DataConfig(prepared=str(tmp_path / "out"), kind="prepared")).batches("eval", **RANK))
    # As another program may have written it.
    record = json.loads(manifest.read_text().replace('"rows": 7', '"rows": 50'))
    file = tmp_path / "out" / "eval" / "part-00000.parquet"
    rows = pq.read_table(file).slice(0, 2)
    bags = pa.array([[0], [None]], pa.large_list(pa.int32()))
    wrong = [("d", pa.array([0.0, number])) for number in (None, math.nan, 1e300)]  # 1e300 is infinite in 32 bits
    wrong += [("bag", bags), ("c", pa.array(["a", "b"])), *(("label", pa.array([one, 2])) for one in (None, 1))]
    for name, column in wrong:
        pq.write_table(rows.set_column(rows.column_names.index(name), name, column), file, row_group_size=1)
        record["files"] = {"eval/part-00000.parquet": (file.stat().st_size, 0)}
        manifest.write_text(json.dumps(record))
        reason = rf"column '{name}' (has missing values|has values from 2 to 2, outside 0 to 1|is (nan|inf)\. Write a)"
        with pytest.raises(InputError, match=rf"part-00000\.parquet(, row 2)?: ({reason}|cannot be read as prepared)"):
            list(ClickData(DataConfig(prepared=str(tmp_path / "out"), kind="prepared")).batches("eval", **RANK))
    # As a version with another key may have written it.
    manifest.write_text(json.dumps({**record, "raw": {"new": 1}}))
    with pytest.raises(InputError, match=r"out': raw in its manifest: new: Extra inputs are not permitted \(got 1\)"):
        ClickData(DataConfig(prepared=str(tmp_path / "out"), kind="prepared"))


def test_ids_of_large_tables_have_64_bits() -> None:
    features = tuple(Feature(name=str(rows), rows=rows, table="t") for rows in (2**31, 2**31 + 1))
    assert Columns(dense=(), features=features, label=None).schema.types == [pa.int32(), pa.int64()]


def test_rows_of_other_files_are_read_without_those_of_the_run() -> None:
    config = DataConfig(kind="columns", train_path="a.csv", eval_path="gone.csv", categorical=("c",))
    assert with_files(config, "b.csv") == DataConfig(kind="columns", train_path="b.csv", categorical=("c",))
    with pytest.raises(InputError, match="prepared='out': its manifest lacks `raw`"):
        with_files(DataConfig(prepared="out"), "b.csv")


def test_a_file_that_is_replaced_while_it_is_read_or_damaged_is_noticed(tmp_path: Path) -> None:
    prepare(config_of(parquet(tmp_path / "a.parquet", range(100))), tmp_path / "out")
    data = ClickData(DataConfig(prepared=str(tmp_path / "out"), shuffle_rows=0))
    file = tmp_path / "out" / "train" / "part-00000.parquet"
    assert len(list(data.batches("train", **RANK))) == 25
    content, dense = bytearray(file.read_bytes()), pq.read_metadata(file).row_group(0).column(1)
    content[dense.data_page_offset - 1] ^= 1  # the exponent of a dense value, which stays finite
    pq.write_table(pq.read_table(file), file)
    with pytest.raises(InputError, match=r"train/part-00000\.parquet has changed since it was opened"):
        list(data.batches("train", **RANK))
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read as prepared rows .*CRC.* Prepare the data again"):
        list(ClickData(data.config).batches("train", **RANK))


RANK: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": 4}


def test_text_is_prepared_once_beside_the_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.tsv", numbered_lines(50))
    config = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"), shuffle_rows=0)
    for cache, message in ((None, "must be prepared first"), (tmp_path / "a.tsv" / "b", "rows, .*b' cannot be wri")):
        with pytest.raises(InputError, match=message):
            ClickData(config, cache=cache)
    cache = tmp_path / "prepared"
    data = ClickData(config, cache=cache)
    assert "Preparing" in caplog.text
    caplog.clear()
    again = ClickData(config, cache=cache)
    assert not caplog.records
    assert again.files("train") == data.files("train")
    assert (data.num_rows("train"), data.num_rows("eval")) == (45, 5)
    assert data.raw.kind == "criteo_tsv"
    for lines, rows in ((numbered_lines(50)[::-1], 45), (numbered_lines(60), 54)):  # of the same size, and of another
        write(tmp_path / "a.tsv", lines)
        assert ClickData(config, cache=cache).num_rows("train") == rows
    assert len(list(cache.glob("*/manifest.json"))) == 3
    write(tmp_path / "a.tsv", [*numbered_lines(3), "x"])
    with pytest.raises(InputError, match="line 4: expected 40 columns, found 1"):
        ClickData(config, cache=cache)


BOTH = {"categorical": ("c", "n")}
WITH_H = {"categorical": ("c", "h"), "sequences": {"h": "c"}}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"label": [0, 2]}, {}, r"row 2: column 'label': .*found 2"),
    ({"d": [1.0, 1e300]}, {}, r"row 2: column 'd': .*found 1e"),
    ({"c": [1.0, 1.5]}, {}, r"row 2: column 'c': .*found 1\.5"),
    ({"d": [[1.0], [2.0]]}, {}, "dense column 'd' has type list"),
    ({"d": pa.array([0, 1], pa.timestamp("s"))}, {}, "dense column 'd' has type timestamp.*data.timestamps"),
    ({"c": pa.array([b"a", b"b"])}, {}, "categorical column 'c' has type binary"),
    ({"c": pa.Array.from_buffers(pa.utf8(), 2, pa.array([b"a", b"\xff"]).buffers())}, {}, "Invalid UTF8 sequence"),
    ({}, {"categorical": ("c", "label")}, "categorical column 'label' is data.label, not an input"),
    ({}, {"eval_path": None, "split_column": "d", "dense": ("d",)}, "dense column 'd' is data.split_column"),
    ({}, {"categorical": ("c", "d")}, "'d' is in more than one of"),
    ({"c_hour": [0, 1]}, {"timestamps": ("c",), "categorical": ("n",), "label": "c_hour"}, "'c_hour' has the name of"),
    ({}, {"categorical": ("c", "c")}, "categorical names 'c' 2 times. Name it once"),
    ({}, {"num_embeddings_per_feature": {"x": 3}}, "num_embeddings_per_feature: 'x' matches no categorical feature"),
    ({}, {"sequences": {"x": "c"}}, "sequences: 'x' matches no categorical feature"),
    ({}, {**BOTH, "shared_tables": {"c": ("n",)}}, r"shared_tables\.c has the name of a feature outside it"),
    ({}, {**BOTH, "shared_tables": {"a": ("c",), "b": ("c", "n")}}, "feature 'c' is named more than once"),
    ({}, {**BOTH, "shared_tables": {"t": ("c", "n")}, "num_embeddings_per_feature": {"c": 3}}, "share a table"),
    ({"h": ["a", "b"]}, WITH_H, "sequences: column 'h' is not a list"),
    ({"h": [["a"], []], "c": [["a"], ["b"]]}, WITH_H, "sequences: target 'c' of 'h' is a list"),
    ({"h": [["a"], []]}, {**WITH_H, "shared_tables": {"t": ("h", "n")}, "categorical": ("c", "h", "n")}, "table 't'"),
    ({"h": [["a"], ["b"] * 1001]}, WITH_H, "row 2: column 'h': expected at most 1000 ids .*found 1001"),
]


@pytest.mark.parametrize(("columns", "settings", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_wrong_columns_and_values_are_refused(
    columns: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    table = {"label": [0, 1], "d": [1.0, 2.0], "c": ["a", "b"], "n": [1, 2], **columns}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    config = config_of(str(tmp_path / "a.parquet"), **{"categorical": ("c",), **settings})
    with pytest.raises(InputError, match=message):
        list(opened(config).batches("train", rank=0, world_size=1, batch_size=1))


def test_what_a_thread_makes_ahead_comes_in_order_with_its_errors() -> None:
    def numbers() -> Any:
        yield from range(20)
        raise InputError("the end")

    ahead = prefetched(numbers(), 3)
    assert [next(ahead) for _ in range(20)] == list(range(20))
    with pytest.raises(InputError, match="the end"):
        next(ahead)
    stopped = prefetched(iter(range(10**9)), 2)
    assert next(stopped) == 0
    stopped.close()


def test_moving_and_pinning_reach_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine without a GPU nothing is pinned or recorded, so the calls are counted.
    calls: list[str] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: calls.append("stream"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *more, **options: calls.append("pin") or tensor)
    ids = KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    batch = ClickBatch(torch.rand(2, 3), ids, torch.zeros(2), torch.ones(2))
    assert isinstance(batch, Pipelineable)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    parts = (moved.dense_features, moved.labels, moved.weights, moved.sparse_features.values())
    assert {tensor.device.type for tensor in parts} == {"meta"}
    batch.record_stream(torch.Stream(device="cpu"))
    assert torch.equal(batch.pin_memory().labels, batch.labels)
    assert min(calls.count("stream"), calls.count("pin")) >= 5


# Rows dealt by arithmetic.

SIZES = [
    np.array([1]),
    np.array([7] * 12),
    np.array([5, 1, 0, 13, 8, 8, 2, 30, 4]),
    np.random.default_rng(0).integers(0, 1500, 37),
]


def rows_of(deal: Deal, parts: list[Span]) -> list[tuple[int, int]]:
    pieces = [piece for part in parts for piece in deal.groups(part)]
    return [(piece.number, row) for piece in pieces for row in range(piece.start, piece.stop)]


@pytest.mark.parametrize("seed", [None, (3, 1)])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} groups")
def test_rows_are_used_once_whatever_ranks_go_on(sizes: np.ndarray, seed: tuple[int, int] | None) -> None:
    draw = np.random.default_rng(1)
    for lanes in (1, 4, 5):
        deal, used, at = Deal(sizes, lanes, seed), Counter[tuple[int, int]](), 0
        while at < deal.num_rows:
            world_size = int(draw.integers(1, 7))
            stop = min(deal.num_rows, at + world_size * int(draw.integers(1, 60)))
            ranks = [rows_of(deal, deal.of_rank(at, stop, rank=r, world_size=world_size)) for r in range(world_size)]
            for rows in ranks:
                used.update(rows)
            assert (stop - at) % world_size or len({len(rows) for rows in ranks}) == 1
            at = stop
        assert used == Counter((group, row) for group, rows in enumerate(sizes) for row in range(rows))


def test_lanes_stay_near_one_another_in_time_without_a_seed() -> None:
    deal = Deal(np.full(40, 10), lanes=4)
    for k in range(0, 400, 40):
        groups = {group for group, _ in rows_of(deal, deal.of_rank(k, k + 40, rank=0, world_size=1))}
        assert groups == {k // 10, k // 10 + 1, k // 10 + 2, k // 10 + 3}


def test_another_number_of_ranks_is_said_to_change_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    assert [rank_batch(8, ranks, 16) for ranks in (8, 4, 1)] == [16, 32, 128]
    assert not caplog.records
    assert rank_batch(4, 3, 16) == 16
    assert "the global batch has 48 rows, not 64" in caplog.text


# Data behind a URL: read as files of this machine are, or refused.


@contextmanager
def uploaded(folder: Path) -> Iterator[str]:
    """Copies files into fsspec's store in memory, which each process has for itself."""
    store = fsspec.filesystem("memory")
    store.put(f"{folder}/", "/clicks/", recursive=True)
    for name in ("_SUCCESS", ".hidden"):
        store.touch(f"/clicks/{name}")
    try:
        yield "memory://clicks"
    finally:
        store.rm("/clicks", recursive=True)


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_files_of_a_store_are_read_as_those_of_this_machine(kind: str, tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()
    if kind == "text":
        (folder / "a.tsv.gz").write_bytes(gzip.compress("\n".join(numbered_lines(30)).encode()))
        config = DataConfig(kind="criteo_tsv", train_path=f"{folder}/a.tsv.gz")
    else:
        config = config_of(parquet(folder / "a.parquet", range(40)), eval_path=None)
    with uploaded(folder) as url:
        place = str(config.train_path).replace(str(folder), url).replace("a.parquet", "?.parquet")
        remote = config.model_copy(update={"train_path": place})
        ours, theirs = (
            real_rows(ClickData(each, cache=tmp_path / "prepared").batches("eval", **RANK)) for each in (config, remote)
        )
    assert ours == theirs != []


def test_faults_of_a_store_name_the_url(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", [*numbered_lines(30), criteo_line("7")])
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with uploaded(tmp_path) as url:
        for name, settings, message in (
            ("a.tsv", {}, f"^{url}/a.tsv, line 31: column 'label': .*found 7"),
            ("z.tsv", {}, f"^train_path='{url}/z.tsv' matches no file. Correct the path.$"),
            ("c.parquet", {"kind": "columns", **NAMES}, f"^{url}/c.parquet: cannot be read as Parquet"),
        ):
            config = DataConfig(**{"kind": "criteo_tsv", "train_path": f"{url}/{name}", **settings})
            with pytest.raises(InputError, match=message):
                ClickData(config, cache=tmp_path / "prepared")
        assert demo_settings(f"{url}/a.tsv")[:2] == ['data.kind="criteo_tsv"', f'data.train_path="{url}/a.tsv"']


def test_folders_that_spark_writes_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = ["a.parquet", "day.parquet/part-1.parquet", "day[1].parquet/part-0.parquet"]
    for name in (*files, "day.parquet/_SUCCESS", "day.parquet/.part-1.crc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = [str(tmp_path / name) for name in files]
    assert matching_files(str(tmp_path)) == matching_files(f"{tmp_path}/*.parquet") == wanted
    with uploaded(tmp_path) as url:
        for place in (url, f"{url}/*.parquet"):
            assert [name.partition("/clicks/")[2] for name in matching_files(place)] == files
    for name in ("_log/0.parquet", "hour=1/_temporary/0/a.parquet", "hour=1/b.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert matching_files(str(tmp_path)) == wanted
    assert f"these folders are not read: {tmp_path}/hour=1." in caplog.text
    assert matching_files(f"{tmp_path}/**/*.parquet") == [*wanted, str(tmp_path / "hour=1" / "b.parquet")]
    (tmp_path / "day.parquet" / "hour=1").mkdir()
    with pytest.raises(InputError, match="hour=1 is a folder, whose rows would be left out"):
        matching_files(str(tmp_path / "day.parquet"))
    (named := tmp_path / "day[2]" / "a.csv").parent.mkdir()
    named.touch()
    assert matching_files(str(named.parent)) == [str(named)]
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"^--data: .*gone.parquet .* is a broken link. Repair or remove the link.$"):
        expand_path("--data", f"{tmp_path}/g*.parquet", columns=True)
