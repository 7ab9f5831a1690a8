"""`DLRM`: Deep Learning Recommendation Model, flat (arXiv 1906.00091).

Legend: B samples, F sparse features, N embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.models.dense import DenseArch, DotInteraction, ModelOptions, OverArch
from dmt.models.presets import DMT_DLRM_OVER_ARCH_LAYER_SIZES, OVER_ARCH_LAYER_SIZES
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    tower_embedding_dims,
    tower_sparse_arch,
)
from dmt.models.tower_modules import DLRMTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DLRM",
    "DMTDLRM",
]


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP; with the paper's sizes 14.74 MFLOPs per sample.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, all of one dimension N.
        dense_in_features: columns of the dense input.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper
            (13-512-256-N and 1024-1024-512-256-1).
        make_sparse_arch: builds the embeddings; see `dmt.models.sparse`.

    Raises:
        InputError: the tables differ in dimension, share a name or a feature, or a size is not positive.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> tables = [
        ...     TableSpec(name=f"t{i}", num_embeddings=10, embedding_dim=8, feature_names=(f"f{i}",)) for i in range(2)
        ... ]
        >>> model = DLRM(tables=tables, dense_in_features=13)
        >>> three_samples = KeyedJaggedTensor.from_lengths_sync(
        ...     keys=["f0", "f1"], values=torch.arange(6), lengths=torch.ones(6, dtype=torch.int32)
        ... )
        >>> model(torch.zeros(3, 13), three_samples).shape
        torch.Size([3, 1])
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
        dim = common_embedding_dim(tables, "DLRM")
        device = options.device
        self.feature_names = tuple(feature_names(tables))
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, device)
        self.inter_arch = DotInteraction(num_vectors=len(self.feature_names), dim=dim)
        over_arch_layer_sizes = options.over_arch_layer_sizes or OVER_ARCH_LAYER_SIZES
        self.over_arch = OverArch(self.inter_arch.out_features, over_arch_layer_sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1].

        Where the sparse arch is sharded, the dense arch runs while the exchange of embeddings is under way. So it does
        in the backward pass, because autograd turns first to what was made last.
        """
        embeddings = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        # By name: once sharded, the order of the columns depends on where the tables lie.
        sparse = torch.stack(feature_vectors(embeddings, self.feature_names), dim=1)
        return self.over_arch(self.inter_arch(dense, sparse))


class DMTDLRM(nn.Module):
    """DLRM over towers: each compresses its features to p + c F_t vectors of dimension D before they leave the host.

    With the paper's sizes and D=64, c=1, p=0 it takes 8.95 MFLOPs per sample, and the towers send half the bytes.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, in any order; one dimension in each tower.
        tower_plan: which features form which tower.
        dense_in_features: columns of the dense input.
        tower_dim: D.
        c: projections of each feature.
        p: linear combinations of all features of a tower.
        options: sizes of the MLPs and the device; by default those that give the MFLOPs of the DMT paper
            (13-512-256-D and 1024-512-256-1, one layer less than DLRM).
        make_sparse_arch: builds the towers from the tower modules; see `dmt.models.sparse`.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, a size is not
            positive, or c and p are both 0.

    Example:
        >>> import torch
        >>> from dmt.plan.tables import TableSpec
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> tables = [
        ...     TableSpec(name=f"t{i}", num_embeddings=10, embedding_dim=8, feature_names=(f"f{i}",)) for i in range(4)
        ... ]
        >>> plan = TowerPlan.from_lists([["f0", "f2"], ["f1", "f3"]])
        >>> model = DMTDLRM(tables=tables, tower_plan=plan, dense_in_features=13, tower_dim=4)
        >>> two_samples = KeyedJaggedTensor.from_lengths_sync(
        ...     keys=["f0", "f1", "f2", "f3"], values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int32)
        ... )
        >>> model(torch.zeros(2, 13), two_samples).shape
        torch.Size([2, 1])
    """

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
        dims = tower_embedding_dims(tables, tower_plan, "DMTDLRM")
        towers = [
            DLRMTowerModule(tower.features, embedding_dim=dim, tower_dim=tower_dim, c=c, p=p, device=device)
            for tower, dim in zip(tower_plan.towers, dims, strict=True)
        ]
        self.num_vectors = sum(tower.num_vectors for tower in towers)
        self.tower_dim = tower_dim
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, tower_dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, tower_plan, towers, device)
        self.inter_arch = DotInteraction(num_vectors=self.num_vectors, dim=tower_dim)
        over_arch_layer_sizes = options.over_arch_layer_sizes or DMT_DLRM_OVER_ARCH_LAYER_SIZES
        self.over_arch = OverArch(self.inter_arch.out_features, over_arch_layer_sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1].

        Where the sparse arch is sharded, the dense arch runs while the towers' peer exchange is under way. So it does
        in the backward pass, because autograd turns first to what was made last.
        """
        towers = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, towers.reshape(-1, self.num_vectors, self.tower_dim)))
