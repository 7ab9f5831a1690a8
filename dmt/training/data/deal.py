"""`Deal`: which rows of an epoch each rank trains on, as arithmetic on the numbers of rows of row groups; `Rows`.

The rows of an epoch are dealt to V lanes, V being the ranks of the first run. Row i of the epoch is row i // V of lane
i % V; a global batch is the next G rows, lane after lane, cut into W equal parts, one for each rank. So the order
depends on V and not on W: where W divides V, a rank has V / W whole lanes, and the global batches of G = V * b rows are
the same for each such W. A position is the number of rows used.

Legend: N rows of an epoch, V lanes, W ranks, G rows of a global batch; n rows, D dense columns, S features with one id.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bags", "Deal", "LaneRows", "Piece", "Rows", "rank_batch"]

logger = logging.getLogger(__name__)


Bags = tuple[NDArray[Any], NDArray[np.int64]]
"""Ids of a feature, row after row, and the n + 1 offsets: row i has ``values[offsets[i]:offsets[i + 1]]``."""


@dataclass(frozen=True)
class Rows:
    """Rows as arrays, column by column.

    Example:
        >>> bags = np.array([7, 8, 9]), np.array([0, 2, 2, 3])
        >>> rows = Rows(np.ones(3), np.zeros((0, 3)), np.zeros((0, 3)), (bags,))
        >>> values, offsets = rows.take(np.array([2, 0])).bags[0]
        >>> values.tolist(), offsets.tolist()
        ([9, 7, 8], [0, 1, 3])
    """

    labels: NDArray[np.float32]
    """0 or 1, float32 [n]."""
    dense: NDArray[np.float32]
    """Transformed dense columns, float32 [D, n]."""
    ids: NDArray[Any]
    """Ids of the features with one id in each row, int32 or int64 [S, n]."""
    bags: tuple[Bags, ...] = ()
    """Ids of the other features."""
    requests: NDArray[np.int64] | None = None
    """Key of each row's request (``data.group_by``) [n]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Returns the rows at these positions, in their order."""
        requests = None if self.requests is None else self.requests[index]
        bags = tuple(_taken(bag, index) for bag in self.bags)
        return Rows(self.labels[index], _gathered(self.dense, index), _gathered(self.ids, index), bags, requests)

    def slice(self, start: int, stop: int) -> Rows:
        """Returns rows ``start`` to ``stop``, without a copy."""
        requests = None if self.requests is None else self.requests[start:stop]
        ends = [offsets[start : stop + 1] for _, offsets in self.bags]
        bags = tuple((bag[0][end[0] : end[-1]], end - end[0]) for bag, end in zip(self.bags, ends, strict=True))
        return Rows(self.labels[start:stop], self.dense[:, start:stop], self.ids[:, start:stop], bags, requests)

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Joins rows of the same columns, at least one part."""
        if len(parts) == 1:
            return parts[0]
        requests = [part.requests for part in parts if part.requests is not None]
        bags = []
        for same in zip(*(part.bags for part in parts), strict=True):
            lengths = np.concatenate([np.diff(offsets) for _, offsets in same])
            bags.append((np.concatenate([values for values, _ in same]), np.concatenate([[0], np.cumsum(lengths)])))
        return Rows(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts], axis=1),
            np.concatenate([part.ids for part in parts], axis=1),
            tuple(bags),
            np.concatenate(requests) if requests else None,
        )


def _taken(bag: Bags, index: NDArray[np.int64]) -> Bags:
    """Returns the bags at these positions, in their order."""
    values, starts = bag
    lengths = np.diff(starts)[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Position of every kept id: where its bag starts in the source, plus its place within the bag.
    places = np.arange(offsets[-1]) + np.repeat(starts[index] - offsets[:-1], lengths)
    return values[places], offsets


def _gathered(columns: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
    """Returns columns [k, n] at these positions [m], as [k, m]; column by column, each of which fits a cache."""
    found = np.empty((len(columns), len(index)), columns.dtype)
    for column, into in zip(columns, found, strict=True):
        np.take(column, index, out=into, mode="clip")  # which needs no buffer; positions come from a permutation
    return found


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a row group."""

    group: int
    start: int
    stop: int


