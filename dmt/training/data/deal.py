"""`Deal`: which rows of an epoch each rank trains on, computed from the sizes of the row groups.

The rows of an epoch are dealt to V lanes, where V is the number of ranks of the first run. Row i of the epoch is row
i // V of lane i % V. A global batch is the next G rows, lane after lane, cut into W equal parts, one for each rank. The
order thus depends on V, not on W: if W divides V, each rank has V / W whole lanes, and global batches with b rows of
each lane (G = V * b) are the same for every such W. A position in an epoch is the number of rows used so far.

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
    """Rows ``start`` to ``stop`` (exclusive) of a lane or of a row group."""

    number: int
    """Index of the lane or row group."""
    start: int
    stop: int


@dataclass(frozen=True)
class Deal:
    """The rows of an epoch, dealt to V lanes.

    Row groups are dealt V at a time, about one to each lane: in file order, so that all lanes read the same period of
    the log, or in a random order if there is a ``seed``.

    Example:
        >>> deal = Deal(np.array([4, 4, 3]), lanes=2)
        >>> deal.groups(Span(1, 0, 4)), deal.groups(Span(0, 4, 6))
        ([Span(number=1, start=0, stop=4)], [Span(number=2, start=0, stop=2)])
        >>> deal.of_rank(0, 8, rank=0, world_size=1)
        [Span(number=0, start=0, stop=4), Span(number=1, start=0, stop=4)]
    """

    sizes: NDArray[np.int64]
    """Number of rows of each row group, in file order, int64 [number of row groups]."""
    lanes: int
    """Number of lanes, V."""
    seed: tuple[int, ...] | None = None
    """Seed of a random order of the row groups; None: file order."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the epoch, N."""
        return int(self.sizes.sum())

    def in_lane(self, rows: int | NDArray[np.int64], lane: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many of the first ``rows`` rows of the epoch are in ``lane``, int64; arrays are broadcast."""
        return np.asarray((rows + self.lanes - 1 - lane) // self.lanes)

    def of_rank(self, start: int, stop: int, *, rank: int, world_size: int) -> list[Span]:
        """Returns a rank's part of rows ``start`` to ``stop`` of an epoch, by lane; the last ranks may get fewer."""
        lanes = np.arange(self.lanes)
        first = self.in_lane(start, lanes)
        numbers = self.in_lane(stop, lanes) - first
        before = np.cumsum(numbers) - numbers
        per_rank = -(-(stop - start) // world_size)
        # np.clip takes ten times as long.
        begins, ends = (first + np.minimum(np.maximum(i * per_rank - before, 0), numbers) for i in (rank, rank + 1))
        return [Span(int(lane), int(begins[lane]), int(ends[lane])) for lane in np.flatnonzero(begins < ends)]

    def groups(self, rows: Span) -> list[Span]:
        """Returns the spans of row groups that hold ``rows``, a span of a lane, in the order of the lane."""
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
        """The row groups in order, the number of rows up to the end of each, and the bounds of blocks of V groups."""
        order = np.arange(len(self.sizes))
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(len(self.sizes))
        ends = np.cumsum(self.sizes[order])
        return order, ends, np.unique(np.concatenate([[0], ends[self.lanes - 1 :: self.lanes], ends[-1:]]))


@cache  # to warn once
def rank_batch(lanes: int, world_size: int, batch_size: int) -> int:
    """Returns the number of rows of a rank's batch: ``batch_size`` from each of its V / W lanes, if W divides V.

    Otherwise returns ``batch_size``, and warns that the global batch has changed.

    Example:
        >>> rank_batch(8, 2, 512), rank_batch(4, 4, 512)
        (2048, 512)
    """
    if lanes % world_size == 0:
        return lanes // world_size * batch_size
    logger.warning(
        "The run began on %d ranks and resumes on %d, which does not divide %d: the global batch has %d rows, not %d. "
        "Rows of files are used at most once in this epoch.",
        *(lanes, world_size, lanes, world_size * batch_size, lanes * batch_size),
    )
    return batch_size
