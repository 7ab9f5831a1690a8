"""Functions that a config can name as ``data.source``: well-behaved ones and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch


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
    return rows | {name: np.array(rows[name]) for name in ("label", "d", "n")}


FORMS = {
    "lists": dict,
    "table": pa.table,
    "record batch": lambda rows: pa.table(rows).to_batches()[0],
    "arrays": as_arrays,
    "pandas": pd.DataFrame,
}


def cuts(shard: int, num_shards: int, first: int = 0, *, num_rows: int = 90, uneven: bool = False) -> list[range]:
    """Batches of uneven sizes; of four shards, the third may have one batch and the last none."""
    bounds = [num_rows * i // num_shards for i in range(num_shards + 1)]
    if uneven and num_shards == 4:
        bounds = [0, num_rows // 2, num_rows - 3, num_rows, num_rows]
    start, stop, found = bounds[shard], bounds[shard + 1], []
    while start < stop:
        found.append(range(first + start, first + min(stop, start + 3 + start % 4)))
        start = found[-1].stop - first
    return found


def rows(split: str, shard: int, num_shards: int, options: dict[str, Any]) -> Iterator[Any]:
    first = 0 if split == "train" else 200
    for number, numbers in enumerate(cuts(shard, num_shards, first, uneven="uneven" in options)):
        batch = columns(numbers)
        if number == options.get("bad"):
            batch["label"][1] = 7
        if number == options.get("wide"):
            batch["n"][0] = options["id"]
        yield FORMS[options.get("form", "table")](batch)


def late(split: str, shard: int, num_shards: int) -> Iterator[Any]:
    """Rows after a batch without any."""
    yield {"label": np.zeros(0), "1": np.zeros(0), "2": []}
    yield {"label": [0, 1] * 9, "1": [0.0, 1.0] * 9, "2": [["a"], ["b", "a"]] * 9}


class Resumable:
    """Remembers where it was."""

    def __init__(self, split: str, shard: int, num_shards: int, options: dict[str, Any]) -> None:
        is_train = split == "train"
        number = options.get("rows", 90) if is_train else 25
        self.cuts = cuts(shard, num_shards, 0 if is_train else options.get("rows", 90), num_rows=number)
        self.options, self.at = options, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.cuts):
            self.at += 1
            yield pa.table(columns(self.cuts[self.at - 1]))

    def state_dict(self) -> dict[str, Any]:
        return {"at": range(3) if "state" in self.options else torch.tensor(self.at), "more": (1, None, "x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["more"] == (1, None, "x")
        self.at = int(state["at"])


def resumable(split: str, shard: int, num_shards: int, options: dict[str, Any]) -> Resumable:
    return Resumable(split, shard, num_shards, options)


def malformed(split: str, shard: int, num_shards: int, options: dict[str, Any]) -> Any:
    good = {"label": [0, 1], "d": [1.0, 2.0], "c": ["a", "b"]}
    yield good
    changes = {
        "a list": [good],
        "no column": {"label": [0, 1], "d": [1.0, 2.0]},
        "lengths": good | {"c": ["a"]},
        "mixed": good | {"c": ["a", 1]},
        "a list now": good | {"c": [["a"], []]},
        "doubled": pa.table([[0, 1], [1.0, 2.0], ["a", "b"], ["a", "b"]], names=["label", "d", "c", "c"]),
    }
    yield changes[options["wrong"]]


def of_rank(split: str, shard: int, num_shards: int) -> Iterator[Any]:
    """Other columns on every rank, where the first has bags."""
    rank = torch.distributed.get_rank()
    yield {"label": [0, 1], f"d_{rank}": [0.0, 1.0], "c_1": [3, 4] if rank else [[3], [4, 4]]}


def none(split: str, shard: int, num_shards: int) -> list[Any]:
    return []


def without_split(shard: int, num_shards: int) -> list[Any]:
    return []


def needs_more(split: str, path: str) -> None:
    raise NotImplementedError
