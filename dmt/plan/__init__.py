"""What goes where, as pure data: the mesh of ranks, tables, towers of features, column shards. No TorchRec."""

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerFeatures, TowerPlan

__all__ = ["TableSpec", "TowerFeatures", "TowerPlan", "TowerTopology"]
