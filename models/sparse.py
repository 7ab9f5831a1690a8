"""The sparse parts of the models, TorchRec's own: flat (`EmbeddingBagCollection`) or in towers, unsharded.

TorchRec and FBGEMM are imported when a sparse part is built, so the dense parts and the complexity accounting work
without them. A table may be cut into column shards (`dmt.plan.TowerPlan.column_splits`): in a flat model
`JoinedShards` puts them side by side again, so that the interaction still sees one vector per feature.
docs/your_model.md composes a model of its own from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.models.dense import Device
from dmt.models.tower_modules import EmbeddingsByName, by_feature
from dmt.plan.split_across_towers import shard_names, split_tables
from dmt.plan.tables import TableSpec, table_specs
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.modules.embedding_tower import EmbeddingTowerCollection

__all__ = [
    "JoinedShards",
    "MakeFlatSparseArch",
    "MakeTowerSparseArch",
    "check_tower_modules",
    "common_embedding_dim",
    "embedding_bag_configs",
    "flat_sparse_arch",
    "make_tower_modules",
    "tower_sparse_arch",
    "whole_tables",
]

MakeFlatSparseArch = Callable[[Sequence[Any], Device], nn.Module]
"""``(tables, device)`` -> module whose output is indexed by feature name, each [B, N]."""
MakeTowerSparseArch = Callable[[Sequence[Any], TowerPlan, Sequence[nn.Module], Device], nn.Module]
"""``(tables, plan, tower_modules, device)`` -> module whose output is [B, sum O_t], towers in the plan's order."""
Splits = Mapping[str, Sequence[int]]
"""Columns of each shard, by feature."""


