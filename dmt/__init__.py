"""Disaggregated Multi-Tower (DMT) training of recommendation models on top of TorchRec.

Importing this package is light: TorchRec and FBGEMM are loaded when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.errors import InputError as InputError
    from dmt.hot_rows.runtime import HotRows as HotRows
    from dmt.plan.tables import TableSpec as TableSpec
    from dmt.plan.topology import TowerTopology as TowerTopology
    from dmt.plan.towers import TowerPlan as TowerPlan
    from dmt.replicas.dense_reduce import HierarchicalDataParallel as HierarchicalDataParallel
    from dmt.replicas.sync import ReplicaSync as ReplicaSync
    from dmt.sharding.planner import TowerShardingPlanner as TowerShardingPlanner
    from dmt.sharding.schemes import TablePlacement as TablePlacement
    from dmt.sptt.flat import SPTTEmbeddingBagCollectionSharder as SPTTEmbeddingBagCollectionSharder
    from dmt.sptt.mesh import TowerMesh as TowerMesh
    from dmt.sptt.micro_batches import MicroBatches as MicroBatches
    from dmt.sptt.micro_batches import run_in_micro_batches as run_in_micro_batches
    from dmt.sptt.outside import OutsideCollectionSharder as OutsideCollectionSharder
    from dmt.sptt.precision import ExchangePrecision as ExchangePrecision
    from dmt.sptt.towers import TowerCollectionSharder as TowerCollectionSharder
    from dmt.sptt.towers import clip_grad_norm as clip_grad_norm
    from dmt.traffic import TrafficMeter as TrafficMeter

_HOME = {
    "ExchangePrecision": "sptt.precision",
    "HierarchicalDataParallel": "replicas.dense_reduce",
    "HotRows": "hot_rows.runtime",
    "InputError": "errors",
    "MicroBatches": "sptt.micro_batches",
    "OutsideCollectionSharder": "sptt.outside",
    "ReplicaSync": "replicas.sync",
    "SPTTEmbeddingBagCollectionSharder": "sptt.flat",
    "TablePlacement": "sharding.schemes",
    "TableSpec": "plan.tables",
    "TowerCollectionSharder": "sptt.towers",
    "TowerMesh": "sptt.mesh",
    "TowerPlan": "plan.towers",
    "TowerShardingPlanner": "sharding.planner",
    "TowerTopology": "plan.topology",
    "TrafficMeter": "traffic",
    "clip_grad_norm": "sptt.towers",
    "run_in_micro_batches": "sptt.micro_batches",
}
__all__ = [*_HOME]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dmt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dmt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
