"""`group_by`: the rows of a request stay in one batch of one rank, and no row is lost on the way."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import open_source

from .helpers import criteo_line, real_rows, write
from .test_start_row import batches, same

ROWS = 120
_draw = np.random.default_rng(0)
REQUESTS = np.repeat(np.arange(40), _draw.integers(1, 7, 40))[:ROWS]
"""The request of each row: 40 of them at most, 1 to 6 rows each, one after another as in a log."""


def config_of(folder, kind="parquet", requests=REQUESTS, **settings):
    names = [f"q{request}" for request in requests]
    numbers = list(range(len(names)))
    if kind == "criteo":  # the request is a categorical column, which need not be a feature
        lines = [
            criteo_line(str(i % 2), [str(i), *["1"] * 12], [f"{r:x}", *["0a"] * 25]) for i, r in enumerate(requests)
        ]
        path = write(folder / "a.tsv", lines)
        settings = {"dense": ("I1",), "categorical": ("C2",), "group_by": "C1", **settings}
        return DataConfig(kind="criteo_tsv", train_path=path, eval_path=path, dense_transform="none", **settings)
    settings = {"group_by": "request", "eval_path": str(folder), "shuffle_rows": 1000, **settings}
    if kind == "csv":
        write(folder / "a.csv", ["label,d,c,request", *(f"{i % 2},{i},x,{name}" for i, name in enumerate(names))])
    else:
        column = pa.array(requests) if kind == "parquet_int" else pa.array(names)
        table = pa.table({"label": [i % 2 for i in numbers], "d": numbers, "c": names, "request": column})
        pq.write_table(table, folder / "a.parquet", row_group_size=50)
    columns = {"dense": ("d",), "categorical": ("c",), "dense_transform": "none", "num_embeddings": 50}
    return DataConfig(kind="columns", train_path=str(folder), **columns, **settings)


def rows_of(config, world_size, batch_size, **more):
    """The rows of each batch, in the order of the stream: first by step, then by rank."""
    ranks = batches(config, world_size, batch_size, **more)
    return [[int(x) for x in batch.dense_features[:, 0]] for step in zip(*ranks, strict=True) for batch in step]


@pytest.mark.parametrize("kind", ["parquet", "parquet_int", "csv", "criteo"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 120), (2, 12), (3, 8), (4, 5)])
def test_a_request_is_in_one_batch_but_for_the_one_at_its_end(kind, world_size, batch_size, tmp_path):
    found = rows_of(config_of(tmp_path, kind), world_size, batch_size)
    assert all(len(batch) == batch_size for batch in found)
    stream = [row for batch in found for row in batch]
    assert sorted(stream) == list(range(ROWS))
    # A run of equal requests for each: none is in two places; the end of a batch may lie within a run.
    runs = [(request, list(rows)) for request, rows in groupby(stream, lambda row: REQUESTS[row])]
    assert [request for request, _ in runs] != sorted({*REQUESTS})
    assert sorted(request for request, _ in runs) == sorted({*REQUESTS})
    assert all(rows == sorted(rows) for _, rows in runs)
    cut = sum(REQUESTS[a[-1]] == REQUESTS[b[0]] for a, b in pairwise(found))
    assert sum(len({*REQUESTS[batch]}) for batch in found) == len({*REQUESTS}) + cut


def test_rows_of_a_request_need_not_be_neighbours_in_the_files(tmp_path):
    mixed = _draw.permutation(REQUESTS)
    stream = [row for batch in rows_of(config_of(tmp_path, requests=mixed), 2, 10) for row in batch]
    assert sorted(stream) == list(range(ROWS))
    assert len([*groupby(mixed[stream])]) == len({*mixed})


def test_a_request_is_cut_at_the_end_of_a_block(tmp_path):
    stream = [row for batch in rows_of(config_of(tmp_path, shuffle_rows=30), 1, 1) for row in batch]
    assert [sorted(stream[i : i + 30]) for i in range(0, ROWS, 30)] == [[*range(i, i + 30)] for i in range(0, ROWS, 30)]
    cut = sum(REQUESTS[i - 1] == REQUESTS[i] for i in (30, 60, 90))
    assert len([*groupby(REQUESTS[stream])]) <= len({*REQUESTS}) + cut


def test_requests_are_shuffled_anew_in_each_epoch_and_not_at_0(tmp_path):
    config = config_of(tmp_path)
    assert rows_of(config, 2, 10) != rows_of(config, 2, 10, epoch=1)
    assert rows_of(config_of(tmp_path, shuffle_rows=0), 1, ROWS) == [[*range(ROWS)]]
    assert rows_of(config_of(tmp_path, "csv"), 2, 10) != rows_of(config_of(tmp_path, "csv", group_by=None), 2, 10)


@pytest.mark.parametrize("shuffle_rows", [30, 1000])
def test_the_rest_of_a_pass_is_that_of_the_whole_one(shuffle_rows, tmp_path):
    config = config_of(tmp_path, shuffle_rows=shuffle_rows)
    whole = batches(config, 2, 10)
    for first in range(7):
        for wanted, found in zip(whole, batches(config, 2, 10, start_row=20 * first), strict=True):
            assert len(found) == 6 - first
            assert all(same(a, b) for a, b in zip(wanted[first:], found, strict=True))
    # Other ranks and batches cut the same stream.
    stream = [row for batch in rows_of(config, 2, 10) for row in batch]
    assert [row for batch in rows_of(config, 3, 5, start_row=40) for row in batch] == stream[40:115]


def test_whole_requests_are_set_apart_for_evaluation(tmp_path):
    config = config_of(tmp_path, eval_path=None, eval_fraction=0.5)
    train, apart = (
        {int(x) for x in real_rows(open_source(config).batches(split, rank=0, world_size=1, batch_size=1))}
        for split in ("train", "eval")
    )
    assert train | apart == {*range(ROWS)}
    assert not {*REQUESTS[[*train]]} & {*REQUESTS[[*apart]]}
    assert apart


def test_rows_without_a_value_are_requests_of_their_own(tmp_path):
    lines = [f"{i % 2},{i},x,{'' if i % 2 else 'q'}" for i in range(40)]
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, ["label,d,c,request", *lines])
    config = DataConfig(
        kind="columns", train_path=str(tmp_path), categorical=("c",), dense=("d",), dense_transform="none",
        group_by="request", eval_fraction=0.5,
    )  # fmt: skip
    data = open_source(config)
    stream = [
        [int(x) for x in real_rows(data.batches(split, rank=0, world_size=1, batch_size=1))]
        for split in ("train", "eval")
    ]
    lone = [[row for row in part if row % 2] for part in stream]
    assert sorted(len(part) - len(alone) for part, alone in zip(stream, lone, strict=True)) == [0, 40]
    assert all(5 < len(part) < 35 for part in lone)  # on both sides
    assert {len({*part}) < len(part) for part in lone} == {True}  # of two files, shuffled apart
    assert lone[0] != sorted(lone[0])


def test_columns_that_tell_no_request(tmp_path):
    table = {"label": [0, 1], "c": ["a", "b"], "f": [1.0, 1.5], "l": [[1], [2]]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    settings = {"kind": "columns", "train_path": str(tmp_path), "eval_path": str(tmp_path), "categorical": ("c",)}
    for name, text in (
        ("request", r"a\.parquet: group_by 'request' matches no column"),
        ("l", r"group_by 'l' has type list.*expected text or a number"),
        ("f", r"a\.parquet, row 2: Feature 'f': category 1\.5 is not a whole number"),
    ):
        with pytest.raises(InputError, match=text):
            open_source(DataConfig(**settings, group_by=name)).validate()
    write(tmp_path / "a.tsv", [criteo_line()])
    with pytest.raises(InputError, match="group_by 'request' matches no column"):
        open_source(DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"), group_by="request"))
    pq.write_table(pa.table({**table, "request": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.tsv").unlink()
    write(tmp_path / "b.csv", ["label,c", "0,x"])
    with pytest.raises(InputError, match=r"b\.csv: column 'request' is missing"):
        open_source(DataConfig(**settings, group_by="request")).validate()
