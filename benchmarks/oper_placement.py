"""OPER's planner as arithmetic (sections 3.2 and 4): partitions of rows, their balanced placement, their replicas.

Rows of all tables are sorted by access, cut into partitions of bounded bytes and accesses, and placed in two phases;
then the partitions that save most are copied to more ranks. What a placement costs is equations 1 to 3.

Legend: K partitions, M ranks; S bytes of a partition, A accesses of a row of it (of one rank, per step).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError

__all__ = [
    "Partitions",
    "Placement",
    "partition_rows",
    "place",
    "replicate_for_inference",
    "replicate_for_training",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """Rows with about the same access, cut into K pieces (section 4.1)."""

    order: NDArray[np.int64]
    """The rows of all tables, the most accessed first, int64 [rows]."""
    starts: NDArray[np.int64]
    """Partition k has ``order[starts[k]:starts[k + 1]]``, int64 [K + 1]."""
    num_bytes: Floats
    """Bytes of each partition [K]."""
    traffic: Floats
    """Bytes that a rank reads of each in a step, the sum of S_k A_k over its rows [K]."""
    by_access: NDArray[np.bool_]
    """True where accesses, not bytes, bound the partition, bool [K]."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A source of every partition for every rank: the P_k of section 3.2, whose rows have one 1 each."""

    partitions: Partitions
    source: NDArray[np.int64]
    """Rank that rank i reads partition k from, int64 [K, M]; one that a rank reads from has a copy."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, M."""
        return self.source.shape[1]

    def memory(self) -> Floats:
        """Returns the bytes on each rank, equation 1, float64 [M]."""
        has = np.zeros(self.source.shape, dtype=bool)
        np.put_along_axis(has, self.source, True, axis=1)
        return np.asarray(self.partitions.num_bytes @ has)

    def communication(self, latency: ArrayLike | None = None) -> Floats:
        """Returns what each rank i reads from each rank j in a step, equation 3, float64 [M, M].

        ``latency`` is L [M, M], the cost per byte that rank i reads from rank j; None: 1, so that the result is bytes.
        The paper prints ``L[j][j]``; its Algorithm 1 has ``L[i][j]``, which is meant.
        """
        found = np.zeros((self.num_ranks, self.num_ranks))
        for rank in range(self.num_ranks):
            np.add.at(found[rank], self.source[:, rank], self.partitions.traffic)
        return found if latency is None else found * np.asarray(latency)

    def lookups(self) -> Floats:
        """Returns the bytes that each rank looks up in a step, for itself and others: equation 2, float64 [M]."""
        return self.communication().sum(axis=0)

    @property
    def balance(self) -> float:
        """Least over most lookups of a rank, 0 to 1: the paper's degree of balance, before replicas."""
        lookups = self.lookups()
        return float(lookups.min() / lookups.max()) if lookups.max() else 1.0


def partition_rows(accesses: ArrayLike, row_bytes: ArrayLike, *, threshold: float) -> Partitions:
    """Cuts rows into partitions of at most ``threshold`` of all bytes and of all traffic (OPER, section 4.1).

    A row with more traffic than that is a partition of its own.

    Args:
        accesses: accesses of each row by one rank in a step, any unit, [rows].
        row_bytes: bytes of each row, or of every row, [rows] or a number.
        threshold: share of all bytes, and of all traffic, that a partition may have, above 0, at most 1.

    Raises:
        InputError: there is no row, a number is negative or not finite, or ``threshold`` is out of range.

    Example:
        >>> found = partition_rows([1, 8, 1, 2], 4, threshold=0.5)
        >>> [found.order[a:b].tolist() for a, b in zip(found.starts, found.starts[1:])], found.by_access.tolist()
        ([[1], [3, 0], [2]], [True, False, False])
    """
    access = np.asarray(accesses, dtype=np.float64)
    size = np.broadcast_to(np.asarray(row_bytes, dtype=np.float64), access.shape)
    for name, values in (("accesses", access), ("row_bytes", size)):
        if not access.size or not np.isfinite(values).all() or values.min() < 0:
            raise InputError(f"partition_rows: {name} must be at least one number, finite and not negative.")
    if not 0 < threshold <= 1:
        raise InputError(f"partition_rows: threshold={threshold:g} must lie above 0 and at most be 1.")
    order = np.argsort(-access, kind="stable")
    sums = [np.concatenate([[0.0], np.cumsum(values[order])]) for values in (size, size * access)]
    # A rounding error of a sum over all rows must not cut a partition short.
    most = [threshold * of_all[-1] * (1 + 1e-9) for of_all in sums]
    starts, by_access = [0], []
    while starts[-1] < len(order):
        first = starts[-1]
        ends = [
            int(np.searchsorted(of_all, of_all[first] + limit, side="right")) - 1
            for of_all, limit in zip(sums, most, strict=True)
        ]
        starts.append(max(min(ends), first + 1))
        by_access.append(ends[1] < ends[0])
    edges = np.array(starts)
    num_bytes, traffic = (np.diff(of_all[edges]) for of_all in sums)
    return Partitions(order=order, starts=edges, num_bytes=num_bytes, traffic=traffic, by_access=np.array(by_access))


