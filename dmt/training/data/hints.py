"""Hints on columns that are used as something else than they look like."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from functools import cache
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from dmt.training.data.storage import open_binary
from dmt.training.data.textfile import text_blocks
from dmt.training.data.times import to_times

__all__ = ["point_out_uses"]

logger = logging.getLogger(__name__)

_LOOKED_AT = 50
# Not a blank: names of people and places have it.
_SEPARATORS = "|;,"


@cache
def point_out_uses(path: str, separator: str | None, columns: tuple[str, ...]) -> None:
    """Logs a hint, once in a process, for each categorical column whose text looks like lists of values, or like times.

    Args:
        path: a Parquet file, or a text file that begins with the names of its columns.
        separator: of the columns of a text file; None for Parquet.
        columns: categorical text columns that are used as single values.
    """
    values = _parquet_values(path, columns) if separator is None else _text_values(path, separator, columns)
    for name, texts in values.items():
        found = [text for text in texts if text]
        if 2 * (len(found) - to_times(pa.array(found, pa.string()))[0].null_count) > len(found):
            remedy = f"""data.timestamps='["{name}"]', and leave it out of data.categorical"""
            logger.warning(
                "%s: column %r looks like times (%r), but each is one value of it. For its hour and weekday: %s.",
                path,
                name,
                found[0],
                remedy,
            )
            continue
        lists = {mark: [text for text in found if _is_list(text, mark)] for mark in _SEPARATORS}
        mark, of_mark = max(lists.items(), key=lambda entry: len(entry[1]))
        if 4 * len(of_mark) > len(found):  # lists of one value look like any text
            remedy = f"""data.multi_hot='["{name}"]' data.list_separator='"{mark}"'"""
            if of_mark[0].startswith(("[", "(", "{")):
                remedy = "write lists into Parquet, or texts without brackets into any file"
            logger.warning(
                "%s: column %r looks like lists (%s), but each text is one value of it. For the values themselves: %s.",
                path,
                name,
                ", ".join(repr(text[:40]) for text in of_mark[:2]),
                remedy,
            )


def _is_list(text: str, mark: str) -> bool:
    """Tells whether a text has two parts at least, none of them empty or with a blank beside the mark."""
    parts = text.strip("[](){}").split(mark)
    return len(parts) > 1 and all(part and part == part.strip() for part in parts)


def _text_values(path: str, separator: str, columns: Sequence[str]) -> dict[str, list[str]]:
    block = next((block for _, block in text_blocks(path, block_bytes=1 << 16)), b"")
    # The last line may be cut; what is wrong with a line, the reader tells.
    lines = block.decode(errors="replace").split("\n")[: _LOOKED_AT + 1]
    try:
        rows = list(csv.DictReader(lines, delimiter=separator))
    except csv.Error:
        return {}
    return {name: [row.get(name) or "" for row in rows] for name in columns}


def _parquet_values(path: str, columns: Sequence[str]) -> dict[str, list[str]]:
    try:
        with open_binary(path) as stream:
            file = pq.ParquetFile(stream)
            batch = next(islice(file.iter_batches(batch_size=_LOOKED_AT, columns=list(columns)), 1), None)
        return {} if batch is None else {name: [v or "" for v in batch.column(name).to_pylist()] for name in columns}
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return {}
