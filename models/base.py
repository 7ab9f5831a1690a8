"""The construction that the four models share: dense arch, sparse arch, interaction, over arch.

`FlatModel` reads one vector per feature, `TowerModel` the vectors that towers made of theirs. What differs between DLRM
and DCN is the interaction and the tower module, which `dmt.models.dlrm` and `dmt.models.dcn` pass in.

Legend: B samples, F features, N embedding dimension, D tower dimension, O_t outputs of tower t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.models.dense import DenseArch, DotInteraction, OverArch, check_layer_sizes
from dmt.models.presets import DENSE_ARCH_LAYER_SIZES, OVER_ARCH_LAYER_SIZES
from dmt.models.sparse import MakeFlatSparseArch, MakeTowerSparseArch, common_embedding_dim, flat_sparse_arch
from dmt.models.tower_modules import feature_vectors
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["FlatModel", "ModelOptions", "TowerModel"]

MakeInteraction = Callable[..., Any]
"""``(num_vectors=, dim=)`` -> module of (dense [B, dim], sparse [B, num_vectors, dim]) with ``out_features``."""
MakeTowerModule = Callable[..., Any]
"""``(features, embedding_dim=)`` -> tower module (`dmt.models.tower_modules`)."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of a model's two MLPs, and where the model is built.

    Raises:
        InputError: a layer size is not a positive whole number, or ``over_arch_layer_sizes`` is empty.
    """

    dense_arch_layer_sizes: tuple[int, ...] = DENSE_ARCH_LAYER_SIZES
    """Hidden sizes of the bottom MLP. The model appends the last size itself: N, or D with towers."""
    over_arch_layer_sizes: tuple[int, ...] | None = None
    """Sizes of the top MLP with its output, 1 for one logit. ``None``: the paper's sizes for the model."""
    device: torch.device | str | None = None
    """Device of the parameters. ``None`` follows PyTorch's own ``with torch.device(...)``."""

    def __post_init__(self) -> None:
        # A list is what a configuration file gives; a tuple keeps the frozen dataclass immutable.
        object.__setattr__(self, "dense_arch_layer_sizes", tuple(self.dense_arch_layer_sizes))
        check_layer_sizes("ModelOptions.dense_arch_layer_sizes", self.dense_arch_layer_sizes)
        if self.over_arch_layer_sizes is not None:
            object.__setattr__(self, "over_arch_layer_sizes", tuple(self.over_arch_layer_sizes))
            check_layer_sizes("ModelOptions.over_arch_layer_sizes", self.over_arch_layer_sizes, at_least=1)


class _Model(nn.Module):
    """Forward pass of all four models; the attribute names are those of ``torchrec.models.dlrm``."""

    paper_over_arch_layer_sizes: tuple[int, ...] = OVER_ARCH_LAYER_SIZES

    def _build(
        self,
        dense_in_features: int,
        dim: int,
        options: ModelOptions,
        make_sparse_arch: Callable[[], nn.Module],
        make_inter_arch: Callable[[], Any],
    ) -> None:
        """Makes the four parts, in the order in which their initial weights are drawn."""
        device = options.device
        self.dense_arch = DenseArch(dense_in_features, [*options.dense_arch_layer_sizes, dim], device=device)
        self.sparse_arch = make_sparse_arch()
        self.inter_arch = make_inter_arch()
        sizes = options.over_arch_layer_sizes or self.paper_over_arch_layer_sizes
        self.over_arch = OverArch(self.inter_arch.out_features, sizes, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense [B, dense_in_features] float32 and sparse ids of B samples, features in any order -> logits [B, 1].

        When the sparse arch is sharded, the dense arch runs while the exchange of its result is in flight. In the
        backward pass too, because autograd runs the operations recorded last first.
        """
        embeddings = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, self._vectors(embeddings)))

    def _vectors(self, embeddings: Any) -> Tensor:
        raise NotImplementedError


class FlatModel(_Model):
    """Flat model: bottom MLP, embeddings [B, F, N], interaction (by default DLRM's), top MLP.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, all of one dimension N.
        dense_in_features: columns of the dense input.
        options: sizes of the MLPs and the device; by default the sizes of the DMT paper.
        make_sparse_arch: builds the embeddings; see `dmt.models.sparse`.
        make_interaction: builds the interaction of F sparse vectors with the dense one.

    Raises:
        InputError: the tables differ in dimension, share a name or a feature, or a size is not positive.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        dense_in_features: int,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch,
        make_interaction: MakeInteraction = DotInteraction,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        dim = common_embedding_dim(tables, type(self).__name__)
        self.feature_names = tuple(feature_names(tables))
        self._build(
            dense_in_features,
            dim,
            options,
            lambda: make_sparse_arch(tables, options.device),
            lambda: make_interaction(num_vectors=len(self.feature_names), dim=dim),
        )

    def _vectors(self, embeddings: Any) -> Tensor:
        # By name: once sharded, the order of the columns depends on the sharding plan.
        return torch.stack(feature_vectors(embeddings, self.feature_names), dim=1)


class TowerModel(_Model):
    """Multi-tower model: each tower compresses its features before they leave the host (DMT section 3.2).

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.plan.tables.TableSpec`, in any order; one dimension per tower.
        tower_plan: which features form which tower.
        dense_in_features: columns of the dense input.
        tower_dim: D, the dimension of the vectors that interact.
        options: sizes of the MLPs and the device; by default those that give the MFLOPs of the DMT paper.
        make_sparse_arch: builds the towers from the tower modules; see `dmt.models.sparse`.
        make_tower_module: builds the module of one tower.
        make_interaction: builds the interaction of sum O_t / D tower vectors with the dense one.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, or a size is not
            positive.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        tower_plan: TowerPlan,
        dense_in_features: int,
        tower_dim: int,
        options: ModelOptions,
        make_sparse_arch: MakeTowerSparseArch,
        make_tower_module: MakeTowerModule,
        make_interaction: MakeInteraction,
    ) -> None:
        super().__init__()
        modules = []
        for tower, own in zip(tower_plan.towers, tower_plan.tables_by_tower(tables), strict=True):
            dim = common_embedding_dim(own, f"{type(self).__name__}, tower {tower.name!r},")
            modules.append(make_tower_module(tower.features, embedding_dim=dim))
        self.num_vectors = sum(module.out_features for module in modules) // tower_dim
        self.tower_dim = tower_dim
        self._build(
            dense_in_features,
            tower_dim,
            options,
            lambda: make_sparse_arch(tables, tower_plan, modules, options.device),
            lambda: make_interaction(num_vectors=self.num_vectors, dim=tower_dim),
        )

    def _vectors(self, embeddings: Any) -> Tensor:
        return embeddings.reshape(-1, self.num_vectors, self.tower_dim)
