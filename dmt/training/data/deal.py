"""`Deal`: which rows of an epoch each rank trains on, as arithmetic on the numbers of rows of row groups.

The rows of an epoch are dealt to V lanes, V being the ranks of the first run. Row i of the epoch is row i // V of lane
i % V; a global batch is the next G rows, lane after lane, cut into W equal parts, one for each rank. So the order
depends on V and not on W: where W divides V, a rank has V / W whole lanes, and the global batches of G = V * b rows are
the same for each such W. A position is the number of rows used.

Legend: N rows of an epoch, V lanes, W ranks, G rows of a global batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Deal", "LaneRows", "Piece", "rank_batch"]

logger = logging.getLogger(__name__)


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
