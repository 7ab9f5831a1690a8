"""`shrink` turns a run that is configured for a cluster into one that a few processes of this machine can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import Rule, ShardingRules, TablePlacement
from dmt.training.config import TrainingConfig
from dmt.training.job import Job

__all__ = ["CheckLimits", "CheckedRun", "fewer_ranks", "shrink", "with_values"]

# Maximum number of warm-up steps, so that the few steps of a check have rising and full learning rates.
_WARMUP_STEPS = 2
# Maximum number of replicas; two suffice to show that replicas train on different batches and are averaged.
_REPLICAS = 2
# Longest interval between averaging replicas, so that averages happen within the few steps.
_SYNC_EVERY = {"now": 2, "delayed": 1}


@dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """Limits on the size of a check; ``dmt check`` has options for the first two."""

    max_rows: int = 1000
    """Maximum number of rows of a table, at least 8; more only if a tower has more ranks, each of which needs a row."""
    max_ranks: int = 8
    """Maximum number of ranks, 4 to 64: both exchanges need two towers of two ranks; one machine runs at most 64."""
    batch_size: int = 16
    """B, samples of a rank in each step."""
    steps: int = 4
    """Number of training steps, at least 2: the second step is the first that uses trained weights."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A shrunk run, the same for every rank; plain data."""

    job: Job
    """The shrunk job; its tables are in the order of their features in a batch."""
    limits: CheckLimits
    """Limits of the check."""
    folder: str
    """Folder for the expected results, which all ranks can read."""
    reduced: tuple[str, ...]
    """Sizes and settings that were made smaller or replaced (but not the device), one clause each."""

    @property
    def config(self) -> TrainingConfig:
        """Config of the shrunk run."""
        return self.job.config


def shrink(job: Job, *, limits: CheckLimits, folder: Path) -> CheckedRun:
    """Shrinks a run to the limits. In the tower dataflow every table keeps its sharding scheme, every tower its module.

    The shrunk run then pins the schemes of ``job``'s plan, which was made for the full size and the config's memory
    limit. If towers keep their number of ranks, every shard keeps its ranks. Expected results go to ``folder``.

    Raises `InputError` if the shrunk tables cannot be placed.
    """
    topology = fewer_ranks(job.topology, limits.max_ranks)
    keeps_ranks = job.topology.ranks_per_tower == topology.ranks_per_tower
    # Row counts are multiples of the ranks, so that row-wise tables can be split over fewer ranks, too.
    ranks = topology.ranks_per_tower
    most, unit = max(limits.max_rows - limits.max_rows % ranks, ranks), 1 if keeps_ranks else ranks
    rows = [min(table.num_embeddings, most) for table in job.tables]
    small = tuple(
        replace(table, num_embeddings=count - count % unit or count)
        for table, count in zip(job.tables, rows, strict=True)
    )
    config, reduced = _smaller(job.config, topology)
    if cut := [table.num_embeddings for table in job.tables if table.num_embeddings > most]:
        reduced.append(f"{len(cut)} of {len(small)} tables have {most:,} rows instead of up to {max(cut):,}")
    shrunk = Job(config=config, tables=small, num_dense=job.num_dense, towers=job.towers)
    if config.dataflow != "flat":
        assert job.sharding is not None, "resolved with the config"
        pinned: dict[str, Rule] = {
            name: TablePlacement(scheme=placement.scheme, ranks=placement.ranks) if keeps_ranks else placement.scheme
            for name, placement in job.sharding.placements.items()
        }
        shrunk = _placed(shrunk, pinned)
    return CheckedRun(job=shrunk, limits=limits, folder=str(folder), reduced=tuple(reduced))


def _smaller(config: TrainingConfig, topology: TowerTopology) -> tuple[TrainingConfig, list[str]]:
    """Returns the config for fewer ranks and steps, and a clause for each setting that was made smaller or replaced."""
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
        # Adam turns the rounding errors of gradients that cancel into full steps, so weights would differ in any case.
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
    """Returns the topology cut to ``max_ranks``: first to two replicas, then in ranks per tower, then in towers.

    A tower of two or more ranks keeps at least two, so that exchanges inside towers run. Of several towers, at least
    two remain if ``max_ranks`` is at least 4 (8 with replicas). In a smaller topology, each tower is a host.
    """
    towers, ranks, replicas = topology.num_towers, topology.ranks_per_tower, min(topology.num_replicas, _REPLICAS)
    max_ranks //= replicas
    ranks = min(ranks, max(min(ranks, 2), max_ranks // towers))
    towers = max(1, min(towers, max_ranks // ranks))
    if (towers, ranks, replicas) == (topology.num_towers, topology.ranks_per_tower, topology.num_replicas):
        return topology
    return replace(topology, num_towers=towers, ranks_per_tower=ranks, num_replicas=replicas, ranks_per_host=None)


def with_values(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    """Returns the config with other values in one section; values are not validated."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _placed(job: Job, rules: Mapping[str, Rule]) -> Job:
    """Returns the job with its towers spread evenly over the towers of its mesh, and its tables placed by ``rules``.

    Towers with modules stay separate, several on one mesh tower; towers without modules are joined.
    """
    assert job.towers is not None, "resolved with the config"
    # Without the plan's tables, which are those of full size.
    plan, num_mesh = replace(job.towers, tables=()), job.topology.num_towers
    mesh = [number * num_mesh // plan.num_towers for number in range(plan.num_towers)]
    by_tower: list[list[TableSpec]] = [[] for _ in range(num_mesh)]
    features: list[list[str]] = [[] for _ in range(num_mesh)]
    for tower, tables, number in zip(plan.towers, plan.tables_by_tower(job.split_tables), mesh, strict=True):
        by_tower[number] += tables
        features[number] += tower.features
    has_modules, in_order = job.config.model.has_towers, mesh == list(range(num_mesh))
    joined = TowerPlan.from_lists(features, column_splits=plan.column_splits, outside=plan.outside)
    outside = plan.outside_tables(job.split_tables)
    return replace(
        job,
        towers=plan if has_modules else joined,
        sharding=plan_tables(by_tower, job.topology, outside=outside, rules=ShardingRules(tables=rules)),
        placement=tuple(mesh) if has_modules and not in_order else None,
    )
