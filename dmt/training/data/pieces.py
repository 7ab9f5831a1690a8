"""`Piece`: a part of a file that is read and parsed in one go; the files of a pass are one sequence of pieces.

Where one piece ends and the next begins follows from the files alone, so that all ranks find the same pieces, and the
rows of a pass are those of its pieces, in order, whoever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dmt.errors import InputError
from dmt.training.data.schema import is_parquet, parquet_file
from dmt.training.data.storage import file_version
from dmt.training.data.textfile import is_gzip

__all__ = ["Piece", "pieces_of", "shuffled_pieces"]

PIECE_BYTES = 4 << 20
"""Bytes of a piece of text: some 17,000 of Criteo's rows."""
PIECE_ROWS = 1 << 15
"""Rows of a piece of Parquet, at least, where row groups are smaller; a larger one is a piece by itself."""
LONG_ROWS = 1 << 20
"""Rows of a piece of Parquet that is not read in one go any more."""


@dataclass(frozen=True)
class Piece:
    """Rows of a file: its row groups ``start`` to ``stop``, or its lines that begin at bytes ``start`` to ``stop``.

    Example:
        >>> print(Piece("day_0.tsv", 0, 4_194_304))
        day_0.tsv, from byte 0 to 4194304
    """

    file: str
    """Path of the file, as the user gave it."""
    start: int = 0
    """First row group or byte."""
    stop: int | None = None
    """End, exclusive; None: that of the file. That of a gzip file is its number of bytes."""
    first_row: int = 1
    """Number of the first row, counted from 1, in a Parquet file."""
    num_rows: int | None = None
    """Rows of Parquet; None: of text, which is not read to find out."""
    is_gzip: bool = False
    """True: it is a whole gzip file, which cannot be cut."""

    @property
    def is_long(self) -> bool:
        """True if it may take long to read, and much memory: gzip, or a row group of more than 2**20 rows."""
        return self.is_gzip or (self.num_rows or 0) > LONG_ROWS

    def __str__(self) -> str:
        """Returns the place, for messages."""
        unit = "byte" if self.num_rows is None else "row group"
        return f"{self.file}, from {unit} {self.start} to {'the end' if self.stop is None else self.stop}"


def pieces_of(files: Sequence[str]) -> list[Piece]:
    """Cuts files into pieces, in order: Parquet at row groups, text at bytes; a gzip file is one piece.

    Files are read as long as they are now, even if they grow.

    Raises:
        InputError: a file cannot be read.
    """
    pieces = []
    for file in files:
        try:
            pieces += _cut(file) or [Piece(file)]
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error
    return pieces


def _cut(file: str) -> list[Piece]:
    """Returns the pieces of a file; none if it is empty."""
    if is_parquet(file):
        metadata = parquet_file(file).metadata
        pieces, start, before, rows = [], 0, 0, 0
        for group in range(metadata.num_row_groups):
            rows += metadata.row_group(group).num_rows
            if rows >= PIECE_ROWS or group + 1 == metadata.num_row_groups:
                pieces.append(Piece(file, start, group + 1, first_row=before + 1, num_rows=rows))
                start, before, rows = group + 1, before + rows, 0
        return pieces
    size = file_version(file)[0]
    if is_gzip(file):
        return [Piece(file, 0, size, is_gzip=True)]
    return [Piece(file, *span) for span in pairwise([*range(0, size, PIECE_BYTES), size])] if size else []


def shuffled_pieces(pieces: Sequence[Piece], *, seed: Sequence[int]) -> list[Piece]:
    """Returns the pieces in a random order that depends on ``seed`` only.

    Example:
        >>> [piece.file for piece in shuffled_pieces([Piece("a"), Piece("b"), Piece("c")], seed=(0, 1))]
        ['b', 'c', 'a']
    """
    return [pieces[i] for i in np.random.default_rng([*seed, len(pieces)]).permutation(len(pieces))]
