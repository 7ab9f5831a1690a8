"""Plans as pure data, without TorchRec: topology, tables, towers of features, column shards."""

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerFeatures, TowerPlan

__all__ = ["TableSpec", "TowerFeatures", "TowerPlan", "TowerTopology"]
