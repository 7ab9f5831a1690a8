"""Dates and times as features: the same values from Parquet and text, and what is no time is refused with its place."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.training.data import times
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import open_source
from dmt.training.data.times import to_times

from .helpers import write

MONDAY = datetime(2024, 1, 1, 23, 59, 59, 500000, tzinfo=UTC)
YEARS = MONDAY.timestamp() / 31_556_952


def config_of(path: Path, **settings: Any) -> DataConfig:
    defaults = {"categorical": ("c",), "timestamps": ("t*",), "dense_transform": "none", "eval_path": str(path)}
    return DataConfig(kind="columns", train_path=str(path), **{**defaults, **settings})


def parquet(path: Path, times: pa.Array) -> Path:
    pq.write_table(pa.table({"label": [0] * len(times), "c": ["x"] * len(times), "time": times}), path)
    return path


def features(config: DataConfig) -> dict[str, list[Any]]:
    data = open_source(config)
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=2))
    dense = dict(zip(data.dense_names, batch.dense_features.T.tolist(), strict=True))
    return dense | {name: batch.sparse_features[name].values().tolist() for name in data.feature_names}


@pytest.mark.parametrize(
    "values",
    [
        ["2024-01-01T23:59:59.5", ""],
        ["2024-01-01 23:59:59.500", "NaT"],
        ["2024-01-01T23:59:59.500000000Z", "null"],
        [" 2024-01-02T05:29:59.5+05:30", ""],
    ],
    ids=str,
)
def test_text_of_every_spelling(values: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, ["label,c,time", *(f"0,x,{value}" for value in values)])
    found = features(config_of(path, timestamp_parts=("weekday", "hour", "month", "day", "years")))
    assert list(found) == ["time_years", "c", "time_weekday", "time_hour", "time_month", "time_day"]
    assert found["time_years"] == pytest.approx([YEARS, 0.0], abs=1e-5)
    assert [found[f"time_{part}"] for part in ("weekday", "hour", "month", "day")] == [[1, 0], [24, 0], [1, 0], [1, 0]]
    again = parquet(tmp_path / "a.parquet", pa.array(values).dictionary_encode())
    assert features(config_of(again))["time_hour"] == [24, 0]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_timestamps_of_every_unit_are_those_of_utc(unit: str, zone: str | None, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.array([MONDAY, None], pa.timestamp(unit, zone)))
    assert features(config_of(path, id_mode="hash"))["time_hour"] == [24, 0]


def test_dates_and_their_tables(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.array([date(2023, 12, 31), date(1969, 12, 28)], pa.date32()))
    config = config_of(path, timestamp_parts=("weekday", "day", "years"))
    assert features(config)["time_weekday"] == [7, 7]  # Sundays, also before 1970
    assert features(config)["time_years"][1] == pytest.approx(-4 * 86_400 / 31_556_952)
    data = open_source(config, embedding_dim=8)
    assert {table.name: table.num_embeddings for table in data.tables} == {
        "t_c": 100_000,
        "t_time_weekday": 8,
        "t_time_day": 32,
    }


def test_years_are_not_transformed_as_other_numbers_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, ["label,c,d,time", "0,x,3,2024-01-01T23:59:59.5", "0,x,3,"])
    found = features(config_of(path, timestamp_parts=("years",), dense=("d",), dense_transform="signed_log1p"))
    assert found["d"] == pytest.approx([np.log(4)] * 2)
    assert found["time_years"] == pytest.approx([YEARS, 0.0], abs=1e-5)


@pytest.mark.parametrize("value", ["22.11.2026", "1700000000", "20261122", "2026-13-01", "2026-11-22T25:00"])
def test_what_is_no_time_is_refused_with_its_line_or_left_out(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    good = [f"0,x,2026-11-{day:02}T08:00" for day in range(1, 31)]
    write(path, ["label,c,time", *good, f"0,x,{value}", *good])
    with pytest.raises(InputError, match=rf"a\.csv, line 32: timestamps column 'time': expected a date .*'{value}'"):
        open_source(config_of(path)).validate()
    data = open_source(config_of(path, skip_bad_lines=True))
    assert data.validate().bad_rows == 1
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=60))
    assert batch.sparse_features["time_hour"].values().tolist() == [9] * 60
    with pytest.raises(InputError, match=r"timestamps column 'time' has type int64.*pandas\.to_datetime"):
        open_source(config_of(parquet(tmp_path / "a.parquet", pa.array([20261122]))))


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, ["label,c,time,time_hour", "0,x,2026-11-22,3"])
    for settings, text in (
        ({"categorical": ("c", "time"), "timestamps": ("time",)}, "'time' is in categorical and in timestamps"),
        ({"categorical": ("c", "time_hour"), "timestamps": ("time",)}, "the name that the hour of 'time' would have"),
        ({"timestamps": ("time", "time_hour")}, "'time_hour' has the name that the hour of 'time' would have"),
        ({"timestamps": ("time",), "label": "time_hour"}, "the name that the hour of 'time' would have"),
        ({"timestamps": ("time",), "group_by": "time_hour"}, "the name that the hour of 'time' would have"),
        (
            {"timestamps": ("time",), "split_column": "time_hour", "eval_path": None},
            "the name that the hour of 'time' would have",
        ),
        ({"timestamps": ("when",)}, "timestamps 'when' matches no column"),
        ({"timestamps": ("time",), "num_embeddings_per_feature": {"time_hour": 24}}, "has 24 rows, but .* has 25"),
    ):
        with pytest.raises(InputError, match=text):
            open_source(config_of(path, **settings))
    day = parquet(tmp_path / "a.parquet", pa.array([date(2026, 11, 22)]))
    for use in ({"categorical": ("c", "time")}, {"dense": ("time",)}):
        with pytest.raises(InputError, match=r"'time' has type date32\[day\].* List it under timestamps"):
            open_source(config_of(day, timestamps=(), **use))
    with pytest.raises(
        InputError, match=r"expected a number, found '2026-11-22' \(dates and times belong to data\.time"
    ):
        open_source(config_of(path, timestamps=(), dense=("time",))).validate()
    with pytest.raises(ValueError, match="timestamps are for kind='columns'"):
        DataConfig(kind="criteo_tsv", train_path="a", timestamps=("I1",))


def test_times_with_and_without_a_zone_are_read_in_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, parsed = [], times._parsed
    monkeypatch.setattr(times, "_parsed", lambda text: calls.append(len(text)) or parsed(text))
    mixed = ["2026-11-22T20:15:00Z", "2026-11-22 20:15:00", None, "2026-11-22T21:15+01:00", "2026-11-22"] * 40
    found, wrong = to_times(pa.array(mixed))
    assert calls == [200, 80, 120]
    assert not wrong.any()
    evening, day = datetime(2026, 11, 22, 20, 15), datetime(2026, 11, 22)
    assert found.to_pylist() == [evening, evening, None, evening, day] * 40


def test_halves_find_each_wrong_value() -> None:
    texts = ["2026-11-22", "x", "2026-11-22T20:15:00Z", None, "y", "2026-11-22 20"] * 5
    found, wrong = to_times(pa.array(texts))
    assert np.flatnonzero(wrong).tolist() == [i for i, text in enumerate(texts) if text in ("x", "y")]
    assert found.null_count == 15
    assert found[2].as_py() == datetime(2026, 11, 22, 20, 15)
