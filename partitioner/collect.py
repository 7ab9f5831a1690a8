"""Measuring how alike embeddings are, `FeatureAffinity.collect`: one streaming sum over the outputs of collections.

Legend: F features, N embedding dim, B samples of a batch.

The result is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix of one
sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero and
stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low affinity,
and I(i, i) is the share of samples in which feature i is present.

**Sequences** are pooled: the vector of a history is the sum of the embeddings of its items.

**On several ranks** each sums over its own samples, and the sums are added at the end. The lookup of a sharded model is
a collective, so the ranks compare what they are about to look up before the first one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError, did_you_mean
from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.tables import TableSpec, feature_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["collect_affinity"]

_WHERE = "FeatureAffinity.collect"
# Float64 elements of normalised embeddings in a block of samples (64 MiB): a batch is worked through in blocks.
BLOCK_ELEMENTS = 2**23


def collect_affinity(
    model: nn.Module, batches: Iterable[Any], *, ids: Callable[[Any], Any], process_group: ProcessGroup | None
) -> FeatureAffinity:
    """Measures the affinity; `FeatureAffinity.collect` describes the arguments."""
    if process_group is None:
        collections = _find_collections(model, in_group=False)
        return _sum(collections, map(ids, batches)).result(_tables_of(collections))
    from dmt.collectives import run_on_all_or_raise, sum_over_ranks

    prepared: list[Any] = []

    def prepare() -> Any:
        """Only what the ranks must have in common is exchanged."""
        keyed = [features for features in map(ids, batches) if features.stride() > 0]
        prepared.extend((_find_collections(model, in_group=True), keyed))
        forms = {(tuple(features.keys()), features.weights_or_none() is not None) for features in keyed}
        return [collection.path for collection in prepared[0]], len(keyed), sorted(forms)

    forms = run_on_all_or_raise(prepare, process_group)
    if other := next((rank for rank, form in enumerate(forms) if form != forms[0]), 0):
        unlike = next((a, b) for a, b in zip(forms[0], forms[other], strict=True) if a != b)
        raise InputError(
            f"{_WHERE}: ranks 0 and {other} of the group differ in their collections, their number of batches with "
            f"samples, or the keys and weights of those: {' against '.join(str(part)[:200] for part in unlike)}. Give "
            "every rank the same model and equally many batches of one form."
        )
    collections, keyed = prepared
    measured = _sum(collections, keyed)
    # Where there is no batch at all, no rank knows the features.
    measured.sum_FF, measured.counts = (
        sum_over_ranks(part, process_group) for part in (measured.sum_FF, measured.counts)
    )
    return measured.result(_tables_of(collections))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Collection:
    """One embedding collection of a model."""

    path: str
    """Dotted path in the model."""
    module: nn.Module
    tables: tuple[TableSpec, ...] = ()
    """Its tables, with the names of the embeddings as features; none if sharded."""
    inputs: tuple[str, ...] = ()
    """Features that it looks up; none if sharded."""


class _Sum:
    """Running sum over the samples of this rank of R R^T, in float64, with numbers of samples and ids."""

    def __init__(self) -> None:
        self.features: tuple[str, ...] = ()
        self.sum_FF = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(1, dtype=torch.float64)
        """Samples, then ids of each feature; NaN where an embedding has not the name of a feature."""

    def add(self, vectors: dict[str, Tensor], ids: Any) -> None:
        """Adds a batch: the [B, N] embeddings by name, and the ids that they were looked up with."""
        if not self.features:
            self.features = tuple(vectors)
            widths = sorted({vector.shape[1] for vector in vectors.values()})
            if len(widths) > 1:
                raise InputError(
                    f"{_WHERE}: the tables have embedding dims {widths}, and vectors of different widths have no "
                    "cosines. Use FeatureAffinity.collect_interactions."
                )
            # The sums live where the embeddings do: a group of GPUs adds up what is on GPUs only.
            self.sum_FF = next(iter(vectors.values())).new_zeros(len(vectors), len(vectors), dtype=torch.float64)
            self.counts = self.sum_FF.new_zeros(1 + len(vectors))
        stacked_BFN = torch.stack([vectors[name] for name in self.features], dim=1)
        for block_BFN in stacked_BFN.split(max(1, BLOCK_ELEMENTS // max(1, stacked_BFN[0].numel()))):
            unit_FX = _normalise(block_BFN.double()).transpose(0, 1).reshape(len(self.features), -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
        lengths = dict(zip(ids.keys(), ids.length_per_key(), strict=True))
        num_ids = [lengths.get(name, float("nan")) for name in self.features]
        self.counts += self.counts.new_tensor([len(stacked_BFN), *num_ids])

    def result(self, tables: tuple[TableSpec, ...]) -> FeatureAffinity:
        """The affinity of the samples; an embedding that is not finite shows in the sum, and so on every rank."""
        num_samples, *num_ids = self.counts.tolist()
        if not num_samples:
            raise InputError(f"{_WHERE}: batches gave no sample. Give larger or more batches.")
        for name, is_finite in zip(self.features, self.sum_FF.diagonal().isfinite().tolist(), strict=True):
            if not is_finite:
                raise InputError(
                    f"{_WHERE}: the embedding of feature {name!r} is not finite. Check the trained table for NaN or "
                    "infinity."
                )
        return FeatureAffinity(
            matrix=(self.sum_FF / num_samples).abs().cpu().numpy(),
            features=self.features,
            num_samples=int(num_samples),
            tables=tables if sorted(feature_names(tables)) == sorted(self.features) else (),
            pooling_factors=tuple(count / num_samples for count in num_ids)
            if all(map(math.isfinite, num_ids))
            else None,
        )


def _sum(collections: Sequence[_Collection], batches: Iterable[Any]) -> _Sum:
    measured = _Sum()
    with _evaluating(collections), torch.no_grad():
        for number, ids in enumerate(batches):
            if ids.stride() > 0:  # TorchRec's plain collections cannot run without rows
                measured.add(_look_up(collections, ids, number), ids)
    return measured


@contextmanager
def _evaluating(collections: Sequence[_Collection]) -> Iterator[None]:
    """Puts the collections in eval mode, and every part of them back into its own mode afterwards."""

    # By children, because sharded modules hide their parts from modules().
    def parts(part: nn.Module) -> Iterator[nn.Module]:
        yield part
        for child in part.children():
            yield from parts(child)

    modes = {part: part.training for collection in collections for part in parts(collection.module)}
    for collection in collections:
        collection.module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _look_up(collections: Sequence[_Collection], ids: Any, number: int) -> dict[str, Tensor]:
    """The [B, N] embedding of each feature, in the order of the ids."""
    place = {name: i for i, name in enumerate(ids.keys())}
    if ids.variable_stride_per_key():
        raise InputError(f"{_WHERE}: batch {number} has features with different numbers of samples. Give all the same.")
    vectors: dict[str, Tensor] = {}
    for collection in collections:
        missing = [name for name in collection.inputs if name not in place]
        if missing:
            raise InputError(
                f"{_WHERE}: batch {number} lacks feature {missing[0]!r} of collection {collection.path!r} "
                f"({len(missing)} missing, {len(place)} present).{did_you_mean(missing[0], place)}"
            )
        output = collection.module(ids)
        found = output.wait() if hasattr(type(output), "wait") else output
        if isinstance(found, dict):  # sequences: of each sample the sum over its items
            found = {key: torch.segment_reduce(v.values(), "sum", lengths=v.lengths()) for key, v in found.items()}
        else:
            found = found.to_dict()
        twice = [name for name in found if name in vectors]
        if twice:
            raise InputError(
                f"{_WHERE}: feature {twice[0]!r} is looked up by two collections, the second at {collection.path!r}. "
                "Give the part of the model that holds the one you want."
            )
        vectors |= found
    # A sharded collection has an order that depends on its plan.
    return {name: vectors[name] for name in sorted(vectors, key=lambda name: (place.get(name, len(place)), name))}


def _normalise(embeddings: Tensor) -> Tensor:
    # Dividing by the largest element first keeps the norms of tiny and huge vectors from under- or overflowing.
    largest = embeddings.abs().amax(dim=-1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, 1.0)
    return nn.functional.normalize(scaled, dim=-1)


def _tables_of(collections: Sequence[_Collection]) -> tuple[TableSpec, ...]:
    """The tables; none where two collections have tables of one name, which no plan could tell apart."""
    tables = tuple(table for collection in collections for table in collection.tables)
    return tables if len({table.name for table in tables}) == len(tables) else ()


def _find_collections(model: nn.Module, *, in_group: bool) -> list[_Collection]:
    try:
        from torchrec.distributed.types import ShardedModule
        from torchrec.modules.embedding_modules import (
            EmbeddingBagCollectionInterface,
            EmbeddingCollectionInterface,
            get_embedding_names_by_table,
        )
        from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
    except ImportError as error:
        raise InputError(
            f"{_WHERE} needs TorchRec, which cannot be imported here ({error}). Collect where it is installed, and "
            "save the affinity."
        ) from error
    found = []
    for path, part in model.named_modules():
        where = f"{_WHERE}: {path!r} is a {type(part).__name__}"
        if isinstance(part, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
            is_sequence = isinstance(part, EmbeddingCollectionInterface)
            configs: Any = part.embedding_configs() if is_sequence else part.embedding_bag_configs()
            tables = tuple(
                TableSpec(
                    name=config.name,
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    feature_names=tuple(names),
                    is_sequence=is_sequence,
                )
                for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            )
            inputs = tuple(dict.fromkeys(feature_names(configs)))
            found.append(_Collection(path=path, module=part, tables=tables, inputs=inputs))
        elif isinstance(part, ShardedModule):
            if issubclass(part.unsharded_module_type, (EmbeddingTower, EmbeddingTowerCollection)):
                raise InputError(
                    f"{where}, whose embeddings never leave their towers. Load the checkpoint into the plain model."
                )
            if issubclass(part.unsharded_module_type, EmbeddingCollectionInterface):
                raise InputError(f"{where}, sequences over ranks. Load the checkpoint into the plain model.")
            if issubclass(part.unsharded_module_type, EmbeddingBagCollectionInterface):
                if not in_group:
                    raise InputError(
                        f"{where}, whose tables are spread over ranks. Call collect on every rank and give "
                        "process_group=, the group of these ranks."
                    )
                # A train pipeline puts an object of its own in the place of the method.
                if not inspect.ismethod(part.forward):
                    raise InputError(f"{where} attached to a train pipeline. Call the pipeline's detach() first.")
                found.append(_Collection(path=path, module=part))
    if not found:
        raise InputError(f"{_WHERE}: {type(model).__name__} holds no collection of embeddings. Give a model that does.")
    return found
