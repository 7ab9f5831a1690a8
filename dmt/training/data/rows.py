"""`Rows`: decoded rows as numpy arrays, between a reader and a batch; and streams of blocks of rows.

A stream is cut, split, shuffled and shared among ranks by positions in it only, so every rank finds the same without
communication.

Legend: n rows, D dense features, F categorical features, W ranks, B rows of a rank's batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Bags",
    "Block",
    "Rows",
    "SelectedRows",
    "cut",
    "every_row",
    "shuffled",
    "spread_split",
]

_PARTS = 1_000_000


@dataclass(frozen=True)
class Bags:
    """The ids of one feature in n rows.

    Example:
        >>> bags = Bags(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
        >>> bags.take(np.array([2, 0])).values.tolist(), bags.take(np.array([1, 0])).offsets.tolist()
        ([9, 7, 8], [0, 0, 2])
    """

    values: NDArray[np.int64]
    """Ids, row after row; int64, rows of the feature's table."""
    offsets: NDArray[np.int64] | None = None
    """Row i has ``values[offsets[i]:offsets[i + 1]]`` (n + 1 entries); None: exactly one id in each row."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids in each row, int64 [n]."""
        return np.ones(len(self.values), dtype=np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, order: NDArray[np.int64]) -> Bags:
        """Returns the rows at these positions, in their order."""
        if self.offsets is None:
            return Bags(self.values[order])
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Position of every kept id: where its bag starts in the source, plus its place within the bag.
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[order] - offsets[:-1], lengths)
        return Bags(self.values[places], offsets)


@dataclass(frozen=True)
class Rows:
    """Decoded rows."""

    labels: NDArray[np.float32]
    """0 or 1, float32 [n]."""
    dense: NDArray[np.float32]
    """Transformed dense features, float32 [n, D]."""
    bags: tuple[Bags, ...]
    """One entry for each of the F features."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Returns the rows at these positions, in their order."""
        return Rows(self.labels[index], self.dense[index], tuple(bags.take(index) for bags in self.bags))


class Block(Protocol):
    """Consecutive rows of a source that are decoded only when asked for."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the block."""

    @property
    def requests(self) -> NDArray[np.int64]:
        """Number of the request that each row belongs to (``data.group_by``), int64 [n]."""

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Decodes the rows at these positions (int64, 0-based), in their order."""


@dataclass(frozen=True)
class SelectedRows:
    """A block of the selected rows of another block."""

    block: Block
    index: NDArray[np.int64]
    """Positions in the block [n]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.index)

    @property
    def requests(self) -> NDArray[np.int64]:
        """Number of each row's request [n]."""
        return self.block.requests[self.index]

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Decodes the rows at these positions."""
        return self.block.rows(self.index[index])


def every_row(block: Block) -> NDArray[np.int64]:
    """Returns the positions of all rows of a block, in order."""
    return np.arange(block.num_rows)


def cut(blocks: Iterable[Block], start: int, stop: int | None) -> Iterator[Block]:
    """Yields rows ``start`` to ``stop`` of a stream (None: to its end), and reads no further.

    Example:
        >>> block = Rows(np.zeros(4, np.float32), np.zeros((4, 0), np.float32), ())
        >>> [b.num_rows for b in cut([block, block, block], 5, 9)]
        [3, 1]
    """
    at = 0
    for block in blocks:
        first = max(start - at, 0)
        last = block.num_rows if stop is None else min(stop - at, block.num_rows)
        if first < last:
            yield block if last - first == block.num_rows else SelectedRows(block, np.arange(first, last))
        at += block.num_rows
        if stop is not None and at >= stop:
            return


def spread_split(
    blocks: Iterable[Block], fraction: float, *, chosen: bool, by_request: bool = False, start: int = 0
) -> Iterator[Block]:
    """Sets rows apart, evenly spread: row i of the stream when ``floor((i+1) * fraction) > floor(i * fraction)``.

    Yields the rows set apart if ``chosen``, otherwise the others; ``fraction`` counts to a millionth. With
    ``by_request``, whole requests are set apart, by their number. The first row of ``blocks`` is row ``start``.

    Example:
        >>> block = Rows(np.arange(5, dtype=np.float32), np.zeros((5, 0), np.float32), ())
        >>> [b.rows(every_row(b)).labels.tolist() for b in spread_split([block], 0.4, chosen=True)]
        [[2.0, 4.0]]
    """
    parts = round(fraction * _PARTS)  # whole numbers: exact at any row number
    for block in blocks:
        row = np.arange(start, start + block.num_rows)
        even = (row + 1) * parts // _PARTS > row * parts // _PARTS
        apart = block.requests % _PARTS < parts if by_request else even
        start += block.num_rows
        index = np.flatnonzero(apart == chosen)
        if len(index):
            yield SelectedRows(block, index)


def shuffled(
    blocks: Iterable[Block], chunk_rows: int, *, seed: Sequence[int], by_request: bool = False, number: int = 0
) -> Iterator[tuple[list[Block], NDArray[np.int64]]]:
    """Cuts a stream into chunks of ``chunk_rows`` rows (the last may be shorter), each with a random order.

    Yields:
        The blocks of a chunk and the order: row ``order[i]``, counted over all its blocks, comes i-th. It depends on
        ``seed`` and the chunk's number, ``number`` for the first; with ``by_request`` also on the rows' requests, which
        stay in one piece.

    Example:
        >>> block = Rows(np.zeros(3, np.float32), np.zeros((3, 0), np.float32), ())
        >>> [sorted(order.tolist()) for _, order in shuffled([block, block], 4, seed=(0, 0))]
        [[0, 1, 2, 3], [0, 1]]
    """
    chunk: list[Block] = []
    filled = 0
    for block in blocks:
        start = 0
        while start < block.num_rows:
            stop = min(block.num_rows, start + chunk_rows - filled)
            whole = start == 0 and stop == block.num_rows
            chunk.append(block if whole else SelectedRows(block, np.arange(start, stop)))
            filled += stop - start
            start = stop
            if filled == chunk_rows:
                yield chunk, _random_order(chunk, [*seed, number], by_request)
                chunk, filled, number = [], 0, number + 1
    if chunk:
        yield chunk, _random_order(chunk, [*seed, number], by_request)


def _random_order(chunk: Sequence[Block], seed: Sequence[int], by_request: bool) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    if not by_request:
        return random.permutation(sum(block.num_rows for block in chunk))
    found, request = np.unique(np.concatenate([block.requests for block in chunk]), return_inverse=True)
    return np.argsort(random.permutation(len(found))[request], kind="stable")
