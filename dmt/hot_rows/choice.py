"""`choose_rows`: picks the rows of a flat model whose copies save bytes between hosts, by `saved_bytes`.

Legend: T towers (hosts) of L ranks, W = T * L, B samples of a rank, N columns, p a row's share of its table's accesses.
Where a host has several towers, or a tower spans several hosts (``ranks_per_host``), only what leaves a host counts.

A rank that uses a row of another tower sends an id of 8 bytes there, gets an output [N] back, and returns the output's
gradient. A copied row sends none of these. In a step in which any rank touches it, its gradient is summed
inside each host and then between hosts (`dmt.hot_rows.touched_sum`); each host sends 2 (T - 1) / T times the row.
Hence, with p B uses by a rank, a copy saves in a step

- if every use is sent: (T - 1) L p B (2 * 4 N + 8) - 2 (T - 1) 4 N t bytes in all,
- if each rank sends distinct ids only: the same with 1 - (1 - p)^B for p B,

where t = 1 - (1 - p)^(B W) is the probability that the row is touched. With many hosts this becomes about p B L > 1:
the ranks of a host use the row more than once per step. The rule of OPER (section 4.3, equations 4 and 5) with links
of equal bandwidth is p B > 1: a rank uses the row more than once. It assumes that each step touches every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import ID_BYTES, TableSpec
from dmt.plan.topology import TowerTopology

__all__ = ["choose_rows", "saved_bytes"]

# Between two hosts nearly every row saves a little, but its copy's gradient is cleared, searched and added to the
# weights in every step. Memory is assumed to be 300 times as fast as the link between hosts.
_HELD = 1 / 300


def saved_bytes(
    counts: RowCounts, table: TableSpec, topology: TowerTopology, *, num_ids: float, distinct: bool
) -> NDArray[np.float64]:
    """Returns, for each counted row, the bytes between hosts that a copy on every rank saves in a step: float64 [n].

    A row is worth a copy if its value is above zero. A charge for holding the copy is already subtracted: 1/300 of the
    bytes that hosts send when they sum the row's gradient.

    Args:
        counts: accesses to the table's rows.
        table: the table, whose bags have at most one id.
        topology: the mesh sizes.
        num_ids: mean number of ids of a feature in a rank's batch: B if no bag is empty, else less.
        distinct: True if each rank sends its distinct ids only (``sharding.unique``).

    Example:
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> saved_bytes(RowCounts.of([1, 7, 7, 7]), table, topology, num_ids=4, distinct=False)
        array([ 80.4281128 , 367.78666668])
    """
    towers, ranks, features = topology.num_towers, topology.ranks_per_tower, len(table.feature_names)
    everyone = topology.sharding_groups()[0]
    hosts = len({topology.host(rank) for rank in everyone})
    # To the peer in the table's tower, and there to the rank that has the row, which may be on another host.
    away = (towers - 1) * ranks * topology.share_across_hosts(topology.peer_groups())
    away += towers * (ranks - 1) * topology.share_across_hosts(topology.tower_groups())
    row = 4 * table.embedding_dim  # outputs and gradients are FP32, even of FP16 tables
    # Each of H hosts sends 2 (H - 1) / H of the row, as in a ring (OPER, section 4.3).
    summed = 2 * (hosts - 1) * row
    # f B of OPER's equation 4; of distinct ids a rank sends a row once, if it reads it at all.
    uses = counts.chances(num_ids) if distinct else num_ids * counts.counts / max(counts.total, 1)
    is_touched = counts.chances(num_ids * features * len(everyone))
    return away * features * (2 * row + ID_BYTES) * uses - summed * is_touched - _HELD * summed


def choose_rows(
    profile: AccessProfile,
    tables: Sequence[TableSpec],
    topology: TowerTopology,
    *,
    batch_size: int,
    distinct: bool,
    max_bytes: float,
) -> dict[str, NDArray[np.int64]]:
    """Chooses the rows whose copies save bytes between hosts, largest saving per byte held first.

    Returns the chosen rows by table, int64 [n], ascending, without tables that have none. Skips tables with more than
    one id per bag on average, since the sum over a bag's cold rows has as many bytes as the whole bag. ``tables`` are
    those that may have copies, ``batch_size`` is B. The weights of a rank's copies take at most ``max_bytes``; other
    arguments are as in `saved_bytes`.

    Example:
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> profile = AccessProfile([table])
        >>> profile.add({"f": [1, 7, 7, 7]}, num_samples=4)
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> choose_rows(profile, [table], topology, batch_size=4, distinct=False, max_bytes=63)
        {'t': array([7])}
    """
    found = []
    for number, table in enumerate(tables):
        counts, ids_per_sample = profile[table.name], profile.ids_per_sample(table)
        if ids_per_sample > 1:
            continue
        num_ids = batch_size * ids_per_sample
        gain = saved_bytes(counts, table, topology, num_ids=num_ids, distinct=distinct)
        pays, size = gain > 0, 4 * table.embedding_dim
        rows = counts.rows[pays]
        found.append((gain[pays] / size, np.full(len(rows), number), rows, np.full(len(rows), size)))
    if not found:
        return {}
    gains, numbers, rows, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # By bytes saved per byte held; ties by table and row, so that the choice does not depend on the order of counts.
    order = np.lexsort((rows, numbers, -gains))
    kept = np.sort(order[np.cumsum(sizes[order]) <= max_bytes])  # by table and row again
    by_table = np.split(rows[kept], np.searchsorted(numbers[kept], range(1, len(tables))))
    return {table.name: of_table for table, of_table in zip(tables, by_table, strict=True) if len(of_table)}