class LaneRows(NamedTuple):
    """Rows ``start`` to ``stop`` of a lane."""

    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class Deal:
    """The rows of an epoch in lanes.

    Without a ``seed``, row groups come in the order of the files, V of them at a time, so that all lanes are at the
    same time of the log. With one, the groups of the whole epoch come in an order of its own, and each lane has a V-th
    of them.

    Example:
        >>> deal = Deal(np.array([4, 4, 3]), lanes=2)
        >>> deal.pieces(LaneRows(1, 0, 4)), deal.pieces(LaneRows(0, 4, 6))
        ([Piece(group=1, start=0, stop=4)], [Piece(group=2, start=0, stop=2)])
        >>> deal.of_rank(0, 8, rank=0, world_size=1)
        [LaneRows(lane=0, start=0, stop=4), LaneRows(lane=1, start=0, stop=4)]
    """

    sizes: NDArray[np.int64]
    """Rows of each group, in the order of the files."""
    lanes: int
    """V."""
    seed: tuple[int, ...] | None = None
    """Of the order of groups."""

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.sizes.sum())

    def of_rank(self, start: int, stop: int, *, rank: int, world_size: int) -> list[LaneRows]:
        """Returns a rank's part of the rows ``start`` to ``stop`` of the epoch; the last ranks may have a row less."""
        lanes = np.arange(self.lanes)
        first, last = _in_lanes(start, lanes, self.lanes), _in_lanes(stop, lanes, self.lanes)
        ends = np.cumsum(last - first)
        per_rank = -(-(stop - start) // world_size)
        low, high = rank * per_rank, min((rank + 1) * per_rank, stop - start)
        parts = []
        for lane in range(int(np.searchsorted(ends, low, side="right")), self.lanes):
            before = int(ends[lane] - (last - first)[lane])
            if before >= high:
                break
            begin, end = max(low - before, 0), min(high, int(ends[lane])) - before
            if begin < end:
                parts.append(LaneRows(lane, int(first[lane]) + begin, int(first[lane]) + end))
        return parts

    def pieces(self, rows: LaneRows) -> list[Piece]:
        """Returns where rows of a lane are, in their order."""
        order, ends, bounds = self._order
        in_lane = _in_lanes(bounds, rows.lane, self.lanes)  # rows of the lane before each block of groups
        found, at = [], rows.start
        while at < rows.stop:
            block = int(np.searchsorted(in_lane, at, side="right")) - 1
            stop = min(rows.stop, int(in_lane[block + 1]))
            # Within its block, a lane has the rows after those of the lanes before it.
            before = _before_lane(bounds, rows.lane, self.lanes)
            place = int(bounds[block] + before[block + 1] - before[block]) + at - int(in_lane[block])
            left = stop - at
            while left:
                slot = int(np.searchsorted(ends, place, side="right"))
                group = int(order[slot])
                within = place - int(ends[slot] - self.sizes[group])
                number = min(left, int(self.sizes[group]) - within)
                found.append(Piece(group, within, within + number))
                place, left = place + number, left - number
            at = stop
        return found

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The groups in order, the row of the epoch at which each ends, and the rows at which blocks of them begin."""
        order = np.arange(len(self.sizes))
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(len(self.sizes))
        ends = np.cumsum(self.sizes[order])
        blocks = ends[self.lanes - 1 :: self.lanes] if self.seed is None else ends[:0]
        return order, ends, np.unique(np.concatenate([[0], blocks, ends[-1:]]))


@cache  # which warns once
def rank_batch(lanes: int, world_size: int, batch_size: int) -> int:
    """Returns the rows of a rank's batch: ``batch_size`` of each of its lanes where the ranks divide the lanes.

    Otherwise ``batch_size``, with a warning: the global batch is another one than in the run that has begun.

    Example:
        >>> rank_batch(8, 2, 512), rank_batch(4, 4, 512)
        (2048, 512)
    """
    if lanes % world_size == 0:
        return lanes // world_size * batch_size
    logger.warning(
        "The run began on %d ranks, which %d do not divide: the global batch is now %d rows instead of %d. The rows "
        "that are left of this epoch are used once.",
        *(lanes, world_size, world_size * batch_size, lanes * batch_size),
    )
    return batch_size


def _in_lanes(rows: int | NDArray[np.int64], lane: int | NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Counts the rows of a lane among the first ``rows`` of the epoch."""
    return np.asarray((rows + lanes - 1 - lane) // lanes)


def _before_lane(rows: NDArray[np.int64], lane: int, lanes: int) -> NDArray[np.int64]:
    """Counts the rows of all lanes before this one among the first ``rows`` of the epoch."""
    return np.asarray(lane * (rows // lanes) + np.minimum(lane, rows % lanes))
