"""`ParquetRows`: reads single row groups of a folder that ``dmt prepare`` wrote; `clicks` makes batches of them."""

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
    """The rows of one part of a prepared folder.

    Args:
        folder: the part.
        columns: those of its manifest.

    Raises:
        InputError: a file cannot be read, or lacks a column.
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
        """Rows of each row group, int64."""

    def read(self, number: int) -> pa.Table:
        """Reads a row group.

        Raises:
            InputError: it cannot be read, has changed since its footer was read, lacks a value, or has an id beyond its
                table.
        """
        file, footer, group = self._groups[number]
        # Memory maps are slower here where they are read for the first time.
        with _reading(file), pq.ParquetFile(file, metadata=footer) as source:
            if _version(file) != self._versions[file]:
                raise InputError(f"{file} has changed since it was opened. Restore it, or start a new run.")
            rows = source.read_row_group(group, columns=[*self._columns.schema.names, REQUEST], use_threads=False)
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if column.null_count or (pa.types.is_nested(column.type) and pc.list_flatten(column).null_count):
                raise InputError(f"{file}: column {name!r} has missing values. Write 0 for them, or an empty list.")
        for feature in self._columns.features:
            column = rows.column(feature.name)
            span = pc.min_max(pc.list_flatten(column) if feature.is_bag else column)
            if span["min"].is_valid and not 0 <= span["min"].as_py() <= span["max"].as_py() < feature.rows:
                raise InputError(
                    f"{file}: column {feature.name!r} has ids from {span['min']} to {span['max']}, some beyond its "
                    f"table of {feature.rows} rows. Prepare the data again."
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
        raise InputError(f"{file}: cannot be read as Parquet ({error}).") from error
