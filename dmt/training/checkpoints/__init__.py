"""Checkpoints that survive kills and full disks, and load into any layout."""

from dmt.training.checkpoints.store import Checkpointer, load_plain, restore

__all__ = ["Checkpointer", "load_plain", "restore"]
