"""`choose_outside`: picks the tables that save bytes between hosts if every rank holds them. Pure arithmetic.

Neo (arXiv 2104.05158, section 4) keeps small tables on every rank: ids and embeddings stay on the rank, and the
gradient of the whole table is all-reduced. That saves bytes between hosts if the table is small beside its outputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dmt.formatting import human_bytes
from dmt.plan.split_across_towers import uncut_name
from dmt.plan.tables import ID_BYTES
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, StepWorkload

__all__ = ["CrossingBytes", "CrossingCosts", "choose_outside"]

# Share of a rank's memory that tables outside towers may take: the rank must also hold tables of its tower.
_MEMORY_SHARE = 0.1


class CrossingBytes(NamedTuple):
    """Bytes that all hosts together send to other hosts in a step because of one table."""

    outside: float
    """Bytes of the all-reduce of the table's gradient over all ranks, if it is outside towers."""
    in_tower: float
    """Bytes of ids, outputs and gradients of samples from other hosts, if it is in a tower."""

    @property
    def saved(self) -> float:
        """Bytes saved by keeping the table outside towers."""
        return self.in_tower - self.outside

    @property
    def reason(self) -> str:
        """A clause that compares the two numbers of bytes."""
        return (
            f"its gradient takes {human_bytes(self.outside)} between hosts in a step; in a tower, ids, outputs and "
            f"their gradients would take {human_bytes(self.in_tower)}"
        )


@dataclass(frozen=True, kw_only=True)
class CrossingCosts:
    """Computes the `CrossingBytes` of the tables of a job.

    Ignores the averaging of replicas and the traffic between the hosts of one tower.
    """

    topology: TowerTopology
    workload: StepWorkload
    """Batch size and ids per sample; for the memory limit of `choose_outside` also the optimizer, for its state."""
    sent: float | None = None
    """How many fewer numbers a tower sends per sample for each feature moved outside; None: its table's columns."""
    number_bytes: tuple[float, float] = (4.0, 4.0)
    """Bytes per number sent between towers, forward and backward."""
    is_unique: bool = False
    """True if a rank sends equal inputs of a feature only once: at most one per table row if samples have one id."""
    distinct: Mapping[str, float] = field(default_factory=dict)
    """By feature, the mean number of distinct inputs in a rank's batch, if they were counted."""

    @functools.cached_property
    def _senders(self) -> float:
        """Number of ranks that send their ids of a feature to a tower on another host."""
        away = self.topology.world_size * (1 - 1 / self.topology.num_towers)
        return away * self.topology.share_across_hosts(self.topology.peer_groups())

    def rows(self, feature: str, table: Any) -> float:
        """Returns how many embeddings of a feature its tower sends to a rank; an upper bound if not counted."""
        size = self.workload.batch_size
        # Bags of several ids are almost never equal.
        is_joined = self.is_unique and self.workload.pooling_factors.get(feature, 1.0) <= 1
        counted = self.distinct.get(uncut_name(feature), size)
        return min(size, table.num_embeddings, counted) if is_joined else size

    def of(self, table: Any) -> CrossingBytes:
        """Returns the bytes of a table, an ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`."""
        in_tower = 0.0
        for feature in table.feature_names:
            pooling = self.workload.pooling_factors.get(feature, 1.0)
            numbers = sum(self.number_bytes) * (table.embedding_dim if self.sent is None else self.sent)
            in_tower += self._senders * self.rows(feature, table) * (ID_BYTES * (pooling + 1) + numbers)
        # Gradients are summed inside each host first.
        crossing = 2 * (self.topology.num_hosts - 1)
        return CrossingBytes(crossing * 4 * table.num_embeddings * table.embedding_dim, in_tower)


def choose_outside(
    tables_by_tower: Sequence[Sequence[Any]],
    costs: CrossingCosts,
    *,
    memory_per_rank: int | None = None,
    candidates: Collection[str] | None = None,
) -> list[str]:
    """Chooses the tables that save bytes between hosts if they are outside towers, largest saving first.

    With their optimizer state, gradients and looked-up embeddings, they take at most a tenth of a rank's memory. Every
    tower keeps at least one table.

    Args:
        tables_by_tower: tables of each tower, with the columns that they would have outside.
        costs: costs of the job's tables.
        memory_per_rank: bytes; None: no limit.
        candidates: names of tables that may be outside; None: all.

    Returns:
        The names of the chosen tables.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> sizes = {"hour": 24, "site": 400, "ad": 200_000}
        >>> hour, site, ad = [
        ...     TableSpec(name=name, num_embeddings=rows, embedding_dim=8, feature_names=(name,))
        ...     for name, rows in sizes.items()
        ... ]
        >>> two = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> choose_outside([[hour, ad], [site]], CrossingCosts(topology=two, workload=StepWorkload(batch_size=512)))
        ['hour']
    """
    alone = CostModel(topology=costs.topology.outside_towers, workload=costs.workload)
    tower_of = {table.name: number for number, tables in enumerate(tables_by_tower) for table in tables}
    left = Counter(tower_of.values())
    free = [t for tables in tables_by_tower for t in tables if candidates is None or t.name in candidates]
    chosen, total = list[str](), 0
    for table in sorted(free, key=lambda table: (-costs.of(table).saved, table.name)):
        needed = alone.shard(table, "data_parallel", table.num_embeddings, table.embedding_dim).needed
        fits = memory_per_rank is None or total + needed <= _MEMORY_SHARE * memory_per_rank
        if fits and left[tower_of[table.name]] > 1 and costs.of(table).saved > 0:
            total += needed
            left[tower_of[table.name]] -= 1
            chosen.append(table.name)
    return chosen
