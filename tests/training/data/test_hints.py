"""Messages for a user's own files: the settings that name columns, and columns that look like lists."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.training.data import DataConfig
from dmt.training.data.schema import resolve_columns


def columns(path: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"kind": "columns", "train_path": str(path), "categorical": ["*"], **settings})


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("dmt"), "propagate", True)  # a command may have run in this process
    caplog.set_level(logging.WARNING, "dmt")
    return caplog


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_text_column_that_looks_like_lists_is_pointed_out_once(
    suffix: str, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"clicks.{suffix}"
    rows = {
        "label": ["0", "1", "0", "1"],
        "tags": ["a|b", "c", "a|c|d", "b|d"],
        "json": ["[1,2]", "[3]", "[4,5,6]", "[7,8]"],
        "city": ["New York", "Paris, TX", "Berlin", "Halle, S"],  # a comma and a blank: a name
        "one": ["x|y", "z", "z", "z"],
        "none": ["none", "null", "NaN", "none"],
        "when": ["2026-11-22", "", "2026-11-22T20:15:00Z", "never"],
    }
    if suffix == "csv":
        lines = ["\t".join(row) for row in zip(*([name, *values] for name, values in rows.items()), strict=True)]
        path.write_text("\n".join(lines) + "\n")
        config = columns(path, csv_separator="\t")
    else:
        pq.write_table(pa.table(rows), path)
        config = columns(path)
    for _ in range(2):
        assert resolve_columns(config, str(path)).multi_hot == frozenset()
    tags, lists, when = (record.getMessage() for record in warned.records)
    assert f"{path}: column 'tags' looks like lists ('a|b', 'a|c|d')" in tags
    assert """data.multi_hot='["tags"]' data.list_separator='"|"'""" in tags
    assert "column 'json' looks like lists ('[1,2]', '[4,5,6]')" in lists
    assert "write lists into Parquet, or texts without brackets" in lists
    assert f"{path}: column 'when' looks like times ('2026-11-22')" in when
    assert """For its hour and weekday: data.timestamps='["when"]'""" in when
    warned.clear()
    resolve_columns(
        config.model_copy(update={"multi_hot": ("tags", "json"), "categorical": ("[!w]*",), "timestamps": ("when",)}),
        str(path),
    )
    assert not warned.records


def test_columns_that_are_not_there_are_named_with_the_settings_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("clicked,user\n1,x\n")
    with pytest.raises(InputError, match=r"label 'label' matches no column.* data\.label=NAME, .*data\.categorical="):
        resolve_columns(columns(tmp_path / "a.csv"), str(tmp_path / "a.csv"))
    config = columns(tmp_path / "a.csv", label="clicked", categorical=["c_*"])
    with pytest.raises(
        InputError, match=r"categorical 'c_\*' matches no column.* Name the features: data\.categorical="
    ):
        resolve_columns(config, str(tmp_path / "a.csv"))
