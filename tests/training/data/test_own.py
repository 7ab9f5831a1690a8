"""Rows of the user's own: every form of a batch, ranks with shards and without, resumed with a state and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.training.data import DataConfig, open_source
from tests.ranks import run_ranks

from .helpers import real_rows, same
from .own_rows import FORMS

HERE = "tests.training.data.own_rows"
NAMES = {"dense": ("d",), "categorical": ("c", "n", "bag"), "num_embeddings": 30, "dense_transform": "none"}


def config_of(function: str, **settings: Any) -> DataConfig:
    defaults = {"source": f"{HERE}:{function}", "shuffle_rows": 20, **NAMES}
    return DataConfig.model_validate({**defaults, **settings})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_the_same_rows(form: str) -> None:
    options = {"rank": 0, "world_size": 1, "batch_size": 8}
    wanted, found = (
        list(open_source(config_of("rows", options={"form": each})).batches("train", **options))
        for each in ("lists", form)
    )
    assert len(found) == 81 // 8
    assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_stream_without_shards_is_dealt_to_the_ranks_and_divided() -> None:
    data = open_source(config_of("rows"))
    ranks = [list(data.batches("train", rank=rank, world_size=3, batch_size=4)) for rank in range(3)]
    rows = [row for batches in ranks for row in real_rows(batches)]
    assert (len(rows), len(set(rows)), {len(batches) for batches in ranks}) == (72, 72, {6})
    test = [real_rows(data.batches("eval", rank=rank, world_size=2, batch_size=4)) for rank in range(2)]
    assert sorted(test[0] + test[1]) == list(range(9, 90, 10))
    assert not set(rows) & set(test[0] + test[1])
    assert data.num_rows("train") is None


def shards_on_rank(rank: int, size: int) -> list[list[float]]:
    data = open_source(config_of("in_shards"))
    options = {"rank": rank, "world_size": size, "batch_size": 4, "group": dist.group.WORLD}
    return [real_rows(data.batches(split, **options)) for split in ("train", "eval")]  # type: ignore[arg-type]


@pytest.mark.ranks
def test_ranks_with_shards_of_unlike_sizes_end_an_epoch_together() -> None:
    ranks = run_ranks(shards_on_rank, 4, 4)
    # The shards have 45, 42, 3 and 0 rows.
    assert [len(train) for train, _ in ranks] == [0, 0, 0, 0]
    ranks = run_ranks(shards_on_rank, 2, 2)
    assert [len(train) for train, _ in ranks] == [44, 44]
    assert len({row for train, _ in ranks for row in train}) == 88
    assert sorted(row for _, test in ranks for row in test) == list(range(200, 290))


@pytest.mark.parametrize("function", ["rows", "in_shards", "resumable"])
def test_reading_goes_on_where_it_was(function: str) -> None:
    data = open_source(config_of(function, options={"rows": 90}))
    options: dict[str, Any] = {"rank": 1, "world_size": 2, "batch_size": 4, "epoch": 1}
    whole = list(data.batches("train", **options))
    for done in (0, 1, 4, len(whole)):
        state = data.source_state(1, 8 * done, world_size=2)
        assert (state is not None) == (function == "resumable")
        again = open_source(data.config)
        again.load_source_state(state)
        rest = list(again.batches("train", rows=8 * done, **options))
        assert len(rest) == len(whole) - done
        assert all(same(a, b) for a, b in zip(rest, whole[done:], strict=True))


def test_columns_are_found_in_the_first_batch_with_rows() -> None:
    data = open_source(config_of("late", dense=("1",), categorical=("2",), eval_fraction=0.5))
    assert (data.dense_names, data.multi_hot) == (("1",), {"2"})
    with pytest.raises(InputError, match="has no batch"):
        open_source(config_of("none"))


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("leaking", {}, "names the argument shard, but data.eval_fraction=0.1 counts rows in their order"),
        ("permuted", {}, "names the argument epoch, but data.eval_fraction"),
        ("rows_by_split", {"split_column": "part"}, "names the argument split, so data.split_column"),
        ("needs_more", {}, "takes 'path', which is none of"),
        ("one_table", {}, "expected an iterable of batches"),
        ("missing", {}, "has no function 'missing'"),
        ("rows", {"options": {"bad": [0, 2]}}, r"batch 3, row 2: column 'label': expected 0 or 1, found 7"),
        ("rows", {"id_mode": "index", "options": {"wide": [0, 1], "id": 99}}, "column 'n': .*found 99"),
        ("unsaveable", {"options": {"state": "range"}}, "holds what cannot be saved"),
    ],
    ids=str,
)
def test_wrong_sources_are_refused(function: str, settings: dict[str, Any], message: str) -> None:
    categorical = ("n",) if "id_mode" in settings else NAMES["categorical"]
    config = config_of(function, **{"categorical": categorical, **settings})
    with pytest.raises(InputError, match=message):
        list(open_source(config).batches("train", rank=0, world_size=1, batch_size=4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("a list", "expected a pyarrow.Table.*found list"),
        ("no column", "column 'c' is missing"),
        ("lengths", "column 'c' has 1 rows, but column 'label' has 2"),
        ("text", "column 'c' cannot be read"),
        ("cube", "column 'd' cannot be read .*3 dimensions"),
        ("matrix", "batch 2"),
        ("mixed", "column 'c' cannot be read"),
        ("lists of lists", "batch 2"),
        ("a list now", "column 'c' is list"),
        ("weights", "its ids have weights"),
        ("doubled", "column 'c' is there 2 times"),
        ("keys", "column '1' is there 2 times"),
        ("bags", "lengths sum to 2, but there are 3 values"),
    ],
)
def test_malformed_batches_are_refused(wrong: str, message: str) -> None:
    config = config_of("malformed", categorical=("c",), options={"wrong": wrong}, eval_fraction=0.01)
    with pytest.raises(InputError, match=message):
        list(open_source(config).batches("train", rank=0, world_size=1, batch_size=1))


def test_an_error_of_the_users_code_names_the_batch() -> None:
    config = config_of("rows", options={"fails": [0, 4]})
    with pytest.raises(RuntimeError, match=r"batch 5: OSError: the store is gone"):
        list(open_source(config).batches("train", rank=0, world_size=1, batch_size=4))
