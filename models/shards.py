"""Column shards of tables put side by side again, for what reads whole embeddings: flat models, feature affinities.

In a flat model whose tables are cut (`dmt.plan.TowerPlan.column_splits`) the shards of a table can live in different
towers, while the interaction still sees one vector for each feature: the model is the uncut one, column by column.

Legend: B samples, N embedding dimension of the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmt.columns import shard_names, split_tables
from dmt.models.features import by_feature
from dmt.models.sparse import Device, MakeFlatSparseArch, flat_sparse_arch
from dmt.models.tower_modules import EmbeddingsByName

if TYPE_CHECKING:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

__all__ = ["JoinedShards", "joined_sparse_arch", "whole_tables"]

Splits = Mapping[str, Sequence[int]]


class JoinedShards(nn.Module):
    """Embeddings of whole features, from a module that has the shards of those that are cut.

    Nothing is computed before a feature is asked for, so a sharded module's exchange stays under way until then.

    Args:
        shards: a module whose output is indexed by the names of shards and uncut features.
        splits: columns of each shard, by feature.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> from dmt.columns import split_ids
        >>> from dmt.tables import TableSpec
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("ad",))
        >>> joined = joined_sparse_arch({"ad": (4, 4)})([table], None)
        >>> ids = KeyedJaggedTensor(keys=["ad"], values=torch.arange(3), lengths=torch.ones(3, dtype=torch.long))
        >>> joined(split_ids(ids, {"ad": (4, 4)}))["ad"].shape
        torch.Size([3, 8])
    """

    def __init__(self, shards: nn.Module, splits: Splits) -> None:
        super().__init__()
        self.shards = shards
        self._names = {feature: shard_names(feature, widths) for feature, widths in splits.items()}

    def forward(self, ids: Any) -> EmbeddingsByName:
        """Ids with the keys that `dmt.columns.split_ids` makes -> [B, N] by feature name."""
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


def joined_sparse_arch(splits: Splits, make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch) -> MakeFlatSparseArch:
    """The ``make_sparse_arch`` of a flat model that is given whole tables and holds them cut.

    Args:
        splits: columns of each shard, by feature (`dmt.plan.TowerPlan.column_splits`).
        make_sparse_arch: makes the embeddings of the shards.

    Example:
        >>> from dmt.models import DLRM
        >>> from dmt.tables import TableSpec
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("ad",))
        >>> model = DLRM(tables=[table], dense_in_features=3, make_sparse_arch=joined_sparse_arch({"ad": (4, 4)}))
        >>> model.feature_names, list(model.sparse_arch.shards.embedding_bags)
        (('ad',), ['t[0:4]', 't[4:8]'])
    """

    def make(tables: Sequence[Any], device: Device) -> nn.Module:
        return JoinedShards(make_sparse_arch(split_tables(tables, splits), device), splits)

    return make


def whole_tables(model: nn.Module, tables: Sequence[Any], splits: Splits) -> EmbeddingBagCollection:
    """The embeddings of a model with cut tables as one collection of whole tables; the weights are copied.

    Args:
        model: unsharded, with TorchRec's tables anywhere inside.
        tables: the whole tables, each in the model, whole or in shards.
        splits: columns of each shard, by feature.

    Example:
        >>> from dmt.tables import TableSpec
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("ad",))
        >>> cut = joined_sparse_arch({"ad": (4, 4)})([table], None)
        >>> whole = whole_tables(cut, [table], {"ad": (4, 4)}).embedding_bags["t"].weight
        >>> torch.equal(whole[:, 4:], cut.shards.embedding_bags["t[4:8]"].weight)
        True
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
