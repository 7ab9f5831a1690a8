"""The device of a rank: CPU or GPU, obstacles to a GPU, the process group and its backends, random states.

On GPUs the groups have two backends: NCCL carries tensors of the GPU, gloo those of the CPU and with them all objects.
docs/status.md says what has been run on which device.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.training.config import TrainingConfig

__all__ = [
    "DeviceType",
    "backend",
    "current_device",
    "device_type",
    "on_all_ranks",
    "peak_memory",
    "process_group",
    "random_state",
    "restart_safe_store",
    "set_random_state",
    "take_device",
]

DeviceType = Literal["cpu", "cuda"]
Value = TypeVar("Value")
# Time that a rank waits for the others: one of them may prepare data.
_TIMEOUT = timedelta(minutes=30)


def device_type(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """Returns the kind of device that ``train.device`` means on this host; ``auto`` is a GPU wherever one can be used.

    Raises:
        InputError: GPUs are wanted and cannot be used.
    """
    can_use_gpus = torch.cuda.is_available() and any(importlib.metadata.distributions(name="fbgemm-gpu"))
    if wanted == "cuda" and not can_use_gpus:
        raise InputError(
            "train.device='cuda', but torch sees no GPU on this host, or FBGEMM's CUDA build, the package fbgemm-gpu, "
            "is not installed; see `dmt doctor`. Or set train.device='cpu'."
        )
    return "cuda" if can_use_gpus and wanted != "cpu" else "cpu"


def take_device(kind: DeviceType, local_rank: int) -> torch.device:
    """Makes the GPU of this rank's number on the host the current one; call it before the process group is created.

    Raises:
        InputError: the host has fewer GPUs than ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"LOCAL_RANK={local_rank}, but torch sees {count} GPUs on this host, and each rank needs one of its own "
            f"(NCCL). Start at most {count} ranks per host (torchrun --nproc-per-node), or set train.device='cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def current_device(kind: DeviceType) -> torch.device:
    """Returns this rank's device."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())


def backend(kind: DeviceType) -> str:
    """Returns the backends of the process groups, in the spelling of ``torch.distributed.init_process_group``."""
    return "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"


def peak_memory(kind: DeviceType) -> int:
    """Returns the most bytes of memory that this process has held so far: tensors on its GPU, or everything in RAM."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    # In KiB. Not ru_maxrss: that begins with the peak of the process that started this one.
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def random_state() -> Tensor:
    """Returns the state of this rank's generators: bytes of the CPU's, then of its GPU's where that is used."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.cat([torch.get_rng_state(), *gpu])


def set_random_state(state: Tensor) -> None:
    """Sets what `random_state` returned; the GPU's part is left out where no GPU is used, and may be absent."""
    of_cpu, of_gpu = state.tensor_split([len(torch.get_rng_state())])
    torch.set_rng_state(of_cpu)
    if len(of_gpu) and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(of_gpu)


@contextmanager
def process_group(config: TrainingConfig) -> Iterator[TowerMesh]:
    """Joins the ranks that torchrun started, yields the mesh of a run, and leaves when all are done.

    Raises:
        InputError: torchrun did not start this, there are other ranks than the topology has, or no device for each.
    """
    if absent := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise InputError(
            f"{absent[0]} is not set: start training with torchrun, e.g. "
            "`torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml`."
        )
    topology, kind = config.topology.build(), device_type(config.train.device)
    topology.check_world_size(int(os.environ["WORLD_SIZE"]))
    take_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    store = restart_safe_store(store, rank, world_size, timeout=_TIMEOUT)
    dist.init_process_group(backend(kind), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        yield TowerMesh(topology)
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def restart_safe_store(store: dist.Store, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:
    """Returns a part of a store that only the ranks of this attempt know; every rank of the attempt calls it.

    torchrun starts ranks again on the store that has the addresses of ranks that died, and its restart count is not the
    same on all hosts. So rank 0 names the part, and answers each greeting that it meets, also one that an earlier
    attempt has left, until all ranks have thanked it. Others wait for it as long as the store does.

    Raises:
        TimeoutError: on rank 0, some rank has not come.
    """
    name = uuid.uuid4().hex
    if rank != 0:
        store.set(f"dmt/greeting/{rank}", name)
        answer = store.get(f"dmt/answer/{name}").decode()
        store.set(f"dmt/thanks/{answer}/{rank}", "")
        return dist.PrefixStore(answer, store)
    waiting, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while waiting := {other for other in waiting if not store.check([f"dmt/thanks/{name}/{other}"])}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ranks {sorted(waiting)[:8]} of {world_size} have not come within {timeout}.")
        for other in waiting:
            if store.check([f"dmt/greeting/{other}"]):
                store.set(f"dmt/answer/{store.get(f'dmt/greeting/{other}').decode()}", name)
        time.sleep(0.05)
    return dist.PrefixStore(name, store)


def on_all_ranks(work: Callable[[], Value], mesh: TowerMesh) -> Value:
    """Returns what ``work`` returns on this rank, or raises on every rank where one fails; collective.

    Raises:
        InputError: the first rank that failed raised one; the same everywhere.
        RankError: it raised something else.
    """
    values: list[Value] = []
    run_on_all_or_raise(lambda: values.append(work()), mesh.global_group)
    return values[0]
