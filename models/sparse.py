"""Builds the sparse parts of the models from TorchRec's modules, unsharded: flat or in towers.

TorchRec and FBGEMM are imported when a sparse part is built, so that dense parts and complexity work without them.

Legend: B samples, N embedding dimension of a feature, O_t outputs of tower t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.models.dense import Device
from dmt.models.sequences import PooledBySequence, SequenceTowerModule
from dmt.models.tower_modules import by_feature
from dmt.plan.split_across_towers import shard_names, split_tables
from dmt.plan.tables import TableSpec, feature_names, is_sequence, table_specs
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.modules.embedding_tower import EmbeddingTowerCollection

__all__ = [
    "JoinedShards",
    "MakeFlatSparseArch",
    "MakeTowerSparseArch",
    "SequenceArch",
    "check_tower_modules",
    "common_embedding_dim",
    "embedding_bag_configs",
    "flat_sparse_arch",
    "make_tower_modules",
    "outside_sparse_arch",
    "tower_sparse_arch",
]

MakeFlatSparseArch = Callable[[Sequence[Any], Device], nn.Module]
"""Function of ``(tables, device)`` that returns a module: ids of B samples -> [B, N] by feature name."""
MakeTowerSparseArch = Callable[[Sequence[Any], TowerPlan, Sequence[nn.Module], Device], nn.Module]
"""Function of ``(tables, plan, tower_modules, device)`` that returns a module: ids of B samples -> [B, sum O_t]."""
Splits = Mapping[str, Sequence[int]]
"""Numbers of columns of each column shard, by feature (`dmt.plan.TowerPlan.column_splits`)."""


def embedding_bag_configs(tables: Sequence[Any]) -> list[Any]:
    """Returns TorchRec's configuration of each table; TorchRec's configurations are returned unchanged.

    A `TableSpec` becomes an ``EmbeddingBagConfig`` with sum pooling, or an ``EmbeddingConfig`` if it ``is_sequence``.

    Raises:
        InputError: two tables share a name or a feature, or one breaks another rule of `dmt.plan.tables.TableSpec`.
    """
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig

    table_specs(tables)
    return [
        (EmbeddingConfig if is_sequence(table) else EmbeddingBagConfig)(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
            data_type=DataType(table.data_type),
        )
        if isinstance(table, TableSpec)
        else table
        for table in tables
    ]


def flat_sparse_arch(tables: Sequence[Any], device: Device = None) -> Any:
    """Builds a TorchRec ``EmbeddingBagCollection`` on ``device``, or a `SequenceArch` if any table has sequences.

    Both return an object whose ``to_dict()`` gives [B, N] by feature. Read it by name, because the order of features
    may change with the sharding. Raises the errors of `embedding_bag_configs`.
    """
    return SequenceArch(tables, device) if any(map(is_sequence, tables)) else _collection(tables, device)


def _collection(tables: Sequence[Any], device: Device) -> Any:
    """Builds an ``EmbeddingCollection`` if any of the tables has sequences, else an ``EmbeddingBagCollection``."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    torch_device = torch.device(device) if isinstance(device, str) else device
    kind = EmbeddingCollection if any(map(is_sequence, tables)) else EmbeddingBagCollection
    return kind(tables=embedding_bag_configs(tables), device=torch_device)


class SequenceArch(nn.Module):
    """Embeddings of a flat model with sequences: `PooledBySequence` pools those of tables with sequences.

    It pools when the model first reads features, so that exchanges of sharded collections stay in flight until then.
    """

    def __init__(self, tables: Sequence[Any], device: Device = None) -> None:
        super().__init__()
        sequences, bags = ([table for table in tables if is_sequence(table) is kind] for kind in (True, False))
        self.bags = _collection(bags, device) if bags else None
        self.embedding = _collection(sequences, device)
        self.pooling = PooledBySequence(sequences, device=device)
        self._bag_names = feature_names(bags)

    def forward(self, ids: Any) -> SimpleNamespace:
        """``KeyedJaggedTensor`` of B samples -> object whose ``to_dict()`` returns [B, N] float32 by feature name."""
        bags, sequences = None if self.bags is None else self.bags(ids), self.embedding(ids)
        return SimpleNamespace(to_dict=lambda: self._vectors(bags, sequences))

    def _vectors(self, bags: Any, sequences: Any) -> dict[str, Tensor]:
        """Outputs of the two collections -> [B, N] by feature name."""
        # Feature by feature, because a train pipeline traces this, and a traced dict has no length.
        pooled, of_bags = self.pooling(sequences), None if bags is None else by_feature(bags)
        vectors = {name: pooled[name] for name in self.pooling.features}
        return vectors if of_bags is None else vectors | {name: of_bags[name] for name in self._bag_names}


