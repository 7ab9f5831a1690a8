"""Numbers in the words of a reader; see `dmt.words`."""

from __future__ import annotations

from dmt.words import byte_unit, human_bytes

__all__ = ["byte_unit", "human_bytes"]
