"""THE ONE FILE that touches private names of TorchRec and FBGEMM. Written for TorchRec 1.8.0.

``tests/dmt/test_torchrec_seam.py`` fails with a clear message when one of the names below moves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin, ParameterSharding, ShardingEnv, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.moment_scale import moment_scaled
from dmt.scaled_rate import ScaledRateOptimizer

__all__ = [
    "PRIVATE_NAMES",
    "AssignableValues",
    "GroupShardedEBC",
    "LazyResult",
    "LookupTable",
    "PipelinedModule",
    "add_dense_hook",
    "at_end_of_backward",
    "equal_blocks",
    "fused_settings",
    "group_env",
    "key_mismatch",
    "lookup_tables",
    "mark_updated_in_backward",
    "place_globally",
    "row_starts",
]

PRIVATE_NAMES: Mapping[str, str] = {
    "torchrec.distributed.embedding_types.ShardedEmbeddingModule": "_input_dists _lookups _output_dists",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_load_state_dict _dmp_wrapped_module",
    "torch.nn.modules.module": "_IncompatibleKeys",
    "torch.distributed": "_remote_device",
    "torchrec.sparse.jagged_tensor.KeyedTensor": "_values",
    "torch.autograd.Variable": "_execution_engine",
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": (
        "_embedding_shardings _embedding_bag_configs _lookups _input_dists _output_dists _embedding_names "
        "_embedding_dims _has_mean_pooling_callback _optim _device _create_input_dist _create_output_dist "
        "_pre_load_state_dict_hook"
    ),
    "torchrec.distributed.sharding.dp_sharding.BaseDpEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.distributed.sharding.rw_sharding.BaseRwEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.distributed.sharding.tw_sharding.BaseTwEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.distributed.sharding.rw_sharding.RwSparseFeaturesDist": "zch_bucketize_row_pos",
    "torchrec.optim.optimizers.in_backward_optimizer_filter": "_in_backward_optimizers",
    "torchrec.distributed.embeddingbag": "_optimizer_classes _optimizer_kwargs",
}


class PipelinedModule(ShardedEmbeddingModule[Any, Any, Any, Any]):
    """A sharded module whose id exchange TorchRec's train pipelines can start one batch ahead.

    The pipelines ask for ``_has_uninitialized_input_dist`` and walk ``_input_dists``; DMP's ``load_state_dict`` walks
    children by name unless ``_FORCE_STATE_DICT_LOAD`` says that the module loads itself.
    """

    _FORCE_STATE_DICT_LOAD = True

    def __init__(self, qcomm_codecs_registry: dict[str, Any] | None = None) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._has_uninitialized_input_dist = True

    @property
    def id_exchange(self) -> nn.Module | None:
        """The module that sends ids, None before the first batch is seen."""
        return self._input_dists[0] if self._input_dists else None

    def set_id_exchange(self, exchange: nn.Module) -> None:
        """Installs the id exchange once the batch's features are known."""
        self._input_dists = [exchange]
        self._has_uninitialized_input_dist = False

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this module only: DMP's data parallel must not see the one inside."""
        yield prefix, self


class LazyResult(LazyGetItemMixin[Any, Any], LazyAwaitable[Any]):
    """A result that is waited for once, at its first use, and then passed through ``finish``."""

    def __init__(self, awaitable: Any, finish: Any = None) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._finish = finish
        self._value: Any = None

    def _wait_impl(self) -> Any:
        # TorchRec's exchange may be waited for once only, but a user may call wait() and use the result as well.
        if self._awaitable is not None:
            value: Tensor = self._awaitable.wait()
            self._value = value if self._finish is None else self._finish(value)
            self._awaitable = None
        return self._value


class AssignableValues(KeyedTensor):
    """A ``KeyedTensor`` that keeps its embeddings elsewhere, and yet notices when TorchRec replaces them.

    The semi-sync train pipeline detaches a result by assigning to ``_values``.
    """

    @property
    def _values(self) -> Tensor:
        return self.values()

    @_values.setter
    def _values(self, values: Tensor) -> None:
        self.replace_values(values)

    def replace_values(self, values: Tensor) -> None:
        """Called with [B, columns] in the order of the keys."""
        raise NotImplementedError


def key_mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> Any:
    """What ``load_state_dict`` returns: the keys that did not match."""
    return nn.modules.module._IncompatibleKeys(list(missing), list(unexpected))


def group_env(group: ProcessGroup) -> ShardingEnv:
    """A TorchRec environment that shards over ``group``.

    ``ShardingEnv(...)`` itself would build a device mesh of the ranks 0..size-1, whatever ranks the group has.
    """
    env = ShardingEnv.from_local(group.size(), group.rank())
    env.process_group = group
    return env


def place_globally(sharding: ParameterSharding, ranks: Sequence[int], devices: Sequence[str]) -> ParameterSharding:
    """Rewrites shard placements from ranks of a group to global ranks; ``sharding.ranks`` stay group-local.

    Args:
        sharding: a table's sharding over a group, placements by group rank.
        ranks: global rank of every group rank.
        devices: device of every group rank, such as ``"cpu"`` or ``"cuda:1"``.
    """
    placed = copy.deepcopy(sharding)
    spec: Any = placed.sharding_spec
    for shard in spec.shards if spec is not None else ():  # a data-wise table has none
        local = shard.placement.rank()
        shard.placement = torch.distributed._remote_device(f"rank:{ranks[local]}/{devices[local]}")
    return placed


