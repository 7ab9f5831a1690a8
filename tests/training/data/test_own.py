"""Rows of the user's own: every form of a batch, unequal ranks, resumed with a state and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from tests.ranks import run_ranks

from .helpers import real_rows, same
from .own_rows import FORMS

HERE = "tests.training.data.own_rows"
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


@pytest.mark.parametrize("function", ["rows", "resumable"])
def test_reading_goes_on_where_it_was(function: str) -> None:
    data = ClickData(config_of(function))
    options: dict[str, Any] = {"rank": 1, "world_size": 2, "batch_size": 4, "epoch": 1}
    whole = list(data.batches("train", **options))
    for done in (0, 1, 4, len(whole)):
        state = data.own.state(1, 4 * done)
        assert (state is not None) == (function == "resumable")
        again = ClickData(data.config)
        again.own.start_state = state
        rest = list(again.batches("train", rows=8 * done, **options))
        assert len(rest) == len(whole) - done
        assert all(same(a, b) for a, b in zip(rest, whole[done:], strict=True))


def test_columns_are_found_in_the_first_batch_with_rows() -> None:
    data = ClickData(config_of("late", dense=("1",), categorical=("2",)))
    assert (data.columns.dense, data.columns.features[0].is_bag, data.num_rows("train")) == (("1",), True, None)
    with pytest.raises(InputError, match="has no batch with rows"):
        ClickData(config_of("none"))


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("without_split", {}, "does not take 'split'"),
        ("needs_more", {}, "takes 'path', which is none of"),
        ("missing", {}, "has no function 'missing'"),
        ("rows", {"options": {"bad": 2}}, r"batch 3, row 2: column 'label': expected 0 or 1, found 7"),
        ("rows", {"id_mode": "index", "options": {"wide": 1, "id": 99}}, "column 'n': .*found 99"),
        ("resumable", {"options": {"state": "range"}}, "cannot be saved"),
        ("malformed", {"options": {"wrong": "a list"}}, "batch 2: list cannot be read as a table"),
        ("malformed", {"options": {"wrong": "no column"}}, "categorical 'c' matches no column"),
        ("malformed", {"options": {"wrong": "lengths"}}, "batch 2: dict cannot be read as a table"),
        ("malformed", {"options": {"wrong": "mixed"}}, "batch 2: dict cannot be read as a table"),
        ("malformed", {"options": {"wrong": "a list now"}}, "of other kinds than those of the first"),
        ("malformed", {"options": {"wrong": "doubled"}}, "column 'c' is named 2 times"),
    ],
    ids=str,
)
def test_wrong_sources_are_refused(function: str, settings: dict[str, Any], message: str) -> None:
    categorical = ("n",) if "id_mode" in settings else ("c",)
    config = config_of(function, **{"categorical": categorical, **settings})
    with pytest.raises(InputError, match=message):
        list(ClickData(config).batches("train", rank=0, world_size=1, batch_size=1))
