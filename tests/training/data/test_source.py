"""Rows of the user's own (``data.source``): the batches of a file with the same rows, shared out, checked, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.collectives import RankError
from dmt.errors import InputError
from dmt.training.data import sharing, source_pass
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import Split, open_source
from tests.ranks import run_ranks

from . import own_rows
from .helpers import real_rows
from .test_sharing import group
from .test_start_row import same

HERE = "tests.training.data.own_rows"


def config_of(function: str = "rows", **settings: Any) -> DataConfig:
    names = {"dense": ("d",), "categorical": ("c", "n", "bag", "pair"), "dense_transform": "none"}
    return DataConfig(source=f"{HERE}:{function}", **{**names, "num_embeddings": 97, "shuffle_rows": 16, **settings})


def file_config(path: Path, **settings: Any) -> DataConfig:
    pq.write_table(pa.table(own_rows.columns(range(90))), path / "a.parquet", row_group_size=90)
    return DataConfig(**{**config_of(**settings).model_dump(), **FILES, "train_path": str(path / "a.parquet")})


FILES = {"kind": "columns", "source": None, "source_shards": 1, "options": {}}


@contextmanager
def small_turns(rows: int = 8) -> Iterator[None]:
    with (
        patch.multiple(source_pass, _TURN_ROWS=rows, _PART_ROWS=3),
        patch.object(sharing, "_EXCHANGE_ROWS", 8),
    ):
        yield


def all_batches(config: DataConfig, split: Split = "train", **more: Any) -> list[Any]:
    with small_turns():
        return list(open_source(config).batches(split, rank=0, world_size=1, batch_size=4, **more))


@pytest.mark.parametrize("form", own_rows.FORMS)
@pytest.mark.parametrize("settings", [{}, {"split_column": "part", "group_by": "n"}], ids=["", "requests"])
def test_batches_are_those_of_a_file_with_the_same_rows(form: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(options={"form": form}, **settings)
    for split in ("train", "eval"):
        wanted = all_batches(file_config(tmp_path, **settings), split, epoch=0 if split == "eval" else 1)
        found = all_batches(config, split, epoch=0 if split == "eval" else 1)
        assert len(wanted) == len(found) > 2
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_source_may_fill_the_same_memory_again() -> None:
    config = config_of("one_buffer", categorical=("c",), eval_fraction=0.01, shuffle_rows=0)
    batches = list(open_source(config).batches("train", rank=0, world_size=1, batch_size=8))
    assert real_rows(batches) == list(range(24))
    ids = open_source(config.model_copy(update={"id_mode": "index"})).batches(
        "train", rank=0, world_size=1, batch_size=4
    )
    assert [batch.sparse_features.values().tolist() for batch in ids] == [[i] * 8 for i in range(6)]


def test_a_function_that_names_split_gives_both_and_an_epoch_has_its_own_order() -> None:
    config = config_of("rows_by_split", shuffle_rows=0)
    first, second = (real_rows(all_batches(config, epoch=epoch)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert sorted(real_rows(all_batches(config, "eval"))) == list(range(60, 90))
    report = open_source(config).validate()
    assert (report.train_rows, report.eval_rows, report.bad_rows) == (60, 30, 0)


def test_rows_in_an_order_of_each_epoch_stay_in_their_split() -> None:
    config = config_of("permuted", shuffle_rows=0, split_column="part")
    held = set(real_rows(all_batches(config, "eval")))
    for epoch in (0, 1):
        trained = real_rows(all_batches(config, epoch=epoch))
        assert sorted([*trained, *held]) == list(range(90))


def stream_on_rank(rank: int, config: DataConfig, split: Split = "train") -> tuple[list[list[float]], list[Any]]:
    """Returns the rows of each batch, and the batches of the source that this rank has asked for."""
    data = open_source(config)
    own_rows.ASKED.clear()
    place = {"rank": rank, "world_size": group().size(), "batch_size": 2}
    with small_turns():
        batches = list(data.batches(split, group=group(), **place))
    return [real_rows([batch]) for batch in batches], list(own_rows.ASKED)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_ranks_have_equally_many_steps_of_the_one_stream_however_uneven_the_shards(world_size: int) -> None:
    for shards in (1, 4, 5):
        config = config_of(source_shards=shards, shuffle_rows=0)
        with small_turns():
            alone = open_source(config).batches("train", rank=0, world_size=1, batch_size=1)
            whole = [row for batch in alone for row in real_rows([batch])]
        assert len(set(whole)) == len(whole) == 81
        ranks = run_ranks(stream_on_rank, world_size, config)
        steps = [rows for rows, _ in ranks]
        assert {len(own) for own in steps} == {81 // (2 * world_size)}
        stream = [row for step in zip(*steps, strict=True) for batch in step for row in batch]
        assert stream == whole[: len(stream)]
        asked = [place for _, own in ranks for place in own]
        assert len(asked) == len(set(asked)), "each batch is made once in the job"
        assert all(shard % world_size == rank for rank, (_, own) in enumerate(ranks) for shard, _ in own)
        seen = [row for rows, _ in run_ranks(stream_on_rank, world_size, config, "eval") for own in rows for row in own]
        assert sorted([*seen, *whole]) == list(range(90)), "evaluation has the others, once"


def part_on_rank(
    rank: int, config: DataConfig, row: int, steps: int, bookmark: Any
) -> tuple[list[list[float]], Any, Any]:
    data, seen = open_source(config), []
    own_rows.ASKED.clear()
    place = {"rank": rank, "world_size": group().size(), "batch_size": 3}
    with small_turns():
        batches = data.batches("train", start_row=row, bookmark=bookmark, group=group(), **place)
        for _, batch in zip(range(steps), batches, strict=False):
            seen.append(real_rows([batch]))
        return seen, data.bookmark("train", epoch=0, row=row + steps * 3 * group().size()), list(own_rows.ASKED)


@pytest.mark.ranks
@pytest.mark.parametrize(("function", "of_iterator"), [("rows", False), ("resumable", False), ("resumable", True)])
def test_a_pass_goes_on_from_a_bookmark_on_any_number_of_ranks(function: str, of_iterator: bool) -> None:
    options = {"of_iterator": of_iterator}
    config = config_of(function, source_shards=4, options=options, shuffle_rows=8, group_by="user")
    with small_turns():
        whole = real_rows(open_source(config).batches("train", rank=0, world_size=1, batch_size=1))
    row, bookmark, seen = 0, None, []
    for world_size, steps in ((2, 6), (4, 1), (1, 99)):
        ranks = run_ranks(part_on_rank, world_size, config, row, steps, bookmark)
        seen += [row for step in zip(*(rows for rows, _, _ in ranks), strict=True) for batch in step for row in batch]
        if row and function == "resumable":
            assert bookmark["kept"] > 0
            assert (0, 0) not in [place for _, _, asked in ranks for place in asked], "what was used is not read again"
        row, bookmark = len(seen), ranks[0][1]
        assert [mark for _, mark, _ in ranks] == [bookmark] * world_size
    assert seen == whole[: len(whole) // 3 * 3]
    assert len(set(whole)) == len(whole) > 60


def test_a_bookmark_that_does_not_fit_is_not_used(caplog: Any) -> None:
    config = config_of(source_shards=2, shuffle_rows=8)
    with small_turns():
        data = open_source(config)
        whole = list(data.batches("train", rank=0, world_size=1, batch_size=5))
        mark = data.bookmark("train", epoch=0, row=60)
        assert data.bookmark("train", epoch=1, row=60) is None
        assert mark is not None
        for wrong in ({"epoch": 1}, {"kept": 99}, {"shards": mark["shards"][:1]}, {"shards": [{}, {"x": 1}]}, {}):
            rest = open_source(config).batches(
                "train", rank=0, world_size=1, batch_size=5, start_row=60, bookmark=mark | wrong
            )
            caplog.clear()
            assert all(same(a, b) for a, b in zip(whole[12:], rest, strict=True)), wrong
            assert ("does not fit" in caplog.text) == bool(wrong)


def test_a_source_that_changes_is_not_resumed() -> None:
    config = config_of("changing", shuffle_rows=8)
    with small_turns():
        data = open_source(config)
        list(data.batches("train", rank=0, world_size=1, batch_size=5))
        mark = data.bookmark("train", epoch=0, row=60)
        rest = open_source(config).batches("train", rank=0, world_size=1, batch_size=5, start_row=60, bookmark=mark)
        with pytest.raises(InputError, match=r"rows in \d+ batches before the run was stopped, and has \d+ in \d+ now"):
            next(rest)
    for state, message in (("range", "holds what cannot be saved"), ("function", "holds what cannot be saved")):
        with pytest.raises(InputError, match=rf"^data.source='{HERE}:unsaveable': its state_dict\(\) {message}"):
            all_batches(config_of("unsaveable", options={"state": state}))
    with pytest.raises(InputError, match=r"its state_dict\(\) has failed \(OSError: the loader is gone\)"):
        all_batches(config_of("unsaveable", options={"state": "fails"}))


@pytest.mark.parametrize("bound", [{"_MOST_MARKS": 10}, {"_MARK_BYTES": 20_000}], ids=str)
def test_marks_are_thinned(bound: dict[str, int]) -> None:
    function = "rows" if "_MOST_MARKS" in bound else "resumable"  # with states of some 2 KB
    config = config_of(function, shuffle_rows=0, options={"rows": 400})
    with small_turns(1), patch.multiple(source_pass, **bound):
        data = open_source(config)
        whole = list(data.batches("train", rank=0, world_size=1, batch_size=4))
        there = data._passes["train"]
        assert 4 < len(there._marks) <= 10
        mark = data.bookmark("train", epoch=0, row=340)
        assert mark is not None
        assert 300 < mark["kept"] <= 340
        rest = open_source(config).batches("train", rank=0, world_size=1, batch_size=4, start_row=340, bookmark=mark)
        assert all(same(a, b) for a, b in zip(whole[85:], rest, strict=True))


def fault_on_rank(rank: int, config: DataConfig) -> tuple[int, str]:
    data, seen = open_source(config), 0
    try:
        with small_turns():
            for _ in data.batches("train", group=group(), rank=rank, world_size=group().size(), batch_size=4):
                seen += 1
    except (InputError, RankError) as error:
        return seen, str(error)
    return seen, ""


@pytest.mark.ranks
def test_a_fault_of_one_shard_is_raised_on_all_ranks_with_its_batch_and_row() -> None:
    place = rf"data.source='{HERE}:rows' (shard 1 of 2), batch 3"
    wanted = {
        "bad": f"{place}, row 2: label column 'label': expected 0 or 1, found 7. Fix the row",
        "wide": f"Feature 'n': id 5000 is outside the table t_n of 97 rows ({place}, row 1)",
        "fails": f"rank 1: RuntimeError: {place}: OSError: the store is gone",
    }
    for name, message in wanted.items():
        options = {name: [1, 2], "id": 5000}
        settings = {"id_mode": "index", "categorical": ("n",)} if name == "wide" else {}
        found = run_ranks(fault_on_rank, 2, config_of(source_shards=2, options=options, shuffle_rows=0, **settings))
        assert found[0][1].startswith(message)
        assert found[0] == found[1]
        assert found[0][0] > 0, "steps before it"
    options = {"bad": [1, 2]}
    skipping = config_of(source_shards=2, options=options, skip_bad_lines=True)
    assert run_ranks(fault_on_rank, 2, skipping) == [(10, "")] * 2
    data = open_source(skipping)
    assert data.validate().bad_rows == 1
    with pytest.raises(InputError, match=r"\(shard 1 of 2\), batch 3, row 2: label column"):
        open_source(config_of(source_shards=2, options=options)).validate()
    wide = {"wide": [1, 2], "id": 5000}
    with pytest.raises(InputError, match="id 5000 is outside"):
        open_source(config_of(source_shards=2, options=wide, id_mode="index", categorical=("n",))).validate()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("a list", "expected a pyarrow.Table or RecordBatch, .*, found list"),
        ("no column", "column 'c' is missing; all batches must have"),
        ("lengths", "column 'c' has 1 rows, but column 'label' has 2"),
        ("text", "column 'c' cannot be read .is of type str."),
        ("cube", "column 'd' cannot be read .has 3 dimensions."),
        ("matrix", "dense column 'd' is a list .*; lists can only be categorical"),
        ("mixed", "column 'c' cannot be read"),
        ("lists of lists", "column 'c' is a list .*, but not in the first file|expected text, whole numbers"),
        ("a list now", "column 'c' is a list"),
        ("doubled", "column 'c' is there 2 times"),
        ("keys", "column '1' is there 2 times"),
        ("weights", "column 'c' cannot be read .its ids have weights"),
        ("bags", "column 'c' cannot be read .lengths sum to 2, but there are 3 values"),
    ],
)
def test_a_malformed_batch_is_named(wrong: str, message: str) -> None:
    config = config_of("malformed", categorical=("c",), options={"wrong": wrong})
    with pytest.raises(InputError, match=rf"^data.source='{HERE}:malformed', batch 2: ({message})"):
        open_source(config).validate()


def test_a_function_that_cannot_be_a_source_is_refused() -> None:
    for function, settings, message in (
        ("absent", {}, "has no function 'absent'"),
        ("rows_by_split", {"source_shards": 2}, "does not name the arguments shard and num_shards"),
        ("rows_by_split", {"split_column": "part"}, "names the argument split, so data.split_column"),
        (
            "permuted",
            {"group_by": "user"},
            r"names the argument epoch, but data.eval_fraction=0.1 counts rows .* Name the argument split",
        ),
        ("needs_more", {}, r"takes 'path', which is none of split, shard, .* into \[data.options\]"),
        ("one_table", {}, "returned a value of type Table, expected an iterable of batches"),
        ("none", {}, r"\(train\) has no batch"),
        ("rows", {"categorical": ("x_*",)}, "batch 1: categorical 'x_.*' matches no column"),
        ("rows", {"num_embeddings_per_feature": {"x": 9}}, "'x' is not a categorical feature"),
    ):
        with pytest.raises(InputError, match=message):
            open_source(config_of(function, **settings))
    with pytest.raises(InputError, match="returned an iterator that it has returned before"):
        open_source(config_of("same_iterator")).validate()


def test_the_first_batch_with_rows_may_be_in_any_shard() -> None:
    for empty in (False, True):
        options = {"empty": empty}
        config = config_of(
            "late", dense=("1",), categorical=("2",), source_shards=3, options=options, eval_fraction=0.01
        )
        (batch,) = open_source(config).batches("train", rank=0, world_size=1, batch_size=2)
        assert sorted(batch.dense_features[:, 0].tolist()) == [0.0, 1.0]
        assert batch.sparse_features["2"].lengths().sum() == 3


def test_views_of_texts_are_texts() -> None:
    plain, found = (all_batches(config_of("views", options={"views": views})) for views in (False, True))
    assert len(plain) == len(found) == 2
    assert all(same(a, b) for a, b in zip(plain, found, strict=True))


def test_a_resumed_pass_has_a_bookmark_before_its_first_round_is_done() -> None:
    config = config_of("resumable", source_shards=4, shuffle_rows=8)
    place = {"rank": 0, "world_size": 1, "batch_size": 4}
    with small_turns():
        data = open_source(config)
        list(data.batches("train", **place))
        mark = data.bookmark("train", epoch=0, row=40)
        assert mark is not None
        assert mark["kept"] > 0
        again = open_source(config)
        next(again.batches("train", **place, start_row=40, bookmark=mark))
        assert again.bookmark("train", epoch=0, row=44) == mark


def test_globs_do_not_depend_on_the_order_of_the_columns() -> None:
    for order in (["c_b", "d_2", "c_a", "d_1", "z"], ["d_1", "z", "c_a", "d_2", "c_b"]):
        data = open_source(config_of("in_order", dense=("d_*",), categorical=("z", "c_*"), options={"order": order}))
        assert (data.dense_names, data.feature_names) == (("d_1", "d_2"), ("z", "c_a", "c_b"))


def test_settings_of_files_are_refused_beside_a_source() -> None:
    for settings, message in (
        ({"train_path": "a.tsv"}, "train_path has no meaning with source="),
        ({"workers": 1}, "workers has no meaning with source="),
        ({"reading": "shared"}, "reading has no meaning with source="),
        ({"categorical": ()}, "source needs categorical"),
        ({"kind": "columns", "train_path": "a.csv"}, "source has no meaning for kind='columns'"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(**settings)
    with pytest.raises(ValueError, match="kind='source' needs source"):
        DataConfig(kind="source")
    with pytest.raises(ValueError, match="source_shards has no meaning for kind='synthetic'"):
        DataConfig(source_shards=2)
    assert DataConfig(**config_of().model_dump()) == config_of()
