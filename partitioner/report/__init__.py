"""Pictures and the page of a partition, drawn without a display and without matplotlib's global state."""

from __future__ import annotations

from dmt.partitioner.report.pictures import plot_affinity, plot_coordinates

__all__ = ["plot_affinity", "plot_coordinates"]
