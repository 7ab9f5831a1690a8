"""`read_tables`: the tables of a run from a file, where ``dmt plan`` has no data to open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmt.errors import InputError, did_you_mean
from dmt.plan.tables import TableSpec, table_specs

__all__ = ["read_tables"]

_TABLE_KEYS = ("name", "num_embeddings", "embedding_dim", "feature_names")
_DATA_TYPES = ("FP32", "FP16")


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """Reads tables from JSON: a list of {name, num_embeddings, embedding_dim, feature_names}, or a ``towers.json``.

    An entry may have a ``data_type``, ``"FP32"`` (the default) or ``"FP16"``.

    Raises:
        InputError: the file is absent, not JSON, or an entry is malformed; entries are counted from 1.
    """
    place = f"data.tables={str(path)!r}"
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{place}: cannot be read ({error}). Name a JSON file.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{place}, line {error.lineno}: not JSON ({error.msg}).") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{place}: not JSON that can be read ({error}).") from error
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{place}: holds no list of tables, as `dmt partition` records them in towers.json.")
    tables = [_table_of(f"{place}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]
    try:
        return table_specs(tables)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _table_of(place: str, entry: Any) -> TableSpec:
    if not isinstance(entry, dict):
        raise InputError(f"{place}: {entry!r} must be an object with the keys {', '.join(_TABLE_KEYS)}.")
    if isinstance(entry.get("name"), str):
        place += f" ({entry['name']!r})"
    known = (*_TABLE_KEYS, "data_type")
    unknown, missing = [key for key in entry if key not in known], [key for key in _TABLE_KEYS if key not in entry]
    if unknown:
        raise InputError(
            f"{place}: the key {unknown[0]!r} is unknown; a table has {', '.join(known)}."
            f"{did_you_mean(unknown[0], known)}"
        )
    if missing:
        raise InputError(f"{place}: {missing[0]} is missing. Give {', '.join(_TABLE_KEYS)}.")
    if not _is_name(entry["name"]):
        raise InputError(f"{place}: name={entry['name']!r} must be a text that is not empty.")
    for size in ("num_embeddings", "embedding_dim"):
        value = entry[size]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{place}: {size}={value!r} must be a whole number of at least 1.")
        if value >= 2**63:
            raise InputError(f"{place}: {size}={value:.3e} must be below 2**63; ids are int64.")
    if entry["embedding_dim"] % 4:
        raise InputError(f"{place}: embedding_dim={entry['embedding_dim']} must be a multiple of 4 (FBGEMM's kernels).")
    features = entry["feature_names"]
    if not isinstance(features, list) or not features or not all(map(_is_name, features)):
        raise InputError(f"{place}: feature_names={features!r} must be a list of one text or more, such as ['ad'].")
    if entry.get("data_type", "FP32") not in _DATA_TYPES:
        raise InputError(f"{place}: data_type={entry['data_type']!r} is unknown; use one of {list(_DATA_TYPES)}.")
    return TableSpec(**{**entry, "feature_names": tuple(features)})


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
