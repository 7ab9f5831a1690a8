"""Saving a trained model and loading it into any layout, by ``torch.distributed.checkpoint``.

Keys name towers and tables, not ranks or hosts, so a checkpoint of any mesh loads into the plain single-process model.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dmt.errors import InputError

__all__ = ["load_plain", "save_model"]


def save_model(model: nn.Module, folder: Path, describe: Callable[[Path], None] | None = None) -> None:
    """Writes the weights of a sharded model; collective over all ranks, to a folder that all of them see.

    They are written beside ``folder`` and renamed at the end, so an interrupted save leaves no half checkpoint.

    Args:
        model: the sharded model.
        folder: the checkpoint; an older one is replaced.
        describe: called on rank 0 with the folder, to lay files beside the weights that say what they are of.
    """
    scratch = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0 and scratch.exists():
        shutil.rmtree(scratch)
    dist.barrier()
    dcp.save({"model": model.state_dict()}, checkpoint_id=scratch)
    dist.barrier()
    if dist.get_rank() == 0:
        if describe is not None:
            describe(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    dist.barrier()


def load_plain(model: nn.Module, folder: Path) -> None:
    """Loads a checkpoint of any layout into the plain model in this process; needs no process group.

    Raises:
        InputError: there is no checkpoint, it is damaged, or it is of another model.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder} holds no checkpoint. Give the output_dir of a finished training run.")
    state = {"model": model.state_dict()}
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    missing = sorted(f"model.{name}" for name in state["model"] if f"model.{name}" not in saved)
    unknown = sorted(name for name in saved if name.removeprefix("model.") not in state["model"])
    if missing or unknown:
        raise InputError(
            f"{folder} is a checkpoint of another model: it lacks {missing[:3] or 'nothing'} and has "
            f"{unknown[:3] or 'nothing'} besides. Use the config of the run that wrote it."
        )
    for name, value in state["model"].items():
        size = tuple(getattr(saved[f"model.{name}"], "size", ()))  # what is not a tensor has none
        if size != tuple(value.shape):
            raise InputError(
                f"{folder} is a checkpoint of another model: its {name} is {list(size)}, the model's is "
                f"{list(value.shape)}. Use the config of the run that wrote it."
            )
    with warnings.catch_warnings():
        # That this is one process without a group is the point here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        except dcp.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise InputError(
                f"{folder} cannot be read, a file of it is damaged or absent ({cause}). Save it anew."
            ) from error
    model.load_state_dict(state["model"])
