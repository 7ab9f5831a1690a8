"""`Piece`: a part of a file that is read and parsed in one go; the files of a pass are one sequence of pieces.

Where one piece ends and the next begins follows from the files alone, so that all ranks find the same pieces, and the
rows of a pass are those of its pieces, in order, whoever reads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dmt.errors import InputError
from dmt.training.data.schema import is_parquet, parquet_file
from dmt.training.data.textfile import is_gzip

__all__ = ["Piece", "pieces_of", "shuffled_pieces"]

PIECE_BYTES = 4 << 20
"""Bytes of a piece of text: some 17,000 of Criteo's rows."""
PIECE_ROWS = 1 << 15
"""Rows of a piece of Parquet, at least, where row groups are smaller; a larger one is a piece by itself."""


@dataclass(frozen=True)
class Piece:
    """Rows of a file: its row groups ``start`` to ``stop``, or its lines that begin at bytes ``start`` to ``stop``.

    Example:
        >>> Piece("day_0.tsv", 0, 4_194_304)
        Piece(file='day_0.tsv', start=0, stop=4194304)
    """

    file: str
    """Path of the file, as the user gave it."""
    start: int = 0
    """First row group or byte."""
    stop: int | None = None
    """End, exclusive; None: that of the file."""


def pieces_of(files: Sequence[str]) -> list[Piece]:
    """Cuts files into pieces, in order: Parquet at row groups, text at bytes; a gzip file is one piece.

    Files are read as long as they are now, even if they grow.

    Raises:
        InputError: a file cannot be read.
    """
    pieces = []
    for file in files:
        try:
            cuts = _cuts(file)
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error
        pieces += [Piece(file, *span) for span in pairwise(cuts)] if cuts else [Piece(file)]
    return pieces


def _cuts(file: str) -> list[int]:
    """Returns the bounds of a file's pieces; none if it cannot be cut or is empty."""
    if is_parquet(file):
        metadata = parquet_file(file).metadata
        cuts, rows = [0], 0
        for group in range(metadata.num_row_groups):
            rows += metadata.row_group(group).num_rows
            if rows >= PIECE_ROWS:
                cuts, rows = [*cuts, group + 1], 0
        return list(dict.fromkeys([*cuts, metadata.num_row_groups])) if metadata.num_row_groups else []
    if is_gzip(file):
        return []
    size = os.path.getsize(file)
    return [*range(0, size, PIECE_BYTES), size] if size else []


def shuffled_pieces(pieces: Sequence[Piece], *, seed: Sequence[int]) -> list[Piece]:
    """Returns the pieces in a random order that depends on ``seed`` only.

    Example:
        >>> [piece.file for piece in shuffled_pieces([Piece("a"), Piece("b"), Piece("c")], seed=(0, 1))]
        ['b', 'c', 'a']
    """
    return [pieces[i] for i in np.random.default_rng([*seed, len(pieces)]).permutation(len(pieces))]
