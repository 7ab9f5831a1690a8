"""Measuring `FeatureAffinity` on a trained model: hooks on its embedding collections, one streaming sum.

Legend: F features, N embedding dim, B samples of a batch.

What is computed is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix
of one sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero
and stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low
affinity, and I(i, i) is the share of samples in which feature i is present.

**On several ranks** each sums over its own samples, and the sums are added at the end. The forward of a sharded model
is a collective, so the ranks tell each other before every batch and every lookup that they are there: they stop
together when the first one runs out of batches, and when one fails all raise. A rank whose batches have no rows adds
nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError, did_you_mean
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.agreement import Agreement
from dmt.plan.tables import TableSpec, feature_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "AffinitySum",
    "Captured",
    "Collection",
    "NoRows",
    "by_feature",
    "capturing",
    "collect_affinity",
    "evaluating",
    "find_collections",
]

# Float64 elements of normalised embeddings held at a time (64 MiB): a batch is worked through in blocks of samples.
BLOCK_ELEMENTS = 2**23


class AffinitySum:
    """The running sum of R R^T over samples, in float64.

    The sums and the count are all there is to it, so those of several processes add up to that of their data.

    Example:
        >>> total = AffinitySum(["a", "b"])
        >>> total.add(torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [-5.0, 0.0]]]))
        >>> total.result().matrix.tolist()
        [[1.0, 0.5], [0.5, 1.0]]
    """

    def __init__(self, features: Sequence[str]) -> None:
        self.features = tuple(features)
        self.sum_FF = torch.zeros(len(self.features), len(self.features), dtype=torch.float64)
        self.num_samples = 0

    def add(self, embeddings_BFN: Tensor) -> None:
        """Adds the samples of a batch.

        Args:
            embeddings_BFN: [B, F, N] pooled embeddings of any floating dtype and device, features in our order.
        """
        num_samples, num_features, dim = embeddings_BFN.shape
        # The sum lives where the embeddings do: a group of GPUs adds up what is on GPUs only.
        self.sum_FF = self.sum_FF.to(embeddings_BFN.device)
        for block_BFN in embeddings_BFN.split(_block_rows(num_features, dim)):
            unit_BFN = _normalise(block_BFN.double())
            unit_FX = unit_BFN.transpose(0, 1).reshape(num_features, -1)
            self.sum_FF.addmm_(unit_FX, unit_FX.T)
        self.num_samples += num_samples

    def result(
        self, *, tables: Sequence[TableSpec] = (), pooling_factors: Sequence[float] | None = None
    ) -> FeatureAffinity:
        """The affinity of all samples so far, of which there must be one at least.

        Args:
            tables: of the features, to go with it.
            pooling_factors: of the features, to go with it.
        """
        mean = (self.sum_FF / self.num_samples).abs_()
        return FeatureAffinity(
            matrix=mean.cpu().numpy(),
            features=self.features,
            num_samples=self.num_samples,
            tables=tuple(tables),
            pooling_factors=None if pooling_factors is None else tuple(pooling_factors),
        )


def collect_affinity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    module_path: str | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> FeatureAffinity:
    """The body of `FeatureAffinity.collect`, where the arguments are described.

    Needs memory for one batch of embeddings and the [F, F] sum, however many batches there are. The features of
    several collections (for instance of the towers of an ``EmbeddingTowerCollection``) are gathered within one forward.
    """
    ranks = Agreement(process_group)
    collections = _agreed_collections(model, module_path, ranks, in_group=process_group is not None)
    measured = _Measured(collections)
    run = forward or _run_batch
    with evaluating(model), capturing(collections, ranks) as captured, torch.no_grad():
        for index, batch in enumerate(_together(batches, ranks, measured)):
            captured.outputs.clear()
            captured.num_ids.clear()
            captured.batch = index
            measured.num_batches += 1
            try:
                run(model, batch)
                measured.add(captured)
            except NoRows:
                continue
            except Exception as error:
                if ranks.settled:
                    raise
                # The other ranks are told when they come to their next exchange; until then they must not miss us.
                measured.error = error
    return _sum_of_ranks(measured, ranks, process_group)


class _Measured:
    """What this rank has found so far."""

    def __init__(self, collections: Sequence[Collection]) -> None:
        self.collections = collections
        self.total: AffinitySum | None = None
        self.num_batches = 0
        self.num_ids: dict[str, int] | None = {}
        self.error: Exception | None = None

    def add(self, captured: Captured) -> None:
        embeddings = by_feature(captured, self.collections)
        if self.total is None:
            self.total = AffinitySum(tuple(embeddings))
        for block_BFN in _stacked(embeddings, self.total.features, captured.batch):
            self.total.add(block_BFN)
        self._count(captured)

    def _count(self, captured: Captured) -> None:
        """Adds up the ids that went into each embedding, as long as every input could be read."""
        for collection in self.collections:
            if self.num_ids is None or collection.path not in captured.outputs:
                continue
            counts = captured.num_ids.get(collection.path)
            if counts is None or not collection.inputs:
                self.num_ids = None
                continue
            for name, feature in collection.inputs.items():
                self.num_ids[name] = self.num_ids.get(name, 0) + counts[feature]

    def tables(self, features: Sequence[str]) -> tuple[TableSpec, ...]:
        """The tables of the features, or none where they do not fit them one to one."""
        tables = [table for collection in self.collections for table in collection.tables]
        used = [table for table in tables if not set(table.feature_names).isdisjoint(features)]
        # Two collections may each have a table of one name, which no plan could tell apart.
        unique = len({table.name for table in used}) == len(used)
        order = {name: i for i, name in enumerate(features)}
        if not unique or sorted(feature_names(used)) != sorted(features):
            return ()
        return tuple(sorted(used, key=lambda table: min(order[name] for name in table.feature_names)))


def _agreed_collections(
    model: nn.Module, module_path: str | None, ranks: Agreement, *, in_group: bool
) -> list[Collection]:
    """The collections, the same on all ranks, each with its tables of all ranks."""
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
        own = (
            collection if collection.is_complete else replace(collection, tables=tuple(tables.values()), inputs=inputs)
        )
        united.append(own)
    return united


def _together(batches: Iterable[Any], ranks: Agreement, measured: _Measured) -> Iterator[Any]:
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


def _sum_of_ranks(measured: _Measured, ranks: Agreement, group: ProcessGroup | None) -> FeatureAffinity:
    mine = ((), 0) if measured.total is None else (measured.total.features, measured.total.num_samples)
    everyone = ranks.share("the end", (*mine, measured.num_ids is not None))
    num_samples = sum(count for _, count, _ in everyone)
    if num_samples == 0:
        # Ranks stop together, so a rank without a batch means that none was run anywhere.
        no_batch = group is not None and measured.num_batches == 0
        who = "a rank had no batch" if no_batch else "batches gave no sample"
        raise InputError(f"FeatureAffinity.collect: {who}; give at least one batch of data with rows.")
    features: tuple[str, ...] = next(names for names, count, _ in everyone if count)
    # A rank whose batches had no rows may not know its features: it adds nothing, and goes along.
    names_of_ranks = [names if count else features for names, count, _ in everyone]
    differing = ranks.ranks_that_differ(names_of_ranks)
    if differing:
        other = next(names for names in names_of_ranks if names != features)
        strange = sorted(set(other) ^ set(features)) or ["their order"]
        raise InputError(
            f"FeatureAffinity.collect: ranks {differing} looked up other features than the first rank, see "
            f"{strange[0]!r}. Every rank must run the same model."
        )
    total = measured.total if measured.total is not None and mine[1] else _nothing(features, measured.collections)
    has_ids = all(known for _, _, known in everyone)
    counts = dict.fromkeys(features, 0) | (measured.num_ids or {})
    num_ids_F = torch.tensor([counts[name] for name in features], dtype=torch.float64, device=total.sum_FF.device)
    if group is not None:
        from dmt.collectives import sum_over_ranks

        total.sum_FF = sum_over_ranks(total.sum_FF, group)
        num_ids_F = sum_over_ranks(num_ids_F, group)
    total.num_samples = num_samples
    pooling_factors = (num_ids_F / num_samples).tolist() if has_ids else None
    return total.result(tables=measured.tables(features), pooling_factors=pooling_factors)


def _nothing(features: Sequence[str], collections: Sequence[Collection]) -> AffinitySum:
    """The sum of no samples, on the device of the embeddings."""
    total = AffinitySum(features)
    weight = next((weight for collection in collections for weight in collection.module.parameters()), None)
    total.sum_FF = total.sum_FF if weight is None else total.sum_FF.to(weight.device)
    return total


def _normalise(embeddings: Tensor) -> Tensor:
    # Dividing by the largest element first keeps the norm of tiny and huge vectors from under- or overflowing.
    largest = embeddings.abs().amax(dim=-1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled.div_(torch.where(norm > 0, norm, 1.0))


def _run_batch(model: nn.Module, batch: Any) -> Any:
    if not (hasattr(batch, "dense_features") and hasattr(batch, "sparse_features")):
        raise InputError(
            f"FeatureAffinity.collect: a batch is a {type(batch).__name__} without dense_features and sparse_features; "
            "say how to run it, for instance forward=lambda model, batch: model(batch)."
        )
    return model(batch.dense_features, batch.sparse_features)


def _block_rows(num_features: int, dim: int) -> int:
    return max(1, BLOCK_ELEMENTS // (num_features * dim))


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
    rows = _block_rows(len(features), dim)
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


class NoRows(Exception):
    """The batch has no rows, which TorchRec's plain collections cannot run; there is nothing to measure in it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Collection:
    """One embedding collection of a model."""

    path: str
    """Where it is in the model, without the wrappers of distribution."""
    module: nn.Module
    """The collection, which may be sharded."""
    is_sharded: bool
    """Whether its forward is a collective."""
    tables: tuple[TableSpec, ...]
    """Its tables as far as this rank knows them, with the names of the embeddings for features."""
    inputs: Mapping[str, str]
    """For each embedding the feature that is looked up; they differ where one feature looks up several tables."""
    is_complete: bool = True
    """Whether this rank knows all its tables, in their order; a rank of a tower knows the tower's."""


