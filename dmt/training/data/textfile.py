"""Text files, plain or gzip, as blocks of whole lines with exact line numbers, and blocks as Arrow columns.

Arrow's streaming CSV reader is not used: after rows that it leaves out, its row numbers start again or are unknown, and
it reports text that is not UTF-8 without its place.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.storage import open_binary

__all__ = ["TextFormat", "is_gzip", "lines_before", "parse_block", "text_blocks"]

_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Format of a line, which is cut into columns."""

    names: tuple[str, ...]
    """All columns of a line, in order."""
    separator: str
    """Character between columns."""
    quotes: bool
    """True: ``"`` quotes a column; otherwise it is a character like any other."""
    types: dict[str, pa.DataType]
    """The columns to keep, with the type to read them as (text or dictionary of text)."""
    expected: str
    """Description of a good line, for messages."""


# By file: line ends before some of its bytes. Pieces may be asked for in any order.
_COUNTED: dict[str, dict[int, int]] = {}


def is_gzip(path: str) -> bool:
    """Tells from a file's first bytes whether it is gzip; a file named so that is not is read, and refused, later."""
    with open_binary(path) as file:
        return file.read(2) == b"\x1f\x8b" or path.endswith(".gz")


def lines_before(path: str, start: int) -> int:
    """Counts the lines of a plain text file that begin before a byte, and reads the file up to there to do so."""
    counted = _COUNTED.setdefault(path, {0: 0})
    place = max(byte for byte in counted if byte <= start)
    ends = counted[place]
    with open_binary(path) as file:
        file.seek(place)
        while place < start and (text := file.read(min(_BLOCK_BYTES, start - place))):
            place, ends = place + len(text), ends + text.count(b"\n")
            counted[place] = ends
        # The line that a byte in its middle cuts begins before it.
        file.seek(max(place - 1, 0))
        return ends + (place > 0 and file.read(1) != b"\n")


def text_blocks(
    path: str, *, start: int = 0, stop: int | None = None, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[int, bytes]]:
    r"""Reads a file, or its lines that begin at bytes ``start`` to ``stop``, in blocks of whole lines.

    Memory is constant.

    Gzip is recognised by its first bytes. Line ends become ``\n``, a last line without one gets it, a byte order
    mark is dropped, and a carriage return inside a line becomes a space.

    Yields:
        The number of the block's first line, counted from 1 at ``start``, and the block, of about ``block_bytes``.

    Raises:
        InputError: the file cannot be read, is a broken or cut-off gzip, or has a line of more than 16 MiB.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"a\r\nb")
        ...     file.flush()
        ...     list(text_blocks(file.name))
        [(1, b'a\n'), (2, b'b\n')]
    """
    line = 1
    rest: list[bytes] = []
    try:
        for piece in _parts(path, block_bytes, start, stop):
            cut = piece.rfind(b"\n") + 1
            if not cut:
                rest.append(piece)
                if sum(map(len, rest)) > _MAX_LINE_BYTES:
                    at = lines_before(path, start) + line
                    raise InputError(f"{path}, line {at}: longer than 16 MiB. Is this text with one row a line?")
                continue
            block = _clean(b"".join([*rest, piece[:cut]]), first=line == 1 and start == 0)
            rest = [piece[cut:]]
            yield line, block
            line += _num_lines(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}, line {line} or soon after: the gzip file is cut off or damaged ({error}). Fetch it again."
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error
    tail = _clean(b"".join(rest), first=line == 1 and start == 0)
    if tail:
        yield line, tail + b"\n"


