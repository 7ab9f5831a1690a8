"""The arithmetic of a stream of blocks: cutting, choosing, shuffling, and which rows are a rank's own.

All of it depends on positions in the stream only, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmt.training.data.rows import Block, Rows

__all__ = ["SomeRows", "every_row", "limit", "own_rows", "shuffled", "spread_split"]

_PARTS = 1_000_000


@dataclass(frozen=True)
class SomeRows:
    """Some of the rows of a block, as a block.

    Example:
        >>> from dmt.training.data.rows import Rows
        >>> block = Rows(np.array([0, 1, 0], np.float32), np.zeros((3, 0), np.float32), ())
        >>> SomeRows(block, np.array([1, 2])).rows(np.array([0])).labels.tolist()
        [1.0]
    """

    block: Block
    index: NDArray[np.int64]
    """Positions in the block [n]."""

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return len(self.index)

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Decodes the rows at these positions."""
        return self.block.rows(self.index[index])


def every_row(block: Block) -> NDArray[np.int64]:
    """The positions of all rows of a block, in order.

    Example:
        >>> every_row(Rows(np.zeros(2, np.float32), np.zeros((2, 0), np.float32), ())).tolist()
        [0, 1]
    """
    return np.arange(block.num_rows)


def limit(blocks: Iterable[Block], most: int | None) -> Iterator[Block]:
    """The first ``most`` rows of a stream (None: all).

    Example:
        >>> block = Rows(np.zeros(4, np.float32), np.zeros((4, 0), np.float32), ())
        >>> [b.num_rows for b in limit([block, block], 6)]
        [4, 2]
    """
    left = most
    for block in blocks:
        if left is None or block.num_rows < left:
            yield block
            left = None if left is None else left - block.num_rows
        else:  # the last one: do not read on
            yield block if block.num_rows == left else SomeRows(block, np.arange(left))
            return


def spread_split(blocks: Iterable[Block], fraction: float, *, chosen: bool) -> Iterator[Block]:
    """Sets rows apart, evenly spread: row i of the stream when ``floor((i+1) * fraction) > floor(i * fraction)``.

    Args:
        blocks: the stream.
        fraction: share of rows set apart, to a millionth.
        chosen: whether to yield the rows set apart, or the others.

    Example:
        >>> block = Rows(np.arange(5, dtype=np.float32), np.zeros((5, 0), np.float32), ())
        >>> [b.rows(every_row(b)).labels.tolist() for b in spread_split([block], 0.4, chosen=True)]
        [[2.0, 4.0]]
    """
    parts = round(fraction * _PARTS)  # whole numbers: exact at any row number
    start = 0
    for block in blocks:
        row = np.arange(start, start + block.num_rows)
        apart = (row + 1) * parts // _PARTS > row * parts // _PARTS
        start += block.num_rows
        index = np.flatnonzero(apart == chosen)
        if len(index):
            yield SomeRows(block, index)


def shuffled(
    blocks: Iterable[Block], chunk_rows: int, *, seed: Sequence[int]
) -> Iterator[tuple[list[Block], NDArray[np.int64]]]:
    """Cuts a stream into chunks of ``chunk_rows`` rows (the last may be shorter), each with a random order.

    Args:
        blocks: the stream.
        chunk_rows: rows that are mixed with each other.
        seed: of the order, together with the chunk's number.

    Yields:
        The blocks of a chunk and the order: row ``order[i]`` of the blocks, counted through, comes i-th.

    Example:
        >>> block = Rows(np.zeros(3, np.float32), np.zeros((3, 0), np.float32), ())
        >>> [sorted(order.tolist()) for _, order in shuffled([block, block], 4, seed=(0, 0))]
        [[0, 1, 2, 3], [0, 1]]
    """
    chunk: list[Block] = []
    filled = number = 0
    for block in blocks:
        start = 0
        while start < block.num_rows:
            stop = min(block.num_rows, start + chunk_rows - filled)
            whole = start == 0 and stop == block.num_rows
            chunk.append(block if whole else SomeRows(block, np.arange(start, stop)))
            filled += stop - start
            start = stop
            if filled == chunk_rows:
                yield chunk, np.random.default_rng([*seed, number]).permutation(filled)
                chunk, filled, number = [], 0, number + 1
    if chunk:
        yield chunk, np.random.default_rng([*seed, number]).permutation(filled)


def own_rows(
    chunk: Sequence[Block], order: NDArray[np.int64], *, start: int, rank: int, world_size: int, batch_size: int
) -> list[Rows]:
    """Decodes a rank's own rows of a chunk: row g of the stream belongs to rank ``g // B mod W``.

    Args:
        chunk: blocks.
        order: row ``order[i]`` of the blocks, counted through, is row ``start + i`` of the stream.
        start: stream position of the chunk.
        rank: which rank.
        world_size: W.
        batch_size: B.

    Returns:
        The own rows in stream order; an empty list when there are none.

    Example:
        >>> block = Rows(np.arange(6, dtype=np.float32), np.zeros((6, 0), np.float32), ())
        >>> own_rows([block], np.arange(6), start=0, rank=1, world_size=2, batch_size=2)[0].labels.tolist()
        [2.0, 3.0]
    """
    position = np.arange(start, start + len(order))
    mine = order[(position // batch_size) % world_size == rank]
    if not len(mine):
        return []
    # Decode block by block in reading order (columns are encoded per block), then bring into stream order.
    reading = np.sort(mine)
    bounds = np.cumsum([0, *(block.num_rows for block in chunk)])
    cuts = np.searchsorted(reading, bounds)
    parts = [
        block.rows(reading[cuts[i] : cuts[i + 1]] - bounds[i]) for i, block in enumerate(chunk) if cuts[i] < cuts[i + 1]
    ]
    rows = Rows.concat(parts)
    if len(reading) > 1 and (np.diff(mine) < 0).any():
        rows = rows.rows(np.searchsorted(reading, mine))
    return [rows]