@dataclass(eq=False)
class Captured:
    """What one forward did."""

    outputs: dict[str, Any] = field(default_factory=dict)
    """By path what came out: a ``KeyedTensor``, or an awaitable of one that may be waited for repeatedly."""
    num_ids: dict[str, dict[str, int]] = field(default_factory=dict)
    """By path the number of ids of each feature that went in; no entry where that cannot be read."""
    batch: int = 0
    """Number of the batch, for messages."""


def find_collections(model: nn.Module, module_path: str | None, *, in_group: bool) -> list[Collection]:
    """The embedding collections at or below a path.

    Args:
        model: plain, or wrapped for distribution.
        module_path: dotted path without the wrappers; None or empty: everywhere.
        in_group: whether there is a process group, without which a sharded collection cannot be run.

    Raises:
        InputError: TorchRec is absent; there is no collection, none at the path, one that is sharded without a group
            or attached to a train pipeline; or towers whose embeddings never come out.
    """
    try:
        found, towers = _search(model)
    except ImportError as error:
        raise InputError(
            f"FeatureAffinity.collect needs TorchRec, which cannot be imported here ({error}). Collect where it is "
            "installed and .save() the affinity; `dmt doctor` says what is missing."
        ) from error
    for path, tower in towers.items():
        if _is_below(path, module_path):
            raise InputError(
                f"FeatureAffinity.collect: {path!r} is a {type(tower).__name__}. The embeddings of a tower's features "
                "stay on the tower's ranks and only tower outputs come out, so no rank ever has all features of a "
                "sample. Collect on a flat model, or load the checkpoint into the plain model in one process."
            )
    if not found:
        raise InputError(
            f"FeatureAffinity.collect: {type(model).__name__} holds no EmbeddingBagCollection. Give the model that "
            "looks up the embeddings, or build FeatureAffinity(matrix=..., features=...) yourself."
        )
    wanted = [collection for collection in found if _is_below(collection.path, module_path)]
    if not wanted:
        paths = [collection.path for collection in found]
        raise InputError(
            f"FeatureAffinity.collect: there is no EmbeddingBagCollection at module_path={module_path!r}."
            f"{did_you_mean(module_path or '', paths)} The model has them at {', '.join(map(repr, paths[:5]))}."
        )
    for collection in wanted:
        if collection.is_sharded:
            _check_sharded(collection, in_group)
    return wanted


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode, and every part of it back into its own mode afterwards."""
    # Module by module: a user may have frozen only some parts in eval mode. By children, because sharded modules
    # hide what is inside them from modules().
    modes: dict[nn.Module, bool] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if part not in modes:
            modes[part] = part.training
            waiting.extend(part.children())
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def capturing(collections: Sequence[Collection], ranks: Agreement) -> Iterator[Captured]:
    """Hooks the collections; yields what the current forward did, to be emptied by the caller before each forward.

    Before a sharded collection exchanges ids, all ranks agree that each can: a rank that raised there would leave the
    others waiting.
    """
    captured = Captured()
    handles = []
    try:
        for collection in collections:
            watch = _Watch(collection, captured, ranks)
            handles.append(collection.module.register_forward_pre_hook(watch.before, with_kwargs=True))
            handles.append(collection.module.register_forward_hook(watch.after))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The hooks of one collection."""

    def __init__(self, collection: Collection, captured: Captured, ranks: Agreement) -> None:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self._collection = collection
        self._captured = captured
        self._ranks = ranks
        self._ids_type: type = KeyedJaggedTensor
        self._keys: list[str] | None = None
        self._last_batch = -1

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Any = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, self._ids_type)), None)
        error = self._fault_of(ids)
        if self._collection.is_sharded:
            # TorchRec's exchanges differ with and without weights, and with one batch size or several.
            form = None if ids is None else (ids.weights_or_none() is not None, ids.variable_stride_per_key())
            stage = f"the lookup of {self._collection.path!r} in batch {self._captured.batch}"
            differing = self._ranks.ranks_that_differ(self._ranks.share(stage, form, error))
            if differing:
                raise InputError(
                    f"FeatureAffinity.collect: at {stage}, ranks {differing} differ from the first in whether ids have "
                    "weights or one batch size for all features. Give all ranks batches of one form."
                )
        elif error is not None:
            raise error
        elif ids is not None and ids.stride() == 0:
            raise NoRows
        self._last_batch = self._captured.batch
        if ids is not None:
            self._keys = list(ids.keys())
            if not ids.variable_stride_per_key():
                counts = zip(ids.keys(), ids.length_per_key(), strict=True)
                self._captured.num_ids[self._collection.path] = {key: int(count) for key, count in counts}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        from torchrec.distributed.types import Awaitable

        from dmt.sptt.results import CachedAwaitable

        # An exchange may be waited for once only; this one passes the result on to the model and to us.
        result = CachedAwaitable(output) if isinstance(output, Awaitable) else output
        self._captured.outputs[self._collection.path] = result
        return result

    def _fault_of(self, ids: Any) -> InputError | None:
        where = f"EmbeddingBagCollection {self._collection.path!r}"
        if self._last_batch == self._captured.batch:
            return InputError(
                f"FeatureAffinity.collect: {where} ran twice in one forward, so its features have two embeddings per "
                "sample. Give forward= that runs it once."
            )
        if ids is None:
            return None
        known = set(ids.keys())
        missing = [name for name in dict.fromkeys(self._collection.inputs.values()) if name not in known]
        if missing:
            return InputError(
                f"FeatureAffinity.collect: batch {self._captured.batch} lacks feature {missing[0]!r} of {where} "
                f"({len(missing)} missing, {len(known)} present).{did_you_mean(missing[0], known)}"
            )
        if self._collection.is_sharded and self._keys is not None and list(ids.keys()) != self._keys:
            # The first batch decides where TorchRec looks for a feature ever after.
            return InputError(
                f"FeatureAffinity.collect: batch {self._captured.batch} gives {where} its features in another order "
                "than earlier ones; a sharded collection needs the same keys in the same order."
            )
        return None


