"""The device of a rank (CPU or GPU), its process group and backends, and the state of its random generators.

On GPUs the groups have two backends: NCCL carries GPU tensors, gloo CPU tensors and all Python objects.
docs/status.md says what has been run on which device.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dmt.collectives import from_rank, run_on_all_or_raise
from dmt.errors import InputError
from dmt.formatting import counted, shorten
from dmt.plan.topology import TowerTopology
from dmt.sptt.mesh import TowerMesh
from dmt.training.config import TrainingConfig

__all__ = [
    "DeviceType",
    "backend",
    "compare_hosts",
    "current_device",
    "device_type",
    "on_all_ranks",
    "on_first_rank",
    "peak_memory",
    "process_group",
    "random_state",
    "restart_safe_store",
    "set_random_state",
    "take_device",
    "this_machine",
]

logger = logging.getLogger(__name__)
DeviceType = Literal["cpu", "cuda"]
Value = TypeVar("Value")
# How long a rank waits for the others; one of them may be preparing data.
_TIMEOUT = timedelta(minutes=30)
_TELL_EVERY_S = 60.0  # in which ranks that have not joined are named


def device_type(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """Returns the kind of device that ``train.device`` selects on this host; ``auto`` selects GPUs if they can be used.

    Raises `InputError` if GPUs are wanted and cannot be used.
    """
    can_use_gpus = torch.cuda.is_available() and any(importlib.metadata.distributions(name="fbgemm-gpu"))
    if wanted == "cuda" and not can_use_gpus:
        raise InputError(
            "train.device='cuda', but torch sees no GPU on this host, or FBGEMM's CUDA build, the package fbgemm-gpu, "
            "is not installed. Run `dmt doctor`, or set train.device='cpu'."
        )
    return "cuda" if can_use_gpus and wanted != "cpu" else "cpu"


def take_device(kind: DeviceType, local_rank: int) -> torch.device:
    """Returns this rank's device; on GPUs, makes GPU ``local_rank`` current. Call it before creating process groups.

    Raises `InputError` if the host has fewer GPUs than ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"LOCAL_RANK={local_rank}, but torch sees {counted(count, 'GPU')} on this host; each rank needs its own. "
            f"Start at most {counted(count, 'rank')} per host (torchrun --nproc-per-node), or set train.device='cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def current_device(kind: DeviceType) -> torch.device:
    """Returns this rank's device: the CPU, or the current GPU of this process."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())


def backend(kind: DeviceType) -> str:
    """Returns the backends of the process groups, in the spelling of ``torch.distributed.init_process_group``."""
    return "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"


def peak_memory(kind: DeviceType) -> int:
    """Returns the peak bytes of this process so far: of its GPU tensors, or, on CPUs, of all its resident memory."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    # In KiB. Not ru_maxrss: that begins with the peak of the process that started this one.
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def random_state() -> Tensor:
    """Returns the state of this rank's random generators, uint8 [n]: the CPU's, then the GPU's if CUDA is in use."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.cat([torch.get_rng_state(), *gpu])


def set_random_state(state: Tensor) -> None:
    """Restores a state of `random_state`, uint8 [n]; its GPU part may be absent, and is ignored without CUDA in use."""
    cpu_state, gpu_state = state.tensor_split([len(torch.get_rng_state())])
    torch.set_rng_state(cpu_state)
    if len(gpu_state) and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(gpu_state)


@contextmanager
def process_group(load: Callable[[], TrainingConfig]) -> Iterator[tuple[TrainingConfig, TowerMesh]]:
    """Joins the ranks that torchrun started, yields a run's config and mesh, and leaves when all ranks are done.

    Each rank calls ``load`` for its config. Sets PyTorch's number of threads to ``OMP_NUM_THREADS``, by default 1.

    Raises:
        InputError: torchrun did not start this process, or it cannot connect to other ranks; or, on every rank: a
            rank's ``load`` raises it, a topology has another number of ranks than started, or a rank has no device.
    """
    if absent := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise InputError(
            f"{absent[0]} is not set: start training with torchrun, e.g. "
            "`torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml`."
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    store = restart_safe_store(store, rank, world_size, timeout=_TIMEOUT)

    def start() -> tuple[TrainingConfig, DeviceType]:
        config = load()
        config.topology.build().check_world_size(world_size)
        kind = device_type(config.train.device)
        take_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        return config, kind

    config, kind = _or_raise_on_all(start, store, rank, world_size)
    try:
        dist.init_process_group(backend(kind), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    except RuntimeError as error:
        problem = (
            f"the ranks cannot connect to each other ({error}). Set GLOO_SOCKET_IFNAME on each host to its interface "
            "to the other hosts, as `ip -brief address` names it."
        )
        raise InputError(from_rank(rank, problem)) from error
    try:
        yield config, TowerMesh(config.topology.build())
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def restart_safe_store(store: dist.Store, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:
    """Returns ``store`` under a prefix that only the ranks of this attempt know. Collective.

    torchrun restarts ranks on the same store, which still has the addresses of dead ranks, and its restart count may
    differ between hosts. So rank 0 chooses the prefix. It answers every request (greeting) in the store, even those of
    earlier attempts, until all ranks have confirmed (thanks). The others wait up to the store's timeout for an answer.

    Raises:
        TimeoutError: on rank 0, if a rank has not confirmed within ``timeout``.
    """
    name = uuid.uuid4().hex
    if rank != 0:
        store.set(f"dmt/greeting/{rank}", name)
        answer = store.get(f"dmt/answer/{name}").decode()
        store.set(f"dmt/thanks/{answer}/{rank}", "")
        return dist.PrefixStore(answer, store)
    waiting, began, told_s = set(range(1, world_size)), time.monotonic(), 0.0
    while waiting := {other for other in waiting if not store.check([f"dmt/thanks/{name}/{other}"])}:
        absent, waited_s = f"Ranks {sorted(waiting)[:8]} of {world_size}", time.monotonic() - began
        if waited_s > timeout.total_seconds():
            raise TimeoutError(f"{absent} did not join in {timeout}. Start them.")
        if waited_s > told_s + _TELL_EVERY_S:
            told_s = waited_s
            logger.warning(f"{absent} have not joined after {waited_s:.0f} s: see the output of their hosts.")
        for other in waiting:
            if store.check([f"dmt/greeting/{other}"]):
                store.set(f"dmt/answer/{store.get(f'dmt/greeting/{other}').decode()}", name)
        time.sleep(0.05)
    return dist.PrefixStore(name, store)


def _or_raise_on_all(work: Callable[[], Value], store: dist.Store, rank: int, world_size: int) -> Value:
    """Returns what `work` returns on this rank; if it raises `InputError` on any rank, raises it on all. Collective.

    It needs no process group: torchrun would not tell ranks of other hosts that one has failed, and they would wait.
    """
    values, fault = list[Value](), ""
    try:
        values.append(work())
    except InputError as error:
        fault = from_rank(rank, str(error)) if rank else str(error)
    store.set(f"fault/{rank}", fault)
    faults = store.multi_get([f"fault/{other}" for other in range(world_size)])
    if first := next(filter(None, faults), b""):
        store.set(f"read/{rank}", "")
        if rank == 0:  # its process may hold the store
            store.wait([f"read/{other}" for other in range(world_size)])
        raise InputError(first.decode())
    return values[0]


def on_all_ranks(work: Callable[[], Value], mesh: TowerMesh) -> Value:
    """Calls ``work`` and returns its value on this rank; if it fails on any rank, raises on all ranks. Collective.

    Raises:
        InputError: the first rank that failed raised it; the same on every rank.
        RankError: the first rank that failed raised another exception.
    """
    values: list[Value] = []
    run_on_all_or_raise(lambda: values.append(work()), mesh.global_group)
    return values[0]


def on_first_rank(work: Callable[[], Value], mesh: TowerMesh) -> Value:
    """Calls ``work`` on rank 0, and returns its value on every rank; raises what `on_all_ranks` does. Collective."""
    return cast(Value, run_on_all_or_raise(lambda: work() if mesh.rank == 0 else None, mesh.global_group)[0])


def this_machine() -> str:
    """Returns what only ranks of this machine return: the id of its boot, as machines or containers may share names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()


def compare_hosts(topology: TowerTopology, machines: Sequence[str]) -> str:
    """Returns what is wrong and what to do if the machines of a job, by rank, are not the hosts of its topology.

    Returns "" if they are, and for a single machine, which may emulate several hosts.
    """
    held = [[r for r, of_rank in enumerate(machines) if of_rank == name] for name in dict.fromkeys(machines)]
    if len(held) == 1 or held == topology.host_groups():
        return ""
    size = len(held[0])
    remedy = "Start equal numbers of ranks on all machines, with consecutive ranks on each, as torchrun does."
    if held == [list(range(first, first + size)) for first in range(0, len(machines), size)]:
        remedy = f"Set topology.ranks_per_host={size}. For dmt bench-comms, start one torchrun on each machine."
    found, expected = (shorten([str(ranks) for ranks in groups], ", ") for groups in (held, topology.host_groups()))
    return (
        f"The machines of the job hold ranks {found}, but the hosts of the topology {expected}, so data take other "
        f"links than is assumed. {remedy}"
    )