def add_dense_hook(dmp: DistributedModelParallel, hook: Callable[[GradBucket], Any]) -> None:
    """Gives a ``DistributedModelParallel`` whose dense part is wrapped a DDP communication hook, if it has one."""
    wrapped: Any = dmp._dmp_wrapped_module
    if isinstance(wrapped, DistributedDataParallel):
        # DDP reads annotations, which are strings here; a lambda has none.
        wrapped.register_comm_hook(hook, lambda state, bucket: state(bucket))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the backward pass that is running has computed every gradient, before it returns."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def mark_updated_in_backward(parameter: Tensor, optimizer: Any) -> None:
    """Tells ``in_backward_optimizer_filter`` that no other optimizer must update this parameter."""
    parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]


def fused_settings(parameter: Tensor, fused_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fused optimizer settings of a table: those of the sharder, then those given on its parameter.

    Args:
        parameter: of the unsharded module; ``apply_optimizer_in_backward`` leaves class and arguments on it.
        fused_params: of the sharder.
    """
    classes, arguments = (getattr(parameter, f"_optimizer_{part}", []) for part in ("classes", "kwargs"))
    settings = dict(fused_params or {})
    for kind, kwargs in zip(classes, arguments, strict=True):
        # PyTorch's name of the learning rate goes before FBGEMM's, as in TorchRec.
        rate = {"learning_rate": kwargs["lr"]} if "lr" in kwargs else {}
        others = {key: value for key, value in kwargs.items() if key != "lr"}
        settings |= {"optimizer": optimizer_type_to_emb_opt_type(kind), **others, **rate}
    return settings


@contextmanager
def _moment_scaled(
    module: EmbeddingBagCollection, scales: Mapping[str, float], fused_params: Mapping[str, Any] | None
) -> Iterator[None]:
    """Leaves scaled settings on the parameters of these tables, as ``apply_optimizer_in_backward`` would, for a while.

    Settings on a parameter go before those of the sharder, so each table can have its own.
    """
    before = []
    for name, scale in scales.items():
        parameter = module.embedding_bags[name].weight
        settings = moment_scaled(fused_settings(parameter, fused_params), scale)
        before.append((parameter, dict(vars(parameter))))
        parameter._optimizer_classes, parameter._optimizer_kwargs = [None], [settings]
    try:
        yield
    finally:
        for parameter, attributes in before:
            vars(parameter).clear()
            vars(parameter).update(attributes)


class GroupShardedEBC(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection over any group of ranks, all four schemes in one collection, with five mends.

    - Data-wise tables are handled by ``make_data_wise`` rather than DDP, and their first weights come from the
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
        make_data_wise: ``(lookup, weights by table, fused params by table) -> module`` for data-wise tables; the
            module has an ``optimizer`` and the lookup as ``module``.
        start_equal: gives every rank the first one's tensor, in place.
        make_row_wise_output: wraps the output exchange of row-wise tables.
        moment_scales: factor c of the tables' AdaGrad moments (`dmt.moment_scale`), by table; 1 for those left out.
            Data-wise tables have none: their gradients are averaged over the replicas, so to them there is only one.
        options: ``fused_params``, ``device`` and ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        *,
        group: ProcessGroup,
        make_data_wise: Callable[[nn.Module, dict[str, Tensor], dict[str, dict[str, Any]]], nn.Module],
        start_equal: Callable[[Tensor], None],
        make_row_wise_output: Callable[[nn.Module], nn.Module],
        moment_scales: Mapping[str, float],
        options: Mapping[str, Any],
    ) -> None:
        self._make_data_wise = make_data_wise
        self._start_equal = start_equal
        self._make_row_wise_output = make_row_wise_output
        self._table_sharding = sharding
        self.moment_scales = {name: scale for name, scale in moment_scales.items() if scale != 1.0}
        with _moment_scaled(module, self.moment_scales, options["fused_params"]):
            super().__init__(module, sharding, group_env(group), **options)
        data_wise = [("", lookup.optimizer) for lookup in self._lookups if hasattr(lookup, "optimizer")]
        fused: Any = self._optim
        self._optim: Any = CombinedOptimizer([*(self._with_scaled_rate(o) for _, o in fused.optimizers), *data_wise])
        divided = {
            feature if feature in self._embedding_names else f"{feature}@{table.name}": feature
            for table in self._embedding_bag_configs
            if table.pooling is PoolingType.MEAN and self._is(table.name, ShardingType.ROW_WISE)
            for feature in table.feature_names
        }
        self._divided_by = [divided.get(name) for name in self._embedding_names]

    def init_data_parallel(self) -> None:
        """Called by TorchRec's constructor where it would wrap data-wise lookups in DDP."""
        for i, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                weights: dict[str, Tensor] = dict(self._lookups[i].named_parameters_by_table())
                settings = {table.name: dict(table.fused_params or {}) for table in sharding.embedding_tables()}
                self._lookups[i] = self._make_data_wise(self._lookups[i], weights, settings)

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
    """``"row_wise"``, ``"data_wise"`` or ``"whole_rows"`` (table-wise, and column-wise for each column shard)."""
    is_mean: bool
    row_starts: tuple[int, ...]
    """Of a row-wise table, see `row_starts`; empty for others."""


def lookup_tables(embedding: ShardedEmbeddingBagCollection) -> list[list[LookupTable]]:
    """What each lookup of a sharded collection reads on this rank: its tables, in the order it reads their ids."""

    def describe(sharding: Any, table: Any) -> LookupTable:
        is_cut = isinstance(sharding, RwPooledEmbeddingSharding)
        other = "data_wise" if isinstance(sharding, DpPooledEmbeddingSharding) else "whole_rows"
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