def tower_sparse_arch(
    tables: Sequence[Any], plan: TowerPlan, tower_modules: Sequence[nn.Module], device: Device = None
) -> EmbeddingTowerCollection:
    """Builds TorchRec's ``EmbeddingTowerCollection``: the tables in towers, each with its tower module.

    It returns [B, sum O_t]: the outputs of the towers side by side, in the plan's order.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec`, in any order.
        plan: which features form which tower.
        tower_modules: one module for each tower of the plan, in its order (`dmt.models.tower_modules`).
        device: device of the tables; ``"meta"`` if ``DistributedModelParallel`` will allocate their shards.

    Raises:
        InputError: the plan does not fit the tables, or the tower modules do not fit the plan.
    """
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

    check_tower_modules(plan, tower_modules)
    pairs = zip(plan.tables_by_tower(tables), tower_modules, strict=True)
    return EmbeddingTowerCollection([EmbeddingTower(_collection(held, device), module) for held, module in pairs])


def outside_sparse_arch(
    tables: Sequence[Any], plan: TowerPlan, device: Device = None, *, dim: int | None = None
) -> EmbeddingBagCollection | None:
    """Builds the embeddings of the plan's features outside towers with `flat_sparse_arch`; None if there are none.

    Raises:
        InputError: a table does not have ``dim`` columns, the dimension of the towers' vectors; None allows any.
    """
    held = plan.outside_tables(tables)
    for table in held:
        if dim not in (None, table.embedding_dim):
            raise InputError(
                f"Table {table.name!r} outside towers has embedding_dim={table.embedding_dim}, but it interacts with "
                f"towers' vectors of tower_dim={dim}. Make the two equal, or put the table's features into a tower."
            )
    return flat_sparse_arch(held, device) if held else None


def check_tower_modules(plan: TowerPlan, tower_modules: Sequence[nn.Module]) -> None:
    """Raises `InputError` unless each tower has one tower module with the tower's ``features``, in order."""
    if len(tower_modules) != plan.num_towers:
        raise InputError(
            f"There are {len(tower_modules)} tower modules for {plan.num_towers} towers. Give one per tower, in order."
        )
    for tower, module in zip(plan.towers, tower_modules, strict=True):
        features = tuple(getattr(module, "features", ()))
        if features != tower.features:
            raise InputError(
                f"The tower module {type(module).__name__} of tower {tower.name!r} has "
                f"features=[{shorten([*map(repr, features)], ', ')}], but the plan gives that tower "
                f"[{shorten([*map(repr, tower.features)], ', ')}]. Set its features to the plan's, in order."
            )


def common_embedding_dim(tables: Sequence[Any], owner: str) -> int:
    """Returns the embedding dimension of all tables; an `InputError` names ``owner`` if two differ or none is given."""
    names = {table.embedding_dim: table.name for table in tables}
    if len(names) != 1:
        given = [f"embedding_dim={dim} of table {name!r}" for dim, name in names.items()]
        raise InputError(
            f"{owner} needs tables with equal embedding_dim, but got {shorten(given, ' and ') or 'no table'}. Change "
            "the tables, or set model.factory to your own model (docs/training.md#your-own-model)."
        )
    return next(iter(names))


def make_tower_modules(
    tables: Sequence[Any], plan: TowerPlan, make: Callable[..., Any], *, tower_dim: int, device: Device = None
) -> tuple[list[Any], int]:
    """Makes each tower's module by ``make(features, embedding_dim=N)``; wraps it if the tower has sequences.

    Returns:
        The modules, and how many vectors of ``tower_dim`` numbers they send together: sum O_t / D.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, or the outputs of a
            tower are not a multiple of ``tower_dim``.
    """
    modules = []
    for tower, tower_tables in zip(plan.towers, plan.tables_by_tower(tables), strict=True):
        module = make(tower.features, embedding_dim=common_embedding_dim(tower_tables, f"tower {tower.name!r}"))
        if module.out_features % tower_dim:
            raise InputError(
                f"The tower module {type(module).__name__} of tower {tower.name!r} has "
                f"out_features={module.out_features}, but the model reads vectors of tower_dim={tower_dim}. Make "
                "out_features a multiple of tower_dim."
            )
        if any(map(is_sequence, tower_tables)):
            module = SequenceTowerModule(PooledBySequence(tower_tables, device=device), module)
        modules.append(module)
    return modules, sum(module.out_features for module in modules) // tower_dim


class JoinedShards(nn.Module):
    """Embeddings of a flat model whose tables are cut into column shards by ``splits``: joins shards to whole features.

    It joins when the model first reads features, so that the exchange of a sharded collection is in flight until then.
    """

    def __init__(self, tables: Sequence[Any], device: Device = None, *, splits: Splits) -> None:
        super().__init__()
        self.shards: nn.Module = flat_sparse_arch(split_tables(tables, splits), device)
        features = [feature for table in tables for feature in table.feature_names]
        self._names = {name: shard_names(name, splits[name]) if name in splits else [name] for name in features}

    def forward(self, ids: Any) -> SimpleNamespace:
        """Output of `dmt.plan.split_across_towers.split_ids` -> object whose ``to_dict()`` gives [B, N] by feature."""
        embeddings = self.shards(ids)
        return SimpleNamespace(to_dict=lambda: self._joined(embeddings))

    def _joined(self, embeddings: Any) -> dict[str, Tensor]:
        vectors = by_feature(embeddings)
        parts = {feature: [vectors[name] for name in names] for feature, names in self._names.items()}
        return {feature: torch.cat(some, dim=1) if len(some) > 1 else some[0] for feature, some in parts.items()}
