"""Checkpoints that survive kills and full disks, and load into any layout: `Checkpointer`, `restore`, `load_plain`."""

from dmt.training.checkpoints.store import (
    Checkpointer,
    Manifest,
    checkpoints,
    load,
    load_plain,
    newest,
    read_manifest,
    restore,
    verify,
)

__all__ = [
    "Checkpointer",
    "Manifest",
    "checkpoints",
    "load",
    "load_plain",
    "newest",
    "read_manifest",
    "restore",
    "verify",
]
