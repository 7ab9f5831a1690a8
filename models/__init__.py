"""DLRM and DCN, flat and multi-tower, as plain single-process PyTorch, and what they cost.

Importing this package and counting complexity need PyTorch only; TorchRec is loaded when a model is built.
Distribution is applied from outside, by TorchRec's ``DistributedModelParallel`` with the sharders of `dmt`.

Example:
    >>> import torch
    >>> from dmt.plan.tables import TableSpec
    >>> from dmt.plan.towers import TowerPlan
    >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    >>> names = ["f0", "f1", "f2", "f3"]
    >>> tables = [TableSpec(name=f"t_{f}", num_embeddings=10, embedding_dim=8, feature_names=(f,)) for f in names]
    >>> plan = TowerPlan.from_lists([["f0", "f2"], ["f1", "f3"]])
    >>> common = {"tables": tables, "dense_in_features": 13}
    >>> models = [
    ...     DLRM(**common),
    ...     DCN(**common, cross_rank=4),
    ...     DMTDLRM(**common, tower_plan=plan, tower_dim=4),
    ...     DMTDCN(**common, tower_plan=plan, tower_dim=4, cross_rank=4),
    ... ]
    >>> two_samples = KeyedJaggedTensor.from_lengths_sync(
    ...     keys=names, values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int32)
    ... )
    >>> [tuple(model(torch.zeros(2, 13), two_samples).shape) for model in models]
    [(2, 1), (2, 1), (2, 1), (2, 1)]
"""

from __future__ import annotations

from dmt.models.base import ModelOptions as ModelOptions
from dmt.models.complexity import Complexity as Complexity
from dmt.models.complexity import complexity_of as complexity_of
from dmt.models.complexity import compression_ratio as compression_ratio
from dmt.models.complexity import count_complexity as count_complexity
from dmt.models.complexity import paper_complexity as paper_complexity
from dmt.models.dcn import DCN as DCN
from dmt.models.dcn import DMTDCN as DMTDCN
from dmt.models.dense import MLP as MLP
from dmt.models.dense import CrossInteraction as CrossInteraction
from dmt.models.dense import DenseArch as DenseArch
from dmt.models.dense import DotInteraction as DotInteraction
from dmt.models.dense import LowRankCrossNet as LowRankCrossNet
from dmt.models.dense import OverArch as OverArch
from dmt.models.dlrm import DLRM as DLRM
from dmt.models.dlrm import DMTDLRM as DMTDLRM
from dmt.models.presets import criteo_1tb_tables as criteo_1tb_tables
from dmt.models.sparse import flat_sparse_arch as flat_sparse_arch
from dmt.models.sparse import tower_sparse_arch as tower_sparse_arch
from dmt.models.tower_modules import DCNTowerModule as DCNTowerModule
from dmt.models.tower_modules import DLRMTowerModule as DLRMTowerModule
from dmt.models.tower_modules import PassThroughTowerModule as PassThroughTowerModule

__all__ = [
    "Complexity",
    "CrossInteraction",
    "DCN",
    "DCNTowerModule",
    "DLRM",
    "DLRMTowerModule",
    "DMTDCN",
    "DMTDLRM",
    "DenseArch",
    "DotInteraction",
    "LowRankCrossNet",
    "MLP",
    "ModelOptions",
    "OverArch",
    "PassThroughTowerModule",
    "complexity_of",
    "compression_ratio",
    "count_complexity",
    "criteo_1tb_tables",
    "flat_sparse_arch",
    "paper_complexity",
    "tower_sparse_arch",
]
