"""Measuring `FeatureAffinity` on a trained model: hooks on its embedding collections, one streaming sum.

Legend: F features, N embedding dim, B samples of a batch.

The result is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix of one
sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero and
stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low affinity,
and I(i, i) is the share of samples in which feature i is present.

**Tables of different widths** have no common space, so no cosine exists between their vectors: rotating the space of
one table changes nothing that the model can see, and a random projection to a common width is such a rotation. There,
*all* pairs are measured by linear CKA (Kornblith et al., arXiv 1905.00414, with the unbiased estimator over batches of
Nguyen et al., arXiv 2010.15327): it asks if samples that are alike in one feature are alike in the other, and needs
cosines between samples of one table only. All pairs, because the two measures have different scales.

**On several ranks** each sums over its own samples, and the sums are added at the end. The forward of a sharded model
is a collective, so before every batch and every lookup the ranks tell each other that they are ready (`Lockstep`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.capture import (
    COLLECT,
    Collection,
    NoRows,
    Watch,
    by_feature,
    evaluating,
    find_collections,
    watching,
)
from dmt.plan.tables import TableSpec, feature_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Lockstep", "check_batch", "collect_affinity", "run_batch", "tables_of"]

# Float64 elements of normalised embeddings, or of CKA's gram matrices, in a block of samples (64 MiB; CKA holds up to
# three such at a time): a batch is worked through in blocks.
BLOCK_ELEMENTS = 2**23
# CKA compares each sample of a block with each other one: with more of them, its work grows and its noise hardly falls.
_CKA_ROWS = 256
# The unbiased estimator divides by n - 3.
_CKA_LEAST_ROWS = 4
# A centred gram this small, squared and relative to the uncentred one, is the rounding of cosines that are all equal.
_CKA_ROUNDING = 1e-12


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
    run = forward or run_batch
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
    """Running sum over the samples of this rank, in float64, of R R^T or of CKA's inner products, and counts."""

    def __init__(self, collections: Sequence[Collection]) -> None:
        self.collections = collections
        self.features: tuple[str, ...] = ()
        self.measure: Literal["cosine", "cka"] = "cosine"
        self.sum_FF = torch.zeros(0, 0, dtype=torch.float64)
        self.uncentred_F = torch.zeros(0, dtype=torch.float64)
        self.num_samples = 0
        self.num_rows = 0  # samples that ids were counted in: CKA leaves out those of small batches
        self.num_ids: dict[str, int] | None = {}
        self.error: Exception | None = None

    def add(self, watches: Sequence[Watch]) -> None:
        embeddings = by_feature(watches)
        if not self.features:
            # The sum lives where the embeddings do: a group of GPUs adds up what is on GPUs only.
            self.start_sum(tuple(embeddings), next(iter(embeddings.values())).device)
            self.measure = "cosine" if len({one.shape[1] for one in embeddings.values()}) == 1 else "cka"
        check_batch(embeddings, self.features, watches[0].batch)
        if self.measure == "cosine":
            self._add_cosines(embeddings)
        else:
            self._add_cka(embeddings)
        self.num_rows += len(embeddings[self.features[0]])
        # Ids of each embedding add up as long as every input could be read.
        for watch in watches:
            if self.num_ids is None or watch.output is None:
                continue
            if watch.num_ids is None or not watch.collection.inputs:
                self.num_ids = None
                continue
            for name, feature in watch.collection.inputs.items():
                self.num_ids[name] = self.num_ids.get(name, 0) + watch.num_ids[feature]

    def _add_cosines(self, embeddings: Mapping[str, Tensor]) -> None:
        first = embeddings[self.features[0]]
        num_features, rows = len(self.features), max(1, BLOCK_ELEMENTS // (len(self.features) * first.shape[1]))
        for start in range(0, len(first), rows):
            block_BFN = torch.stack([embeddings[name][start : start + rows] for name in self.features], dim=1)
            unit_FX = _normalise(block_BFN.double()).transpose(0, 1).reshape(num_features, -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
            self.num_samples += len(block_BFN)

    def _add_cka(self, embeddings: Mapping[str, Tensor]) -> None:
        num_samples, num_features = len(embeddings[self.features[0]]), len(self.features)
        rows = max(_CKA_LEAST_ROWS, min(_CKA_ROWS, math.isqrt(BLOCK_ELEMENTS // num_features)))
        # Blocks of about one size: the samples of a rest below the least would be lost.
        for at in torch.arange(num_samples).tensor_split(max(1, num_samples // rows)):
            if (n := len(at)) < _CKA_LEAST_ROWS:
                continue
            block = slice(int(at[0]), int(at[-1]) + 1)
            grams = [_gram(_normalise(embeddings[name][block].double())) for name in self.features]
            self.uncentred_F += torch.stack([gram.square().sum() for gram in grams]) / (n - 3)
            gram_FX = torch.stack([_centred(gram) for gram in grams]).reshape(num_features, -1)
            # Each sample counts alike, whatever the size of its block.
            self.sum_FF.addmm_(gram_FX, gram_FX.T, alpha=1 / (n - 3))
            self.num_samples += n

    def start_sum(self, features: Sequence[str], device: torch.device) -> None:
        self.features = tuple(features)
        self.sum_FF = torch.zeros(len(features), len(features), dtype=torch.float64, device=device)
        self.uncentred_F = self.sum_FF.new_zeros(len(features))


def tables_of(collections: Sequence[Collection], features: Sequence[str]) -> tuple[TableSpec, ...]:
    """Returns the tables of the features, or none if they do not fit them one to one."""
    tables = [table for collection in collections for table in collection.tables]
    used = [table for table in tables if not set(table.feature_names).isdisjoint(features)]
    # Two collections may each have a table of one name, which no plan could tell apart.
    unique = len({table.name for table in used}) == len(used)
    order = {name: i for i, name in enumerate(features)}
    if not unique or sorted(feature_names(used)) != sorted(features):
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
    mine = measured.features, measured.num_samples, measured.num_ids is not None, measured.measure
    everyone = ranks.share("the end", mine)
    num_samples = sum(count for _, count, *_ in everyone)
    if num_samples == 0 and any(measure == "cka" for *_, measure in everyone):
        raise InputError(
            f"FeatureAffinity.collect: tables of different widths need batches of at least {_CKA_LEAST_ROWS} samples, "
            "which are compared with each other. Give larger batches."
        )
    if num_samples == 0:
        # Ranks stop together: where one has no batch, none is run anywhere.
        raise InputError("FeatureAffinity.collect: batches gave no sample; give every rank at least one with rows.")
    features, measure = next((names, measure) for names, count, _, measure in everyone if count)
    # A rank whose batches had no rows may not know its features; it adds nothing.
    names_of_ranks = [names if count else features for names, count, *_ in everyone]
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
    sum_FF, uncentred_F = measured.sum_FF, measured.uncentred_F
    has_ids = all(known for _, _, known, _ in everyone)
    counts = dict.fromkeys(features, 0) | (measured.num_ids or {})
    own_counts = [*(counts[name] for name in features), measured.num_rows]
    counted = torch.tensor(own_counts, dtype=torch.float64, device=sum_FF.device)
    if group is not None:
        from dmt.collectives import sum_over_ranks

        sum_FF = sum_over_ranks(sum_FF, group)
        uncentred_F = sum_over_ranks(uncentred_F, group)
        counted = sum_over_ranks(counted, group)
    return FeatureAffinity(
        matrix=(_cka(sum_FF, uncentred_F) if measure == "cka" else (sum_FF / num_samples).abs_()).cpu().numpy(),
        features=features,
        num_samples=num_samples,
        measure=measure,
        tables=tables_of(measured.collections, features),
        pooling_factors=tuple((counted[:-1] / counted[-1]).tolist()) if has_ids else None,
    )


def _normalise(embeddings: Tensor) -> Tensor:
    # Dividing by the largest element first keeps the norms of tiny and huge vectors from under- or overflowing.
    largest = embeddings.abs().amax(dim=-1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, 1.0)
    return nn.functional.normalize(scaled, dim=-1)


def _gram(unit_BN: Tensor) -> Tensor:
    """Cosines of the samples with each other, [B, B], and 0 for each with itself."""
    return (unit_BN @ unit_BN.T).fill_diagonal_(0.0)


def _centred(gram_BB: Tensor) -> Tensor:
    """Centres a gram matrix in place, so that unrelated features have a mean product of 0.

    This is the U-centring of Szekely and Rizzo (arXiv 1310.2926, equation 2.3), which makes the estimate unbiased.
    """
    n, of_row_B = len(gram_BB), gram_BB.sum(dim=1)
    gram_BB -= (of_row_B[:, None] + of_row_B) / (n - 2)
    gram_BB += of_row_B.sum() / ((n - 1) * (n - 2))
    return gram_BB.fill_diagonal_(0.0)


def _cka(sum_FF: Tensor, uncentred_F: Tensor) -> Tensor:
    """Sums of inner products to CKA in 0..1; below 0 is noise, and a feature that is the same in all samples has 0."""
    square_F = sum_FF.diagonal()
    scale_F = torch.where(square_F > _CKA_ROUNDING * uncentred_F, square_F, 0.0).sqrt()
    cka_FF = sum_FF / (scale_F[:, None] * scale_F)
    return torch.where(cka_FF.isfinite(), cka_FF, 0.0).clamp(0.0, 1.0)


def run_batch(model: nn.Module, batch: Any, where: str = COLLECT) -> Any:
    """Runs a model on a batch as the trainer does; raises `InputError` where the batch is not of that form."""
    if not (hasattr(batch, "dense_features") and hasattr(batch, "sparse_features")):
        raise InputError(
            f"{where}: a batch is a {type(batch).__name__} without dense_features and sparse_features; "
            "say how to run it, for instance forward=lambda model, batch: model(batch)."
        )
    return model(batch.dense_features, batch.sparse_features)


def check_batch(embeddings: Mapping[str, Tensor], features: Sequence[str], batch: int, where: str = COLLECT) -> None:
    """Raises `InputError` unless the embeddings of a batch can be compared."""
    changed = sorted(set(embeddings) ^ set(features))
    if changed:
        raise InputError(
            f"{where}: feature {changed[0]!r} is not in every batch (see batch {batch}); every forward "
            "must look up the same features."
        )
    first = features[0]
    for feature in features:
        # Pairs exist only within one sample.
        if len(embeddings[feature]) != len(embeddings[first]):
            raise InputError(
                f"{where}: batch {batch} has embeddings [samples, dim] {list(embeddings[first].shape)} "
                f"for feature {first!r} but {list(embeddings[feature].shape)} for {feature!r}; they must have the same "
                "samples."
            )
        if not bool(embeddings[feature].isfinite().all()):
            raise InputError(
                f"{where}: the embedding of feature {feature!r} is not finite in batch {batch}. "
                "Check the trained table for NaN or infinity."
            )
