"""``dmt partition`` (features to towers) and ``dmt plan`` (tables to ranks)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from dmt.errors import InputError
from dmt.formatting import human_bytes, shorten
from dmt.partitioner import FeatureAffinity, Partition, PartitionRules, TowerPartitioner, write_partition_report
from dmt.partitioner.partition import judge_balance, judge_meaning
from dmt.partitioner.report import strongest_rows
from dmt.sharding.explanation import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import ShardingRules, TablePlacement
from dmt.training.commands import Shown
from dmt.training.config import TrainingConfig, load_config
from dmt.training.job import Job, check_table_optimizer, open_job, step_workload

__all__ = ["run_partition", "run_plan"]

_SHOWN_FEATURES, _SHOWN_INTERACTIONS, _SHOWN_TABLES = 8, 5, 20
_TOWER_MODULES = {"dcn": "DCNTowerModule", "dlrm": "DLRMTowerModule", "dlrm-products": "DLRMProductsTowerModule"}


def run_partition(options: Mapping[str, Any], command: str) -> Shown:
    """Runs ``dmt partition``, which writes the plan and, if asked, a report; progress goes to stderr.

    ``options`` has the command's options by name, with ``-`` as ``_``; the plan records ``command``, the command line.

    Raises:
        InputError: options contradict each other, a file cannot be read or written, or towers cannot be made as asked.
    """
    run, data, module, strategy = (options[name] for name in ("checkpoint", "data", "tower_module", "strategy"))
    if run is None and (data is None or module is None or strategy not in ("auto", "interactions")):
        raise InputError(
            "Give --checkpoint RUN_DIR; or, for towers from interactions without a model, --data FILE and "
            f"--tower-module {' or '.join(_TOWER_MODULES)}, with --strategy auto or interactions."
        )
    config = cache(lambda: _config_of(run, data, options["function"]))  # which reads the whole checkpoint of a run
    if run is not None and module is None and config().model.factory is None:
        module = config().model.arch.removeprefix("dmt-")
    keeps_interactions = _keeps_interactions(module)
    if strategy == "auto":
        # Interactions gave better towers for modules that keep them (benchmarks/results/interaction_towers.md); there
        # is no such evidence for linear tower modules.
        strategy = "interactions" if run is None or (module is not None and keeps_interactions) else "coherent"
        click.echo(f"Strategy: {strategy}. Choose another with --strategy.", err=True)
    if strategy == "interactions" and module is None:
        raise InputError(
            f"--strategy interactions needs --tower-module {' or '.join(_TOWER_MODULES)} here: this run has a custom "
            "model, so name the module that is most like its tower modules."
        )
    rules = PartitionRules() if options["rules"] is None else PartitionRules.load(options["rules"])
    sense: Any = "together" if keeps_interactions else "apart"
    partitioner = TowerPartitioner(
        num_towers=options["towers"],
        strategy=sense if strategy == "interactions" else strategy,
        balance_ratio=options["balance_ratio"],
        seed=options["seed"],
        rules=rules,
    )
    partitioner.check()  # before a model is loaded and run
    partition = partitioner.partition(_measure(options, rules, strategy, config))
    partition = replace(partition, plan=replace(partition.plan, command=command))
    partition.plan.save(options["out"])
    click.echo(f"Written to {options['out']}.", err=True)
    if options["report"]:
        click.echo(f"Report: {write_partition_report(partition, options['report'])}", err=True)
    headers, rows, lines = _table_of(partition)
    return Shown(json.loads(options["out"].read_text()), headers, rows, right=range(1, len(headers) - 1), lines=lines)


def _config_of(run: Path | None, data: str | None, functions: Sequence[str]) -> TrainingConfig:
    """Returns the config of a run, with ``data`` in place of its rows if given; without a run, the demo's."""
    from dmt.training.commands.demo import demo_settings
    from dmt.training.trained import checkpoint_of

    if run is not None:
        return checkpoint_of(run, data, functions)[1]
    assert data is not None, "checked before"
    return load_config("demo", demo_settings(data))


def _keeps_interactions(module: str | None) -> bool:
    if module is None:
        return True
    import dmt.models.tower_modules

    return bool(getattr(dmt.models.tower_modules, _TOWER_MODULES[module]).keeps_interactions)


def _measure(
    options: Mapping[str, Any], rules: PartitionRules, strategy: str, config: Callable[[], TrainingConfig]
) -> FeatureAffinity:
    """Measures what the strategy needs, after checking the rules against the features."""
    from dmt.training.affinity import affinity_of_run, interactions_of

    run, data, functions = options["checkpoint"], options["data"], options["function"]
    what = "interactions (up to 15 minutes)" if strategy == "interactions" else "affinity"
    click.echo(f"Measuring {what} of {data or run}", err=True)
    if strategy != "interactions":
        return affinity_of_run(run, data_path=data, rules=rules, functions=functions)
    # A file alone does not determine the tables: the model chooses their number of columns.
    return interactions_of(config(), with_tables=run is not None, seed=options["seed"], rules=rules)


