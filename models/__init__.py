"""DLRM and DCN, flat and multi-tower, as plain single-process PyTorch, and their complexity.

Neither importing this package nor `paper_complexity` needs TorchRec; building a model's tables does. To distribute a
model, pass it to TorchRec's ``DistributedModelParallel`` with the sharders of `dmt`.
"""

from __future__ import annotations

from dmt.models.complexity import (
    Complexity,
    compression_ratio,
    count_complexity,
    criteo_1tb_tables,
    paper_complexity,
)
from dmt.models.dcn import DCN, DMTDCN
from dmt.models.dense import ModelOptions
from dmt.models.dlrm import DLRM, DMTDLRM, DMTDLRMProducts
from dmt.models.sequences import DINTowerModule
from dmt.models.sparse import flat_sparse_arch, tower_sparse_arch
from dmt.models.tower_modules import DCNTowerModule, DLRMProductsTowerModule, DLRMTowerModule, PassThroughTowerModule

__all__ = [
    "Complexity",
    "DCN",
    "DCNTowerModule",
    "DINTowerModule",
    "DLRM",
    "DLRMProductsTowerModule",
    "DLRMTowerModule",
    "DMTDCN",
    "DMTDLRM",
    "DMTDLRMProducts",
    "ModelOptions",
    "PassThroughTowerModule",
    "compression_ratio",
    "count_complexity",
    "criteo_1tb_tables",
    "flat_sparse_arch",
    "paper_complexity",
    "tower_sparse_arch",
]
