"""`TowerShardingPlan`: placement of every table with its reason, and load of every rank; saved as ``sharding.json``."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dmt.files import read_model, write_or_raise
from dmt.formatting import counted, human_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.schemes import SCHEMES, TablePlacement

__all__ = ["SHARDING_FORMAT", "RankLoad", "TableSharding", "TowerShardingPlan"]

SHARDING_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """One table of the plan."""

    name: str
    tower: int | None
    """Mesh tower that holds the table; None: outside towers, on every rank."""
    placement: TablePlacement
    reason: str
    """Reason for the placement, on one line."""
    seconds: float
    """Seconds per step without the fixed costs of collectives, summed over the ranks of the tower; on one rank for a
    table outside towers."""
    memory: int
    """Bytes of weights, optimizer state, dense gradient and caches, on the device or elsewhere, summed over the ranks
    of the tower; on one rank for a table outside towers."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """Load of the tables on one rank, in its tower and outside towers; equal in every replica."""

    tower: int
    local: int
    """Local rank, 0..L-1."""
    memory: int
    """Bytes of weights, optimizer state, dense gradients and caches on the rank's device."""
    activations: int
    """Bytes of the embeddings that a step looks up on the rank, and of their gradients."""
    averaged_bytes: float
    """Bytes that the rank sends to average the replicas, divided by the steps between two averages."""
    seconds: float
    """Seconds per step, with the fixed costs of the collectives of its tower."""

    @property
    def needed(self) -> int:
        """All bytes on the rank's device: ``memory`` and ``activations``."""
        return self.memory + self.activations


@dataclass(frozen=True, kw_only=True)
class TowerShardingPlan:
    """A sharding plan with its costs and reasons, made by `dmt.sharding.plan_tables.plan_tables`."""

    topology: TowerTopology
    workload: StepWorkload
    hardware: Hardware
    tables: tuple[TableSharding, ...]
    """The tables tower by tower, in the order given; then the tables outside towers."""
    ranks: tuple[RankLoad, ...]
    """The ranks of one replica, tower by tower and in order of their local rank."""

    @property
    def placements(self) -> dict[str, TablePlacement]:
        """The placement of every table, by name."""
        return {table.name: table.placement for table in self.tables}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason for the placement of every table, by name."""
        return {table.name: table.reason for table in self.tables}

    @property
    def imbalance(self) -> float:
        """Seconds of the busiest rank divided by the mean over all ranks; 1 is perfectly even."""
        seconds = [rank.seconds for rank in self.ranks]
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else 1.0

    @property
    def tables_by_scheme(self) -> dict[str, int]:
        """Number of tables of each scheme in use."""
        counts = Counter(table.placement.scheme for table in self.tables)
        return {scheme: counts[scheme] for scheme in SCHEMES if counts[scheme]}

    @property
    def summary(self) -> str:
        """Three sentences: the tables and schemes, the fullest rank, the imbalance."""
        topology, fullest = self.topology, max(self.ranks, key=lambda rank: rank.needed)
        schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in self.tables_by_scheme.items())
        if outside := sum(table.tower is None for table in self.tables):
            schemes += f" ({outside:,} outside towers)"  # data_parallel comes last
        return (
            f"{counted(len(self.tables), 'table')} in {counted(topology.num_towers, 'tower')} of "
            f"{counted(topology.ranks_per_tower, 'rank')}: {schemes}. The fullest rank needs "
            f"{human_bytes(fullest.needed)}, {human_bytes(fullest.activations)} of it for the embeddings that it looks "
            f"up and their gradients. The busiest rank costs {self.imbalance:.2f} times the mean of all ranks."
        )

    def to_record(self) -> dict[str, Any]:
        """Returns the plan, with its format version and `imbalance`, as a JSON object."""
        return {"format": SHARDING_FORMAT, "imbalance": self.imbalance, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced in one step.

        Raises:
            InputError: the file cannot be written.
        """
        with write_or_raise(path, "Sharding plan") as scratch:
            scratch.write_text(json.dumps(self.to_record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TowerShardingPlan:
        """Reads a plan that `save` wrote.

        Raises:
            InputError: the file cannot be read, is not JSON or has a different format version, or an entry is absent,
                has the wrong type or breaks a rule of the plan.
        """
        return read_model(path, cls, what="Sharding plan", version=SHARDING_FORMAT, remedy="Re-run `dmt plan`.")
