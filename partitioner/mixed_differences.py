"""Interactions in a trained flat model: mixed differences of its log odds under permuted embeddings.

`FeatureInteractions.collect` asks the labels, without a model; this asks a model what it has learned from them.

Legend: F features, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.partitioner.capture import Collection, NoRows, Watch, by_feature, evaluating, find_collections, watching
from dmt.partitioner.collect import Lockstep, run_batch
from dmt.partitioner.interactions import FeatureInteractions

__all__ = ["interactions_of_model"]

_WHERE = "FeatureInteractions.collect_from_model"


def interactions_of_model(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    module_path: str | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    seed: int = 0,
) -> FeatureInteractions:
    """Measures the mixed differences; `FeatureInteractions.collect_from_model` describes the arguments."""
    run = forward or run_batch
    collections = find_collections(model, module_path, in_group=False)
    generator = torch.Generator().manual_seed(seed)
    features: tuple[str, ...] = ()
    # Of each pair: sums of the gains and of their squares.
    sums, num_rows = torch.zeros(0), 0
    with evaluating(model), watching(collections, Lockstep(None)) as watches, torch.no_grad():
        for index, batch in enumerate(batches):
            for watch in watches:
                watch.start(index)
            try:
                odds = _log_odds(run(model, batch), index)
            except NoRows:
                continue
            vectors = by_feature(watches)
            if not features:
                features = tuple(vectors)
                sums = torch.zeros(2, len(features), len(features), dtype=torch.float64)
            gains = _gains(model, batch, index, run=run, odds=odds, vectors=vectors, watches=watches, rng=generator)
            for k, power in enumerate((gains, gains.square())):
                sums[k] += power.sum(dim=2)
            num_rows += len(odds)
    if not num_rows:
        raise InputError(f"{_WHERE}: batches gave no row; give a few thousand.")
    mean, squares = (sums / num_rows).numpy()
    return FeatureInteractions(
        gains=mean,
        features=features,
        errors=np.sqrt(np.maximum(squares - mean**2, 0.0) / num_rows),
        num_rows=num_rows,
        tables=_tables(collections, features),
        notes=("Gains are mixed differences of a trained model's log odds, in nats; not of held-out labels.",),
    )


def _gains(
    model: nn.Module,
    batch: Any,
    index: int,
    *,
    run: Callable[[nn.Module, Any], Tensor],
    odds: Tensor,
    vectors: Mapping[str, Tensor],
    watches: list[Watch],
    rng: torch.Generator,
) -> Tensor:
    """[F, F, B] float64 gains of every row."""
    # A rotation of a random order: every row gets another one.
    order = torch.randperm(len(odds), generator=rng)
    other = torch.empty_like(order)
    other[order] = order.roll(1)

    def with_permuted(*names: str) -> Tensor:
        for watch in watches:
            watch.start(index)
            watch.replaced = {name: vectors[name][other.to(vectors[name].device)] for name in names}
        try:
            return _log_odds(run(model, batch), index)
        finally:
            for watch in watches:
                watch.replaced = {}

    single = {name: with_permuted(name) for name in vectors}
    weight = torch.sigmoid(odds) * torch.sigmoid(-odds) / 8
    gains = torch.zeros(len(vectors), len(vectors), len(odds), dtype=torch.float64)
    for (i, first), (j, second) in combinations(enumerate(vectors), 2):
        mixed = odds - single[first] - single[second] + with_permuted(first, second)
        gains[i, j] = gains[j, i] = weight * mixed.square()
    return gains


def _log_odds(output: Any, index: int) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() not in (1, 2) or output.numel() != len(output):
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"{_WHERE}: forward of batch {index} returned {shape}; it must be log odds, [B] or [B, 1].")
    if len(output) < 2:
        raise InputError(f"{_WHERE}: batch {index} has {len(output)} row; another one is drawn for each, so give more.")
    odds = output.reshape(-1).double().cpu()
    if not odds.isfinite().all():
        raise InputError(f"{_WHERE}: log odds of batch {index} are not finite; the model's weights may be damaged.")
    return odds


def _tables(collections: list[Collection], features: tuple[str, ...]) -> tuple[Any, ...]:
    """The tables, where they have these features one to one."""
    tables = [table for collection in collections for table in collection.tables]
    known = [name for table in tables for name in table.feature_names]
    return tuple(tables) if sorted(known) == sorted(features) else ()
