"""The device of a rank: CPU or GPU, obstacles to a GPU, backends of the process group, random states.

On GPUs the groups have two backends: NCCL carries tensors of the GPU, gloo those of the CPU and with them all objects.
docs/status.md says what has been run on which device.
"""

from __future__ import annotations

import importlib.metadata
from typing import Literal

import torch
from torch import Tensor

from dmt.errors import InputError

__all__ = [
    "DeviceType",
    "backend",
    "cuda_obstacle",
    "current_device",
    "device_type",
    "random_state",
    "set_random_state",
    "take_device",
]

DeviceType = Literal["cpu", "cuda"]


def device_type(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """Returns the kind of device that ``train.device`` means on this host; ``auto`` is a GPU wherever one can be used.

    Raises:
        InputError: GPUs are wanted, and there is none, or FBGEMM's build has no kernels for it.
    """
    obstacle = "" if wanted == "cpu" else cuda_obstacle()
    if obstacle and wanted == "cuda":
        raise InputError(f"train.device='cuda', but {obstacle}. Or set train.device='cpu'.")
    return "cpu" if obstacle or wanted == "cpu" else "cuda"


def cuda_obstacle() -> str:
    """Returns why ranks of this host cannot train on GPUs, with the remedy; empty if they can."""
    if not torch.cuda.is_available():
        build = "is a CPU build" if torch.version.cuda is None else "sees no GPU (driver, CUDA_VISIBLE_DEVICES)"
        return f"torch {torch.__version__} {build} on this host; `dmt doctor` shows what it finds"
    try:
        importlib.metadata.version("fbgemm-gpu")
    except importlib.metadata.PackageNotFoundError:
        return "FBGEMM's CUDA build, the package fbgemm-gpu, is not installed; `dmt doctor` tells how to install it"
    return ""


def take_device(kind: DeviceType, local_rank: int) -> torch.device:
    """Makes this rank's GPU, that of its number on the host, the current one; call it before the process group is made.

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
    """Returns the device that `take_device` has made this rank's."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())


def backend(kind: DeviceType) -> str:
    """Returns the backends of the process groups, in the spelling of ``torch.distributed.init_process_group``."""
    return "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"


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
