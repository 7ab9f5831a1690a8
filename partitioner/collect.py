"""`FeatureAffinity.collect`: measures how similar embeddings are, by one running sum over the outputs of collections.

Legend: F features, N embedding dim, B samples of a batch.

The result is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix of one
sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero and
stays zero, and its sample still counts in the mean. So a pair that seldom occurs together has a low affinity, and
I(i, i) is the share of samples in which the embedding of feature i is not zero. Items of **sequences** are summed.

**On several ranks** each rank sums over its samples, and the sums are added at the end. A lookup in a sharded model is
a collective, so before the first lookup the ranks check that they agree on collections and batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError, check_instance, did_you_mean
from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.tables import TableSpec, feature_names, table_specs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["collect_affinity"]

_WHERE = "FeatureAffinity.collect"
# Float64 elements of normalized embeddings per block of samples (64 MiB): large batches are processed in blocks.
BLOCK_ELEMENTS = 2**23


def collect_affinity(
    model: nn.Module, batches: Iterable[Any], *, ids: Callable[[Any], Any], process_group: ProcessGroup | None
) -> FeatureAffinity:
    """Returns the measured affinity; `FeatureAffinity.collect` describes arguments and errors."""
    if process_group is None:
        collections = _find_collections(model, in_group=False)
        return _sum(collections, _ids_of(batches, ids)).result(_tables_of(collections))
    from dmt.collectives import run_on_all_or_raise, sum_over_ranks

    prepared: list[Any] = []

    def prepare() -> Any:
        """Reads all batches; returns what must be equal on all ranks."""
        keyed = [features for features in _ids_of(batches, ids) if features.stride() > 0]
        prepared.extend((_find_collections(model, in_group=True), keyed))
        forms = dict.fromkeys((tuple(features.keys()), features.weights_or_none() is not None) for features in keyed)
        return [collection.path for collection in prepared[0]], len(keyed), list(forms)

    forms = run_on_all_or_raise(prepare, process_group)
    if other := next((rank for rank, form in enumerate(forms) if form != forms[0]), 0):
        unlike = next((a, b) for a, b in zip(forms[0], forms[other], strict=True) if a != b)
        raise InputError(
            f"{_WHERE}: ranks 0 and {other} of the group differ in their collections, in their number of batches with "
            f"samples, or in the keys and weights of batches: {' against '.join(str(part)[:200] for part in unlike)}. "
            "Give every rank the same model, and the same number and form of batches."
        )
    if len(forms[0][2]) > 1:  # TorchRec's sharded collections assume the keys of the first batch, in its order
        two = " and ".join(str(form)[:200] for form in forms[0][2][:2])
        raise InputError(
            f"{_WHERE}: batches of the group differ in (keys, has weights): {two}. Give all batches the same keys in "
            "the same order, and give weights to all of them or to none."
        )
    # If a bad id makes one rank raise, all must raise: the others would wait for its sums.
    run_on_all_or_raise(lambda: prepared.append(_sum(*prepared)), process_group)
    collections, _, measured = prepared
    # Without any batch, the sums have size 0 on every rank.
    measured.sum_FF, measured.counts = (
        sum_over_ranks(part, process_group) for part in (measured.sum_FF, measured.counts)
    )
    return measured.result(_tables_of(collections))


def _ids_of(batches: Iterable[Any], ids: Callable[[Any], Any]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        keyed = ids(batch)
        if not hasattr(keyed, "length_per_key"):
            kind = f"a {type(keyed).__name__}, not a KeyedJaggedTensor"
            raise InputError(f"{_WHERE}: for batch {number}, ids returns {kind}. Give a function that returns one.")
        yield keyed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Collection:
    """One embedding collection of a model."""

    path: str
    """Dotted path in the model."""
    module: nn.Module
    tables: tuple[TableSpec, ...] = ()
    """Its tables, whose features have the names of the embeddings; empty if sharded."""
    inputs: tuple[str, ...] = ()
    """Names of the features that it looks up; empty if sharded."""


class _Sum:
    """Running float64 sums over the samples of this rank: R R^T, and counts of samples and of each feature's ids."""

    def __init__(self) -> None:
        self.features: tuple[str, ...] = ()
        self.sum_FF = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(1, dtype=torch.float64)
        """[1 + F] samples, then ids of each feature; NaN for an embedding without a feature of the same name."""

    def add(self, vectors: dict[str, Tensor], ids: Any) -> None:
        """Adds a batch: its [B, N] embeddings by name, and the ``KeyedJaggedTensor`` of their ids."""
        if not self.features:
            self.features = tuple(vectors)
            if len(widths := sorted({vector.shape[1] for vector in vectors.values()})) > 1:
                raise InputError(
                    f"{_WHERE}: the tables have embedding dims {widths}, but cosines need a single one. Use "
                    "FeatureAffinity.collect_interactions."
                )
            # The sums are on the device of the embeddings: a process group of GPUs can only reduce GPU tensors.
            self.sum_FF = next(iter(vectors.values())).new_zeros(len(vectors), len(vectors), dtype=torch.float64)
            self.counts = self.sum_FF.new_zeros(1 + len(vectors))
        stacked_BFN = torch.stack([vectors[name] for name in self.features], dim=1)
        for block_BFN in stacked_BFN.split(max(1, BLOCK_ELEMENTS // stacked_BFN[0].numel())):
            # Zeros stay zeros. In float64 the squares of FP32 numbers neither under- nor overflow.
            unit_BFN = nn.functional.normalize(block_BFN.double(), dim=-1, eps=1e-300)
            unit_FX = unit_BFN.transpose(0, 1).reshape(len(self.features), -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
        lengths = dict(zip(ids.keys(), ids.length_per_key(), strict=True))
        num_ids = [lengths.get(name, float("nan")) for name in self.features]
        self.counts += self.counts.new_tensor([len(stacked_BFN), *num_ids])

    def result(self, tables: tuple[TableSpec, ...]) -> FeatureAffinity:
        """Returns the affinity; every rank raises `InputError` without samples or if an embedding is not finite."""
        num_samples, *num_ids = self.counts.tolist()
        if not num_samples:
            raise InputError(f"{_WHERE}: batches have no samples. Give at least one batch with samples.")
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
    """Sums over the batches with the collections in eval mode, and then puts each back into its mode."""
    measured, modes = _Sum(), [collection.module.training for collection in collections]
    try:
        for collection in collections:
            collection.module.eval()
        with torch.no_grad():
            for number, ids in enumerate(batches):
                if ids.stride() > 0:  # TorchRec's plain collections cannot run without rows
                    measured.add(_look_up(collections, ids, number), ids)
    finally:
        for collection, is_training in zip(collections, modes, strict=True):
            collection.module.train(is_training)
    return measured


def _look_up(collections: Sequence[_Collection], ids: Any, number: int) -> dict[str, Tensor]:
    """Returns the [B, N] embedding of each feature, in the order of the keys of ``ids``."""
    place = {name: i for i, name in enumerate(ids.keys())}
    if ids.variable_stride_per_key():
        raise InputError(f"{_WHERE}: batch {number} has a variable stride. Give all features the same samples.")
    vectors: dict[str, Tensor] = {}
    for collection in collections:
        if missing := [name for name in collection.inputs if name not in place]:
            raise InputError(
                f"{_WHERE}: batch {number} lacks feature {missing[0]!r} of collection {collection.path!r} (features "
                f"missing in all: {len(missing)}).{did_you_mean(missing[0], place)} Add what is missing to all batches."
            )
        output = collection.module(ids)
        looked_up = output.wait() if hasattr(type(output), "wait") else output
        if isinstance(looked_up, dict):  # sequences: sum the items of each sample
            pooled = {key: torch.segment_reduce(v.values(), "sum", lengths=v.lengths()) for key, v in looked_up.items()}
        else:
            pooled = looked_up.to_dict()
        if twice := [name for name in pooled if name in vectors]:
            raise InputError(
                f"{_WHERE}: two collections look up feature {twice[0]!r}, the second at {collection.path!r}. Give the "
                "submodule with the collection to measure."
            )
        vectors |= pooled
    # The order of a sharded collection's output depends on its plan.
    return {name: vectors[name] for name in sorted(vectors, key=lambda name: (place.get(name, len(place)), name))}


def _tables_of(collections: Sequence[_Collection]) -> tuple[TableSpec, ...]:
    """Returns the tables; none if two collections have a table of the same name, which a plan cannot tell apart."""
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
            f"{_WHERE} needs TorchRec, which cannot be imported here ({error}). Collect the affinity where TorchRec is "
            "installed, and save it to a file."
        ) from error
    check_instance("model", model, nn.Module)
    found, remedy = [], "Load the checkpoint into the plain model and measure that."
    for path, part in model.named_modules():
        where = f"{_WHERE}: {path!r} is a {type(part).__name__}"
        if isinstance(part, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
            is_sequence = isinstance(part, EmbeddingCollectionInterface)
            configs: Any = part.embedding_configs() if is_sequence else part.embedding_bag_configs()
            # A feature of two tables has two embeddings, with names of their own.
            specs, names = table_specs(configs, one_table_per_feature=False), get_embedding_names_by_table(configs)
            tables = tuple(replace(spec, feature_names=tuple(own)) for spec, own in zip(specs, names, strict=True))
            inputs = tuple(dict.fromkeys(feature_names(configs)))
            found.append(_Collection(path=path, module=part, tables=tables, inputs=inputs))
        elif isinstance(part, ShardedModule):
            if issubclass(part.unsharded_module_type, (EmbeddingTower, EmbeddingTowerCollection)):
                raise InputError(f"{where}, whose embeddings never leave their towers. {remedy}")
            if issubclass(part.unsharded_module_type, EmbeddingCollectionInterface):
                raise InputError(f"{where}; sequences of a sharded model cannot be measured. {remedy}")
            if issubclass(part.unsharded_module_type, EmbeddingBagCollectionInterface):
                if not in_group:
                    raise InputError(
                        f"{where}, whose tables are spread over ranks. Call collect on every rank and give "
                        "process_group=, the group of these ranks."
                    )
                # A train pipeline replaces forward by an object that is not a method.
                if not inspect.ismethod(part.forward):
                    raise InputError(f"{where} attached to a train pipeline. Call the pipeline's detach() first.")
                found.append(_Collection(path=path, module=part))
    if not found:
        raise InputError(f"{_WHERE}: {type(model).__name__} has no embedding collection. Give a model with embeddings.")
    return found
