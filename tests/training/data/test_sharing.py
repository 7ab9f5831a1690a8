"""Reading shared out among ranks: the batches of every rank are bit for bit those of a rank that reads all."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.training.data import pieces, sharing
from dmt.training.data.batch import make_batch
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import Split, open_source
from dmt.training.data.packed import PackedRows, RowLayout
from dmt.training.data.readers import ColumnReader, CriteoReader
from dmt.training.data.rows import Bags, Rows
from dmt.training.data.textfile import lines_before, text_blocks
from tests.ranks import run_ranks

from .helpers import criteo_line, numbered_lines, write
from .test_start_row import same


def parquet(path: Path, numbers: range, group: int) -> str:
    bags = [[f"x{i}"] * (i % 3) for i in numbers]
    other = [[f"{i}", None, f"{i}y"][: i % 4] for i in numbers]
    table = {"label": [i % 2 for i in numbers], "d": numbers, "c": [str(i) for i in numbers], "bag": bags, "b2": other}
    table["user"] = [None if i % 7 == 0 else f"u{i // 3 % 11}" for i in numbers]
    table["time"] = [f"2026-11-{1 + i % 28:02}T{i % 24:02}:15:00" for i in numbers]
    table["part"] = ["test" if i % 5 == 0 else "train" for i in numbers]
    schema = {"bag": pa.list_(pa.string()), "b2": pa.list_(pa.string()), "d": pa.int64(), "label": pa.int64()}
    columns = {name: pa.array(values, schema.get(name, pa.string())) for name, values in table.items()}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


TIMES = ("", "2026-11-22", "2026-11-22T20:15:00Z")


def csv(path: Path, numbers: range) -> str:
    lines = [
        f"{i % 2},{i},v{i},{'|'.join(['x'] * (i % 3))},,{'' if i % 7 == 0 else i // 3 % 11},{i},{TIMES[i % 3]}"
        for i in numbers
    ]
    return write(path, ["label,d,c,bag,b2,user,part,time", *lines])


def config_of(kind: str, folder: Path, **settings: Any) -> DataConfig:
    if kind.startswith("criteo"):
        lines = numbered_lines(90)
        write(folder / "a.tsv", lines[:40])
        (folder / "b.tsv").touch()
        write(
            folder / "c.tsv", [*lines[40:50], "malformed", *lines[50:60], criteo_line("3"), *lines[60:75]], end="\r\n"
        )
        (folder / "d.tsv").write_bytes("\n".join(lines[75:]).encode())
        settings = {"train_path": str(folder / "?.tsv"), "skip_bad_lines": True, **settings}
        return DataConfig(kind="criteo_tsv", dense_transform="none", **settings)
    names = {"dense": ("d",), "categorical": ("c", "bag", "b2"), "dense_transform": "none"}
    names |= {"timestamps": ("time",), "timestamp_parts": ("years", "hour")}
    if kind in ("csv", "gzip"):
        csv(folder / "a.csv", range(57))
        if kind == "gzip":
            (folder / "a.csv").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
        csv(folder / "b.csv", range(57, 90))
        return DataConfig(
            kind="columns", train_path=str(folder / "?.csv"), multi_hot=("bag", "b2"), **names, **settings
        )
    groups = [100, 100] if kind == "one row group" else [13, 4]
    parquet(folder / "a.parquet", range(57), groups[0])
    parquet(folder / "b.parquet", range(57, 57), 1)
    parquet(folder / "c.parquet", range(57, 90), groups[1])
    return DataConfig(kind="columns", train_path=str(folder / "?.parquet"), **names, **settings)


CASES = {
    "criteo": {"categorical": ("C1",)},
    "criteo, at most 50": {"max_train_rows": 50, "shuffle_rows": 16, "categorical": ("C[12]",)},
    "csv, order of the files": {"shuffle_rows": 0},
    "csv": {"shuffle_rows": 16},
    "gzip": {"shuffle_rows": 16},
    "csv of requests": {"shuffle_rows": 40, "group_by": "user"},
    "parquet": {"shuffle_rows": 23},
    "parquet of requests": {"shuffle_rows": 40, "group_by": "user"},
    "parquet, split by a column": {"shuffle_rows": 16, "split_column": "part"},
    "parquet, pieces shuffled": {"shuffle_rows": 16, "split_column": "part", "shuffle_pieces": True},
    "one row group": {"shuffle_rows": 16},
}

DAILY = ("criteo", "csv of requests", "gzip", "parquet, pieces shuffled")


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def counted_in_small_pieces() -> Iterator[list[int]]:
    """Cuts files into pieces of a few rows, which are exchanged a few at a time; notes the rows of each part parsed."""
    parsed: list[int] = []

    def counting(check: Any) -> Any:
        return lambda self, part: parsed.append(part.table.num_rows) or check(self, part)

    with (
        patch.multiple(pieces, PIECE_BYTES=600, PIECE_ROWS=8),
        patch.object(sharing, "_EXCHANGE_ROWS", 8),
        patch.object(ColumnReader, "_check", counting(ColumnReader._check)),
        patch.object(CriteoReader, "_check", counting(CriteoReader._check)),
    ):
        yield parsed


def shared_out_on_rank(rank: int, cases: list[tuple[str, DataConfig]]) -> dict[str, tuple[int, int]]:
    """Compares both ways of reading; returns the rows parsed in both, in training."""
    found, place = {}, {"rank": rank, "world_size": group().size(), "batch_size": 2}
    with counted_in_small_pieces() as parsed:
        for name, config in cases:
            for split in ("eval", "train"):
                data, alone = open_source(config), open_source(config)
                parsed.clear()
                wanted = list(alone.batches(split, epoch=1, **place))
                alone_parsed = sum(parsed)
                parsed.clear()
                got = list(data.batches(split, group=group(), epoch=1, **place))
                assert len(wanted) == len(got) > 0, (name, split)
                assert all(same(a, b) for a, b in zip(wanted, got, strict=True)), (name, split)
                assert data.bad_lines == alone.bad_lines
                assert data.num_rows(split) == alone.num_rows(split)
            found[name] = (alone_parsed, sum(parsed))
    return found


@pytest.fixture
def cases(tmp_path: Path) -> list[tuple[str, DataConfig]]:
    found = []
    for number, (name, settings) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append((name, config_of(name.partition(",")[0].removesuffix(" of requests"), folder, **settings)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 8))])
def test_batches_have_the_bits_of_a_rank_that_reads_all(world_size: int, cases: Any) -> None:
    if world_size == 2:
        cases = [case for case in cases if case[0] in DAILY]
    if world_size == 8:  # more ranks than pieces
        cases = [case for case in cases if case[0] in ("one row group", "csv of requests", "criteo")]
    ranks = run_ranks(shared_out_on_rank, world_size, cases)
    for name, (alone, _) in ranks[0].items():
        parsed = [rank[name][1] for rank in ranks]
        if name == "gzip":  # which cannot be cut, so that ranks would wait for one that reads it in one go
            assert parsed == [alone] * world_size
        elif "at most" not in name:  # which stops where its rows end, in the middle of a round
            assert sum(parsed) == alone, "each row is parsed once"
        if name.startswith(("parquet", "criteo")):  # of which there are many pieces
            assert max(parsed) <= alone / world_size + 22, "a piece more or less"


def part_on_rank(
    rank: int, config: DataConfig, row: int, steps: int, bookmark: dict[str, Any] | None
) -> tuple[list[Any], int, dict[str, Any] | None]:
    """Some steps from a row on; returns their rows, how many were parsed, and the bookmark of the next row."""
    batch_size, seen = 3, []
    place = {"rank": rank, "world_size": group().size(), "batch_size": batch_size}
    with counted_in_small_pieces() as parsed:
        data = open_source(config)
        batches = data.batches("train", epoch=1, start_row=row, bookmark=bookmark, group=group(), **place)
        for _, batch in zip(range(steps), batches, strict=False):
            seen += batch.dense_features[:, 0].tolist()
        mark = data.bookmark("train", epoch=1, row=row + steps * batch_size * group().size())
        if steps > 90 and config.max_train_rows is None and config.skip_bad_lines:
            assert sum(data.bad_lines.values()) == 2, "with those before the bookmark"
        return seen, sum(parsed), mark


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        *("criteo", "parquet, pieces shuffled"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("criteo, at most 50", "csv of requests")),
    ],
)
def test_a_pass_goes_on_from_a_bookmark_on_any_number_of_ranks(name: str, cases: Any) -> None:
    config = dict(cases)[name].model_copy(update={"shuffle_rows": 8})
    whole = [row for batch in open_whole(config) for row in batch]
    row, bookmark, seen = 0, None, []
    for world_size, steps in ((2, 3), (4, 1), (1, 5), (1, 99)):
        ranks = run_ranks(part_on_rank, world_size, config, row, steps, bookmark)
        rows = list(zip(*([part[i : i + 3] for i in range(0, len(part), 3)] for part, _, _ in ranks), strict=True))
        seen += [x for step in rows for batch in step for x in batch]
        if row:
            # All but the rows before the bookmark's piece: of a shuffled block of 8, and a piece.
            assert sum(parsed for _, parsed, _ in ranks) <= 100 - row + 30
        row, bookmark = len(seen), ranks[0][2]
        assert [mark for _, _, mark in ranks] == [bookmark] * world_size
        assert bookmark is not None
        assert row - 8 - 26 <= bookmark["kept"] <= row
    assert seen == whole[: len(whole) // 3 * 3]
    assert len(whole) == len(set(whole)) >= 50


def open_whole(config: DataConfig) -> Any:
    with counted_in_small_pieces():
        batches = open_source(config).batches("train", rank=0, world_size=1, batch_size=1, epoch=1)
        return [batch.dense_features[:, 0].tolist() for batch in batches]


def test_a_bookmark_of_other_pieces_or_of_another_epoch_is_not_used(tmp_path: Path, caplog: Any) -> None:
    config = config_of("parquet", tmp_path, shuffle_rows=8)
    with counted_in_small_pieces():
        data = open_source(config)
        whole = list(data.batches("train", rank=0, world_size=1, batch_size=5))
        mark = data.bookmark("train", epoch=0, row=60)
        assert mark is not None
        assert data.bookmark("train", epoch=1, row=60) is None
        assert open_source(config).bookmark("train", epoch=0, row=60) is None
        pieces_or_rows = ({"file": "x"}, {"start": 1}, {"epoch": 1}, {"piece": 99}, {"piece": -1}, {"kept": 61})
        malformed = ({"more": 1}, {"bad": {"9": 1}}, {"bad": []}, {"kept": "1"})
        for wrong in (*pieces_or_rows, *malformed, {}):
            saved = {**mark, **wrong}
            caplog.clear()
            rest = open_source(config).batches(
                "train", rank=0, world_size=1, batch_size=5, start_row=60, bookmark=saved
            )
            assert all(same(a, b) for a, b in zip(whole[12:], rest, strict=True)), wrong
            assert ("does not fit" in caplog.text) == bool(wrong)


def fault_on_rank(rank: int, config: DataConfig, split: Split = "train", start_row: int = 0) -> tuple[int, str]:
    place = {"rank": rank, "world_size": group().size(), "batch_size": 4}
    seen = 0
    with counted_in_small_pieces():
        try:
            for _ in open_source(config).batches(split, group=group(), start_row=start_row, **place):
                seen += 1
        except InputError as error:
            return seen, str(error)
    return seen, ""


@pytest.mark.ranks
def test_a_fault_that_one_rank_finds_is_raised_on_all_and_where_the_stream_comes_to_it(tmp_path: Path) -> None:
    lines = numbered_lines(40)
    write(tmp_path / "a.tsv", [*lines[:30], criteo_line("7"), *lines[30:]])
    config = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"), eval_path=str(tmp_path), shuffle_rows=8)
    wanted = rf"^{tmp_path}/a.tsv, line 31: column label: expected 0 or 1, found '7'. Fix the line"
    found = run_ranks(fault_on_rank, 2, config)
    assert found[0] == found[1]
    assert found[0][0] == 3, "all whole steps before"
    assert re.match(wanted, found[0][1])
    used = config.model_copy(update={"max_train_rows": 24})
    assert run_ranks(fault_on_rank, 2, used) == [(3, "")] * 2
    for steps, error in run_ranks(fault_on_rank, 2, config.model_copy(update={"workers": 1})):
        assert steps == 0
        assert re.match(r"data\.workers=1: this process is daemonic .* Set data\.workers=0\.", error)


@pytest.mark.ranks
def test_a_row_that_cannot_be_encoded_is_a_fault_once_a_run_uses_it(tmp_path: Path) -> None:
    ids = [10**6 if i in (19, 26) else i for i in range(40)]  # of which 9, 19, 29 and 39 are for evaluation
    write(tmp_path / "a.csv", ["label,c", *(f"0,{i}" for i in ids)])
    settings: dict[str, Any] = {"categorical": ("c",), "id_mode": "index", "eval_fraction": 0.1, "shuffle_rows": 0}
    config = DataConfig(kind="columns", train_path=str(tmp_path / "a.csv"), num_embeddings=100, **settings)
    (steps, error), other = run_ranks(fault_on_rank, 2, config)
    assert (steps, error) == other
    assert steps == 3, "24 rows before row 26, which trains, and not row 19"
    assert re.match(rf"Feature 'c': id 1000000 is outside the table .*\({tmp_path}/a.csv, line 28\)", error)
    assert run_ranks(fault_on_rank, 2, config.model_copy(update={"max_train_rows": 24})) == [(3, "")] * 2
    assert run_ranks(fault_on_rank, 2, config, "train", 25) == [(1, "")] * 2
    assert run_ranks(fault_on_rank, 2, config.model_copy(update={"max_eval_rows": 1}), "eval") == [(1, "")] * 2
    found = run_ranks(fault_on_rank, 2, config, "eval")
    assert found[0] == found[1]
    assert "a.csv, line 21)" in found[0][1]


def on_its_own_host(rank: int, paths: list[str], lost: bool) -> str:
    path = Path(paths[rank])
    names: dict[str, Any] = {"dense": ("d",), "categorical": ("c",), "eval_path": paths[0]}
    data = open_source(DataConfig(kind="columns", train_path=str(path), **names))
    if lost and rank == 1:
        path.unlink()
    with counted_in_small_pieces(), pytest.raises(InputError) as caught:
        next(data.batches("train", rank=rank, world_size=2, batch_size=2, group=group()))
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_with_other_files_stop_together(tmp_path: Path) -> None:
    paths = []
    for number, rows in enumerate((57, 58)):  # of as many pieces
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(parquet(folder / "a.parquet", range(rows), 13))
    for lost, wanted in ((False, "Rank 1 finds other pieces in its files (5) than rank 0 (5)"), (True, paths[1])):
        found = run_ranks(on_its_own_host, 2, paths, lost)
        assert found[0] == found[1]
        assert found[0].startswith(wanted)


def test_a_group_of_other_ranks_is_refused(tmp_path: Path) -> None:
    other = type("Group", (), {"rank": lambda self: 1, "size": lambda self: 4})()
    data = open_source(config_of("parquet", tmp_path))
    with pytest.raises(InputError, match=r"rank=0, world_size=4: the group has rank 1 of 4\. Give"):
        data.batches("train", rank=0, world_size=4, batch_size=1, group=other)


@pytest.mark.parametrize("wide", [False, True])
def test_packed_rows_are_unpacked_unchanged(wide: bool) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 4, (3, 20))
    most = 2**40 if wide else 2**31 - 1

    def bags(own: Any) -> Bags:
        return Bags(draw.integers(0, most, own.sum()), np.append(0, own.cumsum()))

    rows = Rows(
        draw.random(20).astype(np.float32),
        draw.normal(size=(20, 2)).astype(np.float32),
        (bags(lengths[0]), bags(lengths[1]), Bags(draw.integers(0, most, 20)), bags(lengths[2])),
    )
    layout = RowLayout(num_dense=2, is_bag=(True, True, False, True), wide=wide)
    order = draw.permutation(20)[:13]
    packed = layout.pack(rows)
    parts = PackedRows.concat([packed.take(order[:6]), layout.empty(), packed.take(order[6:])])
    found, wanted = layout.unpack(parts), rows.rows(order)
    assert (found.labels == wanted.labels).all()
    assert (found.dense == wanted.dense).all()
    for a, b in zip(found.bags, wanted.bags, strict=True):
        assert a.values.tolist() == b.values.tolist()
        assert a.lengths.tolist() == b.lengths.tolist()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("with_bags", [False, True])
def test_a_batch_of_packed_rows_is_that_of_the_rows(with_bags: bool, wide: bool) -> None:
    draw = np.random.default_rng(0)
    bags = tuple(Bags(draw.integers(0, 2**31, 20)) for _ in range(3))
    if with_bags:
        bags = (*bags[:2], Bags(draw.integers(0, 2**31, 40), np.arange(0, 41, 2)))
    rows = Rows(draw.random(20).astype(np.float32), draw.normal(size=(20, 2)).astype(np.float32), bags)
    layout = RowLayout(num_dense=2, is_bag=tuple(own.offsets is not None for own in bags), wide=wide)
    packed, names = layout.pack(rows), ["a", "b", "c"]
    parts = [packed.slice(0, 7), packed.slice(7, 8), packed.slice(8, 20)]
    order = draw.permutation(20)[:13]
    taken = PackedRows.take_from(parts, order)
    for part, own, size in ((taken, order, 16), (taken.slice(2, 5), order[2:5], 3)):
        batch, wanted, fill = make_batch(part, layout, names, size), rows.rows(own), size - len(own)
        assert batch.labels.tolist() == [*wanted.labels, *[0] * fill]
        assert batch.weights.tolist() == [1] * len(own) + [0] * fill
        assert batch.dense_features.tolist() == [*wanted.dense.tolist(), *[[0, 0]] * fill]
        for name, bag in zip(names, wanted.bags, strict=True):
            found, filled = batch.sparse_features[name], [int(bag.offsets is None)] * fill
            assert found.lengths().tolist() == [*bag.lengths, *filled]
            assert found.values().tolist() == [*bag.values, *[0] * sum(filled)]


def test_text_is_cut_at_any_byte_without_losing_a_line(tmp_path: Path) -> None:
    draw = random.Random(0)
    for end in ("\n", ""):
        text = "\n".join(draw.choice(["", "a", "bcd\r", "efghij" * 3]) for _ in range(40)) + end
        path = write(tmp_path / f"{len(text)}.tsv", [text], end="")
        whole = b"".join(block for _, block in text_blocks(path))
        for size in (1, 2, 3, 5, 7, 19, 1000):
            cuts = [*range(0, len(text), size), len(text)]
            lines = 0
            for start, stop in pairwise(cuts):
                blocks = list(text_blocks(path, start=start, stop=stop, block_bytes=4))
                assert not blocks or lines_before(path, start) == lines
                got = b"".join(block for _, block in blocks)
                assert whole.split(b"\n")[lines:][: got.count(b"\n")] == got.split(b"\n")[:-1]
                lines += got.count(b"\n")
            assert lines == whole.count(b"\n")
        assert lines_before(path, 0) == 0


def test_shuffled_pieces_and_blocks_come_near_a_full_shuffle(tmp_path: Path) -> None:
    """What docs/training.md says, with 3000 rows in pieces of 20, shuffled in blocks of 300."""
    csv(tmp_path / "a.csv", range(1))
    rows, piece, block = 3000, 20, 300
    parquet(tmp_path / "a.parquet", range(rows), piece)
    names = {"dense": ("d",), "categorical": ("c",), "dense_transform": "none", "eval_path": str(tmp_path / "a.csv")}
    config = DataConfig(kind="columns", train_path=str(tmp_path / "a.parquet"), shuffle_rows=block, **names)

    def order(epoch: int, **changes: Any) -> Any:
        with patch.multiple(pieces, PIECE_ROWS=piece):
            data = open_source(config.model_copy(update=changes))
            batches = data.batches("train", rank=0, world_size=1, batch_size=500, epoch=epoch)
            return np.concatenate([batch.dense_features[:, 0].numpy() for batch in batches]).astype(int)

    blocks_only, first, second = order(0), order(0, shuffle_pieces=True), order(1, shuffle_pieces=True)
    for found in (blocks_only, first, second):
        assert sorted(found) == list(range(rows))
    # Where a row comes tells nothing of where it was in the file; by three standard deviations.
    assert np.corrcoef(blocks_only, np.arange(rows))[0, 1] > 0.98
    for found in (first, second):
        assert abs(np.corrcoef(found, np.arange(rows))[0, 1]) < 3 / np.sqrt(rows / piece)
    # The next row is of the same piece with a chance of (piece - 1) / (block - 1), not (piece - 1) / (rows - 1).
    together = (first[1:] // piece == first[:-1] // piece).mean()
    expected = (piece - 1) / (block - 1)
    assert abs(together - expected) < 4 * np.sqrt(expected / rows)
    # In another epoch, other rows are neighbours: those of a block meet again as by chance.
    place = np.empty(rows, int)
    place[second] = np.arange(rows) // block
    of_other_pieces = first[1:] // piece != first[:-1] // piece
    meet = (place[first[1:]] == place[first[:-1]])[of_other_pieces].mean()
    assert abs(meet - block / rows) < 0.02


def test_shuffled_pieces_need_evaluation_rows_that_do_not_depend_on_the_order() -> None:
    columns = {"kind": "columns", "train_path": "a", "categorical": ("c",), "shuffle_pieces": True}
    with pytest.raises(ValueError, match=r"shuffle_pieces changes the order .* by which eval_fraction counts"):
        DataConfig(**columns)
    with pytest.raises(ValueError, match=r"by which max_train_rows counts"):
        DataConfig(eval_path="b", max_train_rows=5, **columns)
