"""DLRM and DCN, flat and multi-tower, as plain single-process PyTorch, and what they cost.

Importing this package and counting complexity need PyTorch only; TorchRec is loaded when a model is built.
Distribution is applied from outside, by TorchRec's ``DistributedModelParallel`` with the sharders of `dmt`.
"""

from __future__ import annotations

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
from dmt.models.dense import ModelOptions as ModelOptions
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
