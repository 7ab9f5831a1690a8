"""`ParquetRows` reads single row groups of a prepared folder, for `dmt.training.data.clicks`, which makes batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import Columns
from dmt.training.data.files import REQUEST, REQUEST_FIELD

__all__ = ["ParquetRows", "Rows", "pack_rows"]

Rows = tuple[NDArray[np.signedinteger], pa.Table]
"""n prepared rows, see `pack_rows`: the columns with one value per row, int32 or int64 [columns, n], and the bags."""
_version = attrgetter("st_size", "st_mtime_ns")


class ParquetRows:
    """The rows of one part of a prepared folder, ``train`` or ``eval``. The constructor reads the footers.

    Args:
        files: files of the part in the manifest, in order; others in its folder are not read.
        columns: columns of the manifest.

    Raises:
        InputError: a file cannot be read or lacks a column of the manifest.
    """

    def __init__(self, files: Iterable[Path], columns: Columns) -> None:
        self._columns = columns
        self._groups: list[tuple[Path, tuple[int, int], pq.FileMetaData, int]] = []
        for file in files:
            with _reading(file):
                version, footer = _version(file.stat()), pq.read_metadata(file)
                names = set(footer.schema.to_arrow_schema().names)
            if absent := [name for name in columns.schema.names if name not in names]:
                raise InputError(f"{file}: column {absent[0]!r} is missing. Prepare the data again.")
            self._groups += [(file, version, footer, group) for group in range(footer.num_row_groups)]
        self.sizes = np.array([footer.row_group(group).num_rows for _, _, footer, group in self._groups], np.int64)
        """Number of rows of each row group, in file order, int64 [number of row groups]."""

    def read(self, number: int) -> pa.Table:
        """Reads row group ``number`` (index in `sizes`): the manifest's columns, cast to its types, and any `REQUEST`.

        Raises:
            InputError: the row group cannot be read, its file has changed since its footer was read, a value is missing
                or cannot be cast, a dense value is not finite, a label is not 0 or 1, or an id is outside its table.
        """
        file, version, footer, group = self._groups[number]
        # A memory map would be slower here when it is read for the first time.
        with _reading(file), pq.ParquetFile(file, metadata=footer, page_checksum_verification=True) as source:
            if _version(file.stat()) != version:
                raise InputError(f"{file} has changed since it was opened. Restore the file, or start a new run.")
            schema = self._columns.schema
            rows = source.read_row_group(group, columns=[*schema.names, REQUEST], use_threads=False).combine_chunks()
            for name, column in zip(rows.column_names, rows.columns, strict=True):
                if column.null_count or (pa.types.is_nested(column.type) and pc.list_flatten(column).null_count):
                    instead = "Leave out these rows" if name in (self._columns.label, REQUEST) else "Write 0 or []"
                    raise InputError(f"{file}: column {name!r} has missing values. {instead}.")
            if REQUEST in rows.column_names:
                schema = schema.append(REQUEST_FIELD)
            if not rows.schema.equals(schema):  # other programs may write other types
                rows = rows.select(schema.names).cast(schema)
        for name in self._columns.dense:
            values = np.from_dlpack(rows.column(name).chunk(0))
            if not (is_finite := np.isfinite(values)).all():
                at = int(is_finite.argmin())
                row = sum(footer.row_group(earlier).num_rows for earlier in range(group)) + at + 1
                raise InputError(f"{file}, row {row}: column {name!r} is {values[at]}. Write a finite float32, or 0.")
        limits = {} if self._columns.label is None else {self._columns.label: 2}
        limits |= {feature.name: feature.rows for feature in self._columns.features}
        for name, limit in limits.items():
            column = rows.column(name).chunk(0)
            ids = np.from_dlpack(column.flatten() if pa.types.is_nested(column.type) else column)
            if len(ids) and ids.view(f"u{ids.itemsize}").max() >= limit:  # without a sign, -1 is large
                raise InputError(
                    f"{file}: column {name!r} has values from {ids.min()} to {ids.max()}, outside 0 to {limit - 1}, "
                    f"the {'labels' if name == self._columns.label else 'rows of its table'}. Prepare the data again."
                )
        return rows


def pack_rows(table: pa.Table, columns: Columns, order: NDArray[np.int64] | None = None) -> Rows:
    """Packs n prepared rows for fast slicing and conversion, permuted by ``order``, int64 [n], unless it is None.

    Returns an array [columns, n] of the labels, the bits of the dense columns and the ids of features with one id per
    row, and a table of the bags.
    """
    single = {field.name: field.type for field in columns.schema if not pa.types.is_nested(field.type)}
    words = np.empty((len(single), table.num_rows), np.int64 if pa.int64() in single.values() else np.int32)
    for word, name in zip(words, single, strict=True):
        values = np.from_dlpack(table.column(name).combine_chunks())  # to_numpy would load pandas
        values = (values.view(np.int32) if values.dtype == np.float32 else values).astype(words.dtype, copy=False)
        # By default, np.take would fill a copy of ``out``.
        word[:] = values if order is None else np.take(values, order, out=word, mode="wrap")
    bags = table.select([feature.name for feature in columns.features if feature.is_bag])
    return words, bags if order is None or not bags.num_columns else bags.take(order)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as prepared rows ({error}). Prepare the data again.") from error
