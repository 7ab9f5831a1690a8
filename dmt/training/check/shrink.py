"""From a config made for a cluster to one that a few processes of this machine can run: `shrink`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import StepWorkload
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import TablePlacement
from dmt.sharding.user_rules import Rule, ShardingRules
from dmt.training.config import TrainingConfig
from dmt.training.job import Job

__all__ = ["CheckLimits", "CheckedRun", "fewer_ranks", "shrink", "with_values"]

# Most warm-up steps: the few steps that are run then have rising rates and full ones.
_WARMUP_STEPS = 2
# Two show what replicas do, with batches of their own.
_REPLICAS = 2
# Longest interval between averaging replicas: the few steps then see averaged weights and states.
_SYNC_EVERY = {"now": 2, "delayed": 1}


@dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """Limits on the size of a check."""

    max_rows: int = 1000
    """Most rows of a table, at least 8: fewer would leave row-wise shards of most ranks nothing but frequent ids."""
    max_ranks: int = 8
    """Most ranks, 4 to 64: two towers of two show both exchanges; more processes outgrow one machine."""
    batch_size: int = 16
    """B, rows per rank and step."""
    steps: int = 4
    """Training steps, at least 2: the second is the first whose weights were trained."""
    timeout_s: float = 120.0
    """Longest time without any news from a rank, at least 1."""

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--rows", self.max_rows, 8, math.inf),
            ("--max-ranks", self.max_ranks, 4, 64),
            ("--batch-size", self.batch_size, 1, math.inf),
            ("--steps", self.steps, 2, math.inf),
            ("--timeout", self.timeout_s, 1, math.inf),
        ):
            if not least <= value <= most:
                limit = f"at least {least}" if math.isinf(most) else f"from {least} to {most:g}"
                raise InputError(
                    f"{option}={value:g} is out of range: a check needs {limit} (docs/check.md says why). Give {limit}."
                )


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The run of every rank; plain data."""

    job: Job
    """The run, shrunk; the order of its tables is that of the features."""
    limits: CheckLimits
    """Limits of the check."""
    folder: str
    """Folder of expected values and checkpoints; all ranks see it."""
    reduced: tuple[str, ...]
    """Differences to the config that make the run smaller, a line each."""
    schemes: tuple[str, ...]
    """The schemes that are run, by number of tables; then the tables that cannot have the one asked for, and why."""

    @property
    def config(self) -> TrainingConfig:
        """The config of the run, shrunk."""
        return self.job.config

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The uncut tables, shrunk."""
        return self.job.tables

    @property
    def topology(self) -> TowerTopology:
        """The mesh that is run."""
        return self.config.topology.build()


def shrink(job: Job, *, limits: CheckLimits, folder: Path) -> CheckedRun:
    """Makes the run small and keeps what it is made of: every table its scheme, every tower its module.

    The sharding plan is made for the full size, under the config's memory limit, and its schemes are pinned; where
    towers keep their number of ranks, so are the ranks of every shard.

    Raises:
        InputError: the shrunk tables cannot be placed.
    """
    topology = fewer_ranks(job.topology, limits.max_ranks)
    most = max(limits.max_rows, topology.ranks_per_tower)
    small = tuple(replace(table, num_embeddings=min(table.num_embeddings, most)) for table in job.tables)
    config, reduced = _smaller(job.config, topology)
    cut = [table.num_embeddings for table in job.tables if table.num_embeddings > most]
    if cut:
        reduced.append(f"{len(cut)} of {len(small)} tables have {most:,} rows instead of up to {max(cut):,}")
    shared: dict[str, Any] = {"limits": limits, "folder": str(folder), "reduced": tuple(reduced)}
    if config.dataflow == "flat":
        scheme = config.sharding.scheme
        shown = "table_wise or column_wise, as TorchRec's planner chooses" if scheme == "auto" else scheme
        shrunk = Job(config=config, tables=small, num_dense=job.num_dense)
        return CheckedRun(job=shrunk, schemes=(f"schemes: {len(small)} {shown}",), **shared)
    assert job.towers is not None, "resolved with the config"
    assert job.sharding is not None, "resolved with the config"
    keeps_ranks = job.topology.ranks_per_tower == topology.ranks_per_tower
    pinned: dict[str, Rule] = {
        name: TablePlacement(scheme=placement.scheme, ranks=placement.ranks) if keeps_ranks else placement.scheme
        for name, placement in job.sharding.placements.items()
    }
    shrunk = Job(config=config, tables=small, num_dense=job.num_dense, towers=job.towers)
    mesh = [i * topology.num_towers // job.towers.num_towers for i in range(job.towers.num_towers)]
    run = _arranged(shrunk, limits, mesh, pinned)
    assert run.sharding is not None, "planned just now"
    return CheckedRun(job=run, schemes=_scheme_lines(run.sharding, job.sharding), **shared)


def _smaller(config: TrainingConfig, topology: TowerTopology) -> tuple[TrainingConfig, list[str]]:
    """Returns the config of a shorter run on fewer ranks, and a line for everything that is smaller than asked for."""
    own, instead = config.replicas, "{key} is {after} instead of {before}"
    config = with_values(config, "train", device="cpu")
    config = with_values(config, "topology", ranks_per_host=topology.ranks_per_host)
    changes: list[tuple[str, str, Any, str]] = [
        # Batches of the checks may be smaller than the number of micro-batches.
        ("topology", "ranks_per_tower", topology.ranks_per_tower, "checked with {after} of {before} ranks per tower"),
        ("topology", "num_towers", topology.num_towers, "the {before} towers share the ranks of {after}"),
        # Adam makes whole steps of what rounding leaves of gradients that cancel: nothing could be told from weights.
        ("train", "dense_reduce_precision", "fp32", "dense gradients are sent in {after} instead of {before}"),
        ("optimizer", "warmup_steps", _WARMUP_STEPS, "learning rates rise over {after} steps instead of {before}"),
        ("optimizer", "decay_start", _WARMUP_STEPS, "they fall from step {after} on instead of {before}"),
        ("optimizer", "decay_steps", _WARMUP_STEPS, "their fall takes {after} steps instead of {before}"),
    ]
    if topology.num_replicas > 1:
        most = own.moment_scale if isinstance(own.moment_scale, str) else float(topology.num_replicas)
        changes += [
            ("topology", "num_replicas", topology.num_replicas, "checked with {after} of {before} replicas"),
            ("replicas", "sync_every", _SYNC_EVERY[own.optimizer_state], instead),
            ("replicas", "moment_scale", most, instead),
        ]
    lines = []
    for section, key, after, line in changes:
        before = getattr(getattr(config, section), key)
        if before is None:
            continue
        after = after if isinstance(after, str) else min(before, after)
        if before != after:
            config = with_values(config, section, **{key: after})
            lines.append(line.format(key=f"{section}.{key}", before=before, after=after))
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


def _arranged(job: Job, limits: CheckLimits, mesh: Sequence[int], rules: Mapping[str, Rule]) -> Job:
    """Returns the job with its towers on these towers of the mesh, and its tables placed by these rules.

    The modules of towers stay, several on one mesh tower; the towers of a flat model are joined.
    """
    assert job.towers is not None, "resolved with the config"
    # Without the tables it was made for, which were larger.
    plan, num_mesh = replace(job.towers, tables=()), job.topology.num_towers
    by_tower: list[list[TableSpec]] = [[] for _ in range(num_mesh)]
    features: list[list[str]] = [[] for _ in range(num_mesh)]
    for tower, tables, number in zip(plan.towers, plan.tables_by_tower(job.split_tables), mesh, strict=True):
        by_tower[number] += tables
        features[number] += tower.features
    has_modules, in_order = job.config.model.has_towers, list(mesh) == list(range(num_mesh))
    workload = StepWorkload(batch_size=limits.batch_size, optimizer=job.config.optimizer.sparse)
    return replace(
        job,
        towers=plan if has_modules else TowerPlan.from_lists(features, column_splits=plan.column_splits),
        sharding=plan_tables(by_tower, job.topology, workload=workload, rules=ShardingRules(tables=rules)),
        placement=tuple(mesh) if has_modules and not in_order else None,
    )


def _scheme_lines(made: TowerShardingPlan, whole: TowerShardingPlan) -> tuple[str, ...]:
    """Returns the schemes of the plan that is run, and the reasons of the full-size plan."""
    lines = ["schemes: " + ", ".join(f"{count} {scheme}" for scheme, count in made.tables_by_scheme.items())]
    by_reason: dict[str, list[str]] = {}
    for name, reason in whole.reasons.items():
        if "asked for, but" in reason:
            # From the scheme on, without its rank: many tables share what is left.
            scheme, why = whole.placements[name].scheme, reason.partition(": ")[2]
            by_reason.setdefault(f"{scheme}: {why}", []).append(name)
    for reason, names in by_reason.items():
        lines.append(f"{shorten(names, ', ')}: {reason}")
    return tuple(lines)
