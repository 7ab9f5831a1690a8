"""Measuring `FeatureAffinity` on a trained model: hooks on its embedding collections, one streaming sum.

Legend: F features, N embedding dim, B samples of a batch.

The result is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix of one
sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero and
stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low affinity,
and I(i, i) is the share of samples in which feature i is present.

**On several ranks** each sums over its own samples, and the sums are added at the end. The forward of a sharded model
is a collective, so before every batch and every lookup the ranks tell each other that they are ready (`Lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.capture import Collection, NoRows, Watch, by_feature, evaluating, find_collections, watching
from dmt.plan.tables import TableSpec, feature_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Lockstep", "collect_affinity"]

# Float64 elements of normalised embeddings held at a time (64 MiB): a batch is worked through in blocks of samples.
BLOCK_ELEMENTS = 2**23


def collect_affinity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    module_path: str | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> FeatureAffinity:
    """Measures the affinity; `FeatureAffinity.collect` describes the arguments."""
    ranks = Lockstep(process_group)
    collections = _common_collections(model, module_path, ranks, in_group=process_group is not None)
    measured = _Measured(collections)
    run = forward or _run_batch
    with evaluating(model), watching(collections, ranks) as watches, torch.no_grad():
        for index, batch in enumerate(_together(batches, ranks, measured)):
            for watch in watches:
                watch.start(index)
            try:
                run(model, batch)
                measured.add(watches)
            except NoRows:
                continue
            except Exception as error:
                if ranks.failure_shared:
                    raise
                # Told to the other ranks in the next exchange, which they wait for.
                measured.error = error
    return _sum_of_ranks(measured, ranks, process_group)


class Lockstep:
    """Keeps ranks together that work on data of their own, so that none waits for one that has stopped.

    Before a collective that all must take part in, every rank says how it is doing (`share`). Every such exchange has
    one form, so that a rank that has failed can say so in the next one, whichever the others are in: all then raise.
    (`dmt.collectives.run_on_all_or_raise` needs all ranks to be at the same stage.) A group of None is this process
    alone, for which nothing is exchanged.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group, self._ranks = group, [0]
        if group is not None:
            from torch.distributed import ProcessGroup, get_process_group_ranks

            # torch hands out a number in place of a group that the rank is not in.
            if not isinstance(group, ProcessGroup):
                raise InputError(
                    f"process_group={group!r} is no group of this rank; call this on the ranks of the group only."
                )
            self._ranks = get_process_group_ranks(group)
        self.failure_shared = False
        """True if all ranks know of a failure, so that raising it needs no further exchange."""

    def share(self, stage: str, value: Any, error: Exception | None = None) -> list[Any]:
        """Tells all ranks this one's small ``value``, or its ``error``; returns everyone's values by group rank.

        Raises ``error`` after the others have been told, or `InputError` if another rank failed or is at another
        ``stage``, in words that fit "this rank is at ...".
        """
        if self._group is None:
            if error is not None:
                self.failure_shared = True
                raise error
            return [value]
        from dmt.collectives import gather_objects, reason_of

        records = gather_objects((stage, value, None if error is None else reason_of(error)), self._group)
        ranks = list(zip(self._ranks, records, strict=True))
        failed = [(rank, reason) for rank, (_, _, reason) in ranks if reason is not None]
        elsewhere = [(rank, other) for rank, (other, _, _) in ranks if other != records[0][0]]
        self.failure_shared = bool(failed or elsewhere)
        if error is not None:
            raise error
        if failed:
            raise InputError(f"Rank {failed[0][0]} failed: {failed[0][1]}")
        if elsewhere:
            raise InputError(
                f"Rank {elsewhere[0][0]} is at {elsewhere[0][1]} while rank {self._ranks[0]} is at {records[0][0]}. "
                "Every rank must run the same model on batches of the same features."
            )
        return [value for _, value, _ in records]

    def ranks_that_differ(self, values: list[Any]) -> list[int]:
        """Global ranks whose value differs from the first rank's."""
        return [rank for rank, value in zip(self._ranks, values, strict=True) if value != values[0]]


