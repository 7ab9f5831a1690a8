"""Checks a run's data, model and ranks before it trains; `dmt.training.config` refuses settings that conflict."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import nn

from dmt.collectives import by_path, check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.formatting import counted, human_bytes, shorten
from dmt.models.complexity import Complexity, tower_modules
from dmt.simulator.cluster import load_cluster
from dmt.sptt.mesh import TowerMesh
from dmt.testing.plain import is_table
from dmt.training.build import build_model, count_model
from dmt.training.config import TrainingConfig
from dmt.training.device import DeviceType, compare_hosts, current_device, on_all_ranks, on_first_rank, this_machine
from dmt.training.factory import check_outputs
from dmt.training.job import Job, check_table_optimizer
from dmt.training.records import versions

__all__ = ["check_rows", "check_same_input", "checked_model", "preflight"]

logger = logging.getLogger(__name__)

# Paths may differ between hosts; the files that they name may not.
_PATHS = ("data.prepared", "data.train_path", "data.eval_path", "towers.plan", "sharding.cluster")


def checked_model(job: Job) -> nn.Module:
    """Makes all checks of a run that need only one process, and returns its plain model on the meta device.

    Raises:
        InputError: settings, data, optimizer and devices do not fit each other; or `build_model` or, for the model of
            a factory, `check_outputs` raises it.
    """
    config = job.config
    if job.sharding is None and job.topology.num_replicas > 1:
        raise InputError(
            f"topology.num_replicas={job.topology.num_replicas} needs the tower dataflow, but this run is flat. "
            "Set sharding.dataflow='sptt'; topology.num_towers=1 makes all ranks of a replica one tower."
        )
    if job.sharding is None and config.sharding.cluster is not None:
        load_cluster(config.sharding.cluster)  # which a flat run uses at its end only
    check_table_optimizer(config.optimizer, job.device_type)
    if job.opened_data is None:
        raise InputError(f"data.tables={config.data.tables!r} only lists tables. Set data.prepared or data.train_path.")
    if job.data.columns.label is None:
        raise InputError(
            f"data.prepared={config.data.prepared!r} has rows without labels. Set `label` in its manifest.json "
            "to the name of their column, or use other rows."
        )
    check_rows(config, job.topology.world_size, job.data.num_rows("train"))
    if job.data.num_rows("eval") == 0:
        raise InputError("There are no rows to evaluate. Check data.eval_path, split_column and eval_fraction.")
    model = build_model(job, device="meta")
    if config.model.factory is not None:
        check_outputs(job, model)
    return model


def preflight(job: Job, mesh: TowerMesh) -> tuple[nn.Module, Complexity]:
    """Makes all checks of a run; returns its plain model on the meta device, and the model's complexity. Collective.

    Raises:
        InputError: see `checked_model`, `check_same_input` and `check_memory`; the same on every rank.
    """
    model = on_all_ranks(lambda: checked_model(job), mesh)
    check_same_input(job, model, mesh)
    places = run_on_all_or_raise(partial(this_place, job.device_type), mesh.global_group)
    check_memory(job, model, places)
    counts = on_first_rank(lambda: count_model(job, model), mesh)
    if mesh.rank == 0:
        if job.data.notes:
            logger.warning(f"Check the data: {job.data.notes}")
        if problem := compare_hosts(job.topology, [place.machine for place in places]):
            logger.warning(problem)
        if (ratio := counts.compression_ratio) < 1:
            logger.warning(
                f"The towers send {1 / ratio:.2f} times as many numbers as their embeddings have (compression ratio "
                f"{ratio:.2f}). Lower model.tower_dim, model.c or model.p."
            )
    return model, counts


def check_rows(config: TrainingConfig, num_ranks: int, rows: int | None) -> None:
    """Raises `InputError` if one step of ``num_ranks`` needs more than the training ``rows``; None: not known."""
    needed = num_ranks * config.train.batch_size
    if rows is not None and rows < needed:
        raise InputError(
            f"The data has {counted(rows, 'training row')}, fewer than one step takes: {counted(num_ranks, 'rank')} x "
            f"train.batch_size={config.train.batch_size} = {needed:,}. Lower train.batch_size, give more data, or "
            "correct data.split_column."
        )


def check_same_input(job: Job, model: nn.Module, mesh: TowerMesh) -> None:
    """Checks that all ranks have the same settings, tables, plans and data files; collective.

    Files are compared by name, size and CRC-32, see `ClickData.files`.

    Raises:
        InputError: a rank differs from the first; every rank gets the same message, with the setting or file and hosts.
    """
    given = by_path(job.config.model_dump(mode="json"))
    for path in _PATHS:
        del given[path]
    data = job.data
    given |= {
        "versions": versions(),
        "device": job.device_type,
        "rows and columns": {table.name: (table.num_embeddings, table.embedding_dim) for table in job.split_tables},
        # With a user's source, the columns come from this rank's first batch.
        "dense columns": data.columns.dense,
        "features": data.columns.feature_names,
        "features with bags": {feature.name: feature.is_bag for feature in data.columns.features},
        "targets of sequences": {feature.name: feature.target for feature in data.columns.features},
        "parameters of the model": {name: tuple(value.shape) for name, value in model.named_parameters()},
        "tower": None if job.towers is None else dict(enumerate([*job.towers.to_lists(), job.towers.outside])),
        "placement": None if job.sharding is None else job.sharding.placements,
    }
    for split in ("train", "eval"):
        for number, (name, size, checksum) in enumerate(data.files(split)):
            given[f"file {number} of data.{split}_path"] = f"{name} of {size:,} bytes (CRC-32 {checksum:08x})"
    try:
        check_agreement("Training", given, mesh.global_group)
    except InputError as error:
        hosts = gather_objects(socket.gethostname(), mesh.global_group)
        places = [f"{host} (from rank {hosts.index(host)})" for host in dict.fromkeys(hosts)]
        raise InputError(f"{error} The ranks run on {shorten(places, ', ', most=8)}.") from error


class Place(NamedTuple):
    """A GPU, or a machine (of CPU ranks), whose memory its ranks share."""

    name: str
    num_bytes: int
    machine: str


def this_place(kind: DeviceType) -> Place:
    """Returns the place of this rank."""
    host = f"host {socket.gethostname()}"
    if kind == "cpu":
        return Place(host, memory_limit(), this_machine())
    device = current_device(kind)
    return Place(f"{host}, {device}", torch.cuda.get_device_properties(device).total_memory, this_machine())


def check_memory(job: Job, model: nn.Module, places: Sequence[Place]) -> None:
    """Checks by a lower bound that each of the ``places``, given by rank, has the memory that its ranks need.

    The bound counts a rank's tables, the embeddings that it looks up in a step for all ranks (their gradients may reuse
    that memory), as many copies of hot rows as allowed, dense weights and gradients, and its batch with its embeddings.

    Raises:
        InputError: a machine, its container or a GPU has less memory. The message names the largest batch size that
            fits by the same bound, if there is one.
    """
    config, topology = job.config, job.topology
    towers = sum(weight.nbytes for module in tower_modules(model) for weight in module.parameters())
    weights = (weight for name, weight in model.named_parameters() if not is_table(name))
    dense = sum(weight.nbytes for weight in weights) - towers
    copies = 0.0
    if topology.share_across_hosts(topology.sharding_groups()) > 0:  # else no row is ever copied
        # Each copy has a weight and a gradient.
        copies = 2 * config.hot_rows.extra_memory * sum(table.num_bytes for table in job.tables)
    tables, batches = _lookup_bytes(job).T
    needed = tables + batches + copies + 2 * (dense + towers / topology.num_towers)
    ranks_of = {place: [rank for rank, held in enumerate(places) if held == place] for place in dict.fromkeys(places)}
    # What each place lacks, as a share of the bytes of its batches.
    lacks = {place: (needed[ranks].sum() - place.num_bytes) / batches[ranks].sum() for place, ranks in ranks_of.items()}
    place = max(lacks, key=lambda place: lacks[place])
    if lacks[place] <= 0:
        return
    ranks, size = ranks_of[place], config.train.batch_size
    most = int(size * (1 - lacks[place]))
    enough = f"There is enough for train.batch_size={most}. " if most > 0 else ""
    raise InputError(
        f"{place.name} has {human_bytes(place.num_bytes)} of memory, but its {counted(len(ranks), 'rank')} would take "
        f"at least {human_bytes(needed[ranks].sum())}. Each would take up to {human_bytes(tables[ranks].max())} for "
        f"tables, {human_bytes(batches[ranks].max())} for a batch and the embeddings of a step (train.batch_size="
        f"{size}), {human_bytes(copies)} for copies of hot rows (hot_rows.extra_memory), and more for dense layers "
        "(model: dense_arch, over_arch, tower_dim, c, p, cross_rank). "
        f"{enough}Lower one of these settings, or use more hosts."
    )


def _lookup_bytes(job: Job) -> NDArray[Any]:
    """Returns lower bounds [W, 2] of each rank's bytes: of tables, and of a batch with the embeddings of a step."""
    samples, ranks = job.config.train.batch_size, job.topology.one_replica.world_size
    columns = sum(table.embedding_dim * len(table.feature_names) for table in job.tables)
    batch, tables = 4 * samples * (job.num_dense + columns), sum(table.num_bytes for table in job.tables)
    if job.sharding is not None:
        held = [(float(rank.memory), rank.activations / 2 + batch) for rank in job.sharding.ranks]
    else:  # TorchRec's planner places them later.
        is_whole = job.config.sharding.scheme == "data_parallel"
        held = [(tables if is_whole else tables / ranks, 4.0 * samples * columns + batch)] * ranks
    return job.topology.on_all_replicas(held)


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns this machine's memory in bytes, or the limit of its container (cgroups in ``root``) if that is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = (root / name).read_text().strip() if (root / name).exists() else "max"
        limits += [int(text)] if text.isdecimal() else []  # "max": no limit
    return min(limits)
