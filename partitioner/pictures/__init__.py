"""Pictures of a partition, drawn without a display and without matplotlib's global state.

One file per picture; ``style`` holds the colours and the words they share. matplotlib is imported when one is drawn.
"""

from __future__ import annotations

from dmt.partitioner.pictures.affinity import plot_affinity
from dmt.partitioner.pictures.balance import plot_balance
from dmt.partitioner.pictures.comparison import plot_comparison
from dmt.partitioner.pictures.coordinates import plot_coordinates
from dmt.partitioner.pictures.style import LIGHT_COLORS, TOWER_COLORS

__all__ = [
    "LIGHT_COLORS",
    "TOWER_COLORS",
    "plot_affinity",
    "plot_balance",
    "plot_comparison",
    "plot_coordinates",
]