def place(partitions: Partitions, num_ranks: int) -> Placement:
    """Places each partition on one rank, in two phases (OPER, section 4.2).

    Partitions bounded by access go to the rank with the fewest lookups so far. Then those bounded by bytes fill up
    memory. The paper gives each to the rank with the least; here the most read come first, each to the rank with the
    fewest lookups among those that it leaves at or below the mean. The many that are hardly read come last and go
    wherever room is left, so that both are balanced.

    Raises:
        InputError: ``num_ranks`` is not positive.
    """
    if num_ranks < 1:
        raise InputError(f"place: num_ranks={num_ranks} must be at least 1.")
    sizes, traffic = partitions.num_bytes, partitions.traffic
    owner = np.zeros(len(traffic), np.int64)
    memory, lookups = np.zeros(num_ranks), np.zeros(num_ranks)
    most = sizes.sum() / num_ranks * (1 + 1e-9)
    for bounded_by_access in (True, False):
        members = np.flatnonzero(partitions.by_access == bounded_by_access)
        for k in members[np.argsort(-traffic[members], kind="stable")]:
            fits = np.ones(num_ranks, dtype=bool) if bounded_by_access else memory + sizes[k] <= most
            rank = int(np.where(fits, lookups, np.inf).argmin() if fits.any() else memory.argmin())
            owner[k] = rank
            memory[rank] += sizes[k]
            lookups[rank] += traffic[k]
    return Placement(partitions=partitions, source=np.repeat(owner[:, None], num_ranks, axis=1))


def replicate_for_inference(placement: Placement, extra_bytes: ArrayLike, latency: ArrayLike) -> Placement:
    """Copies partitions to ranks that read much from afar (OPER, Algorithm 1): for serving, which has no gradients.

    Each rank in turn copies the most read partition that fits and that it reads over the link on which it waits
    longest; other ranks to which the copy is nearer read it there. A rank stops when nothing on that link fits.

    Args:
        placement: one rank for each partition.
        extra_bytes: memory for copies on each rank, or on every rank, bytes, [M] or a number.
        latency: L, cost per byte that rank i reads from rank j [M, M], least at i = j.

    Raises:
        InputError: ``latency`` is not [M, M], or reading from another rank costs less than from oneself.
    """
    ranks = placement.num_ranks
    costs = np.asarray(latency, dtype=np.float64)
    if costs.shape != (ranks, ranks) or (costs < np.diag(costs)[:, None]).any():
        raise InputError(
            f"replicate_for_inference: latency must be [{ranks}, {ranks}] with each rank nearest to itself; it is "
            f"{list(costs.shape)}. Give the cost per byte that rank i (row) reads from rank j."
        )
    room = np.broadcast_to(np.asarray(extra_bytes, dtype=np.float64), (ranks,)).copy()
    source, parts = placement.source.copy(), placement.partitions
    waits = placement.communication(costs)
    densest = np.argsort(-parts.traffic / np.maximum(parts.num_bytes, 1e-300), kind="stable")
    going = list(range(ranks))
    while going:
        for rank in list(going):
            far = np.where(np.arange(ranks) == rank, -1.0, waits[rank]).argmax()
            fits = np.flatnonzero((source[densest, rank] == far) & (parts.num_bytes[densest] <= room[rank]))
            if far == rank or not len(fits):
                going.remove(rank)
                continue
            k = densest[fits[0]]
            room[rank] -= parts.num_bytes[k]
            nearer = costs[np.arange(ranks), rank] < costs[np.arange(ranks), source[k]]
            for reader in np.flatnonzero(nearer):
                waits[reader, source[k, reader]] -= parts.traffic[k] * costs[reader, source[k, reader]]
                waits[reader, rank] += parts.traffic[k] * costs[reader, rank]
                source[k, reader] = rank
    return replace(placement, source=source)


def replicate_for_training(placement: Placement, extra_bytes: float, *, p2p_over_all_reduce: float = 1.0) -> Placement:
    """Copies the most read partitions to all ranks, where that is less to send (OPER, section 4.3, "for training").

    A row that is read f B times by each rank in a step is copied if f B > BW_P2P / BW_AR (equations 4 and 5): reading
    it then costs more than the all-reduce of its gradient.

    Args:
        placement: one rank for each partition; accesses are those of a rank in a step.
        extra_bytes: memory for copies on each rank, bytes; the owner of a partition needs none.
        p2p_over_all_reduce: BW_P2P / BW_AR, rate of reading over rate of an all-reduce.

    Example:
        >>> found = place(partition_rows([9, 5, 0.5], 4, threshold=0.4), num_ranks=3)
        >>> replicate_for_training(found, 8).communication().diagonal().tolist()
        [56.0, 56.0, 58.0]
    """
    source, parts = placement.source.copy(), placement.partitions
    density = parts.traffic / np.maximum(parts.num_bytes, 1e-300)
    room = np.full(placement.num_ranks, float(extra_bytes))
    everyone = np.arange(placement.num_ranks)
    for k in np.argsort(-density, kind="stable"):
        if density[k] <= p2p_over_all_reduce:
            break
        others = everyone != source[k, 0]
        if (room[others] >= parts.num_bytes[k]).all():
            room[others] -= parts.num_bytes[k]
            source[k] = everyone
    return replace(placement, source=source)