def by_feature(captured: Captured, collections: Sequence[Collection]) -> dict[str, Tensor]:
    """The [B, N] embedding of each feature of one forward, read by key, in the order of the tables.

    Raises:
        InputError: no collection ran, one returned something else than a ``KeyedTensor``, or two have one feature.
    """
    embeddings: dict[str, Tensor] = {}
    home: dict[str, str] = {}
    for collection in collections:
        path = collection.path
        if path not in captured.outputs:
            continue
        output = captured.outputs[path]
        if collection.is_sharded and hasattr(type(output), "wait"):
            output = output.wait()
        if not hasattr(output, "to_dict"):
            raise InputError(
                f"FeatureAffinity.collect: {path!r} returned a {type(output).__name__}, not a KeyedTensor. Give the "
                "model with TorchRec's own collections."
            )
        found = output.to_dict()
        # The key order of a sharded collection depends on the sharding plan.
        ordered = [name for name in collection.inputs if name in found] if collection.is_complete else []
        for feature in ordered if len(ordered) == len(found) else found:
            if feature in home:
                raise InputError(
                    f"FeatureAffinity.collect: feature {feature!r} is looked up by {home[feature]!r} and by {path!r}; "
                    "choose one with module_path."
                )
            home[feature] = path
            embeddings[feature] = found[feature]
    if not embeddings:
        paths = [collection.path for collection in collections]
        raise InputError(
            f"FeatureAffinity.collect: the forward of batch {captured.batch} ran no EmbeddingBagCollection (waiting "
            f"for {', '.join(map(repr, paths[:5]))}). Check forward= and module_path."
        )
    return embeddings