def embedding_bag_configs(tables: Sequence[Any]) -> list[EmbeddingBagConfig]:
    """TorchRec's configurations of the tables: its own stay as they are, a `TableSpec` becomes one with sum pooling.

    Raises:
        InputError: two tables have one name, or a feature looks up in two tables.
    """
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

    table_specs(tables)
    return [
        EmbeddingBagConfig(
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


def flat_sparse_arch(tables: Sequence[Any], device: Device = None) -> EmbeddingBagCollection:
    """Builds one TorchRec ``EmbeddingBagCollection`` of all tables, on ``device``.

    Its result is a ``KeyedTensor``; read it by name, since the order of its keys changes with the sharding. Errors are
    those of `embedding_bag_configs`.
    """
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    torch_device = torch.device(device) if isinstance(device, str) else device
    return EmbeddingBagCollection(tables=embedding_bag_configs(tables), device=torch_device)


def tower_sparse_arch(
    tables: Sequence[Any], plan: TowerPlan, tower_modules: Sequence[nn.Module], device: Device = None
) -> EmbeddingTowerCollection:
    """Builds TorchRec's ``EmbeddingTowerCollection``: the tables in towers, each with its tower module.

    Its result is [B, sum O_t], the towers side by side in the plan's order.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec`, in any order.
        plan: which features form which tower.
        tower_modules: one module for each tower of the plan (`dmt.models.tower_modules`).
        device: of the tables; ``"meta"`` for tables that only the sharded ranks will hold.

    Raises:
        InputError: the plan does not fit the tables, or the tower modules do not fit the plan.
    """
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

    check_tower_modules(plan, tower_modules)
    pairs = zip(plan.tables_by_tower(tables), tower_modules, strict=True)
    return EmbeddingTowerCollection([EmbeddingTower(flat_sparse_arch(own, device), module) for own, module in pairs])


def check_tower_modules(plan: TowerPlan, tower_modules: Sequence[nn.Module]) -> None:
    """Raises `InputError` unless there is one tower module for each tower, which reads that tower's features."""
    if len(tower_modules) != plan.num_towers:
        raise InputError(
            f"{len(tower_modules)} tower modules for {plan.num_towers} towers; give one for each tower of the plan, "
            "in its order."
        )
    module: Any  # the user's own class
    for tower, module in zip(plan.towers, tower_modules, strict=True):
        where = f"The tower module {type(module).__name__} of tower {tower.name!r}"
        absent = [name for name in ("features", "in_features", "out_features") if not hasattr(module, name)]
        if absent:
            raise InputError(f"{where} has no attribute {absent[0]!r}; set it in __init__ (dmt.models.tower_modules).")
        if tuple(module.features) != tower.features:
            raise InputError(
                f"{where} reads features {list(module.features)}, but the plan gives that tower "
                f"{list(tower.features)}. Pass the plan's features, in its order."
            )


def common_embedding_dim(tables: Sequence[Any], owner: str) -> int:
    """The one embedding dimension of the tables; ``owner`` needs it.

    Raises:
        InputError: there is no table, or two differ.
    """
    if not tables:
        raise InputError(f"{owner}: tables is empty; give at least one table.")
    first = tables[0]
    for table in tables:
        if table.embedding_dim != first.embedding_dim:
            raise InputError(
                f"Table {table.name!r} has embedding_dim={table.embedding_dim}, but {owner} needs the same for all its "
                f"tables and table {first.name!r} has {first.embedding_dim}. Make them equal, or compose a model of "
                "your own (docs/your_model.md)."
            )
    return first.embedding_dim


def make_tower_modules(
    tables: Sequence[Any], plan: TowerPlan, make: Callable[..., Any], *, tower_dim: int
) -> tuple[list[Any], int]:
    """Makes the tower module of each tower, ``make(features, embedding_dim=N)``.

    Returns:
        The modules, and how many vectors of ``tower_dim`` they send together: sum O_t / D.

    Raises:
        InputError: the plan does not fit the tables, the tables of a tower differ in dimension, or the outputs of a
            tower are no multiple of ``tower_dim``.
    """
    modules = []
    for tower, tower_tables in zip(plan.towers, plan.tables_by_tower(tables), strict=True):
        dim = common_embedding_dim(tower_tables, f"tower {tower.name!r}")
        module = make(tower.features, embedding_dim=dim)
        if module.out_features % tower_dim:
            raise InputError(
                f"The tower module {type(module).__name__} of tower {tower.name!r} has out_features="
                f"{module.out_features}, no multiple of tower_dim={tower_dim}: the model reads vectors of that size."
            )
        modules.append(module)
    return modules, sum(module.out_features for module in modules) // tower_dim


class JoinedShards(nn.Module):
    """Embeddings of whole features, from shards of those that are cut; a flat model's ``make_sparse_arch``.

    Nothing is computed before a feature is read, so a sharded module's exchange stays in flight until then.

    Args:
        tables: the whole tables; their shards are made on ``device``.
        splits: columns of each shard, by feature (`dmt.plan.towers.TowerPlan.column_splits`).
    """

    def __init__(self, tables: Sequence[Any], device: Device = None, *, splits: Splits) -> None:
        super().__init__()
        self.shards: nn.Module = flat_sparse_arch(split_tables(tables, splits), device)
        self._names = {feature: shard_names(feature, widths) for feature, widths in splits.items()}

    def forward(self, ids: Any) -> EmbeddingsByName:
        """Ids with the keys that `dmt.plan.split_across_towers.split_ids` makes -> [B, N] by feature name."""
        return _Joined(self.shards(ids), self._names)


class _Joined:
    def __init__(self, embeddings: EmbeddingsByName, names: Mapping[str, list[str]]) -> None:
        self._embeddings = embeddings
        self._names = names

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self._names:
            return self._vectors[name]
        return torch.cat([self._vectors[shard] for shard in self._names[name]], dim=1)

    @cached_property
    def _vectors(self) -> Mapping[str, Tensor]:
        return by_feature(self._embeddings)


def whole_tables(model: nn.Module, tables: Sequence[Any], splits: Splits) -> EmbeddingBagCollection:
    """Copies the embeddings of a model with cut tables into one collection of whole tables.

    The model is unsharded and has TorchRec's tables anywhere inside, whole or in the shards of ``splits``.
    """
    weights = {
        name.split(".")[-2]: weight for name, weight in model.named_parameters() if ".embedding_bags." in f".{name}"
    }
    whole = flat_sparse_arch(tables)
    with torch.no_grad():
        for table in tables:
            widths = splits.get(table.feature_names[0])
            names = [table.name] if widths is None else shard_names(table.name, widths)
            whole.embedding_bags[table.name].weight.copy_(torch.cat([weights[name] for name in names], dim=1))
    return whole
