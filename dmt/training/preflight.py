"""Every check of a run before its work starts: of the config with its data and model, of memory, of equal input."""

from __future__ import annotations

import copy
import logging
import os
import socket
from pathlib import Path
from typing import Any

from torch import nn

from dmt.collectives import check_agreement, gather_objects
from dmt.errors import InputError
from dmt.formatting import human_bytes, shorten
from dmt.models.complexity import Complexity, count_on_meta, tower_modules
from dmt.plan.topology import TowerTopology
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import build_model
from dmt.training.config import TrainingConfig
from dmt.training.factory import check_outputs, without_tables
from dmt.training.job import Job, check_kernels, check_table_optimizer, open_job

__all__ = [
    "check_memory",
    "check_rows",
    "check_same_input",
    "checked_model",
    "compare_hosts",
    "memory_limit",
    "preflight",
    "resolve",
]

logger = logging.getLogger(__name__)

# Paths may differ between hosts; the files behind them may not.
_PATHS = (
    *(("data", key) for key in ("prepared", "train_path", "eval_path")),
    ("towers", "plan"),
    ("sharding", "cluster"),
)


def resolve(config: TrainingConfig, world_size: int) -> Job:
    """Opens a run and checks, in one process, what can be checked before ``world_size`` ranks train it."""
    job = open_job(config)
    checked_model(job, world_size)
    return job


def checked_model(job: Job, world_size: int) -> nn.Module:
    """Checks a run, as far as one process can, and builds its plain model on the meta device.

    Raises:
        InputError: settings, data, optimizer and devices do not fit each other or ``world_size``, or a factory's model
            returns something else than logits.
    """
    config = job.config
    config.topology.build().check_world_size(world_size)
    if job.sharding is None and job.topology.num_replicas > 1:
        raise InputError(
            f"topology.num_replicas={job.topology.num_replicas} needs the tower dataflow, but this run has "
            "sharding.dataflow='flat'. Set it to 'sptt'; with topology.num_towers=1 a replica exchanges over all ranks."
        )
    check_table_optimizer(config.optimizer, job.device_type)
    check_kernels(job)
    if job.source is None:
        raise InputError(
            f"data.tables={config.data.tables!r} lists tables without rows, for dmt plan. Leave it out to train."
        )
    if not job.num_dense and config.model.factory is None:
        raise InputError(
            "The data has no dense column, but the models need at least one. Name some in data.dense, or give a model "
            "of your own (model.factory)."
        )
    check_rows(config, world_size, job.data.num_rows("train"))
    model = build_model(job, device="meta")
    if config.model.factory is not None:
        check_outputs(job, model)
    return model


