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
    >>> model = DMTDLRM(tables=tables, dense_in_features=13, tower_plan=plan, tower_dim=4)
    >>> two_samples = KeyedJaggedTensor(keys=names, values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int32))
    >>> model(torch.zeros(2, 13), two_samples).shape
    torch.Size([2, 1])
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
from dmt.models.sparse import flat_sparse_arch, tower_sparse_arch
from dmt.models.tower_modules import (
    DCNTowerModule,
    DLRMProductsTowerModule,
    DLRMTowerModule,
    PassThroughTowerModule,
)

__all__ = [
    "Complexity",
    "DCN",
    "DCNTowerModule",
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
