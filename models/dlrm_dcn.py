"""DLRM and DCN v2, flat and multi-tower (DMT paper, arXiv 2403.00877, sections 3.2 and 4, Listings 1 and 2).

DLRM is that of arXiv 1906.00091, DCN that of arXiv 2008.13535, as in TorchRec's reference. They differ in the
interaction: dot products, or cross layers.

Legend: B samples, F features, F_t features of tower t, O_t its outputs, N embedding dim, D tower dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dmt.models.dense import CROSS_RANK, DotInteraction, LowRankCrossNet, ModelOptions, mlp
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    make_tower_modules,
    outside_sparse_arch,
    tower_sparse_arch,
)
from dmt.models.tower_modules import DCNTowerModule, DLRMProductsTowerModule, DLRMTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DCN", "DLRM", "DMTDCN", "DMTDLRM", "DMTDLRMProducts"]

_OVER_ARCH_LAYER_SIZES = (1024, 1024, 512, 256, 1)
_CROSS_LAYERS = 3


class DLRM(nn.Module):
    """DLRM: bottom MLP, embeddings, pairwise dot products, top MLP; 14.74 MFLOPs per sample at the paper's sizes.

    By default the MLPs have layers of 512, 256 and N outputs, and of 1024, 1024, 512, 256 and 1.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, all of one dimension N.
        dense_in_features: number of columns of the dense input.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper.
        make_sparse_arch: function that builds the embeddings; see `dmt.models.sparse`.

    Raises:
        InputError: there are no tables, they differ in dimension or share a name or feature, or a size is below 1.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        dense_in_features: int,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        dim, device = common_embedding_dim(tables, "DLRM"), options.device
        self.feature_names = tuple(feature_names(tables))
        self.dense_arch = mlp(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, device)
        self.inter_arch = DotInteraction(num_vectors=len(self.feature_names), dim=dim)
        sizes = options.over_arch_layer_sizes or _OVER_ARCH_LAYER_SIZES
        self.over_arch = mlp(self.inter_arch.out_features, sizes, last_is_linear=True, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        embeddings = self.sparse_arch(sparse_features)
        # Runs here to overlap the exchange of a sharded sparse arch's result, in the backward pass too.
        dense = self.dense_arch(dense_features)
        # Read by name: once sharded, the order of the columns depends on the sharding plan.
        vectors_BFN = torch.stack(feature_vectors(embeddings, self.feature_names), dim=1)
        return self.over_arch(self.inter_arch(dense, vectors_BFN))


class DMTDLRM(nn.Module):
    """Multi-tower DLRM: each tower compresses its features to p + c F_t vectors of dimension D, which leave the tower.

    At the paper's sizes and D=64, c=1, p=0 it takes 8.95 MFLOPs per sample, and towers send half the bytes. The MLPs
    default to layers of 512, 256, D and 1024, 512, 256, 1, one less than DLRM's, which Tables 4 and 5 imply.

    Takes the arguments of `DLRM`, where tables need the same dimension N only within a tower, and:

    Args:
        tower_plan: which features form which tower. The vectors of features outside towers interact uncompressed; their
            tables need D columns.
        tower_dim: D, the dimension of the vectors that interact.
        c: number of projections of each feature.
        p: number of linear combinations of all features of a tower.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, a table outside towers
            does not have D columns, c and p are both 0, or a size is not positive.
    """

    tower_module: ClassVar[type[DLRMTowerModule]] = DLRMTowerModule

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        tower_plan: TowerPlan,
        dense_in_features: int,
        tower_dim: int = 64,
        c: int = 1,
        p: int = 0,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeTowerSparseArch = tower_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        device = options.device
        make = partial(self.tower_module, tower_dim=tower_dim, c=c, p=p, device=device)
        modules, num_vectors = make_tower_modules(tables, tower_plan, make, tower_dim=tower_dim, device=device)
        self.outside_features = tower_plan.outside
        self.num_vectors, self.tower_dim = num_vectors + len(self.outside_features), tower_dim
        self.dense_arch = mlp(dense_in_features, [*options.dense_arch_layer_sizes, tower_dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, tower_plan, modules, device)
        self.outside_arch = outside_sparse_arch(tables, tower_plan, device, dim=tower_dim)
        self.inter_arch = DotInteraction(num_vectors=self.num_vectors, dim=tower_dim)
        sizes = options.over_arch_layer_sizes or (1024, 512, 256, 1)
        self.over_arch = mlp(self.inter_arch.out_features, sizes, last_is_linear=True, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        outputs = self.sparse_arch(sparse_features)  # [B, sum O_t]
        outside = None if self.outside_arch is None else self.outside_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        if outside is not None:
            outputs = torch.cat([outputs, *feature_vectors(outside, self.outside_features)], dim=1)
        return self.over_arch(self.inter_arch(dense, outputs.reshape(-1, self.num_vectors, self.tower_dim)))


class DMTDLRMProducts(DMTDLRM):
    """Multi-tower DLRM whose tower modules add inner products to their outputs (`DLRMProductsTowerModule`).

    It is not in the paper. Takes the arguments of `DMTDLRM`; p must be at least 1.
    """

    tower_module = DLRMProductsTowerModule


class DCN(nn.Module):
    """DCN v2: bottom MLP, embeddings, low-rank cross layers, top MLP; 96.2 MFLOPs per sample at the paper's sizes.

    Arguments, errors and the default layers of the MLPs are as in `DLRM`, and:

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
    has rank ``cross_rank``. Tables of features outside towers may have any number of columns.
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
