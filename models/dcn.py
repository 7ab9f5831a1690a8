"""DCN v2 (arXiv 2008.13535, as in TorchRec's reference) and DMT-DCN (arXiv 2403.00877, sections 3.2, 4, Listing 2).

They differ from DLRM and DMT-DLRM in the interaction: cross layers instead of dot products.

Legend: B samples, F features, O_t outputs of tower t, N embedding dim, D tower dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dmt.models.dense import CROSS_RANK, LowRankCrossNet, ModelOptions, mlp
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    make_tower_modules,
    outside_sparse_arch,
    tower_sparse_arch,
)
from dmt.models.tower_modules import DCNTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DCN", "DMTDCN"]

_CROSS_LAYERS = 3
_OVER_ARCH_LAYER_SIZES = (1024, 1024, 512, 256, 1)


class DCN(nn.Module):
    """DCN v2: bottom MLP, embeddings, low-rank cross layers, top MLP; 96.2 MFLOPs per sample at the paper's sizes.

    Arguments, errors and the default layers of the MLPs are those of `DLRM`; it also takes:

    Args:
        num_cross_layers: number of cross layers over the (F + 1) N numbers of a sample.
        cross_rank: rank of each cross layer.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        dense_in_features: int,
        num_cross_layers: int = _CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        dim, device = common_embedding_dim(tables, "DCN"), options.device
        self.feature_names = tuple(feature_names(tables))
        self.dense_arch = mlp(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, device)
        width = (len(self.feature_names) + 1) * dim
        self.inter_arch = LowRankCrossNet(width, num_layers=num_cross_layers, rank=cross_rank, device=device)
        sizes = options.over_arch_layer_sizes or _OVER_ARCH_LAYER_SIZES
        self.over_arch = mlp(width, sizes, last_is_linear=True, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        embeddings = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        vectors = feature_vectors(embeddings, self.feature_names)
        return self.over_arch(self.inter_arch(torch.cat([dense, *vectors], dim=1)))


class DMTDCN(nn.Module):
    """Multi-tower DCN: a cross layer in each tower, then cross layers over the tower outputs and the dense vector.

    At the paper's sizes and D=128 it takes 43.7 to 87.1 MFLOPs per sample for 2 to 16 towers. By default the MLPs have
    the layers of `DCN`, with D outputs instead of N. A tower sends one vector; in a subclass whose ``tower_module`` is
    ``partial(DCNTowerModule, per_feature=True)`` it sends one vector per feature, as in Listing 2.

    Takes the arguments and raises the errors of `DMTDLRM`, except for c and p, and of `DCN`. The cross layer of a tower
    has rank ``cross_rank``. Features outside towers enter the cross layers over all towers, with tables of any width.
    """

    tower_module: ClassVar[Callable[..., Any]] = DCNTowerModule

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        tower_plan: TowerPlan,
        dense_in_features: int,
        tower_dim: int = 128,
        num_cross_layers: int = _CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeTowerSparseArch = tower_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        device = options.device
        make = partial(type(self).tower_module, tower_dim=tower_dim, rank=cross_rank, device=device)
        modules, num_vectors = make_tower_modules(tables, tower_plan, make, tower_dim=tower_dim, device=device)
        self.dense_arch = mlp(dense_in_features, [*options.dense_arch_layer_sizes, tower_dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, tower_plan, modules, device)
        self.outside_features = tower_plan.outside
        self.outside_arch = outside_sparse_arch(tables, tower_plan, device)
        dims = [table.embedding_dim for table in tower_plan.outside_tables(tables) for _ in table.feature_names]
        width = (num_vectors + 1) * tower_dim + sum(dims)
        self.inter_arch = LowRankCrossNet(width, num_layers=num_cross_layers, rank=cross_rank, device=device)
        sizes = options.over_arch_layer_sizes or _OVER_ARCH_LAYER_SIZES
        self.over_arch = mlp(width, sizes, last_is_linear=True, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        outputs = self.sparse_arch(sparse_features)  # [B, sum O_t]
        outside = None if self.outside_arch is None else self.outside_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        if outside is not None:
            outputs = torch.cat([outputs, *feature_vectors(outside, self.outside_features)], dim=1)
        return self.over_arch(self.inter_arch(torch.cat([dense, outputs], dim=1)))
