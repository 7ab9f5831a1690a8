"""The Tower Partitioner: makes a balanced `TowerPlan` from a `FeatureAffinity` (DMT paper, section 3.3).

Partitioning a saved affinity needs neither TorchRec nor FBGEMM. torch, matplotlib, scikit-learn and the K-means solver
are imported when they are first used, not with this package.

Example:
    >>> affinity = FeatureAffinity(matrix=[[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], features=["a", "b", "c"])
    >>> TowerPartitioner(num_towers=2, seed=0).fit(affinity).to_lists()
    [['a', 'b'], ['c']]
"""

from __future__ import annotations

from dmt.partitioner.affinity import FeatureAffinity, Interaction
from dmt.partitioner.partition import Partition, tower_affinity
from dmt.partitioner.partitioner import TowerPartitioner
from dmt.partitioner.report import plot_affinity, plot_coordinates, write_partition_report
from dmt.partitioner.rules import PartitionRules

__all__ = [
    "FeatureAffinity",
    "Interaction",
    "Partition",
    "PartitionRules",
    "TowerPartitioner",
    "plot_affinity",
    "plot_coordinates",
    "tower_affinity",
    "write_partition_report",
]
