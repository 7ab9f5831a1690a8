"""Folders that ``dmt prepare`` writes: a manifest, and the settings of ``[data]`` that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmt.errors import InputError
from dmt.files import read_json

if TYPE_CHECKING:
    from dmt.training.data.columns import Columns
    from dmt.training.data.config import DataConfig

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PARTS",
    "REQUEST",
    "access_counts",
    "prepared_folder",
    "prepared_settings",
    "prepared_sources",
    "read_manifest",
    "with_prepared",
]

MANIFEST = "manifest.json"
FORMAT = 2
PARTS: tuple[Literal["train", "eval"], ...] = ("train", "eval")
"""Folders of the Parquet files of either split."""
REQUEST = "#request"
"""Column of the key of each row's request, in folders whose rows have one (``data.group_by``)."""


def read_manifest(folder: Path, place: str) -> dict[str, Any]:
    """Reads the manifest of a folder, and checks that its files are those that it was written for.

    Raises:
        InputError: ``dmt prepare`` has not written the folder, or a file has gone or has another size; ``place`` names
            the setting.
    """
    remedy = "Name a folder that `dmt prepare` has written."
    record = read_json(folder / MANIFEST, place=place, remedy=remedy)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{place}: its {MANIFEST} is not of format {FORMAT}. {remedy}")
    try:
        files = {str(name): int(size) for name, size in record["files"].items()}
        dict(record["data"])
        _ = record["access_counts"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place}: its {MANIFEST} is damaged ({error!r}). {remedy}") from error
    for name, size in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            text = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise InputError(f"{place}: {file} {text}. Copy the folder whole, or prepare it again.")
    return record


def prepared_folder(path: str | None) -> Path | None:
    """Returns the prepared folder whose rows a path names; None if it is of another kind."""
    folder = None if path is None else Path(path).parent
    is_part = folder is not None and Path(path or "").name in PARTS and (folder / MANIFEST).is_file()
    return folder if is_part else None


def access_counts(train_path: str | None) -> Path | None:
    """Returns the file of the access counts of a prepared folder, by its training rows; None if there is none.

    Raises:
        InputError: see `read_manifest`.
    """
    if (folder := prepared_folder(train_path)) is None:
        return None
    counts = read_manifest(folder, f"data.train_path={train_path!r}")["access_counts"]
    return None if counts is None else folder / str(counts)


def prepared_sources(path: str | None) -> list[tuple[str, int]]:
    """Returns name and bytes of the files that were prepared into the folder whose rows a path names, if it tells."""
    if (folder := prepared_folder(path)) is None:
        return []
    sources = read_manifest(folder, f"data.train_path={path!r}").get("sources", [])
    return [(Path(file).name, int(size)) for file, size, _ in sources]


def raw_settings(config: DataConfig, columns: Columns) -> tuple[DataConfig, Columns]:
    """Returns the settings and columns that turn raw rows into the ids of these, with every column by name.

    Raises:
        InputError: see `read_manifest`.
    """
    # Here: the settings import this module.
    from dmt.training.data.columns import Columns, Feature, explicit_config
    from dmt.training.data.config import DataConfig
    from dmt.training.data.times import TimePart

    folder = prepared_folder(config.train_path)
    record = {} if folder is None else read_manifest(folder, f"data.train_path={config.train_path!r}")
    if not record.get("raw"):
        return (config if config.kind == "synthetic" else explicit_config(config, columns)), columns
    features = {}
    for name, entry in record["features"].items():
        time = None if entry["time"] is None else TimePart(*entry["time"])
        features[name] = Feature(**{**entry, "time": time})
    raw = DataConfig.model_validate(record["raw"])
    years = {
        name: TimePart(column, "years") for column in raw.timestamps if (name := f"{column}_years") in columns.dense
    }
    return raw, Columns(dense=columns.dense, features=tuple(features.values()), years=years)


def prepared_settings(folder: str) -> dict[str, Any]:
    """Returns the settings of ``[data]`` that read a prepared folder; errors are those of `read_manifest`."""
    record = read_manifest(Path(folder), f"data.prepared={folder!r}")
    paths = {f"{part}_path": str(Path(folder, part)) for part in PARTS}
    return {"kind": "columns", **paths, **record["data"]}


def with_prepared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a section ``[data]`` with those of a prepared folder in the place of its name.

    Raises:
        InputError: see `read_manifest`; or a value contradicts the folder.
    """
    found = prepared_settings(str(values["prepared"]))
    # Times are columns of their parts in the folder.
    times = {"timestamps": None} if values.get("timestamps") else {}
    for key, value in {**found, **times}.items():
        if key in values and values[key] != value and (key, values[key]) != ("kind", "synthetic"):
            raise InputError(
                f"{key} has no meaning with prepared={values['prepared']!r}, which says it. Leave out one of them, or "
                "prepare the data again."
            )
    return {key: value for key, value in {**values, **found}.items() if key != "prepared"}
