"""Tower modules compress the embeddings of a tower's features before they leave the host (DMT section 3.2).

A tower module of your own is an ``nn.Module`` with three attributes and a forward:

- ``features: tuple[str, ...]``, the features of its tower, in the plan's order;
- ``in_features: int``, numbers per sample that enter it (F_t N where all embeddings have dimension N);
- ``out_features: int`` (O_t), numbers per sample that leave it and cross the slow network;
- ``forward(embeddings) -> [B, O_t]``, where ``embeddings[name]`` is the pooled embedding [B, N] of a feature.

It may declare ``keeps_interactions: bool`` as a class attribute: True where products of its own features reach the
output, so that features that interact should share a tower; False where each output is linear in them, so that they
should not. ``dmt partition --strategy interactions`` goes by it.

It must read the embeddings **by name**: in a job they come as a TorchRec ``KeyedTensor`` whose order of columns depends
on how the tables are sharded. It sees one sample per row and must not mix rows (no batch norm): in a job its batch is
that of all its peers. docs/your_model.md puts one into a model.

A tower over an ``EmbeddingCollection`` gets a dict of ``JaggedTensor`` instead: `dmt.models.sequences`.

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
        """The pooled embedding [B, N] of a feature, float32."""


class DLRMTowerModule(nn.Module):
    """DLRM's tower module: linear combinations of the features, and a projection of each (DMT section 4, Listing 1).

    The p combinations [B, p D] of all embeddings come first, then the c projections [B, F_t c D] of each, with one
    weight for all features of the tower. Together they are p + c F_t vectors of dimension D for the pairwise dot.

    A projection whose input and output sizes agree is skipped: it would compress nothing. The paper's MFLOPs for 16
    towers (Table 4) show that the authors do so for towers of one feature with p=1 and D=N.

    Args:
        features: the tower's features, in the plan's order.
        embedding_dim: N.
        tower_dim: D.
        c: projections of each feature, 0 for none.
        p: linear combinations of all features, 0 for none.
        device: where the parameters are made.
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
        check_sizes("DLRMTowerModule", embedding_dim=embedding_dim, tower_dim=tower_dim, c_plus_p=c + p)
        self.features = tuple(features)
        self.in_features = len(self.features) * embedding_dim
        self.num_vectors = p + c * len(self.features)
        self.out_features = self.num_vectors * tower_dim
        self.combine = _projection(self.in_features, p * tower_dim, device=device) if p else None
        self.project = _projection(embedding_dim, c * tower_dim, device=device) if c else None

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings of [B, N] -> [B, (p + c F_t) D]."""
        vectors, outputs = feature_vectors(embeddings, self.features), []
        if self.combine is not None:
            outputs.append(self.combine(torch.cat(vectors, dim=1)))
        if self.project is not None:
            outputs.append(self.project(torch.stack(vectors, dim=1)).flatten(1))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


class DLRMProductsTowerModule(DLRMTowerModule):
    """DLRM's tower module whose combinations include the inner products of the features; not in the paper.

    The paper's module is linear: what two of its features say together is lost, since DLRM multiplies the compressed
    vectors only. Here the F_t (F_t - 1) / 2 inner products of the embeddings, which the flat DLRM computes too, are
    mapped into the p D outputs and added, so that as many bytes cross hosts. Features that interact should then share
    a tower (``benchmarks/results/product_towers.md``).

    Arguments are those of `DLRMTowerModule`; p is at least 1, to carry the products.

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
        # A tower of one feature has no pair.
        self.products = nn.Linear(pairs, p * tower_dim, bias=False, device=device) if pairs else None

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings of [B, N] -> [B, (p + c F_t) D]."""
        output = super().forward(embeddings)
        if self.products is None:
            return output
        stacked = torch.stack(feature_vectors(embeddings, self.features), dim=1)
        products = self.products(strict_upper(torch.bmm(stacked, stacked.transpose(1, 2))))
        # The combinations come first.
        return output + functional.pad(products, (0, self.out_features - self.products.out_features))


class DCNTowerModule(nn.Module):
    """DCN's tower module: one cross layer over the tower's embeddings, then a projection (DMT section 4, Listing 2).

    The projection has D outputs per tower: the MFLOPs of Table 4 (and D=128=N) fit no other reading. The listing prints
    F_t D, which ``per_feature`` gives. A projection of as many inputs as outputs is skipped.

    Arguments are those of `DLRMTowerModule`, but for ``rank`` of the cross layer and ``per_feature``.
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
        """Embeddings of [B, N] -> [B, D], or [B, F_t D] per feature."""
        crossed = self.crossnet(torch.cat(feature_vectors(embeddings, self.features), dim=1))
        return self.project(crossed)


class PassThroughTowerModule(nn.Module):
    """Concatenates the embeddings in the features' order: SPTT with nothing on top (DMT section 5.2.1).

    It has no parameters. ``embedding_dims`` are those of the features, in their order, and may differ.
    """

    def __init__(self, features: Sequence[str], *, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.features = tuple(features)
        self.in_features = self.out_features = sum(embedding_dims)

    def forward(self, embeddings: EmbeddingsByName) -> Tensor:
        """Embeddings of [B, N_i] -> [B, sum N_i]."""
        return torch.cat(feature_vectors(embeddings, self.features), dim=1)


def _projection(in_features: int, out_features: int, *, device: Device) -> nn.Module:
    """A linear layer; the identity where it would change no size."""
    return nn.Identity() if in_features == out_features else nn.Linear(in_features, out_features, device=device)


def by_feature(embeddings: Any) -> Mapping[str, Tensor]:
    """Embeddings as a mapping from names to [B, N_i]; keep it while reading feature after feature."""
    # Slices of a KeyedTensor would each cost a whole matrix of zeros in the backward pass; to_dict splits once.
    return embeddings.to_dict() if hasattr(embeddings, "to_dict") else embeddings


def feature_vectors(embeddings: Any, features: Sequence[str]) -> list[Tensor]:
    """Embeddings [B, N_i] of the features, in their order."""
    vectors = by_feature(embeddings)
    return [vectors[name] for name in features]
