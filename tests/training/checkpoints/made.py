"""Checkpoints for tests, made without ranks of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmt.plan.topology import TowerTopology
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints import Checkpointer, Manifest
from dmt.training.checkpoints.store import sha256_of, write_manifest


@contextmanager
def alone() -> Iterator[TowerMesh]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=1))
    finally:
        dist.destroy_process_group()


def save_alone(model: nn.Module, folder: Path, *, files: Mapping[str, str] | None = None, step: int = 1) -> Path:
    """A real checkpoint of a plain model, with files beside its tensors."""

    def describe(scratch: Path) -> None:
        for name, text in (files or {}).items():
            (scratch / name).write_text(text)

    with alone() as mesh:
        assert Checkpointer(folder, mesh).save(model, None, step=step, progress={}, describe=describe)
    return folder / f"step-{step:08d}"


def make_checkpoint(folder: Path, step: int, files: Mapping[str, str], name: str = "") -> Path:
    """A whole checkpoint of text files without a tensor."""
    path = folder / (name or f"step-{step:08d}")
    path.mkdir(parents=True)
    fill_checkpoint(path, step, files)
    return path


def fill_checkpoint(path: Path, step: int, files: Mapping[str, str], **progress: Any) -> None:
    for file, text in files.items():
        (path / file).write_text(text)
    records = {file: sha256_of(path / file) for file in files}
    write_manifest(path, Manifest(step=step, progress=progress, versions={}, files=records))


def linear(value: float) -> nn.Linear:
    """A layer full of one number."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer
