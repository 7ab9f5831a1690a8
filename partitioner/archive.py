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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import replacing
from dmt.tables import TableSpec, feature_names

__all__ = ["FORMAT_VERSION", "read_arrays", "tables_from", "tables_to", "write_arrays"]

FORMAT_VERSION = 1
"""Of the files written here, and the only one read."""

# For every array its number of dimensions, the kinds of its dtype, and both in words. The matrix is checked elsewhere.
_FORMS = {
    "format": (0, "iu", "one whole number"),
    "features": (1, "U", "text of shape [F]"),
    "num_samples": (0, "iu", "one whole number"),
    "pooling_factors": (1, "iuf", "numbers of shape [F]"),
    "table_names": (1, "U", "text of shape [K]"),
    "table_rows": (1, "iu", "whole numbers of shape [K]"),
    "table_dims": (1, "iu", "whole numbers of shape [K]"),
    "table_sizes": (1, "iu", "whole numbers of shape [K]"),
    "table_features": (1, "U", "text of shape [F]"),
}
_TABLE_ARRAYS = ("table_names", "table_rows", "table_dims", "table_sizes", "table_features")


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes the arrays with the format version; an existing file is replaced in one step.

    Raises:
        InputError: the file cannot be written; nothing of it is left behind, and an existing file stays as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_arrays(f"{folder}/a.npz", {"matrix": np.eye(1), "features": np.array(["a"])})
        ...     sorted(read_arrays(f"{folder}/a.npz"))
        ['features', 'format', 'matrix']
    """
    contents: dict[str, Any] = {"format": np.int64(FORMAT_VERSION), **arrays}
    try:
        # Through a file object: given a name, numpy would append ".npz" to it. Uncompressed: the last digits of a mean
        # are noise, and packing 128 MB of them takes seconds and saves next to nothing.
        with replacing(Path(path)) as scratch, scratch.open("wb") as file:
            np.savez(file, **contents)
    except (OSError, ValueError) as error:  # ValueError: a path that is no file name, such as "."
        raise InputError(
            f"Affinity file {path}: cannot be written ({error}). Give another path or free space."
        ) from error


def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Reads the arrays of a file that has ``matrix`` and ``features`` at least; unpickles nothing.

    Raises:
        InputError: the file is absent, damaged, not such a file, or of another format version, or an array has another
            shape or dtype than the table above says.
    """
    where = f"Affinity file {path}"
    try:
        # Opened here, because numpy leaves a broken archive open.
        with Path(path).open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            # A plain .npy array comes back without names.
            arrays = {name: archive[name] for name in getattr(archive, "files", ())}
    except Exception as error:  # What a damaged archive makes numpy, zipfile and zlib raise has no common class.
        # Numpy's advice on what is no archive at all is to allow pickles: untrue and unsafe here.
        reason = "it holds no plain arrays" if "pickle" in str(error) else error
        raise InputError(f"{where}: cannot be read ({reason}). Expected what FeatureAffinity.save wrote.") from error
    for name, (num_dims, kinds, words) in _FORMS.items():
        if name in arrays and (arrays[name].ndim != num_dims or arrays[name].dtype.kind not in kinds):
            found = f"{arrays[name].dtype} of shape {list(arrays[name].shape)}"
            raise InputError(f"{where}: array {name!r} is {found}; it must be {words}. Write it so, or collect anew.")
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
    if sizes and min(sizes) < 1:
        raise InputError(f"table {names[sizes.index(min(sizes))]!r} has {min(sizes)} features; it needs one at least.")
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
