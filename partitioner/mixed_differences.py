"""Interactions in a trained flat model: mixed differences of its log odds under permuted embeddings.

`FeatureInteractions.collect` asks the labels, without a model; this asks a model what it has learned from them.

Legend: F features, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.partitioner.capture import NoRows, Watch, by_feature, evaluating, find_collections, watching
from dmt.partitioner.interactions import FeatureInteractions
from dmt.partitioner.measure_affinity import Lockstep, check_batch, run_batch, tables_of

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
    run = forward or partial(run_batch, where=_WHERE)
    collections = find_collections(model, module_path, in_group=None, where=_WHERE)
    generator = torch.Generator().manual_seed(seed)
    features: tuple[str, ...] = ()
    # Of each pair: sums of the gains and of their squares.
    sums, num_rows = torch.zeros(0), 0
    constant, are_probabilities = _ConstantInBatches(), True
    with evaluating(model), watching(collections, Lockstep(None), _WHERE) as watches, torch.no_grad():
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
            check_batch(vectors, features, index, _WHERE)
            rows = _real_rows(batch, odds, len(vectors[features[0]]), index)
            if not len(rows):
                continue
            are_probabilities &= bool(((odds[rows] >= 0) & (odds[rows] <= 1)).all())
            constant.add({name: vectors[name][rows.to(vectors[name].device)] for name in features})
            # A rotation of a random order: every row that counts gets another one.
            order, other = rows[torch.randperm(len(rows), generator=generator)], torch.arange(len(odds))
            other[order] = order.roll(1)
            _add_gains(
                sums, odds, rows, features, partial(_permuted, partial(run, model, batch), watches, vectors, other)
            )
            num_rows += len(rows)
    if not num_rows:
        raise InputError(f"{_WHERE}: batches gave no row; give a few thousand.")
    if are_probabilities:
        raise InputError(
            f"{_WHERE}: all outputs of forward are between 0 and 1, as probabilities are; it must return log odds. "
            "Give forward= that returns what comes before the sigmoid."
        )
    constant.check()
    mean, squares = (sums / num_rows).numpy()
    return FeatureInteractions(
        gains=mean,
        features=features,
        errors=np.sqrt(np.maximum(squares - mean**2, 0.0) / num_rows),
        num_rows=num_rows,
        tables=tables_of(collections, features),
        notes=("Gains are mixed differences of a trained model's log odds, in nats; not of held-out labels.",),
    )


class _ConstantInBatches:
    """Features that have one vector in all rows of a batch, in every batch so far, and others in other batches."""

    def __init__(self) -> None:
        self._first: dict[str, Tensor] | None = None
        self._differs: dict[str, bool] = {}

    def add(self, vectors: Mapping[str, Tensor]) -> None:
        if self._first is None:
            self._first = {name: own[0] for name, own in vectors.items()}
            self._differs = dict.fromkeys(vectors, False)
        for name in list(self._differs):
            if bool((vectors[name] != vectors[name][0]).any()):
                del self._differs[name]
            else:
                self._differs[name] |= bool((vectors[name][0] != self._first[name]).any())

    def check(self) -> None:
        """Raises `InputError` for such a feature: exchanged within a batch, it shows no interaction."""
        found = [name for name, differs in self._differs.items() if differs]
        if found:
            raise InputError(
                f"{_WHERE}: feature {found[0]!r} is the same in all rows of each batch, but not in all batches "
                f"({len(found)} such). Rows are exchanged within a batch, so its interactions would be lost: give "
                "batches of rows in random order."
            )


def _real_rows(batch: Any, odds: Tensor, num_rows: int, index: int) -> Tensor:
    """[R] rows that count: those with a weight, where the batch has ``weights``."""
    if len(odds) != num_rows:
        raise InputError(
            f"{_WHERE}: forward of batch {index} returned {len(odds)} log odds for {num_rows} rows of embeddings; it "
            "must return one for each."
        )
    weights = getattr(batch, "weights", None)
    if callable(weights) or weights is None:  # a KeyedJaggedTensor's method is of ids
        rows = torch.arange(num_rows)
    elif weights.shape != (num_rows,):
        raise InputError(
            f"{_WHERE}: batch {index} has {num_rows} rows but weights of shape {list(weights.shape)}; give one "
            "for each."
        )
    else:
        rows = torch.nonzero(weights.cpu() > 0).flatten()
    if len(rows) == 1:
        raise InputError(
            f"{_WHERE}: batch {index} has 1 row with a weight; another one is drawn for each, so give more."
        )
    return rows


def _permuted(
    forward: Callable[[], Any],
    watches: Sequence[Watch],
    vectors: Mapping[str, Tensor],
    other: Tensor,
    names: Sequence[str],
) -> Tensor:
    """[B] log odds where these features have the embeddings of the ``other`` rows."""
    for watch in watches:
        watch.start(watch.batch)
        watch.replaced = {name: vectors[name][other.to(vectors[name].device)] for name in names}
    try:
        return _log_odds(forward(), watches[0].batch)
    finally:
        for watch in watches:
            watch.replaced = {}


def _add_gains(
    sums: Tensor, odds: Tensor, rows: Tensor, features: Sequence[str], permuted: Callable[[Sequence[str]], Tensor]
) -> None:
    """Adds the gains of these rows and their squares to ``sums``, [2, F, F] float64."""
    own = odds[rows]
    single = {name: permuted([name])[rows] for name in features}
    weight = torch.sigmoid(own) * torch.sigmoid(-own) / 8
    for (i, first), (j, second) in combinations(enumerate(features), 2):
        mixed = own - single[first] - single[second] + permuted([first, second])[rows]
        gains = weight * mixed.square()
        for k, power in enumerate((gains, gains.square())):
            sums[k, i, j] += power.sum()
            sums[k, j, i] = sums[k, i, j]


def _log_odds(output: Any, index: int) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() not in (1, 2) or output.numel() != len(output):
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"{_WHERE}: forward of batch {index} returned {shape}; it must be log odds, [B] or [B, 1].")
    odds = output.reshape(-1).double().cpu()
    if not odds.isfinite().all():
        raise InputError(f"{_WHERE}: log odds of batch {index} are not finite; the model's weights may be damaged.")
    return odds