def parse_block(block: bytes, form: TextFormat) -> tuple[pa.Table, NDArray[np.int64], dict[int, str]]:
    r"""Cuts a block's lines into columns of text; an empty column is missing.

    Returns:
        The kept columns of the well-formed lines (an empty line is one with every column missing); the 0-based number
        of each of these lines in the block, int64 [n]; and the fault of every other line, by its number.

    Example:
        >>> form = TextFormat(names=("a", "b"), separator=",", quotes=False, types={"b": pa.string()}, expected="a,b")
        >>> table, lines, faults = parse_block(b"1,2\n3\n4,\n", form)
        >>> table.to_pydict(), lines.tolist(), faults
        ({'b': ['2', None]}, [0, 2], {1: 'expected 2 columns (a,b), found 1'})
    """
    unreadable = _unreadable_lines(block, quotes=form.quotes)
    if unreadable:  # Arrow would refuse the block, or lose its line count: blank these lines, drop their rows below.
        block = b"\n".join(b"" if i in unreadable else text for i, text in enumerate(block.split(b"\n")))
    cut_wrong: dict[int, str] = {}

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        found = f"expected {row.expected_columns} columns ({form.expected}), found {row.actual_columns}"
        cut_wrong[row.number - 1] = found
        return "skip"

    table = pa.csv.read_csv(
        pa.py_buffer(block),
        # One Arrow block: only then are row numbers those of the lines. Threads would lose them.
        read_options=pa.csv.ReadOptions(use_threads=False, column_names=list(form.names), block_size=len(block) + 1),
        parse_options=pa.csv.ParseOptions(
            delimiter=form.separator,
            quote_char='"' if form.quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=on_invalid,
        ),
        convert_options=pa.csv.ConvertOptions(
            column_types=form.types,
            include_columns=list(form.types),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    present = np.ones(_num_lines(block), dtype=bool)
    present[list(cut_wrong)] = False
    lines = np.flatnonzero(present)
    assert len(lines) == table.num_rows, f"{len(lines)} lines gave {table.num_rows} rows"
    if unreadable:
        readable = ~np.isin(lines, list(unreadable))
        table, lines = table.filter(pa.array(readable)), lines[readable]
    # A one-column format takes a blanked line as a row, any other may call it cut wrong: the first reason is kept.
    return table, lines, {**cut_wrong, **unreadable}


def _parts(path: str, size: int, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields the decompressed file in parts, or the lines that begin at bytes ``start`` to ``stop`` of a plain one."""
    with open_binary(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not packed and path.endswith(".gz") and raw.read(1):
            raise InputError(f"{path}: not a gzip file, in spite of its name. Rename it or compress it.")
        if packed or (start == 0 and stop is None):
            with gzip.open(raw) if packed else raw as file:
                while piece := file.read(size):
                    yield piece
            return
        raw.seek(max(start - 1, 0))
        while start and (before := raw.readline(size)) and not before.endswith(b"\n"):
            continue  # the end of a line that began in the piece before
        piece = b"\n"
        while (left := (2**62 if stop is None else stop) - raw.tell()) > 0 and (piece := raw.read(min(size, left))):
            if left <= size and not piece.endswith(b"\n"):
                piece += raw.readline(size)  # not a block by itself, which would cost as much as a hundred lines
            yield piece
        while left <= 0 and not piece.endswith(b"\n") and (piece := raw.readline(size)):
            yield piece


def _num_lines(block: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))  # bytes.count takes four times as long


def _clean(text: bytes, *, first: bool) -> bytes:
    if first:
        text = text.removeprefix(b"\xef\xbb\xbf")
    if b"\r" in text:
        # Arrow takes a lone carriage return for a line end, which would break the line count.
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b" ")
    return text


def _unreadable_lines(block: bytes, *, quotes: bool) -> dict[int, str]:
    """Returns the faults of lines that are not UTF-8 or leave a quote open, by 0-based line number."""
    faults: dict[int, str] = {}
    try:
        block.decode()
    except UnicodeDecodeError:
        for i, text in enumerate(block.split(b"\n")):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                faults[i] = (
                    f"expected text in UTF-8, found byte 0x{text[error.start]:02x} at position {error.start + 1}"
                )
    # An even count in the block can hide two open quotes, so every line is checked if the block has any quote.
    if quotes and b'"' in block:
        for i, text in enumerate(block.split(b"\n")):
            if text.count(b'"') % 2:
                faults[i] = 'expected quotes in pairs, found an open quote (") (a line end inside quotes is not read)'
    return faults
