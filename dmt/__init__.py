"""Disaggregated Multi-Tower (DMT) training of recommendation models on top of TorchRec.

Importing this package is light: TorchRec and FBGEMM are loaded when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.dense_reduce import HierarchicalDataParallel as HierarchicalDataParallel
    from dmt.errors import InputError as InputError
    from dmt.mesh import TowerMesh as TowerMesh
    from dmt.micro_batches import MicroBatches as MicroBatches
    from dmt.placement import TablePlacement as TablePlacement
    from dmt.plan import TowerPlan as TowerPlan
    from dmt.planner import TowerShardingPlanner as TowerShardingPlanner
    from dmt.precision import ExchangePrecision as ExchangePrecision
    from dmt.replicas import ReplicaSync as ReplicaSync
    from dmt.sharded_ebc import SPTTEmbeddingBagCollectionSharder as SPTTEmbeddingBagCollectionSharder
    from dmt.sharded_towers import TowerCollectionSharder as TowerCollectionSharder
    from dmt.tables import TableSpec as TableSpec
    from dmt.topology import TowerTopology as TowerTopology
    from dmt.traffic import TrafficMeter as TrafficMeter

_HOME = {
    "ExchangePrecision": "dmt.precision",
    "HierarchicalDataParallel": "dmt.dense_reduce",
    "InputError": "dmt.errors",
    "MicroBatches": "dmt.micro_batches",
    "ReplicaSync": "dmt.replicas",
    "SPTTEmbeddingBagCollectionSharder": "dmt.sharded_ebc",
    "TablePlacement": "dmt.placement",
    "TableSpec": "dmt.tables",
    "TowerCollectionSharder": "dmt.sharded_towers",
    "TowerMesh": "dmt.mesh",
    "TowerPlan": "dmt.plan",
    "TowerShardingPlanner": "dmt.planner",
    "TowerTopology": "dmt.topology",
    "TrafficMeter": "dmt.traffic",
}

__all__ = [
    "ExchangePrecision",
    "HierarchicalDataParallel",
    "InputError",
    "MicroBatches",
    "ReplicaSync",
    "SPTTEmbeddingBagCollectionSharder",
    "TablePlacement",
    "TableSpec",
    "TowerCollectionSharder",
    "TowerMesh",
    "TowerPlan",
    "TowerShardingPlanner",
    "TowerTopology",
    "TrafficMeter",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dmt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