def _search(model: nn.Module) -> tuple[list[Collection], dict[str, nn.Module]]:
    """Collections in the order of the model, and sharded towers by path."""
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

    found: list[Collection] = []
    towers: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def walk(part: nn.Module, path: str) -> None:
        if part in seen:
            return
        seen.add(part)
        if isinstance(part, (DistributedModelParallel, DistributedDataParallel)):
            walk(part.module, path)
        elif isinstance(part, EmbeddingBagCollectionInterface):
            found.append(_plain(path, part))
        elif isinstance(part, ShardedModule):
            kind = part.unsharded_module_type
            if issubclass(kind, EmbeddingBagCollectionInterface):
                found.append(_sharded(path, part))
            elif issubclass(kind, (EmbeddingTower, EmbeddingTowerCollection)):
                towers[path] = part
        else:
            for name, child in part.named_children():
                walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found, towers


def _is_below(path: str, module_path: str | None) -> bool:
    return not module_path or path == module_path or path.startswith(f"{module_path}.")


def _check_sharded(collection: Collection, in_group: bool) -> None:
    where = f"FeatureAffinity.collect: {collection.path!r} is a {type(collection.module).__name__}"
    if not in_group:
        raise InputError(
            f"{where}, whose tables are spread over ranks. Call collect on every rank, each with its own batches, and "
            "give process_group=, the group of all these ranks (mesh.global_group, or torch.distributed.group.WORLD)."
        )
    # A train pipeline puts an object of its own in the place of the method.
    if not inspect.ismethod(collection.module.forward):
        raise InputError(
            f"{where} attached to a train pipeline, which runs its id exchange elsewhere. Call the pipeline's detach() "
            "first."
        )