class _Measured:
    """Running sum of R R^T over the samples of this rank, in float64, and counts."""

    def __init__(self, collections: Sequence[Collection]) -> None:
        self.collections = collections
        self.features: tuple[str, ...] = ()
        self.sum_FF = torch.zeros(0, 0, dtype=torch.float64)
        self.num_samples = 0
        self.num_ids: dict[str, int] | None = {}
        self.error: Exception | None = None

    def add(self, watches: Sequence[Watch]) -> None:
        embeddings = by_feature(watches)
        if not self.features:
            # The sum lives where the embeddings do: a group of GPUs adds up what is on GPUs only.
            self.start_sum(tuple(embeddings), next(iter(embeddings.values())).device)
        for block_BFN in _stacked(embeddings, self.features, watches[0].batch):
            unit_FX = _normalise(block_BFN.double()).transpose(0, 1).reshape(len(self.features), -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
            self.num_samples += len(block_BFN)
        # Ids of each embedding add up as long as every input could be read.
        for watch in watches:
            if self.num_ids is None or watch.output is None:
                continue
            if watch.num_ids is None or not watch.collection.inputs:
                self.num_ids = None
                continue
            for name, feature in watch.collection.inputs.items():
                self.num_ids[name] = self.num_ids.get(name, 0) + watch.num_ids[feature]

    def start_sum(self, features: Sequence[str], device: torch.device) -> None:
        self.features = tuple(features)
        self.sum_FF = torch.zeros(len(features), len(features), dtype=torch.float64, device=device)

    def tables(self) -> tuple[TableSpec, ...]:
        """Tables of the features, or none if they do not fit them one to one."""
        tables = [table for collection in self.collections for table in collection.tables]
        used = [table for table in tables if not set(table.feature_names).isdisjoint(self.features)]
        # Two collections may each have a table of one name, which no plan could tell apart.
        unique = len({table.name for table in used}) == len(used)
        order = {name: i for i, name in enumerate(self.features)}
        if not unique or sorted(feature_names(used)) != sorted(self.features):
            return ()
        return tuple(sorted(used, key=lambda table: min(order[name] for name in table.feature_names)))


def _common_collections(
    model: nn.Module, module_path: str | None, ranks: Lockstep, *, in_group: bool
) -> list[Collection]:
    """Collections that all ranks have, each with its tables of all ranks."""
    collections: list[Collection] = []
    fault: Exception | None = None
    try:
        collections = find_collections(model, module_path, in_group=in_group)
    except InputError as error:
        fault = error
    mine = [(collection.path, collection.tables, dict(collection.inputs)) for collection in collections]
    everyone = ranks.share("the search for embedding collections", mine, fault)
    differing = ranks.ranks_that_differ([[path for path, _, _ in of_rank] for of_rank in everyone])
    if differing:
        raise InputError(
            f"FeatureAffinity.collect: ranks {differing} have EmbeddingBagCollections at other paths than the first "
            "rank. Give every rank the same model and module_path."
        )
    united = []
    for collection, *of_ranks in zip(collections, *everyone, strict=True):
        tables = {table.name: table for _, tables, _ in of_ranks for table in tables}
        inputs = {name: feature for _, _, inputs in of_ranks for name, feature in inputs.items()}
        known = collection.is_complete
        united.append(collection if known else replace(collection, tables=tuple(tables.values()), inputs=inputs))
    return united


def _together(batches: Iterable[Any], ranks: Lockstep, measured: _Measured) -> Iterator[Any]:
    """This rank's batches, as long as every rank has one and none has failed."""
    iterator = iter(batches)
    nothing = object()
    while True:
        batch: Any = nothing
        if measured.error is None:
            try:
                batch = next(iterator, nothing)
            except Exception as error:
                measured.error = error
        if not all(ranks.share("the next batch", batch is not nothing, measured.error)):
            return
        yield batch


def _sum_of_ranks(measured: _Measured, ranks: Lockstep, group: ProcessGroup | None) -> FeatureAffinity:
    everyone = ranks.share("the end", (measured.features, measured.num_samples, measured.num_ids is not None))
    num_samples = sum(count for _, count, _ in everyone)
    if num_samples == 0:
        # Ranks stop together: where one has no batch, none is run anywhere.
        raise InputError("FeatureAffinity.collect: batches gave no sample; give every rank at least one with rows.")
    features: tuple[str, ...] = next(names for names, count, _ in everyone if count)
    # A rank whose batches had no rows may not know its features; it adds nothing.
    names_of_ranks = [names if count else features for names, count, _ in everyone]
    differing = ranks.ranks_that_differ(names_of_ranks)
    if differing:
        other = next(names for names in names_of_ranks if names != features)
        strange = sorted(set(other) ^ set(features)) or ["their order"]
        raise InputError(
            f"FeatureAffinity.collect: ranks {differing} looked up other features than the first rank, see "
            f"{strange[0]!r}. Every rank must run the same model."
        )
    if not measured.num_samples:
        # A sum of no samples, on the device of the embeddings.
        weights = (weight for collection in measured.collections for weight in collection.module.parameters())
        measured.start_sum(features, next(weights, measured.sum_FF).device)
    sum_FF = measured.sum_FF
    has_ids = all(known for _, _, known in everyone)
    counts = dict.fromkeys(features, 0) | (measured.num_ids or {})
    num_ids_F = torch.tensor([counts[name] for name in features], dtype=torch.float64, device=sum_FF.device)
    if group is not None:
        from dmt.collectives import sum_over_ranks

        sum_FF = sum_over_ranks(sum_FF, group)
        num_ids_F = sum_over_ranks(num_ids_F, group)
    return FeatureAffinity(
        matrix=(sum_FF / num_samples).abs_().cpu().numpy(),
        features=features,
        num_samples=num_samples,
        tables=measured.tables(),
        pooling_factors=tuple((num_ids_F / num_samples).tolist()) if has_ids else None,
    )


def _normalise(embeddings: Tensor) -> Tensor:
    # Dividing by the largest element first keeps the norms of tiny and huge vectors from under- or overflowing.
    largest = embeddings.abs().amax(dim=-1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, 1.0)
    return nn.functional.normalize(scaled, dim=-1)


def _run_batch(model: nn.Module, batch: Any) -> Any:
    if not (hasattr(batch, "dense_features") and hasattr(batch, "sparse_features")):
        raise InputError(
            f"FeatureAffinity.collect: a batch is a {type(batch).__name__} without dense_features and sparse_features; "
            "say how to run it, for instance forward=lambda model, batch: model(batch)."
        )
    return model(batch.dense_features, batch.sparse_features)


def _stacked(embeddings: Mapping[str, Tensor], features: Sequence[str], batch: int) -> Iterator[Tensor]:
    """Blocks [B', F, N] of a batch, features in order, after checking that the embeddings can be compared."""
    changed = sorted(set(embeddings) ^ set(features))
    if changed:
        raise InputError(
            f"FeatureAffinity.collect: feature {changed[0]!r} is not in every batch (see batch {batch}); every forward "
            "must look up the same features."
        )
    first = features[0]
    for feature in features:
        # Cosines exist only between vectors of one length, and pairs only within one sample.
        if embeddings[feature].shape != embeddings[first].shape:
            raise InputError(
                f"FeatureAffinity.collect: batch {batch} has embeddings [samples, dim] {list(embeddings[first].shape)} "
                f"for feature {first!r} but {list(embeddings[feature].shape)} for {feature!r}; all must agree. "
                "Train the flat model for partitioning with one embedding_dim."
            )
    num_samples, dim = embeddings[first].shape
    rows = max(1, BLOCK_ELEMENTS // (len(features) * dim))
    for start in range(0, num_samples, rows):
        block = torch.stack([embeddings[feature][start : start + rows] for feature in features], dim=1)
        finite = block.isfinite().all(dim=2).all(dim=0)
        if not bool(finite.all()):
            feature = features[int((~finite).nonzero()[0])]
            raise InputError(
                f"FeatureAffinity.collect: the embedding of feature {feature!r} is not finite in batch {batch}. "
                "Check the trained table for NaN or infinity."
            )
        yield block
