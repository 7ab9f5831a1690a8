"""`dmt prepare`: the batches of the raw rows, ids by frequency, counts, and folders that are whole or not there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dmt.errors import InputError
from dmt.training.access import collect_profile, load_profile
from dmt.training.commands import main
from dmt.training.config import load_config
from dmt.training.data.config import DataConfig, SyntheticConfig
from dmt.training.data.dataset import ClickData, open_source
from dmt.training.data.prepare import PrepareOptions, prepare

from .helpers import criteo_line, numbered_lines, write
from .test_sharing import config_of
from .test_start_row import same

FREQUENCY = PrepareOptions(ids="frequency", group_rows=16)


def read(folder: Path, **settings: Any) -> ClickData:
    return open_source(DataConfig.model_validate({"prepared": str(folder), **settings}), embedding_dim=8)


def batches(data: ClickData, split: Any) -> list[Any]:
    return list(data.batches(split, rank=0, world_size=1, batch_size=4, epoch=1 if split == "train" else 0))


@pytest.mark.parametrize("kind", ["criteo", "csv", "parquet"])
def test_prepared_batches_are_those_of_the_raw_rows(kind: str, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    config = config_of(kind, tmp_path / "raw", shuffle_rows=20, num_embeddings=50)
    config = config.model_copy(update={"dense_transform": "signed_log1p"})
    record = prepare(config, tmp_path / "out", PrepareOptions(group_rows=16))
    data, raw = read(tmp_path / "out", shuffle_rows=20), open_source(config, embedding_dim=8)
    assert data.tables == raw.tables
    for split in ("train", "eval"):
        wanted, found = batches(raw, split), batches(data, split)
        assert len(wanted) == len(found) > 2
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))
        assert record["rows"][split] == raw.num_rows(split) == data.num_rows(split)
        groups = pq.read_metadata(tmp_path / "out" / split / "part-00000.parquet")
        sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        assert sum(sizes) == record["rows"][split]
        assert set(sizes[:-1]) <= {16}
    assert record["malformed_rows"] == (2 if kind == "criteo" else 0)
    # The counts are those that a profile of the raw rows would have.
    profile, counted = load_profile(tmp_path / "out" / "access.parquet"), collect_profile(raw)
    for table in raw.tables:
        own, wanted_counts = profile[table.name], counted[table.name]
        assert dict(zip(own.rows, own.counts, strict=True)) == dict(
            zip(wanted_counts.rows, wanted_counts.counts, strict=True)
        )
        distinct = record["tables"][table.name]["distinct"]
        used = int((own.rows != 0).sum())  # row 0 is for missing values
        if table.name == "t_time_hour":
            assert distinct == used
        else:
            assert distinct is None or used <= distinct  # an estimate: rows are shared


def test_values_that_are_rows_are_counted_as_they_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0] * 60, "n": [i % 6 for i in range(60)]}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    config = DataConfig(
        kind="columns", train_path=path, eval_path=path, categorical=("n",), id_mode="index", num_embeddings=7
    )
    for number, own in enumerate((config, DataConfig(synthetic=SyntheticConfig(num_rows=2000, rows_per_table=7)))):
        record = prepare(own, tmp_path / str(number), PrepareOptions())
        assert [each["distinct"] for each in record["tables"].values()] == [
            each["rows_read"] for each in record["tables"].values()
        ]
    assert json.loads((tmp_path / "0" / "manifest.json").read_text())["tables"]["t_n"]["distinct"] == 6


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
    return DataConfig(kind="columns", train_path=str(path), shuffle_rows=0, **names)


def ids_of(data: ClickData, split: Any, feature: str = "user") -> list[int]:
    found = []
    for batch in data.batches(split, rank=0, world_size=1, batch_size=1):
        found += batch.sparse_features[feature].values().tolist()
    return found


def test_ids_follow_the_frequency_of_values_and_rare_ones_share_one(tmp_path: Path) -> None:
    config = clicks(tmp_path / "clicks.parquet")
    record = prepare(config, tmp_path / "all", FREQUENCY)
    order = {"b": 2, "a": 3, "c": 4, "d": 5, None: 0}
    found = ids_of(read(tmp_path / "all", shuffle_rows=0), "train")
    assert [order.get(user, 9) for user in USERS] == [9 if row in (6, 7) else row for row in found]
    assert {found[24], found[25]} == {6, 7}, "those that come once, in the order of their hashes"
    assert ids_of(read(tmp_path / "all"), "eval") == [3, 1, 0]
    assert record["tables"]["t_user"] | {"accesses": 28, "rows": 8, "distinct": 6} == record["tables"]["t_user"]

    prepare(config, tmp_path / "two", PrepareOptions(ids="frequency", min_count=4))
    data = read(tmp_path / "two", shuffle_rows=0)
    assert ids_of(data, "train") == [order.get(user, 1) if user != "d" else 1 for user in USERS]
    assert {t.name: t.num_embeddings for t in data.tables} == {"t_user": 5, "t_friend": 6}
    # "z" is in every list, so that it is the most frequent value; a missing list is an empty bag.
    friends = {"b": 3, "a": 4, "c": 5}
    wanted = [x for user in USERS if user is not None for x in (friends.get(user, 1), 2)]
    assert ids_of(data, "train", "friend") == wanted
    profile = load_profile(tmp_path / "two" / "access.parquet")
    counted = Counter(ids_of(data, "train"))
    assert dict(zip(profile["t_user"].rows.tolist(), profile["t_user"].counts.tolist(), strict=True)) == counted
    assert [table.num_embeddings for table in profile.tables] == [table.num_embeddings for table in data.tables]

    # Features that share a table share its ids.
    prepare(config.model_copy(update={"shared_tables": {"people": ("user", "friend")}}), tmp_path / "one", FREQUENCY)
    data = read(tmp_path / "one", shuffle_rows=0)
    assert [(table.name, table.num_embeddings) for table in data.tables] == [("t_people", 9)]
    assert ids_of(data, "train", "friend")[::2] == [row for row in ids_of(data, "train") if row]

    # No more rows than the config says, and other rows with the same ids.
    few = config.model_copy(update={"num_embeddings_per_feature": {"user": 4}})
    prepare(few, tmp_path / "few", FREQUENCY)
    assert max(ids_of(read(tmp_path / "few"), "train")) == 3
    later = clicks(tmp_path / "later.parquet", ["c", "new", "f", "a", None], test=("b",))
    prepare(later, tmp_path / "later", PrepareOptions(ids="frequency", vocabulary=tmp_path / "two"))
    data = read(tmp_path / "later", shuffle_rows=0)
    assert ids_of(data, "train") == [4, 1, 1, 3, 0]
    assert [table.num_embeddings for table in data.tables] == [5, 6]


def test_values_beyond_what_is_counted_are_rare_and_said_to_be(tmp_path: Path, caplog: Any) -> None:
    users = [*["a"] * 30, *["b"] * 20, *map(str, range(40))]
    config = clicks(tmp_path / "clicks.parquet", users)
    options = PrepareOptions(ids="frequency", most_values=3, min_count=3)
    record = prepare(config, tmp_path / "out", options)
    assert "t_user has more values than --most-values=3" in caplog.text
    assert record["tables"]["t_user"]["distinct"] is None
    found = ids_of(read(tmp_path / "out", shuffle_rows=0), "train")
    assert found[:50] == [2] * 30 + [3] * 20


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", [*numbered_lines(40), criteo_line("7")])
    config = DataConfig(kind="criteo_tsv", train_path=str(tmp_path / "a.tsv"))
    out = tmp_path / "out"
    with pytest.raises(InputError, match="line 41: column label"):
        prepare(config, out, PrepareOptions(group_rows=8))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tsv"], "nothing is left"

    write(tmp_path / "a.tsv", numbered_lines(40))
    prepare(config, out, PrepareOptions(group_rows=8))
    with pytest.raises(InputError, match="exists, and nothing is overwritten"):
        prepare(config, out, PrepareOptions())
    with pytest.raises(ValueError, match="id_mode has no meaning with prepared="):
        read(out, id_mode="hash")
    with pytest.raises(ValueError, match="timestamps has no meaning with prepared="):
        DataConfig(prepared=str(out), timestamps=("t",))
    settings = DataConfig(prepared=str(out))
    assert settings.prepared is None
    # As an override of the config that it was prepared from, the folder takes the place of what that says.
    write(tmp_path / "raw.toml", ["[data]", 'kind = "criteo_tsv"', f'train_path = "{tmp_path / "a.tsv"}"'])
    assert load_config(tmp_path / "raw.toml", [f"data.prepared={out}"]).data == settings
    for setting in ("id_mode=hash", "num_embeddings_per_feature.C1=7"):
        with pytest.raises(InputError, match=rf"{setting[:7]}.* has no meaning with prepared="):
            load_config(tmp_path / "raw.toml", [f"data.prepared={out}", f"data.{setting}"])
    write(tmp_path / "raw.toml", ["[data]", 'split_column = "s"', 'source = "a.b:c"'])
    assert load_config(tmp_path / "raw.toml", [f"data.prepared={out}"]).data == settings
    with pytest.raises(InputError, match="data: "):
        load_config(tmp_path / "raw.toml", ["data=3"])
    assert DataConfig.model_validate(settings.model_dump()) == settings

    part = out / "train" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-00000.parquet has \d+ bytes, not \d+. Copy the folder whole"):
        read(out)
    part.unlink()
    with pytest.raises(ValueError, match=r"part-00000.parquet is missing"):
        read(out)
    for text, message in (("{}", "is not of format 1"), ('{"format": 1}', "is damaged"), ("x", "not JSON")):
        (out / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read(out)
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="Name a folder that `dmt prepare` has written"):
        read(out)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    config = clicks(tmp_path / "clicks.parquet")
    prepare(config, tmp_path / "hashed", PrepareOptions())
    other = config.model_copy(update={"categorical": ("user",)})
    prepare(config, tmp_path / "by_frequency", FREQUENCY)
    for data, options, message in (
        (config, {"min_count": 2}, "--min-count needs ids by frequency"),
        (config, {"min_count": 0}, "--min-count=0 must be at least 1"),
        (config, {"vocabulary": tmp_path / "hashed"}, "--vocabulary needs ids by frequency"),
        (config, {"ids": "frequency", "vocabulary": tmp_path / "hashed"}, "has no vocabulary"),
        (other, {"ids": "frequency", "vocabulary": tmp_path / "by_frequency"}, "has other tables or features"),
        (config.model_copy(update={"group_by": "user"}), {}, "data.group_by='user' cannot be prepared"),
        (config.model_copy(update={"label": None}), {}, "data.label is not set"),
        (DataConfig(), {"ids": "frequency"}, "Synthetic clicks are ids already"),
    ):
        with pytest.raises(InputError, match=message):
            prepare(data, tmp_path / "out", PrepareOptions(**options))
    assert not (tmp_path / "out").exists()


def test_the_command_writes_what_the_trainer_takes(tmp_path: Path) -> None:
    clicks(tmp_path / "clicks.parquet")
    names = 'categorical = ["user", "friend"]\nsplit_column = "split"'
    (tmp_path / "run.toml").write_text(f'[data]\nkind = "columns"\ntrain_path = "{tmp_path}/clicks.parquet"\n{names}\n')
    out, run = tmp_path / "out", CliRunner().invoke
    ran = run(main, ["prepare", str(tmp_path / "run.toml"), "--out", str(out), "--ids", "frequency", "--json"])
    assert ran.exit_code == 0, ran.output
    record = json.loads(ran.stdout)
    assert record["rows"] == {"train": 28, "eval": 3}
    config = load_config("demo", [f"data.prepared={out}", "train.batch_size=4"])
    assert config.data.num_embeddings_per_feature == {"user": 8, "friend": 9}
    assert load_profile(out / "access.parquet").num_samples == 28
    ran = run(main, ["prepare", str(tmp_path / "run.toml"), "--out", str(out)])
    assert (ran.exit_code, "nothing is overwritten" in ran.output) == (2, True)
