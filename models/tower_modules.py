"""Tower modules compress the embeddings of a tower's features before they leave the host (DMT section 3.2).

A custom tower module is an ``nn.Module`` with these members; only the trainer and `dmt.models` read the attributes:

- ``features: tuple[str, ...]``, the features of its tower, in the plan's order;
- ``in_features: int``, numbers per sample that enter it (F_t N if all embeddings have dimension N);
- ``out_features: int`` (O_t), numbers per sample that leave it and cross the slow network;
- ``forward(embeddings) -> [B, O_t]``, where `by_feature` gives the pooled embedding [B, N] of each feature.

It must read the embeddings **by name**: the columns of the ``KeyedTensor`` are in the order of the tables, which need
not be that of ``features``. Each row is a sample. A module must not mix rows (no batch norm), because the batch of a
sharded tower has the samples of all its peers. docs/your_model.md puts a tower module into a model. Over an
``EmbeddingCollection``, ``embeddings`` is a dict of ``JaggedTensor`` instead (`dmt.models.sequences`).

The modules of DLRM and DCN have a class attribute ``keeps_interactions``, which ``dmt partition`` reads. True: products
of features reach the output, so features that interact should share a tower. False: each output is linear in the
features, so they should not.

Legend: B samples, F_t features of the tower, N their embedding dimension, D the tower dimension, O_t outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmt.models.dense import CROSS_RANK, Device, LowRankCrossNet, check_sizes, strict_upper

__all__ = [
    "DCNTowerModule",
    "DLRMProductsTowerModule",
    "DLRMTowerModule",
    "EmbeddingsByName",
    "PassThroughTowerModule",
    "by_feature",
    "feature_vectors",
]


class EmbeddingsByName(Protocol):
    """Input of a tower module: a TorchRec ``KeyedTensor``, a dict, or anything else indexed by feature name."""

    def __getitem__(self, name: str, /) -> Tensor:
        """Returns the pooled embedding [B, N] of a feature, float32."""


class DLRMTowerModule(nn.Module):
    """DLRM's tower module: linear combinations of all features, and projections of each (DMT section 4, Listing 1).

    The p combinations of all embeddings [B, p D] come first, then the c projections of each feature [B, F_t c D], whose
    weights all features of the tower share. Together they are p + c F_t vectors of dimension D.

    A projection with as many outputs as inputs is skipped, because it would compress nothing. The paper's MFLOPs for 16
    towers (Table 4) show that its authors do so for towers of one feature with p=1 and D=N.

    Args:
        features: the tower's features, in the plan's order.
        embedding_dim: N.
        tower_dim: D.
        c: number of projections of each feature, 0 or more.
        p: number of linear combinations of all features, 0 or more.
        device: device of the parameters.

    Raises:
        InputError: a dimension is below 1, c or p is negative, or both are 0.
    """

    keeps_interactions = False

    def __init__(
        self,
        features: Sequence[str],
        *,
        embedding_dim: int,
        tower_dim: int,
        c: int = 1,
        p: int = 0,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_sizes("DLRMTowerModule", c=c, p=p, minimum=0)
        check_sizes("DLRMTowerModule", embedding_dim=embedding_dim, tower_dim=tower_dim, **{"c + p": c + p})
        self.features = tuple(features)
        self.in_features = len(self.features) * embedding_dim
        self.num_vectors = p + c * len(self.features)
        self.out_features = self.num_vectors * tower_dim
        self.combine = _projection(self.in_features, p * tower_dim, device=device) if p else None
        self.project = _projection(embedding_dim, c * tower_dim, device=device) if c else None

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings [B, N] of each feature -> [B, (p + c F_t) D], float32."""
        vectors, outputs = feature_vectors(embeddings, self.features), []
        if self.combine is not None:
            outputs.append(self.combine(torch.cat(vectors, dim=1)))
        if self.project is not None:
            outputs.append(self.project(torch.stack(vectors, dim=1)).flatten(1))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


