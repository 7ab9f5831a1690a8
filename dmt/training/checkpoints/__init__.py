"""Checkpoints that survive kills and full disks, and load into any layout: `Checkpointer`, `resume`, `load_plain`."""

from dmt.training.checkpoints.load import Restored, load_plain, restore, resume, whole_checkpoint
from dmt.training.checkpoints.manifest import Manifest, checkpoints, newest, read_manifest, verify
from dmt.training.checkpoints.saver import Checkpointer

__all__ = [
    "Checkpointer",
    "Manifest",
    "Restored",
    "checkpoints",
    "load_plain",
    "newest",
    "read_manifest",
    "restore",
    "resume",
    "verify",
    "whole_checkpoint",
]
