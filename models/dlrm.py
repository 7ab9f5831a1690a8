"""DLRM (arXiv 1906.00091) and its multi-tower form DMT-DLRM (arXiv 2403.00877, sections 3.2 and 4, Listing 1).

Legend: B samples, F_t features of tower t, O_t its outputs, N embedding dim, D tower dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dmt.models.dense import DotInteraction, ModelOptions, mlp
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    make_tower_modules,
    outside_sparse_arch,
    tower_sparse_arch,
)
from dmt.models.tower_modules import DLRMProductsTowerModule, DLRMTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DLRM", "DMTDLRM", "DMTDLRMProducts"]


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
        sizes = options.over_arch_layer_sizes or (1024, 1024, 512, 256, 1)
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

    At the paper's sizes and D=64, c=1, p=0 it takes 8.95 MFLOPs per sample, and towers send half the bytes. By default
    the MLPs have layers of 512, 256, D and 1024, 512, 256, 1: one fewer than DLRM, as Tables 4 and 5 imply.

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

    It is not in the paper. Takes the arguments of `DMTDLRM`; p, by default 0 there, must be set to at least 1.
    """

    tower_module = DLRMProductsTowerModule