class DLRMProductsTowerModule(DLRMTowerModule):
    """DLRM's tower module plus the inner products of its features; not in the paper.

    The paper's module is linear, so interactions of its features are lost: DLRM multiplies compressed vectors only.
    This module maps the F_t (F_t - 1) / 2 inner products of the embeddings, which flat DLRM computes too, linearly to
    p D numbers and adds them to the p combinations, so that no more bytes cross hosts. Features that interact should
    then share a tower (``benchmarks/results/product_towers.md``).

    Takes the arguments and raises the errors of `DLRMTowerModule`; by default c=0 and p=1, and p must be at least 1.

    Example:
        >>> tower = DLRMProductsTowerModule(["ad", "user"], embedding_dim=8, tower_dim=4, c=0, p=1)
        >>> tower({"ad": torch.ones(3, 8), "user": torch.ones(3, 8)}).shape
        torch.Size([3, 4])
    """

    keeps_interactions = True

    def __init__(
        self, features: Sequence[str], *, tower_dim: int, c: int = 0, p: int = 1, device: Device = None, **sizes: int
    ) -> None:
        check_sizes("DLRMProductsTowerModule", p=p)
        super().__init__(features, tower_dim=tower_dim, c=c, p=p, device=device, **sizes)
        pairs = len(self.features) * (len(self.features) - 1) // 2
        # A tower of a single feature has no pairs.
        self.products = nn.Linear(pairs, p * tower_dim, bias=False, device=device) if pairs else None

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings [B, N] of each feature -> [B, (p + c F_t) D], float32."""
        output = super().forward(embeddings)
        if self.products is None:
            return output
        stacked = torch.stack(feature_vectors(embeddings, self.features), dim=1)
        products = self.products(strict_upper(torch.bmm(stacked, stacked.transpose(1, 2))))
        # The combinations come first.
        return output + functional.pad(products, (0, self.out_features - self.products.out_features))


class DCNTowerModule(nn.Module):
    """DCN's tower module: one cross layer over the tower's embeddings, then a projection (DMT section 4, Listing 2).

    The projection has D outputs per tower, the only reading that fits the MFLOPs of Table 4 (with D=128=N). With
    ``per_feature`` it has F_t D, as in the listing. A projection with as many outputs as inputs is skipped.

    Takes ``rank``, the rank of the cross layer, and ``per_feature`` instead of c and p of `DLRMTowerModule`. Raises
    `InputError` for a size that is not positive.
    """

    keeps_interactions = True

    def __init__(
        self,
        features: Sequence[str],
        *,
        embedding_dim: int,
        tower_dim: int,
        rank: int = CROSS_RANK,
        per_feature: bool = False,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_sizes("DCNTowerModule", embedding_dim=embedding_dim, tower_dim=tower_dim)
        self.features = tuple(features)
        self.in_features = len(self.features) * embedding_dim
        self.out_features = tower_dim * (len(self.features) if per_feature else 1)
        self.crossnet = LowRankCrossNet(self.in_features, num_layers=1, rank=rank, device=device)
        self.project = _projection(self.in_features, self.out_features, device=device)

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings [B, N] of each feature -> [B, D], or [B, F_t D] with ``per_feature``, float32."""
        crossed = self.crossnet(torch.cat(feature_vectors(embeddings, self.features), dim=1))
        return self.project(crossed)


class PassThroughTowerModule(nn.Module):
    """Concatenates the embeddings in the order of ``features``, uncompressed: plain SPTT (DMT section 5.2.1).

    It has no parameters. ``embedding_dims`` has the dimension of each feature, in order; dimensions may differ.
    """

    def __init__(self, features: Sequence[str], *, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.features = tuple(features)
        self.in_features = self.out_features = sum(embedding_dims)

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings [B, N_i] of each feature -> [B, sum N_i], float32."""
        return torch.cat(feature_vectors(embeddings, self.features), dim=1)


def _projection(in_features: int, out_features: int, *, device: Device) -> nn.Module:
    """Returns a linear layer, or the identity if there are as many outputs as inputs."""
    return nn.Identity() if in_features == out_features else nn.Linear(in_features, out_features, device=device)


def by_feature(embeddings: Any) -> Mapping[str, Tensor]:
    """Returns embeddings as a mapping from names to [B, N_i]; call it once, then read all features from the mapping."""
    # Each slice of a KeyedTensor would cost a whole matrix of zeros in the backward pass; to_dict splits once.
    return embeddings.to_dict() if hasattr(embeddings, "to_dict") else embeddings


def feature_vectors(embeddings: Any, features: Sequence[str]) -> list[Tensor]:
    """Returns the embeddings [B, N_i] of ``features``, in that order."""
    vectors = by_feature(embeddings)
    return [vectors[name] for name in features]
