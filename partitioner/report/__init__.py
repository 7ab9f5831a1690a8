"""Pictures of a partition, drawn without a display and without matplotlib's global state.

One file per picture; ``style`` holds the colours and the words they share. matplotlib is imported when one is drawn.
"""

from __future__ import annotations

from dmt.partitioner.report.affinity import plot_affinity
from dmt.partitioner.report.coordinates import plot_coordinates
from dmt.partitioner.report.style import LIGHT_COLORS, TOWER_COLORS

__all__ = ["LIGHT_COLORS", "TOWER_COLORS", "plot_affinity", "plot_coordinates"]