def preflight(job: Job, model: nn.Module, mesh: TowerMesh) -> Complexity:
    """Makes the checks that several ranks need, before a run starts on a mesh, and counts its model; collective.

    Args:
        job: the run.
        model: `checked_model`, on the meta device; it stays as it is.
        mesh: the groups.

    Raises:
        InputError: anything the user can fix; the same on every rank.
    """
    check_same_input(job, model, mesh)
    check_memory(job, model, mesh)
    counts = count_on_meta(without_tables(copy.deepcopy(model)), job.num_dense)
    if mesh.rank == 0:
        if job.data.notes:
            logger.warning(f"Mind the data: {job.data.notes}")
        compare_hosts(job.topology, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
        if (ratio := counts.compression_ratio) < 1:
            logger.warning(
                f"The towers send {1 / ratio:.2f} times the numbers of their embeddings (compression ratio "
                f"{ratio:.2f}). Lower model.tower_dim (or c, p), or leave it out: half of embedding_dim, a ratio of 2."
            )
    return counts


def check_rows(config: TrainingConfig, world_size: int, rows: int | None) -> None:
    """Raises `InputError` when there are fewer rows than one training step takes; None is an unknown number."""
    needed = world_size * config.train.batch_size
    if rows is not None and rows < needed:
        raise InputError(
            f"There are {rows} training rows, fewer than one step takes: {world_size} ranks x train.batch_size="
            f"{config.train.batch_size} = {needed}. Lower train.batch_size, give more data, or "
            "correct data.split_column."
        )


def check_same_input(job: Job, model: nn.Module, mesh: TowerMesh) -> None:
    """Compares settings, tables, plans and files of data over the ranks; collective, before they depend on each other.

    Files are compared by name, bytes and CRC-32, see `ClickData.files`.

    Raises:
        InputError: a rank differs from the first; names setting or file, ranks and hosts; the same on every rank.
    """
    given: dict[str, Any] = job.config.model_dump(mode="json")
    for section, key in _PATHS:
        del given[section][key]
    data = job.data
    given |= {
        "device": job.device_type,
        "rows and columns": {table.name: (table.num_embeddings, table.embedding_dim) for table in job.split_tables},
        # Of a source, they follow from the first batch that this rank was given.
        "dense columns": data.columns.dense,
        "features": data.columns.feature_names,
        "features with bags": {feature.name: feature.is_bag for feature in data.columns.features},
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
        places = [f"{host} (rank {hosts.index(host)} on)" for host in dict.fromkeys(hosts)]
        raise InputError(f"{error} The ranks are on host {shorten(places, ', ', most=8)}.") from error


def check_memory(job: Job, model: nn.Module, mesh: TowerMesh) -> None:
    """Checks by a lower bound that each machine has the memory that its ranks need together; collective.

    Counted are a rank's tables, the copies of hot rows that it may have, the dense weights with their gradients, and a
    batch with its embeddings.

    Raises:
        InputError: a machine, or the container that this is, has less; the same on every rank.
    """
    config, topology = job.config, job.topology
    towers = sum(weight.nbytes for module in tower_modules(model) for weight in module.parameters())
    weights = (weight for name, weight in model.named_parameters() if ".embedding_bags." not in name)
    dense = sum(weight.nbytes for weight in weights) - towers
    tables = _table_bytes(job, mesh.rank)
    # Of each copy the weight and its gradient. On one host no row is ever chosen.
    is_across = topology.share_across_hosts(topology.sharding_groups()) > 0
    copies = 2 * config.hot_rows.extra_memory * sum(table.num_bytes for table in job.tables) * is_across
    columns = job.num_dense + sum(table.embedding_dim * len(table.feature_names) for table in job.tables)
    batch = config.train.batch_size * columns * 4
    needed = tables + copies + 2 * (dense + towers / topology.num_towers) + batch
    everyone = gather_objects((socket.gethostname(), needed, memory_limit()), mesh.global_group)
    for host in dict.fromkeys(name for name, _, _ in everyone):
        ranks = [(size, limit) for name, size, limit in everyone if name == host]
        whole, limit = sum(size for size, _ in ranks), min(limit for _, limit in ranks)
        if whole > limit:
            raise InputError(
                f"The {len(ranks)} ranks on host {host} need at least {human_bytes(whole)} of memory, but it has "
                f"{human_bytes(limit)}: {human_bytes(tables)} each for tables, {human_bytes(copies)} each for copies "
                "of hot rows (hot_rows.extra_memory), and dense layers (model: dense_arch, over_arch, tower_dim, c, p, "
                "cross_rank) and batches (train.batch_size). Lower the settings, or use more hosts."
            )


def _table_bytes(job: Job, rank: int) -> float:
    """Bytes of this machine's memory that a rank's tables need at least; 0 for tables on GPUs, also with caches."""
    if job.device_type == "cuda":
        return 0
    if job.sharding is not None:
        place = job.topology.coordinates(rank)
        loads = {(load.tower, load.local): load.memory for load in job.sharding.ranks}
        return loads[place.tower, place.local]
    # TorchRec's planner places them later.
    whole, ranks = sum(table.num_bytes for table in job.tables), job.topology.world_size // job.topology.num_replicas
    return whole if job.config.sharding.scheme == "data_parallel" else whole / ranks


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory that this machine has, or fewer that its container may use (cgroup, v2 or v1)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = (root / name).read_text().strip() if (root / name).exists() else "max"
        limits += [int(text)] if text.isdecimal() else []  # "max": no limit
    return min(limits)


def compare_hosts(topology: TowerTopology, ranks_per_machine: int) -> None:
    """Warns of hosts that are not the machines of a job on several; one machine may play several hosts."""
    if 0 < ranks_per_machine < topology.world_size and ranks_per_machine != topology.host_size:
        logger.warning(
            f"The job runs {ranks_per_machine} ranks per machine, but the topology has hosts of {topology.host_size}, "
            f"so bytes are counted for other links. Set topology.ranks_per_host={ranks_per_machine}."
        )
