"""Measuring how alike embeddings are, `FeatureAffinity.collect`: one streaming sum over the outputs of collections.

Legend: F features, N embedding dim, B samples of a batch.

The result is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix of one
sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero and
stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low affinity,
and I(i, i) is the share of samples in which feature i is present.

**Tables of different widths** have no common space, so no cosine exists between their vectors: rotating the space of
one table changes nothing that the model can see. There, *all* pairs are measured by linear CKA (Kornblith et al., arXiv
1905.00414, with the unbiased estimator over batches of Nguyen et al., arXiv 2010.15327): it asks if samples that are
alike in one feature are alike in the other, and needs cosines between samples of one table only.

**On several ranks** each sums over its own samples, and the sums are added at the end. The lookup of a sharded model is
a collective, so the ranks compare what they are about to look up before the first one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError, did_you_mean
from dmt.partitioner.affinity import FeatureAffinity, Measure
from dmt.plan.tables import TableSpec, feature_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["collect_affinity"]

_WHERE = "FeatureAffinity.collect"
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
    model: nn.Module, batches: Iterable[Any], *, ids: Callable[[Any], Any], process_group: ProcessGroup | None
) -> FeatureAffinity:
    """Measures the affinity; `FeatureAffinity.collect` describes the arguments."""
    if process_group is None:
        collections = _find_collections(model, in_group=False)
        measured = _measure(collections, (ids(batch) for batch in batches))
        measured.raise_fault()
        return measured.result(_tables_of(collections, measured.features))
    from dmt.collectives import run_on_all_or_raise, sum_over_ranks

    mine: list[Any] = []

    def prepare() -> Any:
        """Only what the ranks must have in common is exchanged."""
        keyed = [ids(batch) for batch in batches]
        mine.extend((_find_collections(model, in_group=True), [one for one in keyed if one.stride() > 0]))
        return _form(*mine)

    forms = run_on_all_or_raise(prepare, process_group)
    if any(form != forms[0] for form in forms):
        other = next(rank for rank, form in enumerate(forms) if form != forms[0])
        raise InputError(
            f"{_WHERE}: ranks 0 and {other} of the group differ in their collections, their number of batches with "
            f"samples, or the keys and weights of those: {_difference(forms[0], forms[other])}. Give every rank the "
            "same model and equally many batches of one form."
        )
    collections, batches = mine
    measured = _measure(collections, batches)
    run_on_all_or_raise(measured.raise_fault, process_group)
    for name in ("sum_FF", "uncentred_F", "counts"):
        setattr(measured, name, sum_over_ranks(getattr(measured, name), process_group))
    return measured.result(_tables_of(collections, measured.features))


def _form(collections: Sequence[_Collection], batches: Sequence[Any]) -> tuple[Any, ...]:
    keys = {(tuple(ids.keys()), ids.weights_or_none() is not None, ids.variable_stride_per_key()) for ids in batches}
    return [collection.path for collection in collections], len(batches), sorted(keys)


def _difference(first: Sequence[Any], other: Sequence[Any]) -> str:
    return next(f"{str(a)[:200]} against {str(b)[:200]}" for a, b in zip(first, other, strict=True) if a != b)


def _measure(collections: Sequence[_Collection], batches: Iterable[Any]) -> _Measured:
    measured = _Measured()
    with _evaluating(collections), torch.no_grad():
        for number, ids in enumerate(batches):
            if ids.stride() == 0:
                continue  # TorchRec's plain collections cannot run without rows
            vectors = _look_up(collections, ids, number)
            measured.add(vectors, ids, number)
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
    """The [B, N] embedding of each feature, in the order of the tables or, once sharded, of the ids."""
    vectors: dict[str, Tensor] = {}
    for collection in collections:
        missing = [name for name in collection.inputs if name not in ids.keys()]  # noqa: SIM118 - a method of its own
        if missing:
            raise InputError(
                f"{_WHERE}: batch {number} lacks feature {missing[0]!r} of EmbeddingBagCollection {collection.path!r} "
                f"({len(missing)} missing, {len(ids.keys())} present).{did_you_mean(missing[0], ids.keys())}"
            )
        output = collection.module(ids)
        found = (output.wait() if hasattr(type(output), "wait") else output).to_dict()
        if collection.is_sharded:  # in an order that depends on the sharding plan
            place = {name: i for i, name in enumerate(ids.keys())}
            found = {name: found[name] for name in sorted(found, key=lambda name: (place.get(name, len(place)), name))}
        twice = [name for name in found if name in vectors]
        if twice:
            raise InputError(
                f"{_WHERE}: feature {twice[0]!r} is looked up by two collections, the second at {collection.path!r}. "
                "Give the part of the model that holds the wanted one."
            )
        vectors |= found
    return vectors


class _Measured:
    """Running sum over the samples of this rank, in float64, of R R^T or of CKA's inner products, and counts."""

    def __init__(self) -> None:
        self.features: tuple[str, ...] = ()
        self.measure: Measure = "cosine"
        self.fault: InputError | None = None
        self.sum_FF = torch.zeros(0, 0, dtype=torch.float64)
        self.uncentred_F = torch.zeros(0, dtype=torch.float64)
        self.counts = torch.zeros(2, dtype=torch.float64)  # samples measured, samples seen, then ids of each feature
        self.has_ids = True

    def add(self, vectors: Mapping[str, Tensor], ids: Any, number: int) -> None:
        """Adds a batch; a fault is kept for the end, since other ranks wait in the next lookup."""
        if not self.features:
            self.features = tuple(vectors)
            # The sums live where the embeddings do: a group of GPUs adds up what is on GPUs only.
            self.sum_FF = next(iter(vectors.values())).new_zeros(len(vectors), len(vectors), dtype=torch.float64)
            self.uncentred_F = self.sum_FF.new_zeros(len(vectors))
            self.counts = self.sum_FF.new_zeros(2 + len(vectors))
            self.measure = "cosine" if len({vector.shape[1] for vector in vectors.values()}) == 1 else "cka"
        rows = {len(vector) for vector in vectors.values()}
        broken = [name for name, vector in vectors.items() if not bool(vector.isfinite().all())]
        if len(rows) > 1 or broken:
            self.fault = self.fault or InputError(
                f"{_WHERE}: the embedding of feature {broken[0]!r} is not finite in batch {number}. Check the trained "
                "table for NaN or infinity."
                if broken
                else f"{_WHERE}: batch {number} has {sorted(rows)} samples by feature; give all features the same."
            )
            return
        (self._add_cosines if self.measure == "cosine" else self._add_cka)([vectors[name] for name in self.features])
        self.counts[1] += rows.pop()
        lengths = None if ids.variable_stride_per_key() else dict(zip(ids.keys(), ids.length_per_key(), strict=True))
        self.has_ids = self.has_ids and lengths is not None and all(name in lengths for name in self.features)
        if lengths is not None and self.has_ids:
            self.counts[2:] += self.counts.new_tensor([lengths[name] for name in self.features])

    def _add_cosines(self, vectors: Sequence[Tensor]) -> None:
        num_features, rows = len(vectors), max(1, BLOCK_ELEMENTS // (len(vectors) * vectors[0].shape[1]))
        for start in range(0, len(vectors[0]), rows):
            block_BFN = torch.stack([vector[start : start + rows] for vector in vectors], dim=1)
            unit_FX = _normalise(block_BFN.double()).transpose(0, 1).reshape(num_features, -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
            self.counts[0] += len(block_BFN)

    def _add_cka(self, vectors: Sequence[Tensor]) -> None:
        num_samples, num_features = len(vectors[0]), len(vectors)
        rows = max(_CKA_LEAST_ROWS, min(_CKA_ROWS, math.isqrt(BLOCK_ELEMENTS // num_features)))
        # Blocks of about one size: the samples of a rest below the least would be lost.
        for at in torch.arange(num_samples).tensor_split(max(1, num_samples // rows)):
            if (n := len(at)) < _CKA_LEAST_ROWS:
                continue
            block = slice(int(at[0]), int(at[-1]) + 1)
            grams = [_gram(_normalise(vector[block].double())) for vector in vectors]
            self.uncentred_F += torch.stack([gram.square().sum() for gram in grams]) / (n - 3)
            gram_FX = torch.stack([_centred(gram) for gram in grams]).reshape(num_features, -1)
            # Each sample counts alike, whatever the size of its block.
            self.sum_FF.addmm_(gram_FX, gram_FX.T, alpha=1 / (n - 3))
            self.counts[0] += n

    def raise_fault(self) -> None:
        """Raises what was wrong with a batch, or that there was no sample."""
        if self.fault is not None:
            raise self.fault
        if not self.counts[0]:
            least = f"; tables of different widths need batches of {_CKA_LEAST_ROWS}" if self.measure == "cka" else ""
            raise InputError(f"{_WHERE}: batches gave no sample{least}. Give larger or more batches.")

    def result(self, tables: Sequence[TableSpec]) -> FeatureAffinity:
        """The affinity of the samples that were added."""
        num_samples, num_rows, *num_ids = self.counts.tolist()
        mean_FF = _cka(self.sum_FF, self.uncentred_F) if self.measure == "cka" else (self.sum_FF / num_samples).abs()
        return FeatureAffinity(
            matrix=mean_FF.cpu().numpy(),
            features=self.features,
            measure=self.measure,
            num_samples=int(num_samples),
            tables=tuple(tables),
            pooling_factors=tuple(count / num_rows for count in num_ids) if self.has_ids else None,
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Collection:
    """One embedding collection of a model."""

    path: str
    """Dotted path in the model, without the wrappers of distribution."""
    module: nn.Module
    is_sharded: bool = False
    """True if its forward is a collective."""
    tables: tuple[TableSpec, ...] = ()
    """Its tables, with the names of the embeddings as features; none if sharded."""
    inputs: tuple[str, ...] = ()
    """Features that it looks up, where known."""


def _tables_of(collections: Sequence[_Collection], features: Sequence[str]) -> tuple[TableSpec, ...]:
    """The tables of the features, or none if they do not fit them one to one."""
    tables = tuple(table for collection in collections for table in collection.tables)
    # Two collections may each have a table of one name, which no plan could tell apart.
    unique = len({table.name for table in tables}) == len(tables)
    return tables if unique and sorted(feature_names(tables)) == sorted(features) else ()


def _find_collections(model: nn.Module, *, in_group: bool) -> list[_Collection]:
    try:
        found = list(_walk(model, "", set()))
    except ImportError as error:
        raise InputError(
            f"{_WHERE} needs TorchRec, which cannot be imported here ({error}). Collect where it is installed and "
            ".save() the affinity; `dmt doctor` says what is missing."
        ) from error
    if not found:
        raise InputError(
            f"{_WHERE}: {type(model).__name__} holds no EmbeddingBagCollection. Give the model that looks up the "
            "embeddings, or build FeatureAffinity(matrix=..., features=...) yourself."
        )
    for collection in found:
        where = f"{_WHERE}: {collection.path!r} is a {type(collection.module).__name__}"
        if collection.is_sharded and not in_group:
            raise InputError(
                f"{where}, whose tables are spread over ranks. Call collect on every rank, each with its own batches, "
                "and give process_group=, the group of all these ranks (mesh.global_group, or "
                "torch.distributed.group.WORLD)."
            )
        # A train pipeline puts an object of its own in the place of the method.
        if collection.is_sharded and not inspect.ismethod(collection.module.forward):
            raise InputError(
                f"{where} attached to a train pipeline, which runs its id exchange elsewhere. Call the pipeline's "
                "detach() first."
            )
    return found


def _walk(part: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[_Collection]:
    """The collections in the order of the model."""
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

    if part in seen:
        return
    seen.add(part)
    if isinstance(part, (DistributedModelParallel, DistributedDataParallel)):
        yield from _walk(part.module, path, seen)
    elif isinstance(part, EmbeddingBagCollectionInterface):
        configs: Any = part.embedding_bag_configs()
        named = zip(configs, get_embedding_names_by_table(configs), strict=True)
        tables = (_spec(config, names) for config, names in named)
        inputs = dict.fromkeys(feature_names(configs))
        yield _Collection(path=path, module=part, tables=tuple(tables), inputs=tuple(inputs))
    elif isinstance(part, ShardedModule):
        kind = part.unsharded_module_type
        if issubclass(kind, (EmbeddingTower, EmbeddingTowerCollection)):
            raise InputError(
                f"{_WHERE}: {path!r} is a {type(part).__name__}. The embeddings of a tower's features stay on the "
                "tower's ranks and only tower outputs come out, so no rank ever has all features of a sample. Collect "
                "on a flat model, or load the checkpoint into the plain model in one process."
            )
        if issubclass(kind, EmbeddingBagCollectionInterface):
            yield _Collection(path=path, module=part, is_sharded=True)
    else:
        for name, child in part.named_children():
            yield from _walk(child, f"{path}.{name}" if path else name, seen)


def _spec(config: Any, names: Sequence[str]) -> TableSpec:
    rows, dim = config.num_embeddings, config.embedding_dim
    return TableSpec(name=config.name, num_embeddings=rows, embedding_dim=dim, feature_names=tuple(names))
