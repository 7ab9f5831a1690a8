"""`DLRM`: Deep Learning Recommendation Model, flat (arXiv 1906.00091).

Legend: B samples, F sparse features, N embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.models.dense import DenseArch, DotInteraction, OverArch
from dmt.models.features import feature_vectors
from dmt.models.options import ModelOptions
from dmt.models.presets import OVER_ARCH_LAYER_SIZES
from dmt.models.sparse import MakeFlatSparseArch, common_embedding_dim, flat_sparse_arch
from dmt.tables import feature_names

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP; with the paper's sizes 14.74 MFLOPs per sample.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.tables.TableSpec`, all of one dimension N.
        dense_in_features: columns of the dense input.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper
            (13-512-256-N and 1024-1024-512-256-1).
        make_sparse_arch: builds the embeddings; see `dmt.models.sparse`.

    Raises:
        InputError: the tables differ in dimension, share a name or a feature, or a size is not positive.

    Example:
        >>> from dmt.tables import TableSpec
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
