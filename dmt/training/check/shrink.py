"""From a config made for a cluster to one that a few processes of this machine can run: `shrink`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import StepWorkload
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import Rule, ShardingRules, TablePlacement
from dmt.training.config import TrainingConfig
from dmt.training.job import Job

__all__ = ["CheckLimits", "CheckedRun", "fewer_ranks", "shrink", "with_values"]

# Most steps of warm-up: the few steps that are run then have rising rates and full ones.
_WARMUP_STEPS = 2
# Two show what replicas do, with batches of their own.
_REPLICAS = 2
# Longest interval between averaging replicas: the few steps then see averaged weights and states.
_SYNC_EVERY = {"now": 2, "delayed": 1}


@dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """Limits on the size of a check; ``dmt check`` has an option for most."""

    max_rows: int = 1000
    """Most rows of a table, at least 8: fewer would leave row-wise shards of most ranks nothing but frequent ids."""
    max_ranks: int = 8
    """Most ranks, 4 to 64: two towers of two show both exchanges; more processes outgrow one machine."""
    batch_size: int = 16
    """B, rows per rank and step."""
    steps: int = 4
    """Training steps, at least 2: the second is the first whose weights were trained."""
    timeout_s: float = 600.0
    """Longest time that the ranks may take."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The run of every rank; plain data."""

    job: Job
    """The run, shrunk; the order of its tables is that of the features."""
    limits: CheckLimits
    """Limits of the check."""
    folder: str
    """Folder of expected values; all ranks see it."""
    reduced: tuple[str, ...]
    """Differences to the config that make the run smaller, a line each."""

    @property
    def config(self) -> TrainingConfig:
        """The config of the run, shrunk."""
        return self.job.config

    @property
    def topology(self) -> TowerTopology:
        """The mesh that is run."""
        return self.config.topology.build()


def shrink(job: Job, *, limits: CheckLimits, folder: Path) -> CheckedRun:
    """Shrinks a run: every table keeps its scheme, every tower its module.

    The sharding plan is made for the full size, under the config's memory limit, and its schemes are pinned; where
    towers keep their number of ranks, so are the ranks of every shard.

    Raises:
        InputError: the shrunk tables cannot be placed.
    """
    topology = fewer_ranks(job.topology, limits.max_ranks)
    keeps_ranks = job.topology.ranks_per_tower == topology.ranks_per_tower
    # Multiples, so that a row-wise table can be cut for fewer ranks, too.
    ranks = topology.ranks_per_tower
    most, unit = max(limits.max_rows - limits.max_rows % ranks, ranks), 1 if keeps_ranks else ranks
    rows = [min(table.num_embeddings, most) for table in job.tables]
    small = tuple(
        replace(table, num_embeddings=count - count % unit or count)
        for table, count in zip(job.tables, rows, strict=True)
    )
    config, reduced = _smaller(job.config, topology)
    cut = [table.num_embeddings for table in job.tables if table.num_embeddings > most]
    if cut:
        reduced.append(f"{len(cut)} of {len(small)} tables have {most:,} rows instead of up to {max(cut):,}")
    shrunk = Job(config=config, tables=small, num_dense=job.num_dense, towers=job.towers)
    if config.dataflow != "flat":
        assert job.sharding is not None, "resolved with the config"
        pinned: dict[str, Rule] = {
            name: TablePlacement(scheme=placement.scheme, ranks=placement.ranks) if keeps_ranks else placement.scheme
            for name, placement in job.sharding.placements.items()
        }
        shrunk = _placed(shrunk, limits, pinned)
    return CheckedRun(job=shrunk, limits=limits, folder=str(folder), reduced=tuple(reduced))


def _smaller(config: TrainingConfig, topology: TowerTopology) -> tuple[TrainingConfig, list[str]]:
    """Returns the config of a shorter run on fewer ranks, and a line for everything that is smaller than asked for."""
    replicas = config.replicas
    config = with_values(config, "train", device="cpu")
    config = with_values(config, "topology", ranks_per_host=topology.ranks_per_host)
    most: dict[str, Any] = {
        "topology.ranks_per_tower": topology.ranks_per_tower,
        "topology.num_towers": topology.num_towers,
        "optimizer.warmup_steps": _WARMUP_STEPS,
    }
    if topology.num_replicas > 1:
        most["topology.num_replicas"] = topology.num_replicas
        most["replicas.sync_every"] = _SYNC_EVERY[replicas.optimizer_state]
        if not isinstance(replicas.moment_scale, str):
            most["replicas.moment_scale"] = float(topology.num_replicas)
    lines = []
    if config.train.dense_reduce == "hierarchical_bf16":
        # Adam makes whole steps of what rounding leaves of gradients that cancel: nothing could be told from weights.
        config = with_values(config, "train", dense_reduce="hierarchical")
        lines.append("train.dense_reduce is hierarchical instead of hierarchical_bf16")
    for name, limit in most.items():
        section, _, key = name.partition(".")
        before = getattr(getattr(config, section), key)
        after = min(before, limit)
        if before != after:
            config = with_values(config, section, **{key: after})
            lines.append(f"{name} is {after} instead of {before}")
    return config, lines


def fewer_ranks(topology: TowerTopology, max_ranks: int) -> TowerTopology:
    """Returns the topology with at most ``max_ranks``: two replicas, fewer ranks per tower, fewer towers on the mesh.

    Towers keep two ranks where they had two or more, so that exchanges inside a tower are run; with ``max_ranks`` of at
    least 4 (8 with replicas) there are two towers where there were two or more. Each tower is a host.
    """
    towers, ranks, replicas = topology.num_towers, topology.ranks_per_tower, min(topology.num_replicas, _REPLICAS)
    max_ranks //= replicas
    ranks = min(ranks, max(min(ranks, 2), max_ranks // towers))
    towers = max(1, min(towers, max_ranks // ranks))
    if (towers, ranks, replicas) == (topology.num_towers, topology.ranks_per_tower, topology.num_replicas):
        return topology
    return replace(topology, num_towers=towers, ranks_per_tower=ranks, num_replicas=replicas, ranks_per_host=None)


def with_values(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    """Returns the config with other values in one section, unchecked."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _placed(job: Job, limits: CheckLimits, rules: Mapping[str, Rule]) -> Job:
    """Returns the job with its towers spread evenly over those of its mesh, and its tables placed by these rules.

    The modules of towers stay, several on one mesh tower; the towers of a flat model are joined.
    """
    assert job.towers is not None, "resolved with the config"
    # Without the tables it was made for, which were larger.
    plan, num_mesh = replace(job.towers, tables=()), job.topology.num_towers
    mesh = [number * num_mesh // plan.num_towers for number in range(plan.num_towers)]
    by_tower: list[list[TableSpec]] = [[] for _ in range(num_mesh)]
    features: list[list[str]] = [[] for _ in range(num_mesh)]
    for tower, tables, number in zip(plan.towers, plan.tables_by_tower(job.split_tables), mesh, strict=True):
        by_tower[number] += tables
        features[number] += tower.features
    has_modules, in_order = job.config.model.has_towers, mesh == list(range(num_mesh))
    workload = StepWorkload(batch_size=limits.batch_size, optimizer=job.config.optimizer.sparse)
    joined = TowerPlan.from_lists(features, column_splits=plan.column_splits, outside=plan.outside)
    outside = plan.outside_tables(job.split_tables)
    return replace(
        job,
        towers=plan if has_modules else joined,
        sharding=plan_tables(
            by_tower, job.topology, outside=outside, workload=workload, rules=ShardingRules(tables=rules)
        ),
        placement=tuple(mesh) if has_modules and not in_order else None,
    )
