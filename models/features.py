"""Embeddings of several features side by side, read off anything that is indexed by feature name.

Nothing here needs TorchRec: its ``KeyedTensor`` is known by its methods, a dict of tensors does as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["by_feature", "feature_vectors", "stacked_in_any_order"]


def by_feature(embeddings: Any) -> Mapping[str, Tensor]:
    """Embeddings as a mapping from names to [B, N_i], split once; keep it while reading feature after feature.

    Slices of a ``KeyedTensor`` would each cost a whole matrix of zeros in the backward pass; its ``to_dict`` splits
    once.
    """
    return embeddings.to_dict() if hasattr(embeddings, "to_dict") else embeddings


def feature_vectors(embeddings: Any, features: Sequence[str]) -> list[Tensor]:
    """[B, N_i] of each feature.

    Example:
        >>> [v.tolist() for v in feature_vectors({"a": torch.ones(1, 2), "b": torch.zeros(1, 1)}, ["b", "a"])]
        [[[0.0]], [[1.0, 1.0]]]
    """
    vectors = by_feature(embeddings)
    return [vectors[name] for name in features]


def stacked_in_any_order(embeddings: Any, features: Sequence[str]) -> tuple[Tensor, list[int]]:
    """[B, F, N] with features in the order that costs least, and where each feature is.

    Args:
        embeddings: [B, N] of each feature.
        features: F names.

    Returns:
        The vectors, and for each feature its position on dimension 1. Where all columns of a ``KeyedTensor`` are asked
        for, that is a view of them as they arrived; elsewhere a copy in the order of ``features``.

    Example:
        >>> stacked, position = stacked_in_any_order({"a": torch.ones(1, 2), "b": torch.zeros(1, 2)}, ["b", "a"])
        >>> stacked.tolist(), position
        ([[[0.0, 0.0], [1.0, 1.0]]], [0, 1])
    """
    arrived = getattr(embeddings, "arrived", embeddings)
    # A tracer's stand-in has every attribute and no keys to go through.
    if hasattr(arrived, "length_per_key") and not isinstance(arrived, torch.fx.Proxy):
        keys, widths = arrived.keys(), arrived.length_per_key()
        if len(set(widths)) == 1 and sorted(keys) == sorted(features):
            position = {key: i for i, key in enumerate(keys)}
            return arrived.values().view(-1, len(keys), widths[0]), [position[name] for name in features]
    return torch.stack(feature_vectors(embeddings, features), dim=1), list(range(len(features)))
