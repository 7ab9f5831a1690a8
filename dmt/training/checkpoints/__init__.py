"""Checkpoints that survive kills and full disks, and load into any layout: `Checkpointer`, `restore`, `load_plain`."""

from dmt.training.checkpoints.folder import (
    Manifest,
    checkpoints,
    discard_checkpoints,
    newest,
    read_manifest,
    verify,
)
from dmt.training.checkpoints.load import Restored, load_plain, restore
from dmt.training.checkpoints.store import Checkpointer

__all__ = [
    "Checkpointer",
    "Manifest",
    "Restored",
    "checkpoints",
    "discard_checkpoints",
    "load_plain",
    "newest",
    "read_manifest",
    "restore",
    "verify",
]
