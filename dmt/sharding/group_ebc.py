"""`GroupShardedEBC`: TorchRec's sharded collection over any group of ranks, with all four schemes in one collection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from dmt._torchrec import _moment_scaled, group_env
from dmt.sharding.scaled_rate import ScaledRateOptimizer

__all__ = ["GroupShardedEBC", "LookupTable", "RowWiseOutputs", "equal_blocks", "lookup_tables", "row_starts"]


class GroupShardedEBC(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection over any group of ranks, all four schemes in one collection, with five fixes.

    - Data-parallel tables are handled by ``make_data_parallel`` rather than DDP, and their first weights come from the
      group's first rank (TorchRec broadcasts from global rank 0, which may not be in the group).
    - Row-wise shards of any sizes: TorchRec's bucketizer takes equal blocks, whatever the sharding spec says.
    - Mean pooling of row-wise tables divides those tables only; TorchRec divides every table of the collection by
      its bags' lengths (plus 1e-6), those with other schemes a second time.
    - Column shards of unequal widths can be loaded: TorchRec views each with the width of the first.
    - Row-wise tables with batches of unequal size, by ``make_row_wise_output``: gloo cannot gather unequal gradients.

    Args:
        module: the collection.
        sharding: of each table; ``ranks`` in the group, placements global.
        group: the ranks.
        make_data_parallel: ``(lookup, weights by table, fused params by table) -> module`` for data-parallel tables; the
            module has an ``optimizer`` and the lookup as ``module``.
        start_equal: gives every rank the first one's tensor, in place.
        make_row_wise_output: wraps the output exchange of row-wise tables.
        moment_scales: factor c of the tables' AdaGrad moments (`dmt.sharding.optimizers`), by table; 1 for those left out.
            Data-parallel tables have none: their gradients are averaged over the replicas, so to them there is only one.
        options: ``fused_params``, ``device`` and ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        *,
        group: ProcessGroup,
        make_data_parallel: Callable[[nn.Module, dict[str, Tensor], dict[str, dict[str, Any]]], nn.Module],
        start_equal: Callable[[Tensor], None],
        make_row_wise_output: Callable[[nn.Module], nn.Module],
        moment_scales: Mapping[str, float],
        options: Mapping[str, Any],
    ) -> None:
        self._make_data_parallel = make_data_parallel
        self._start_equal = start_equal
        self._make_row_wise_output = make_row_wise_output
        self._table_sharding = sharding
        self.moment_scales = {name: scale for name, scale in moment_scales.items() if scale != 1.0}
        with _moment_scaled(module, self.moment_scales, options["fused_params"]):
            super().__init__(module, sharding, group_env(group), **options)
        data_parallel = [("", lookup.optimizer) for lookup in self._lookups if hasattr(lookup, "optimizer")]
        fused: Any = self._optim
        self._optim: Any = CombinedOptimizer(
            [*(self._with_scaled_rate(o) for _, o in fused.optimizers), *data_parallel]
        )
        divided = {
            feature if feature in self._embedding_names else f"{feature}@{table.name}": feature
            for table in self._embedding_bag_configs
            if table.pooling is PoolingType.MEAN and self._is(table.name, ShardingType.ROW_WISE)
            for feature in table.feature_names
        }
        self._divided_by = [divided.get(name) for name in self._embedding_names]

    def init_data_parallel(self) -> None:
        """Called by TorchRec's constructor where it would wrap data-parallel lookups in DDP."""
        for i, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                weights: dict[str, Tensor] = dict(self._lookups[i].named_parameters_by_table())
                settings = {table.name: dict(table.fused_params or {}) for table in sharding.embedding_tables()}
                self._lookups[i] = self._make_data_parallel(self._lookups[i], weights, settings)

    def flush(self) -> None:
        """Brings weights up to date where rows are cached on an accelerator, and empties the cache."""
        for lookup in self._lookups:
            lookup.flush()
            lookup.purge()

    def reset_parameters(self) -> None:
        """Draws the weights of this rank's shards from each table's ``init_fn``."""
        if self._device is not None and self._device.type == "meta":
            return
        for table in self._embedding_bag_configs:
            weight = self.embedding_bags[table.name].weight
            table.init_fn(weight)
            if self._is(table.name, ShardingType.DATA_PARALLEL):
                self._start_equal(weight.data)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Starts the id exchange inside the group."""
        awaitable = super().input_dist(ctx, features)
        if self._has_mean_pooling_callback:
            ctx.divisor = self._divisor(features)
        return awaitable

    @staticmethod
    def _pre_load_state_dict_hook(
        self: GroupShardedEBC,  # TorchRec registers it as a function of the module
        state_dict: dict[str, Any],
        prefix: str,
        *arguments: Any,
    ) -> None:
        mine = {}
        for table in self._embedding_bag_configs:
            key = f"{prefix}embedding_bags.{table.name}.weight"
            if isinstance(state_dict.get(key), ShardedTensor):
                shards = state_dict.pop(key).local_shards()
                mine[key] = shards[0].tensor if shards else torch.empty(0)
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *arguments)
        state_dict.update(mine)

    def _divisor(self, features: Any) -> Tensor:
        """[B, columns]: lengths of the bags for row-wise mean-pooled tables (1 for empty bags), 1 for all others."""
        lengths = features.lengths().view(len(features.keys()), -1)
        position = {key: i for i, key in enumerate(features.keys())}
        ones = torch.ones_like(lengths[0])
        columns = [ones if key is None else lengths[position[key]].clamp(min=1) for key in self._divided_by]
        widths = torch.tensor(self._embedding_dims, device=lengths.device)
        return torch.stack(columns, dim=1).repeat_interleave(widths, dim=1).to(torch.float32)

    def _with_scaled_rate(self, optimizer: Any) -> Any:
        """A lookup's optimizer, behind the learning rate that the user means; its tables have one factor c."""
        scales = {self.moment_scales.get(key.split(".")[-2], 1.0) for key in optimizer.params}
        assert len(scales) <= 1, f"a lookup has tables of moment scales {scales}"
        return ScaledRateOptimizer(optimizer, math.sqrt(scales.pop())) if scales - {1.0} else optimizer

    def _is(self, table: str, scheme: ShardingType) -> bool:
        return self._table_sharding[table].sharding_type == scheme.value

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for exchange, sharding in zip(self._input_dists, self._embedding_shardings, strict=True):
            if not isinstance(sharding, RwPooledEmbeddingSharding):
                continue
            cuts = [(row_starts(t), len(t.feature_names)) for t in sharding.embedding_tables()]
            if any(starts != equal_blocks(starts) for starts, _ in cuts):
                exchange.zch_bucketize_row_pos = [
                    torch.tensor(starts, device=self._device) for starts, count in cuts for _ in range(count)
                ]

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        for i, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, RwPooledEmbeddingSharding):
                self._output_dists[i] = self._make_row_wise_output(self._output_dists[i])


