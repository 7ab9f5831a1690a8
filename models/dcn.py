"""`DCN`: Deep and Cross Network v2 in the form of TorchRec's reference, flat (arXiv 2008.13535).

Legend: B samples, F sparse features, N embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.models.dense import CrossInteraction, DenseArch, ModelOptions, OverArch
from dmt.models.presets import CROSS_LAYERS, CROSS_RANK, OVER_ARCH_LAYER_SIZES
from dmt.models.sparse import (
    MakeFlatSparseArch,
    MakeTowerSparseArch,
    common_embedding_dim,
    flat_sparse_arch,
    tower_embedding_dims,
    tower_sparse_arch,
)
from dmt.models.tower_modules import DCNTowerModule, feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DCN",
    "DMTDCN",
]


class DCN(nn.Module):
    """Bottom MLP, embeddings, low-rank cross layers, top MLP; with the paper's sizes 96.22 MFLOPs per sample.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, all of one dimension N.
        dense_in_features: columns of the dense input.
        num_cross_layers: cross layers over the (F + 1) N numbers of a sample.
        cross_rank: rank of each.
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
        >>> model = DCN(tables=tables, dense_in_features=13, cross_rank=4)
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
        num_cross_layers: int = CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        dim = common_embedding_dim(tables, "DCN")
        device = options.device
        self.feature_names = tuple(feature_names(tables))
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, device)
        self.inter_arch = CrossInteraction(
            num_vectors=len(self.feature_names), dim=dim, num_layers=num_cross_layers, rank=cross_rank, device=device
        )
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


class DMTDCN(nn.Module):
    """DCN over towers: a cross layer in each tower, then the cross layers over the T tower vectors and the dense one.

    With the paper's sizes and D=128 it takes 43.71 to 87.19 MFLOPs per sample for 2 to 16 towers.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, in any order; one dimension in each tower.
        tower_plan: which features form which tower.
        dense_in_features: columns of the dense input.
        tower_dim: D, the outputs of a tower.
        num_cross_layers: cross layers over the (T + 1) D numbers of a sample; a tower has one.
        cross_rank: rank of each cross layer, in the towers too.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper
            (13-512-256-D and 1024-1024-512-256-1).
        make_sparse_arch: builds the towers from the tower modules; see `dmt.models.sparse`.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, or a size is not
            positive.

    Example:
        >>> import torch
        >>> from dmt.plan.tables import TableSpec
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> tables = [
        ...     TableSpec(name=f"t{i}", num_embeddings=10, embedding_dim=8, feature_names=(f"f{i}",)) for i in range(4)
        ... ]
        >>> plan = TowerPlan.from_lists([["f0", "f2"], ["f1", "f3"]])
        >>> model = DMTDCN(tables=tables, tower_plan=plan, dense_in_features=13, tower_dim=4, cross_rank=4)
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
        tower_dim: int = 128,
        num_cross_layers: int = CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeTowerSparseArch = tower_sparse_arch,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        device = options.device
        dims = tower_embedding_dims(tables, tower_plan, "DMTDCN")
        towers = [
            DCNTowerModule(tower.features, embedding_dim=dim, tower_dim=tower_dim, rank=cross_rank, device=device)
            for tower, dim in zip(tower_plan.towers, dims, strict=True)
        ]
        self.num_vectors = len(towers)
        self.tower_dim = tower_dim
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, tower_dim], device=device)
        self.sparse_arch = make_sparse_arch(tables, tower_plan, towers, device)
        self.inter_arch = CrossInteraction(
            num_vectors=self.num_vectors, dim=tower_dim, num_layers=num_cross_layers, rank=cross_rank, device=device
        )
        over_arch_layer_sizes = options.over_arch_layer_sizes or OVER_ARCH_LAYER_SIZES
        self.over_arch = OverArch(self.inter_arch.out_features, over_arch_layer_sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1].

        Where the sparse arch is sharded, the dense arch runs while the towers' peer exchange is under way. So it does
        in the backward pass, because autograd turns first to what was made last.
        """
        towers = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, towers.reshape(-1, self.num_vectors, self.tower_dim)))
