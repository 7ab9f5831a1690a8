"""The file of a `FeatureAffinity`: named arrays in numpy's ``.npz`` format, nothing pickled.

========================  ===================  ============================================================
array                     shape, dtype
========================  ===================  ============================================================
``format``                int64                `FORMAT_VERSION`
``matrix``                [F, F] float64       required
``features``              [F] text             required
``num_samples``           int64                -1 where it is not known
``pooling_factors``       [F] float64          optional: mean number of ids per sample
``table_names``           [K] text             optional, with the next four
``table_rows``            [K] int64            rows of each table
``table_dims``            [K] int64            columns of each table
``table_sizes``           [K] int64            number of features of each table
``table_features``        [F] text             the tables' features, table after table
========================  ===================  ============================================================
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.tables import TableSpec, feature_names

__all__ = ["FORMAT_VERSION", "read_arrays", "tables_from", "tables_to", "write_arrays"]

FORMAT_VERSION = 1
"""Of the files written here, and the only one read."""

_TABLE_ARRAYS = ("table_names", "table_rows", "table_dims", "table_sizes", "table_features")


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes the arrays with the format version; an existing file is replaced in one step.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_arrays(f"{folder}/a.npz", {"matrix": np.eye(1), "features": np.array(["a"])})
        ...     sorted(read_arrays(f"{folder}/a.npz"))
        ['features', 'format', 'matrix']
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    # Through a file object: given a name, numpy would append ".npz" to it. Uncompressed: the last digits of a mean are
    # noise, and packing 128 MB of them takes seconds and saves next to nothing.
    with scratch.open("wb") as file:
        contents: dict[str, Any] = {"format": np.int64(FORMAT_VERSION), **arrays}
        np.savez(file, **contents)
    scratch.replace(target)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Reads the arrays of a file that has ``matrix`` and ``features`` at least; unpickles nothing.

    Raises:
        InputError: the file is absent, not such a file, or of another format version.
    """
    where = f"Affinity file {path}"
    try:
        # Opened here, because numpy leaves a broken archive open.
        with Path(path).open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            # A plain .npy array comes back without names.
            arrays = {name: archive[name] for name in getattr(archive, "files", ())}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{where}: cannot be read ({error}). Expected what FeatureAffinity.save wrote.") from error
    version = int(arrays.get("format", np.int64(FORMAT_VERSION)))
    if version != FORMAT_VERSION:
        raise InputError(f"{where} has format {version}; this version reads format {FORMAT_VERSION}. Collect anew.")
    absent = [name for name in ("matrix", "features") if name not in arrays]
    if absent:
        raise InputError(f"{where} has no array {absent[0]!r}; it needs 'matrix' [F, F] and 'features' [F].")
    return arrays


def tables_to(tables: Sequence[TableSpec]) -> dict[str, NDArray[Any]]:
    """The tables as arrays; none without tables.

    Example:
        >>> tables = (TableSpec(name="t", num_embeddings=9, embedding_dim=4, feature_names=("a", "b")),)
        >>> tables_from(tables_to(tables)) == tables
        True
    """
    if not tables:
        return {}
    return {
        "table_names": np.array([table.name for table in tables], dtype=np.str_),
        "table_rows": np.array([table.num_embeddings for table in tables], dtype=np.int64),
        "table_dims": np.array([table.embedding_dim for table in tables], dtype=np.int64),
        "table_sizes": np.array([len(table.feature_names) for table in tables], dtype=np.int64),
        "table_features": np.array(feature_names(tables), dtype=np.str_),
    }


def tables_from(arrays: Mapping[str, NDArray[Any]]) -> tuple[TableSpec, ...]:
    """The tables that `tables_to` wrote; none where there are none.

    Raises:
        InputError: some of the arrays are absent or do not fit together, or a table has no row, column or feature.
    """
    absent = [name for name in _TABLE_ARRAYS if name not in arrays]
    if len(absent) == len(_TABLE_ARRAYS):
        return ()
    if absent:
        raise InputError(f"array {absent[0]!r} is absent; tables need all of {', '.join(_TABLE_ARRAYS)}.")
    names, rows, dims, sizes, features = (arrays[name].tolist() for name in _TABLE_ARRAYS)
    if not len(names) == len(rows) == len(dims) == len(sizes) or sum(sizes) != len(features):
        raise InputError(
            f"the arrays of its tables do not fit together: {len(names)} names, {len(rows)} rows, {len(dims)} dims, "
            f"{len(sizes)} sizes with the sum {sum(sizes)}, {len(features)} features."
        )
    rest = iter(features)
    return tuple(
        TableSpec(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=dim,
            feature_names=tuple(next(rest) for _ in range(size)),
        )
        for name, num_rows, dim, size in zip(names, rows, dims, sizes, strict=True)
    )
