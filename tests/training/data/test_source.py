"""Rows of the user's own: every form of a batch, unequal ranks, resumed with a state and without; a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from dmt.errors import InputError
from dmt.training.config import TrainingConfig
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.serving.score import score
from tests.ranks import run_ranks
from tests.training.data.helpers import real_rows, same
from tests.training.small import small
from tests.training.test_resume import attempt, losses


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
    "pandas categories": lambda rows: pd.DataFrame(rows | {"n": pd.Categorical(np.array(rows["n"], float))}),
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


def rows(split: str, shard: int, num_shards: int, options: dict[str, Any], **_: Any) -> Iterator[Any]:
    first = 0 if split == "train" else 200
    for number, numbers in enumerate(cuts(shard, num_shards, first, uneven="uneven" in options)):
        batch = columns(numbers)
        if number == options.get("bad") and shard == options.get("bad_shard", shard):
            batch["label"][1] = 7
        if number == options.get("wide"):
            batch["n"][0] = options["id"]
        yield FORMS[options.get("form", "table")](batch)


def late(split: str, shard: int, num_shards: int, seed: int, epoch: int, **_: Any) -> Iterator[Any]:
    """Rows after a batch without any."""
    yield {"label": np.zeros(0), "1": np.zeros(0), "2": []}
    yield {"label": [0, 1] * 9, "1": [float(seed), float(epoch)] * 9, "2": [["a"], ["b", "a"]] * 9}


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


def resumable(split: str, shard: int, num_shards: int, options: dict[str, Any], **_: Any) -> Resumable:
    return Resumable(split, shard, num_shards, options)


def malformed(split: str, shard: int, num_shards: int, options: dict[str, Any], **_: Any) -> Any:
    good = {"label": [0, 1], "d": [1.0, 2.0], "c": ["a", "b"]}
    yield good
    changes = {
        "a list": [good],
        "mixed": good | {"c": ["a", 1]},
        "a list now": good | {"c": [["a"], []]},
        "doubled": pa.table([[0, 1], [1.0, 2.0], ["a", "b"], ["a", "b"]], names=["label", "d", "c", "c"]),
    }
    yield changes[options["wrong"]]


def of_rank(split: str, shard: int, num_shards: int, **_: Any) -> Iterator[Any]:
    """Other columns on every rank, where the first has bags."""
    rank = torch.distributed.get_rank()
    yield {"label": [0, 1], f"d_{rank}": [0.0, 1.0], "c_1": [3, 4] if rank else [[3], [4, 4]]}


def none(split: str, shard: int, num_shards: int, **_: Any) -> list[Any]:
    return []


def without_seed(split: str, shard: int, num_shards: int, epoch: int, options: dict[str, Any]) -> list[Any]:
    return []


def needs_more(split: str, path: str, **_: Any) -> None:
    raise NotImplementedError


HERE = "tests.training.data.test_source"
RESUMABLE = f"{HERE}:resumable"
NAMES = {"dense": ("d",), "categorical": ("c", "n", "bag"), "num_embeddings": 30, "dense_transform": "none"}


def config_of(function: str, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"source": f"{HERE}:{function}", **NAMES, **settings})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_the_same_rows(form: str) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": 8}
    wanted, found = (
        list(ClickData(config_of("rows", options={"form": each})).batches("train", **options))
        for each in ("lists", form)
    )
    assert [row for batch in found for row in real_rows([batch])] == list(range(88))
    assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


def shards_on_rank(rank: int, size: int) -> list[list[float]]:
    data = ClickData(config_of("rows", options={"uneven": True}))
    options = {"rank": rank, "world_size": size, "batch_size": 4, "group": dist.group.WORLD}
    return [real_rows(data.batches(split, **options)) for split in ("train", "eval")]  # type: ignore[arg-type]


@pytest.mark.ranks
def test_ranks_with_shards_of_unlike_sizes_end_an_epoch_together() -> None:
    ranks = run_ranks(shards_on_rank, 4, 4)
    # The shards have 45, 42, 3 and 0 rows.
    assert [len(train) for train, _ in ranks] == [0, 0, 0, 0]
    assert sorted(row for _, test in ranks for row in test) == list(range(200, 290))
    ranks = run_ranks(shards_on_rank, 2, 2)
    assert [len(train) for train, _ in ranks] == [44, 44]
    assert len({row for train, _ in ranks for row in train}) == 88


def refusal_on_rank(rank: int, size: int) -> str:
    data = ClickData(config_of("rows", options={"bad": 2, "bad_shard": 1}))
    with pytest.raises(InputError) as caught:
        list(data.batches("train", rank=rank, world_size=size, batch_size=4, group=dist.group.WORLD))
    return str(caught.value)


@pytest.mark.ranks
def test_an_invalid_row_of_one_rank_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(refusal_on_rank, 2, 2)
    assert first == second
    assert "batch 3, row 2: column 'label': expected 0 or 1, found 7" in first


@pytest.mark.parametrize("function", ["rows", "resumable"])
def test_reading_goes_on_where_it_was(function: str) -> None:
    data = ClickData(config_of(function))
    options: dict[str, Any] = {"rank": 1, "world_size": 2, "batch_size": 4, "epoch": 1}
    whole = list(data.batches("train", **options))
    for done in (0, 1, 4, len(whole)):
        state = data.source.state(1, 4 * done)
        assert (state is not None) == (function == "resumable")
        assert state is None or (state[0] > 0) == (done > 0), "the last state before"
        assert data.source.state(2, 0) is None, "another epoch"
        again = ClickData(data.config)
        again.source.start_state = state
        rest = list(again.batches("train", rows=8 * done, **options))
        assert again.source.start_state is None, "the next epoch begins without it"
        assert len(rest) == len(whole) - done
        assert all(same(a, b) for a, b in zip(rest, whole[done:], strict=True))
        # A run that was finished before measures from the first row on.
        again.source.start_state = state
        assert len(list(again.batches("train", **options))) == len(whole)


def test_columns_are_found_in_the_first_batch_with_rows() -> None:
    data = ClickData(config_of("late", dense=("1",), categorical=("2",), shuffle_seed=7))
    assert (data.columns.dense, data.columns.features[0].is_bag, data.num_rows("train")) == (("1",), True, None)
    batches = data.batches("train", rank=0, world_size=1, batch_size=6, epoch=2)
    assert [batch.dense_features.flatten().tolist() for batch in batches] == [[7.0, 2.0] * 3] * 3
    found = ClickData(config_of("rows", categorical=("[bcln]*",))).columns.feature_names
    assert found == ("bag", "c", "n"), "by name: another process may yield them in another order"
    with pytest.raises(InputError, match="has no batch with rows"):
        ClickData(config_of("none"))


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("without_seed", {}, r"without_seed' is called with the keywords split, .*unexpected keyword argument 'seed'"),
        ("needs_more", {}, r"needs_more' is called with .*missing a required (keyword-only )?argument: 'path'"),
        ("missing", {}, "has no function 'missing'"),
        ("rows", {"options": {"bad": 2}}, r"batch 3, row 2: column 'label': expected 0 or 1, found 7"),
        ("rows", {"id_mode": "index", "options": {"wide": 1, "id": 99}}, "column 'n': .*found 99"),
        ("resumable", {"options": {"state": "range"}}, "cannot be saved"),
        ("malformed", {"options": {"wrong": "a list"}}, "batch 2: list cannot be read as a table"),
        ("malformed", {"options": {"wrong": "mixed"}}, "batch 2: dict cannot be read as a table"),
        ("malformed", {"options": {"wrong": "a list now"}}, "columns are not those of the first batch"),
        ("malformed", {"options": {"wrong": "doubled"}}, "2 columns have the name 'c'"),
    ],
    ids=str,
)
def test_wrong_sources_are_refused(function: str, settings: dict[str, Any], message: str) -> None:
    categorical = ("n",) if "id_mode" in settings else ("c",)
    config = config_of(function, **{"categorical": categorical, **settings})
    with pytest.raises(InputError, match=message):
        list(ClickData(config).batches("train", rank=0, world_size=1, batch_size=1))


def run_of(folder: Path, **train: Any) -> TrainingConfig:
    names = {"dense": ["d"], "categorical": ["c", "n", "bag", "pair"], "num_embeddings": 23}
    data = {"source": RESUMABLE, "options": {"rows": 130}, **names}
    train = {"batch_size": 8, "log_every": 1, "output_dir": str(folder), **train}
    config = small(train={"device": "cpu", **train}, topology={"num_towers": 2, "ranks_per_tower": 1})
    return TrainingConfig.model_validate(config.model_dump() | {"data": data})


@pytest.mark.ranks
def test_a_run_is_resumed_bit_for_bit_and_its_model_scores_rows(tmp_path: Path) -> None:
    whole, parts = run_of(tmp_path / "whole"), tmp_path / "parts"
    result = attempt(whole)
    assert result is not None
    assert result["steps"] == 65 // 8
    # The second attempt begins in the middle of a batch of the source.
    assert (attempt(run_of(parts, max_steps=5)) or {})["steps"] == 5
    again = attempt(run_of(parts))
    assert again is not None
    assert again["eval_loss"] == result["eval_loss"]
    assert losses(run_of(parts))["train/loss"] == losses(whole)["train/loss"]

    found = score(tmp_path / "whole", tmp_path / "scores.parquet", functions=[RESUMABLE])
    assert found.num_rows == 25
    assert found.metrics is not None
    assert found.metrics.loss == pytest.approx(result["eval_loss"], rel=1e-5)  # sums in another order
    # A file with the columns of the source does as well.
    pq.write_table(pa.table(columns(range(40))), tmp_path / "rows.parquet")
    assert score(tmp_path / "whole", tmp_path / "s.parquet", data_path=str(tmp_path / "rows.parquet")).num_rows == 40
