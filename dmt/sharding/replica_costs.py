"""`ReplicaCosts`: memory and time of replicas of the tables (2D sparse parallelism, Zhang et al. 2025, section 5).

Pure arithmetic. Legend: M replicas, W ranks of the whole job (the paper's T), S bytes of one copy of the tables, B the
rate at which a rank sends to its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dmt.errors import InputError
from dmt.number_formats import NUMBER_FORMATS, SyncPrecision
from dmt.plan.tables import number_bytes
from dmt.sharding.costs import CostModel
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.schemes import table_shards

__all__ = ["ReplicaCosts", "replica_costs"]


@dataclass(frozen=True, kw_only=True)
class ReplicaCosts:
    """Memory and time that M replicas take, against the same W ranks sharing one copy of the tables.

    S counts the weights and the optimizer state of tables that `dmt.ReplicaSync` averages. Data-parallel tables are not
    among them: they are whole on every rank with and without replicas, and their gradients are reduced over all
    replicas in every step, which the plan's own costs hold.

    The paper's numbers are means over ranks; a sync lasts until the rank that holds most is done, which its
    ``fullest_`` twins tell.

    Raises:
        InputError: ``sync_gb_per_s`` is not a positive number or ``sync_every`` not a whole number of at least 1.

    Example:
        >>> costs = ReplicaCosts(
        ...     num_replicas=2, num_ranks=8, weight_bytes=30 * 10**9, state_bytes=2 * 10**9, fullest_bytes=9 * 10**9,
        ...     sent_bytes=32e9, most_sent_bytes=9e9, data_parallel_tables=0, sync_gb_per_s=20.0, sync_every=4,
        ... )
        >>> costs.overhead_bytes, costs.fullest_overhead_bytes
        (4000000000.0, 4500000000.0)
        >>> costs.sync_seconds, costs.step_seconds  # 2 * 4 GB at 20 GB/s, every 4 steps
        (0.4, 0.1)
    """

    num_replicas: int
    """M."""
    num_ranks: int
    """W = M x towers x ranks per tower."""
    weight_bytes: int
    """Bytes of the weights of one copy of the synchronised tables."""
    state_bytes: int
    """Bytes of their optimizer state; row-wise AdaGrad has 4 bytes per row and column shard."""
    fullest_bytes: int
    """Bytes of their weights and state on the rank that holds most."""
    sent_bytes: float
    """Bytes of one copy in the format that is sent."""
    most_sent_bytes: float
    """Bytes of the rank that sends most, in the format that is sent."""
    data_parallel_tables: int
    """Tables that are not counted."""
    sync_gb_per_s: float | None
    """B, in 10^9 bytes per second; None: times are not known."""
    sync_every: int = 1
    """N, steps from one sync to the next."""

    def __post_init__(self) -> None:
        rate, every = self.sync_gb_per_s, self.sync_every
        if rate is not None and not 0 < rate < math.inf:
            raise InputError(
                f"Costs of replicas: sync_gb_per_s={rate} must be a positive number, the 10^9 bytes per second that a "
                "rank sends to its replicas. Leave it out where it is not known."
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InputError(
                f"Costs of replicas: sync_every={every!r} must be a whole number of at least 1, the steps from one "
                "sync to the next."
            )

    @property
    def table_bytes(self) -> int:
        """S: weights and optimizer state of one copy."""
        return self.weight_bytes + self.state_bytes

    @property
    def overhead_bytes(self) -> float:
        """S (M - 1) / W: what a rank holds more than if all ranks shared one copy; the mean."""
        return self.table_bytes * (self.num_replicas - 1) / self.num_ranks

    @property
    def fullest_overhead_bytes(self) -> float:
        """Overhead on the fullest rank: the same share of its bytes."""
        return self.fullest_bytes * (self.num_replicas - 1) / self.num_replicas

    @property
    def sync_seconds(self) -> float | None:
        """2 S (M - 1) / (W B), equation 1: a ring all-reduce of a rank's shards over the replicas; the mean.

        S as it is sent: `ReplicaSync` sends 4 bytes a number, also of FP16 tables, or 2 with BF16.
        """
        return self._ring_seconds(self.sent_bytes / self.num_ranks * self.num_replicas)

    @property
    def fullest_sync_seconds(self) -> float | None:
        """Seconds of one averaging on the rank that sends most."""
        return self._ring_seconds(self.most_sent_bytes)

    @property
    def step_seconds(self) -> float | None:
        """A step's share of the mean sync."""
        return None if self.sync_seconds is None else self.sync_seconds / self.sync_every

    @property
    def fullest_step_seconds(self) -> float | None:
        """A step's share of the fullest rank's sync."""
        return None if self.fullest_sync_seconds is None else self.fullest_sync_seconds / self.sync_every

    def to_record(self) -> dict[str, Any]:
        """All numbers, by name, as JSON writes them."""
        derived = (
            "table_bytes",
            *(f"{which}overhead_bytes" for which in ("", "fullest_")),
            *(f"{which}{span}_seconds" for span in ("sync", "step") for which in ("", "fullest_")),
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def _ring_seconds(self, sent: float) -> float | None:
        if self.sync_gb_per_s is None:
            return None
        return 2 * sent * (self.num_replicas - 1) / self.num_replicas / (1e9 * self.sync_gb_per_s)


def replica_costs(
    plan: TowerShardingPlan,
    tables: Iterable[Any],
    *,
    sync_gb_per_s: float | None = None,
    sync_every: int = 1,
    precision: SyncPrecision = "fp32",
) -> ReplicaCosts:
    """Returns the costs of the replicas of a plan; its topology determines their number.

    Args:
        plan: where every table lies in one replica.
        tables: ``EmbeddingBagConfig`` or `TableSpec` of every table of the plan; of a table that the tower plan cuts,
            its column shards.
        sync_gb_per_s: B, in 10^9 bytes per second.
        sync_every: N, steps from one sync to the next.
        precision: of what is sent.

    Raises:
        InputError: the tables are not those of the plan, or a number is out of range.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> from dmt.plan.topology import TowerTopology
        >>> from dmt.sharding.plan_tables import plan_tables
        >>> table = TableSpec(name="t", num_embeddings=1000, embedding_dim=64, feature_names=("f",))
        >>> plan = plan_tables([[table]], TowerTopology(num_towers=1, ranks_per_tower=1, num_replicas=4))
        >>> replica_costs(plan, [table]).overhead_bytes  # 3/4 of 256,000 bytes of weights and 4,000 of state
        195000.0
    """
    placements, tables = plan.placements, list(tables)
    names = {table.name for table in tables}
    if len(tables) != len(names) or names != set(placements):
        odd = sorted(names ^ set(placements)) or [table.name for table in tables]
        raise InputError(
            f"The sharding plan has {len(placements)} tables and {len(tables)} are given, but not the same; "
            f"{odd[0]!r} is odd. Give the tables that the plan was made for."
        )
    model = CostModel(topology=plan.topology, workload=plan.workload, hardware=plan.hardware)
    held = {(rank.tower, rank.local): 0 for rank in plan.ranks}
    sent = dict.fromkeys(held, 0.0)
    tower_of = {table.name: table.tower for table in plan.tables}
    synchronised = [table for table in tables if placements[table.name].scheme != "data_parallel"]
    weights, width = 0, NUMBER_FORMATS[precision].num_bytes
    for table in synchronised:
        placement = placements[table.name]
        for shard, (local, load) in zip(table_shards(table, placement), model.shards(table, placement), strict=True):
            numbers = shard.rows * shard.columns
            of_weights = numbers * number_bytes(table)
            weights += of_weights
            held[tower_of[table.name], local] += load.memory
            # States are FP32.
            sent[tower_of[table.name], local] += (numbers + (load.memory - of_weights) / 4) * width
    return ReplicaCosts(
        num_replicas=plan.topology.num_replicas,
        num_ranks=plan.topology.world_size,
        weight_bytes=weights,
        state_bytes=sum(held.values()) - weights,
        fullest_bytes=max(held.values()),
        sent_bytes=sum(sent.values()),
        most_sent_bytes=max(sent.values()),
        data_parallel_tables=len(tables) - len(synchronised),
        sync_gb_per_s=sync_gb_per_s,
        sync_every=sync_every,
    )
