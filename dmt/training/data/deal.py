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

__all__ = ["Deal", "Span", "rank_batch"]

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """Rows ``start`` to ``stop`` of a lane or of a row group."""

    number: int
    """The lane or row group."""
    start: int
    stop: int


@dataclass(frozen=True)
class Deal:
    """The rows of an epoch, dealt to V lanes.

    V row groups are dealt at a time, about one to each lane: in the order of the files, so that all lanes are at the
    same time of the log, or with a ``seed`` in a random order.

    Example:
        >>> deal = Deal(np.array([4, 4, 3]), lanes=2)
        >>> deal.groups(Span(1, 0, 4)), deal.groups(Span(0, 4, 6))
        ([Span(number=1, start=0, stop=4)], [Span(number=2, start=0, stop=2)])
        >>> deal.of_rank(0, 8, rank=0, world_size=1)
        [Span(number=0, start=0, stop=4), Span(number=1, start=0, stop=4)]
    """

    sizes: NDArray[np.int64]
    """Rows of each group, in the order of the files."""
    lanes: int
    """V."""
    seed: tuple[int, ...] | None = None
    """Seed of the order of the row groups; None: that of the files."""

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.sizes.sum())

    def in_lane(self, rows: int | NDArray[np.int64], lane: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts the rows of a lane among the first ``rows`` of the epoch."""
        return np.asarray((rows + self.lanes - 1 - lane) // self.lanes)

    def of_rank(self, start: int, stop: int, *, rank: int, world_size: int) -> list[Span]:
        """Returns a rank's part of the rows ``start`` to ``stop`` of the epoch; the last ranks may have a row less."""
        lanes = np.arange(self.lanes)
        first = self.in_lane(start, lanes)
        numbers = self.in_lane(stop, lanes) - first
        before = np.cumsum(numbers) - numbers
        per_rank = -(-(stop - start) // world_size)
        begins = first + np.clip(rank * per_rank - before, 0, numbers)
        ends = first + np.clip((rank + 1) * per_rank - before, 0, numbers)
        return [Span(int(lane), int(begins[lane]), int(ends[lane])) for lane in np.flatnonzero(begins < ends)]

    def groups(self, rows: Span) -> list[Span]:
        """Returns where the rows of a lane (``rows``) are: spans of row groups, in the order of the lane."""
        order, ends, bounds = self._order
        in_lane = self.in_lane(bounds, rows.number)
        # Within its block of groups, a lane has the rows after those of the lanes before it.
        before = rows.number * (bounds // self.lanes) + np.minimum(rows.number, bounds % self.lanes)
        begins = bounds[:-1] + np.diff(before) - in_lane[:-1]
        spans = []
        for block in range(int(in_lane.searchsorted(rows.start, "right")) - 1, int(in_lane.searchsorted(rows.stop))):
            start = int(begins[block] + max(rows.start, in_lane[block]))
            stop = int(begins[block] + min(rows.stop, in_lane[block + 1]))
            for place in range(int(ends.searchsorted(start, "right")), int(ends.searchsorted(stop)) + 1):
                group = int(order[place])
                first = int(ends[place] - self.sizes[group])
                spans.append(Span(group, max(start - first, 0), min(stop - first, int(self.sizes[group]))))
        return [span for span in spans if span.start < span.stop]

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The groups in order, the row of the epoch at which each ends, and the rows at which blocks of them begin."""
        order = np.arange(len(self.sizes))
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(len(self.sizes))
        ends = np.cumsum(self.sizes[order])
        return order, ends, np.unique(np.concatenate([[0], ends[self.lanes - 1 :: self.lanes], ends[-1:]]))


@cache  # to warn once
def rank_batch(lanes: int, world_size: int, batch_size: int) -> int:
    """Returns the rows of a rank's batch: ``batch_size`` of each of its lanes where the ranks divide the lanes.

    Otherwise ``batch_size``, with a warning: the global batch differs from that of the run so far.

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
