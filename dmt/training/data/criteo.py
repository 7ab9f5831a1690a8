"""Criteo's click logs: label, 13 integers, 26 hexadecimal categories, tab-separated, empty = missing, no header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.training.data.encode import Encoder, FileBlock
from dmt.training.data.rows import BadRows, Place
from dmt.training.data.textfile import TextFormat, parse_block, text_blocks

__all__ = ["CRITEO_CATEGORICAL", "CRITEO_DENSE", "criteo_blocks"]

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
"""Criteo's integer columns."""
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
"""Criteo's categorical columns."""

_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_FORMAT = TextFormat(
    names=("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL),
    separator="\t",
    quotes=False,
    # Dictionaries: a value that occurs often in a block is checked and hashed once.
    types=dict.fromkeys(("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL), _DICTIONARY),
    expected="tab-separated: label, I1-I13, C1-C26",
)
_WHOLE = r"^-?[0-9]{1,18}$"
_RULES = {
    "label": (r"^[01]$", "0 or 1"),
    **dict.fromkeys(CRITEO_DENSE, (_WHOLE, "a whole number or nothing")),
    **dict.fromkeys(CRITEO_CATEGORICAL, (r"^[0-9a-fA-F]{1,16}$", "a hexadecimal number or nothing")),
}


def criteo_blocks(paths: Sequence[str], encoder: Encoder, bad: BadRows, *, quiet: bool = False) -> Iterator[FileBlock]:
    r"""Reads files in Criteo's format (plain or gzip), one after another, in constant memory.

    All 40 columns of every line are checked, whichever are used.

    Args:
        paths: the files.
        encoder: how to turn columns into model inputs; its columns are named I1-I13 and C1-C26.
        bad: takes malformed lines.
        quiet: no warning about left-out lines (every rank but the first).

    Yields:
        Blocks of well-formed rows with their line numbers.

    Raises:
        InputError: a file cannot be read, or a line is malformed and bad lines are not skipped: file, line number,
            what was expected, what was found.

    Example:
        >>> import tempfile
        >>> encoder = Encoder(dense=("I1",), num_embeddings={"C1": 100}, multi_hot=frozenset(), list_separator="|",
        ...                   id_mode="hash", signed_log1p=False)
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("1" + 13 * "\t7" + 26 * "\t0a")
        ...     file.flush()
        ...     blocks = criteo_blocks([file.name], encoder, BadRows(skip=False))
        ...     [block.rows(np.array([0])).dense.tolist() for block in blocks]
        [[[7.0]]]
    """
    used = (*encoder.dense, *encoder.num_embeddings)
    for path in paths:
        bad.start(path)
        for first_line, block in text_blocks(path):
            table, lines, faults = parse_block(block, _FORMAT)
            good = _check(table, lines, faults)
            bad.record(path, "line", {first_line + line: text for line, text in faults.items()})
            if not good.all():
                table, lines = table.filter(pa.array(good)), lines[good]
            if len(lines):
                place = Place(path, "line", first_line + lines)
                labels = _numbers(table.column("label")).astype(np.float32)
                yield FileBlock(_numeric(table.select(used), encoder.dense), labels, place, encoder)
        bad.finish(path, quiet=quiet)


def _check(table: pa.Table, lines: NDArray[np.int64], faults: dict[int, str]) -> NDArray[np.bool_]:
    """Adds the first fault of each line to ``faults``; returns which rows have none [n]."""
    good = np.ones(table.num_rows, dtype=bool)
    for name, (pattern, expected) in _RULES.items():
        column = table.column(name).combine_chunks()
        dictionary = column.dictionary
        fits = pc.match_substring_regex(dictionary, pattern).to_numpy(zero_copy_only=False)
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        # A missing value (code -1) reads the appended last entry.
        wrong = ~np.append(fits, name != "label")[codes]
        for row in np.flatnonzero(wrong & good):
            value = column[int(row)].as_py()
            found = "nothing" if value is None else repr(value if len(value) < 40 else value[:40] + "...")
            faults[int(lines[row])] = f"column {name}: expected {expected}, found {found}"
        good &= ~wrong
    return good


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A dictionary column of checked whole numbers as float64 [n], missing as NaN."""
    array = column.combine_chunks()
    # The dictionary still holds values of rows that were left out; no row reads them now.
    sound = pc.if_else(pc.match_substring_regex(array.dictionary, _WHOLE), array.dictionary, None)
    values = sound.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return np.append(values, np.nan)[array.indices.fill_null(-1).to_numpy(zero_copy_only=False)]


def _numeric(table: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        table = table.set_column(table.column_names.index(name), name, pa.array(_numbers(table.column(name))))
    return table
