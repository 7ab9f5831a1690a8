"""Functions that a config can name as ``data.source``: well-behaved ones and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset
from torchrec.sparse.jagged_tensor import JaggedTensor

ASKED: list[tuple[str, int]] = []
"""Shard and batch of all batches that were made in this process."""


def columns(numbers: range) -> dict[str, list[Any]]:
    """Rows that can be told apart by ``d``."""
    return {
        "label": [i % 2 for i in numbers],
        "d": [float(i) for i in numbers],
        "c": [None if i % 9 == 0 else f"v{i}" for i in numbers],
        "n": [i % 5 for i in numbers],
        "bag": [[i, i + 1][: i % 3] for i in numbers],
        "pair": [[i, 2 * i] for i in numbers],
        "part": ["test" if i % 5 == 0 else "train" for i in numbers],
        "user": [None if i % 7 == 0 else f"u{i // 3 % 11}" for i in numbers],
    }


def as_arrays(rows: dict[str, list[Any]]) -> dict[str, Any]:
    lists = {name: rows[name] for name in ("c", "bag", "part", "user")}
    return lists | {name: np.array(rows[name]) for name in ("label", "d", "n", "pair")}


def as_tensors(rows: dict[str, list[Any]]) -> dict[str, Any]:
    values = torch.tensor([x for bag in rows["bag"] for x in bag], dtype=torch.int64)
    bags = JaggedTensor(values, lengths=torch.tensor([len(bag) for bag in rows["bag"]]))
    tensors = {name: torch.tensor(rows[name]) for name in ("label", "n", "pair")}
    tensors |= {"d": torch.tensor(rows["d"], dtype=torch.bfloat16, requires_grad=True)}  # exact up to 256
    return {name: rows[name] for name in ("c", "part", "user")} | tensors | {"bag": bags}


FORMS = {
    "table": pa.table,
    "record batch": lambda rows: pa.table(rows).to_batches()[0],
    "lists": dict,
    "arrays": as_arrays,
    "tensors": as_tensors,
    "pandas": pd.DataFrame,
}


def cuts(shard: int, num_shards: int, num_rows: int) -> list[range]:
    """Batches of uneven sizes; of four shards, the third has one batch and the last none."""
    bounds = [num_rows * i // num_shards for i in range(num_shards + 1)]
    if num_shards == 4:
        bounds = [0, num_rows // 2, num_rows - 3, num_rows, num_rows]
    start, stop, found = bounds[shard], bounds[shard + 1], []
    while start < stop:
        found.append(range(start, min(stop, start + 3 + start % 4)))
        start = found[-1].stop
    return found


def rows(options: dict[str, Any]) -> Iterator[Any]:
    shard = 0
    for number, numbers in enumerate(cuts(0, 1, options.get("rows", 90))):
        ASKED.append((shard, number))
        if (shard, number) == tuple(options.get("fails", ())):
            raise OSError("the store is gone")
        batch = columns(numbers)
        if (shard, number) == tuple(options.get("bad", ())):
            batch["label"][1] = 7
        if (shard, number) == tuple(options.get("wide", ())):
            batch["n"][0] = options["id"]
        yield FORMS[options.get("form", "table")](batch)


def rows_by_split(split: str, options: dict[str, Any], epoch: int, seed: int) -> Iterator[Any]:
    """Shuffled by itself, another way in each epoch."""
    numbers = range(60) if split == "train" else range(60, 90)
    order = np.random.default_rng([seed, epoch]).permutation(len(numbers))
    for start in range(0, len(order), 7):
        yield pa.table(columns(numbers)).take(order[start : start + 7])


def permuted(seed: int, epoch: int) -> Iterator[Any]:
    """One stream of rows, another way in each epoch."""
    for start in range(0, 90, 7):
        yield pa.table(columns(range(90))).take(np.random.default_rng([seed, epoch]).permutation(90)[start : start + 7])


def in_order(options: dict[str, Any]) -> Iterator[Any]:
    """Columns in an order of the options."""
    yield {name: [0, 1] for name in ("label", *options["order"])}


def late() -> Iterator[Any]:
    """Rows after a batch without any, of columns of numbers as keys of a dict."""
    yield {"label": np.zeros(0), 1: np.zeros(0), 2: []}
    yield {"label": [0, 1] * 9, 1: [0.0, 1.0] * 9, 2: [["a"], ["b", "a"]] * 9}


def in_shards(split: str, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
    """Uneven shards; other rows to evaluate."""
    first = 0 if split == "train" else 200
    for numbers in cuts(shard, num_shards, 90):
        yield columns(range(first + numbers.start, first + numbers.stop))


def views(options: dict[str, Any]) -> Iterator[Any]:
    """Texts in columns such as polars gives, or in plain ones."""
    text = pa.string_view() if options["views"] else pa.string()
    texts = [f"a text longer than twelve bytes {i}" if i % 3 else None for i in range(9)]
    index = pa.array([i % 2 for i in range(9)], pa.int32())
    yield pa.table(
        {
            "label": [i % 2 for i in range(9)],
            "d": [float(i) for i in range(9)],
            "c": pa.array(texts, text),
            "n": pa.DictionaryArray.from_arrays(index, pa.array(["a", "b"], text)),
            "bag": pa.array([[each, "b"] for each in texts], pa.large_list(text)),
            "pair": pa.array([[each, "c"] for each in texts], pa.list_(text, 2)),
        }
    )


def of_rank() -> Iterator[Any]:
    """Other columns on every rank, where the first has bags."""
    rank = torch.distributed.get_rank()
    yield {"label": [0, 1], f"d_{rank}": [0.0, 1.0], "c_1": [3, 4] if rank else [[3], [4, 4]]}


class Resumable(IterableDataset[Any]):
    """Remembers where it was, by itself or (``of_iterator``) by its iterator."""

    def __init__(self, split: str, shard: int, num_shards: int, options: dict[str, Any]) -> None:
        first = 0 if split == "train" else options.get("rows", 90)
        number = options.get("rows", 90) if split == "train" else 25
        self.cuts, self.shard, self.options, self.at = (
            [range(first + one.start, first + one.stop) for one in cuts(shard, num_shards, number)],
            shard,
            options,
            0,
        )

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self) if self.options.get("of_iterator") else self._batches()

    def _batches(self) -> Iterator[Any]:
        while self.at < len(self.cuts):
            yield self.take()

    def take(self) -> Any:
        ASKED.append((self.shard, self.at))
        self.at += 1
        return pa.table(columns(self.cuts[self.at - 1]))

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and not self.options.get("of_iterator"):
            return getattr(_Iterator(self), name)
        raise AttributeError(name)


class _Iterator:
    def __init__(self, dataset: Resumable) -> None:
        self.dataset = dataset

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self.dataset.at >= len(self.dataset.cuts):
            raise StopIteration
        return self.dataset.take()

    def state_dict(self) -> dict[str, Any]:
        at = self.dataset.at
        # As loaders do, at the end it describes the next epoch's start.
        return {"at": torch.tensor(at % max(len(self.dataset.cuts), 1)), "more": (1, None, "x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["more"] == (1, None, "x")
        self.dataset.at = int(state["at"])


def resumable(split: str, shard: int, num_shards: int, options: dict[str, Any]) -> Resumable:
    return Resumable(split, shard, num_shards, options)


def one_buffer() -> Iterator[dict[str, Any]]:
    """Fills the same memory again and again."""
    label, d, bag = torch.zeros(4), np.zeros(4), torch.zeros(4, 2, dtype=torch.int64)
    for i in range(6):
        d[:], bag[:] = np.arange(4 * i, 4 * i + 4), i
        yield {"label": label, "d": d, "c": bag}


def malformed(options: dict[str, Any]) -> Any:
    good = {"label": [0, 1], "d": [1.0, 2.0], "c": ["a", "b"]}
    yield good
    changes = {
        "a list": [good],
        "no column": {"label": [0, 1], "d": [1.0, 2.0]},
        "lengths": good | {"c": ["a"]},
        "text": good | {"c": "ab"},
        "cube": good | {"d": np.zeros((2, 2, 2))},
        "matrix": good | {"d": np.zeros((2, 2))},
        "mixed": good | {"c": ["a", 1]},
        "lists of lists": good | {"c": [[["a"]], []]},
        "a list now": good | {"c": [["a"], []]},
        "weights": good | {"c": JaggedTensor(torch.arange(2), weights=torch.ones(2), lengths=torch.ones(2).long())},
        "doubled": pa.table([[0, 1], [1.0, 2.0], ["a", "b"], ["a", "b"]], names=["label", "d", "c", "c"]),
        "keys": {"label": [0, 1], "d": [1.0, 2.0], 1: ["a", "b"], "1": ["a", "b"]},
        "bags": good | {"c": JaggedTensor(torch.arange(3), lengths=torch.ones(2).long())},
    }
    yield changes[options["wrong"]]


def none(split: str) -> list[Any]:
    return []


def one_table() -> pa.Table:
    return pa.table({"label": [0]})


def needs_more(split: str, path: str) -> None:
    raise NotImplementedError


class Unsaveable(Resumable):
    def state_dict(self) -> dict[str, Any]:
        if self.options["state"] == "fails":
            raise OSError("the loader is gone")
        return {"at": range(3) if self.options["state"] == "range" else lambda: 3}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def unsaveable(split: str, shard: int, num_shards: int, options: dict[str, Any]) -> Unsaveable:
    return Unsaveable(split, shard, num_shards, options)


def leaking(shard: int, num_shards: int) -> Iterator[Any]:
    """Parts without splits."""
    raise NotImplementedError