def _plain(path: str, module: Any) -> Collection:
    from torchrec.modules.embedding_modules import get_embedding_names_by_table

    configs = module.embedding_bag_configs()
    return _collection(path, module, configs, get_embedding_names_by_table(configs), is_sharded=False)


def _sharded(path: str, module: Any) -> Collection:
    from dmt.sptt.flat import ShardedSPTTEmbeddingBagCollection

    is_tower = isinstance(module, ShardedSPTTEmbeddingBagCollection)
    inner: Any = module.embedding if is_tower else module
    # Kinds that keep their tables elsewhere are measured all the same, without tables.
    infos = getattr(inner, "sharding_type_to_sharding_infos", {})
    by_name = {info.embedding_config.name: info.embedding_config for infos in infos.values() for info in infos}
    configs = [by_name[name] for name in getattr(inner, "embedding_bags", {}) if name in by_name]
    names = [list(config.embedding_names or config.feature_names) for config in configs]
    return _collection(path, module, configs, names, is_sharded=True, is_complete=not is_tower)


def _collection(
    path: str,
    module: nn.Module,
    configs: Sequence[Any],
    names: Sequence[Sequence[str]],
    *,
    is_sharded: bool,
    is_complete: bool = True,
) -> Collection:
    tables = tuple(
        TableSpec(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            feature_names=tuple(of_table),
        )
        for config, of_table in zip(configs, names, strict=True)
    )
    inputs = {
        name: feature
        for config, of_table in zip(configs, names, strict=True)
        for name, feature in zip(of_table, config.feature_names, strict=True)
    }
    return Collection(
        path=path, module=module, is_sharded=is_sharded, tables=tables, inputs=inputs, is_complete=is_complete
    )