def row_starts(table: Any) -> list[int]:
    """First row of every row shard of TorchRec's sharded table, and the number of rows."""
    shards = table.global_metadata.shards_metadata
    return [shard.shard_offsets[0] for shard in shards] + [table.num_embeddings]


def equal_blocks(starts: Sequence[int]) -> list[int]:
    """The row starts that TorchRec's bucketizer assumes for so many rows and shards."""
    num_shards, rows = len(starts) - 1, starts[-1]
    block = -(-rows // num_shards)
    return [min(block * shard, rows) for shard in range(num_shards)] + [rows]


class LookupTable(NamedTuple):
    """A table as one lookup of a sharded collection reads it on this rank: whole, or a shard of it."""

    name: str
    features: tuple[str, ...]
    scheme: str
    """``"row_wise"``, ``"data_parallel"`` or ``"whole_rows"`` (table-wise, and column-wise for each column shard)."""
    is_mean: bool
    row_starts: tuple[int, ...]
    """Of a row-wise table, see `row_starts`; empty for others."""

    @property
    def pooling(self) -> str:
        """Name of TorchRec's ``PoolingType``."""
        return "MEAN" if self.is_mean else "SUM"


def lookup_tables(embedding: ShardedEmbeddingBagCollection) -> list[list[LookupTable]]:
    """What each lookup of a sharded collection reads on this rank: its tables, in the order it reads their ids."""

    def describe(sharding: Any, table: Any) -> LookupTable:
        is_cut = isinstance(sharding, RwPooledEmbeddingSharding)
        other = "data_parallel" if isinstance(sharding, DpPooledEmbeddingSharding) else "whole_rows"
        return LookupTable(
            name=table.name,
            features=tuple(table.feature_names),
            scheme="row_wise" if is_cut else other,
            is_mean=table.pooling is PoolingType.MEAN,
            row_starts=tuple(row_starts(table)) if is_cut else (),
        )

    shardings: list[Any] = embedding._embedding_shardings
    return [
        [describe(sharding, table) for group in sharding._grouped_embedding_configs for table in group.embedding_tables]
        for sharding in shardings
    ]


class RowWiseOutputs(nn.Module):
    """Reduce-scatter of partial sums inside a tower (SPTT step d of row-wise tables) for batches of any sizes.

    ========= ==================================================================================================
    before    every rank: [sum over ranks of B, columns], partial sums of the rows it holds, for the samples of all
    after     every rank: [B, columns], whole sums for its own samples
    backward  all-gather of the gradients, divided by the group size (TorchRec's gradient division)
    ========= ==================================================================================================

    Blocks of unequal size are padded with zeros to the largest and cut again: gloo's all-gather takes equal parts only.

    Args:
        exchange: TorchRec's output exchange of row-wise tables.
        rank: this rank in the group.
    """

    def __init__(self, exchange: nn.Module, rank: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._rank = rank

    def forward(self, partial_sums: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """Starts the exchange; the context has the batch size of every rank."""
        sizes = sharding_ctx.batch_size_per_rank
        if len(set(sizes)) <= 1:
            return self._exchange(partial_sums, sharding_ctx)
        largest = max(sizes)
        padded = [nn.functional.pad(part, (0, 0, 0, largest - len(part))) for part in partial_sums.split(sizes)]
        even = EmbeddingShardingContext(batch_size_per_rank=[largest] * len(sizes))
        return _FirstRows(self._exchange(torch.cat(padded), even), sizes[self._rank])


class _FirstRows(Awaitable[Tensor]):
    def __init__(self, awaitable: Awaitable[Tensor], rows: int) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._rows = rows

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait()[: self._rows]