def _table_of(partition: Partition) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns headers, a row for each tower, and lines that judge the towers."""
    has_work = partition.loads[0].work is not None
    rows = []
    for tower, load in zip(partition.plan.towers, partition.loads, strict=True):
        weights = [f"{load.work:,.0f}", human_bytes(load.num_bytes or 0)] if has_work else []
        names = shorten(tower.features, " ", most=_SHOWN_FEATURES)
        rows.append([tower.name, f"{load.num_features:,}", *weights, names])
    headers = ["tower", "features", *(["elements/sample", "tables"] if has_work else []), ""]
    lines = [f"Note: {note}" for note in partition.notes]
    lines.append(judge_meaning(partition))
    for names, gain, share, place in strongest_rows(partition, _SHOWN_INTERACTIONS):
        lines.append(f"{names}: their interaction lowers the loss by {gain} nats per row ({share} of it); {place}")
    lines.append(judge_balance(partition))
    return headers, rows, lines


def run_plan(config: str, overrides: Sequence[str] = (), *, out: Path | None = None) -> Shown:
    """Places the tables of a run as the trainer will, and writes the plan to ``out``, if given.

    If ``data.tables`` is set, plans the tables that this file describes instead, without data.

    Raises:
        InputError: a file cannot be read or written, the optimizer or model is refused, or the tables cannot be placed.
    """
    run = load_config(config, overrides)
    job = open_job(run)
    if run.data.tables is None:
        check_table_optimizer(run.optimizer, job.device_type)
    if run.model.factory is not None:
        # Imported here because plans of shipped models need no TorchRec.
        from dmt.training.build import build_model
        from dmt.training.factory import check_outputs

        check_outputs(job, build_model(job, device="meta"))
    sharding = job.sharding or _plan_flat(job)
    if out is not None:
        sharding.save(out)
    return _show_sharding(job, sharding, out)


def _plan_flat(job: Job) -> TowerShardingPlan:
    """Plans a flat run by TorchRec's planner, and returns it as one tower on all ranks of a replica."""
    from dmt.training.build import build_model, fused_params
    from dmt.training.flat import plan_flat

    fused = fused_params(job.config.optimizer)
    plans = plan_flat(job, build_model(job, device="meta"), fused).plan.values()
    rules = {
        name: TablePlacement(scheme=placed.sharding_type, ranks=tuple(dict.fromkeys(placed.ranks)))
        for plan in plans
        for name, placed in plan.items()
    }
    topology = replace(job.topology.one_replica, num_replicas=job.topology.num_replicas)
    workload = step_workload(job.config, job.config.sharding.pooling_factors)
    report = plan_tables([job.tables], topology, workload=workload, rules=ShardingRules(tables=rules))
    reasons = [table.reason.replace("pinned by the user", "placed by TorchRec's planner") for table in report.tables]
    return replace(report, tables=tuple(replace(t, reason=r) for t, r in zip(report.tables, reasons, strict=True)))


def _show_sharding(job: Job, sharding: TowerShardingPlan, out: Path | None) -> Shown:
    ranked = sorted(sharding.tables, key=lambda entry: (-entry.seconds, entry.name))
    rows = []
    for entry in ranked[:_SHOWN_TABLES]:
        tower = "all" if entry.tower is None else str(entry.tower)
        cost = f"{1e3 * entry.seconds:,.3f} ms" if entry.seconds >= 1e-3 else f"{1e6 * entry.seconds:,.1f} µs"
        rows.append((entry.name, tower, human_bytes(entry.memory), cost, entry.reason))
    topology = job.topology
    hosts = topology.on_all_replicas([rank.needed for rank in sharding.ranks]).reshape(topology.num_hosts, -1)
    elsewhere = " on its devices, besides tables in host memory" if job.config.sharding.is_off_device else ""
    lines = [sharding.summary, f"The fullest host needs {human_bytes(hosts.sum(axis=1).max())}{elsewhere}."]
    if topology.num_replicas > 1:
        lines.append(
            f"To average {topology.num_replicas} replicas, a rank sends up to "
            f"{human_bytes(max(rank.averaged_bytes for rank in sharding.ranks))} per step; compare with dmt what-if."
        )
    if topology.num_replicas > 1 and job.sharding is None:
        lines.append(
            "Replicas of a flat model train in the tower dataflow only: set sharding.dataflow=sptt "
            f"topology.num_towers=1 topology.ranks_per_tower={sharding.topology.ranks_per_tower}."
        )
    if job.opened_data is not None and job.opened_data.notes:
        lines.append(f"Check the data: {job.opened_data.notes}")
    lines += [] if out is None else [f"Written to {out}."]
    title = "Tables, costliest first" + ("; --json has all" if len(ranked) > _SHOWN_TABLES else "")
    headers = ("table", "tower", "memory", "cost", "reason (ranks are counted inside the tower)")
    return Shown(sharding.to_record(), headers, rows, title, (1, 2, 3), lines)
