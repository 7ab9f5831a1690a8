"""A model's embedding collections, plain or sharded, and hooks that catch their input and output.

Legend: F features, N embedding dim, B samples of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dmt.errors import InputError, did_you_mean
from dmt.plan.tables import TableSpec

if TYPE_CHECKING:
    from dmt.partitioner.measure_affinity import Lockstep

__all__ = ["COLLECT", "Collection", "NoRows", "Watch", "by_feature", "evaluating", "find_collections", "watching"]

COLLECT = "FeatureAffinity.collect"
"""Name that messages begin with, unless another measure is told."""


class NoRows(Exception):
    """Raised for a batch without rows, which TorchRec's plain collections cannot run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Collection:
    """One embedding collection of a model."""

    path: str
    """Dotted path in the model, without the wrappers of distribution."""
    module: nn.Module
    is_sharded: bool
    """True if its forward is a collective."""
    tables: tuple[TableSpec, ...]
    """Tables that this rank knows, with the names of the embeddings as features."""
    inputs: Mapping[str, str]
    """Feature that each embedding looks up; the names differ if one feature looks up several tables."""
    is_complete: bool = True
    """True if this rank knows all tables in their order; a rank of a tower knows the tower's only."""


def find_collections(
    model: nn.Module, module_path: str | None, *, in_group: bool | None, where: str = COLLECT
) -> list[Collection]:
    """Finds the embedding collections at or below a path (`FeatureAffinity.collect`); None: everywhere.

    ``in_group`` is None for a measure that takes no sharded models.

    Raises:
        InputError: TorchRec is absent; there is no collection, none at the path, one that is sharded without a group
            or attached to a train pipeline; or towers whose embeddings never come out.
    """
    try:
        found, towers = _search(model)
    except ImportError as error:
        raise InputError(
            f"{where} needs TorchRec, which cannot be imported here ({error}). Collect where it is "
            "installed and .save() the affinity; `dmt doctor` says what is missing."
        ) from error
    for path, tower in towers.items():
        if _is_below(path, module_path):
            raise InputError(
                f"{where}: {path!r} is a {type(tower).__name__}. The embeddings of a tower's features "
                "stay on the tower's ranks and only tower outputs come out, so no rank ever has all features of a "
                "sample. Collect on a flat model, or load the checkpoint into the plain model in one process."
            )
    if not found:
        raise InputError(
            f"{where}: {type(model).__name__} holds no EmbeddingBagCollection. Give the model that "
            "looks up the embeddings, or build FeatureAffinity(matrix=..., features=...) yourself."
        )
    wanted = [collection for collection in found if _is_below(collection.path, module_path)]
    if not wanted:
        paths = [collection.path for collection in found]
        raise InputError(
            f"{where}: there is no EmbeddingBagCollection at module_path={module_path!r}."
            f"{did_you_mean(module_path or '', paths)} The model has them at {', '.join(map(repr, paths[:5]))}."
        )
    for collection in wanted:
        if collection.is_sharded:
            _check_sharded(collection, in_group, where)
    return wanted


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode, and every part of it back into its own mode afterwards."""

    # Module by module: a user may have frozen only some parts in eval mode. By children, because sharded modules
    # hide their parts from modules().
    def parts(part: nn.Module) -> Iterator[nn.Module]:
        yield part
        for child in part.children():
            yield from parts(child)

    modes = {part: part.training for part in parts(model)}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def watching(collections: Sequence[Collection], ranks: Lockstep, where: str = COLLECT) -> Iterator[list[Watch]]:
    """Hooks the collections; the caller calls `Watch.start` before each forward."""
    watches = [Watch(collection, ranks, where) for collection in collections]
    try:
        yield watches
    finally:
        for handle in (handle for watch in watches for handle in watch.handles):
            handle.remove()


class Watch:
    """The hooks of one collection, and what they saw in the current forward."""

    def __init__(self, collection: Collection, ranks: Lockstep, where: str = COLLECT) -> None:
        self.collection, self._ranks = collection, ranks
        self.where = where
        """Name that its messages begin with."""
        self._keys: list[str] | None = None
        self.replaced: Mapping[str, Tensor] = {}
        """Embeddings [B, N] by feature that the model gets instead of its own; of plain collections only."""
        hook = collection.module.register_forward_pre_hook(self._before, with_kwargs=True)
        self.handles = hook, collection.module.register_forward_hook(self._after)
        self.start(0)

    def start(self, batch: int) -> None:
        """Forgets the last forward; ``batch`` is the number of the next one, for messages."""
        self.batch, self._has_run = batch, False
        self.output: Any = None
        """A ``KeyedTensor``, or an awaitable of one that may be waited for repeatedly; None if it did not run."""
        self.num_ids: dict[str, int] | None = None
        """Number of input ids of each feature; None if it cannot be read."""

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ids: Any = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, KeyedJaggedTensor)), None)
        error = self._input_error(ids)
        if self.collection.is_sharded:
            # All ranks agree that each can exchange ids: a rank that raised there would leave the others waiting.
            # TorchRec's exchanges differ with and without weights, and with one batch size or several.
            form = None if ids is None else (ids.weights_or_none() is not None, ids.variable_stride_per_key())
            stage = f"the lookup of {self.collection.path!r} in batch {self.batch}"
            differing = self._ranks.ranks_that_differ(self._ranks.share(stage, form, error))
            if differing:
                raise InputError(
                    f"{self.where}: at {stage}, ranks {differing} differ from the first in whether ids have "
                    "weights or one batch size for all features. Give all ranks batches of one form."
                )
        elif error is not None:
            raise error
        elif ids is not None and ids.stride() == 0:
            raise NoRows
        self._has_run = True
        if ids is not None:
            self._keys = list(ids.keys())
            if not ids.variable_stride_per_key():
                self.num_ids = dict(zip(self._keys, map(int, ids.length_per_key()), strict=True))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        from torchrec.distributed.types import Awaitable

        from dmt.sptt.results import CachedAwaitable

        # TorchRec's awaitables may be waited for once only; this one serves the model and us.
        self.output = CachedAwaitable(output) if isinstance(output, Awaitable) else output
        return _with_replaced(self.output, self.replaced) if self.replaced else self.output

    def _input_error(self, ids: Any) -> InputError | None:
        where, module = self.where, f"EmbeddingBagCollection {self.collection.path!r}"
        if self._has_run:
            return InputError(
                f"{where}: {module} ran twice in one forward, so its features have two embeddings per "
                "sample. Give forward= that runs it once."
            )
        if ids is None:
            return None
        known = set(ids.keys())
        missing = [name for name in dict.fromkeys(self.collection.inputs.values()) if name not in known]
        if missing:
            return InputError(
                f"{where}: batch {self.batch} lacks feature {missing[0]!r} of {module} "
                f"({len(missing)} missing, {len(known)} present).{did_you_mean(missing[0], known)}"
            )
        if self.collection.is_sharded and self._keys is not None and list(ids.keys()) != self._keys:
            # The first batch decides where TorchRec looks for a feature ever after.
            return InputError(
                f"{where}: batch {self.batch} gives {module} its features in another order "
                "than earlier ones; a sharded collection needs the same keys in the same order."
            )
        return None


def _with_replaced(output: Any, replaced: Mapping[str, Tensor]) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedTensor

    vectors = output.to_dict()
    return KeyedTensor.from_tensor_list(list(vectors), [replaced.get(name, own) for name, own in vectors.items()])


def by_feature(watches: Sequence[Watch]) -> dict[str, Tensor]:
    """Reads the [B, N] embedding of each feature of one forward by key, in the order of the tables.

    Raises:
        InputError: no collection ran, one returned something else than a ``KeyedTensor``, or two have one feature.
    """
    embeddings: dict[str, Tensor] = {}
    where = watches[0].where
    home: dict[str, str] = {}
    for watch in watches:
        collection, path, output = watch.collection, watch.collection.path, watch.output
        if output is None:
            continue
        if collection.is_sharded and hasattr(type(output), "wait"):
            output = output.wait()
        if not hasattr(output, "to_dict"):
            raise InputError(
                f"{where}: {path!r} returned a {type(output).__name__}, not a KeyedTensor. Give the "
                "model with TorchRec's own collections."
            )
        found = output.to_dict()
        # The key order of a sharded collection depends on the sharding plan.
        ordered = [name for name in collection.inputs if name in found] if collection.is_complete else []
        for feature in ordered if len(ordered) == len(found) else found:
            if feature in home:
                raise InputError(
                    f"{where}: feature {feature!r} is looked up by {home[feature]!r} and by {path!r}; "
                    "choose one with module_path."
                )
            home[feature] = path
            embeddings[feature] = found[feature]
    if not embeddings:
        paths = [watch.collection.path for watch in watches]
        raise InputError(
            f"{where}: the forward of batch {watches[0].batch} ran no EmbeddingBagCollection (waiting "
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


def _check_sharded(collection: Collection, in_group: bool | None, where: str) -> None:
    where = f"{where}: {collection.path!r} is a {type(collection.module).__name__}"
    if in_group is None:
        raise InputError(
            f"{where}, whose tables are spread over ranks. Load the checkpoint into the plain model, in one process."
        )
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
    path: str, module: nn.Module, configs: Sequence[Any], names: Sequence[Sequence[str]], **flags: bool
) -> Collection:
    tables = []
    inputs: dict[str, str] = {}
    for config, of_table in zip(configs, names, strict=True):
        rows, dim = config.num_embeddings, config.embedding_dim
        tables.append(
            TableSpec(name=config.name, num_embeddings=rows, embedding_dim=dim, feature_names=tuple(of_table))
        )
        inputs |= zip(of_table, config.feature_names, strict=True)
    return Collection(path=path, module=module, tables=tuple(tables), inputs=inputs, **flags)
