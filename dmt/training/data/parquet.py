"""`ParquetRows` reads single row groups of a prepared folder, for `dmt.training.data.clicks`, which makes batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dmt.errors import InputError
from dmt.training.data.columns import Columns
from dmt.training.data.files import REQUEST

__all__ = ["ParquetRows"]


class ParquetRows:
    """The rows of one part of a prepared folder, ``train`` or ``eval``. The constructor reads the footers.

    Args:
        folder: folder of the part.
        columns: columns of the manifest.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """

    def __init__(self, folder: Path, columns: Columns) -> None:
        self._columns = columns
        self._groups: list[tuple[Path, pq.FileMetaData, int]] = []
        self._versions = dict[Path, tuple[int, int]]()
        for file in sorted(folder.glob("*.parquet")):
            with _reading(file):
                self._versions[file] = _version(file)
                footer = pq.read_metadata(file)
                names = footer.schema.to_arrow_schema().names
            if absent := [name for name in columns.schema.names if name not in names]:
                raise InputError(f"{file}: column {absent[0]!r} is missing. Prepare the data again.")
            self._groups += [(file, footer, group) for group in range(footer.num_row_groups)]
        sizes = [footer.row_group(group).num_rows for _, footer, group in self._groups]
        self.sizes = np.array(sizes, dtype=np.int64)
        """Number of rows of each row group, in file order, int64 [number of row groups]."""

    def read(self, number: int) -> pa.Table:
        """Reads row group ``number``: the columns of the manifest, and `REQUEST` if the folder has it.

        Raises:
            InputError: the row group cannot be read, its file has changed since the footer was read, a value is missing
                or of another type, a dense value is not finite, a label is not 0 or 1, or an id is outside its table.
        """
        file, footer, group = self._groups[number]
        # A memory map would be slower here when it is read for the first time.
        with _reading(file), pq.ParquetFile(file, metadata=footer) as source:
            if _version(file) != self._versions[file]:
                raise InputError(f"{file} has changed since it was opened. Restore the file, or start a new run.")
            schema = self._columns.schema
            rows = source.read_row_group(group, columns=[*schema.names, REQUEST], use_threads=False)
            if REQUEST in rows.column_names:
                schema = schema.append(pa.field(REQUEST, pa.int64()))
            rows = rows.select(schema.names).cast(schema)  # other programs may write other types
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if column.null_count or (pa.types.is_nested(column.type) and pc.list_flatten(column).null_count):
                raise InputError(f"{file}: column {name!r} has missing values. Write 0 or an empty list instead.")
        for name in self._columns.dense:
            values = rows.column(name).to_numpy()
            if not (is_finite := np.isfinite(values)).all():
                at = int(is_finite.argmin())
                row = sum(footer.row_group(earlier).num_rows for earlier in range(group)) + at + 1
                raise InputError(f"{file}, row {row}: column {name!r} is {values[at]}. Write a finite float32, or 0.")
        limits = {} if self._columns.label is None else {self._columns.label: 2}
        limits |= {feature.name: feature.rows for feature in self._columns.features}
        for name, limit in limits.items():
            column = rows.column(name)
            span = pc.min_max(pc.list_flatten(column) if pa.types.is_nested(column.type) else column)
            if span["min"].is_valid and not 0 <= span["min"].as_py() <= span["max"].as_py() < limit:
                raise InputError(
                    f"{file}: column {name!r} has values from {span['min']} to {span['max']}, expected 0 to "
                    f"{limit - 1} (labels, or rows of its table). Prepare the data again."
                )
        return rows


def _version(file: Path) -> tuple[int, int]:
    entry = file.stat()
    return entry.st_size, entry.st_mtime_ns


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as prepared rows ({error}). Prepare the data again.") from error
