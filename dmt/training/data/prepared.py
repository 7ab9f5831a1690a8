"""Folders that ``dmt prepare`` writes: a manifest, and the settings of ``[data]`` that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dmt.errors import InputError
from dmt.files import read_json

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PARTS",
    "REQUEST",
    "access_counts",
    "prepared_settings",
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


def access_counts(train_path: str | None) -> Path | None:
    """Returns the file of the access counts of a prepared folder, by its training rows; None if they are others.

    Raises:
        InputError: see `read_manifest`.
    """
    if train_path is None:
        return None
    folder = Path(train_path).parent
    if Path(train_path) != folder / PARTS[0] or not (folder / MANIFEST).is_file():
        return None
    counts = read_manifest(folder, f"data.train_path={train_path!r}")["access_counts"]
    return None if counts is None else folder / str(counts)


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
