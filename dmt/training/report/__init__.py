"""The page that ``dmt demo`` leaves behind: two runs side by side, their towers, and what the numbers mean."""

from __future__ import annotations

from dmt.training.report.curves import plot_curves
from dmt.training.report.page import RunComparison, auc_standard_error, compare_runs, write_report

__all__ = ["RunComparison", "auc_standard_error", "compare_runs", "plot_curves", "write_report"]
