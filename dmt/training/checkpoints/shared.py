"""`check_shared`: whether all ranks see the same folder, asked before hours of training are saved into it."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.training.checkpoints.files import PROBE

__all__ = ["check_shared"]


def check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Checks that every rank sees what rank 0 writes into a folder; collective.

    Hosts that have a disk each at the same path would all write, and no checkpoint would ever be whole.

    Args:
        folder: exists on rank 0.
        group: the ranks.

    Raises:
        InputError: a rank does not see it, or rank 0 cannot write; on every rank.
    """
    rank = dist.get_rank(group)
    # A name of its own each time: hosts of a network file system remember which names were absent.
    laid = run_on_all_or_raise(partial(_lay, folder) if rank == 0 else str, group)[0]
    try:
        run_on_all_or_raise(partial(_look, folder, laid, rank), group)
    finally:
        if rank == 0:
            (folder / laid).unlink(missing_ok=True)


def _lay(folder: Path) -> str:
    try:
        descriptor, path = tempfile.mkstemp(prefix=PROBE, dir=folder)
        os.close(descriptor)
    except OSError as error:
        raise InputError(f"Checkpoint folder {folder} cannot be written: {error.strerror}.") from error
    return Path(path).name


def _look(folder: Path, name: str, rank: int) -> None:
    # Not Path.exists: that raises where a folder may not be entered.
    if not os.path.exists(folder / name):
        raise InputError(
            f"Checkpoint folder {folder}: rank {rank} does not see what rank 0 writes there, but all ranks read and "
            "write one checkpoint together. Set train.output_dir to a folder that all hosts share."
        )
