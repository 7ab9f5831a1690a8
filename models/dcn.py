"""DCN v2 (arXiv 2008.13535, as in TorchRec's reference) beside DMT-DCN (arXiv 2403.00877, sections 3.2, 4, Listing 2).

Legend: B samples, F features, T towers, O_t outputs of tower t, N embedding dim, D tower dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dmt.models.dense import CrossInteraction, DenseArch, ModelOptions, OverArch
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    make_tower_modules,
    tower_sparse_arch,
)
from dmt.models.tower_modules import CROSS_RANK, DCNTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DCN", "DMTDCN"]

_CROSS_LAYERS = 3
_OVER_ARCH_LAYER_SIZES = (1024, 1024, 512, 256, 1)


class DCN(nn.Module):
    """Bottom MLP, embeddings, low-rank cross layers, top MLP; with the paper's sizes 96.22 MFLOPs per sample.

    The attribute names are those of ``torchrec.models.dlrm``. The MLPs are 13-512-256-N and 1024-1024-512-256-1.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, all of one dimension N.
        dense_in_features: columns of the dense input.
        num_cross_layers: cross layers over the (F + 1) N numbers of a sample.
        cross_rank: rank of each.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper.
        make_sparse_arch: builds the embeddings; see `dmt.models.sparse`.

    Raises:
        InputError: the tables differ in dimension, share a name or a feature, or a size is not positive.
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
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, device)
        cross = partial(CrossInteraction, num_layers=num_cross_layers, rank=cross_rank, device=device)
        self.inter_arch = cross(num_vectors=len(self.feature_names), dim=dim)
        sizes = options.over_arch_layer_sizes or _OVER_ARCH_LAYER_SIZES
        self.over_arch = OverArch(self.inter_arch.out_features, sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        embeddings = self.sparse_arch(sparse_features)
        # Between the two: a sharded sparse arch exchanges its result meanwhile, in the backward pass too.
        dense = self.dense_arch(dense_features)
        # By name: once sharded, the order of the columns depends on the sharding plan.
        vectors_BFN = torch.stack(feature_vectors(embeddings, self.feature_names), dim=1)
        return self.over_arch(self.inter_arch(dense, vectors_BFN))


class DMTDCN(nn.Module):
    """DCN over towers: a cross layer in each tower, then the cross layers over the tower outputs and the dense vector.

    With the paper's sizes and D=128 it takes 43.71 to 87.19 MFLOPs per sample for 2 to 16 towers. The MLPs are
    13-512-256-D and 1024-1024-512-256-1. A tower sends one vector; a subclass whose ``tower_module`` is
    ``partial(DCNTowerModule, per_feature=True)`` sends one per feature, as Listing 2 prints it.

    Arguments are those of `DCN`, whose tables may come in any order and need one dimension N per tower, and:

    Args:
        tower_plan: which features form which tower.
        tower_dim: D, the dimension of the vectors that interact; a tower has one cross layer of rank ``cross_rank``.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, a tower's outputs are
            no multiple of D, or a size is not positive.
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
        modules, self.num_vectors = make_tower_modules(tables, tower_plan, make, tower_dim=tower_dim)
        self.tower_dim = tower_dim
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, tower_dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, tower_plan, modules, device)
        cross = partial(CrossInteraction, num_layers=num_cross_layers, rank=cross_rank, device=device)
        self.inter_arch = cross(num_vectors=self.num_vectors, dim=tower_dim)
        sizes = options.over_arch_layer_sizes or _OVER_ARCH_LAYER_SIZES
        self.over_arch = OverArch(self.inter_arch.out_features, sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1]."""
        outputs = self.sparse_arch(sparse_features)  # [B, sum O_t]
        dense = self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, outputs.reshape(-1, self.num_vectors, self.tower_dim)))
