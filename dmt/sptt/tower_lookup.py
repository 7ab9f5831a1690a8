"""`GroupShardedEBC`: TorchRec's sharded collection over any group of ranks, all four schemes in one collection.

Inside a tower it does SPTT's steps a (ids to the rank that holds the table), b (lookup) and d (partial embeddings to
the tower's ranks). Step e needs no code: embeddings arrive in the layout of its view, and are read by key.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt._torchrec import OpenShardedEBC, at_end_of_backward, group_env, mark_updated_in_backward
from dmt.collectives import broadcast_tensor, start_sum, start_sum_over_hosts
from dmt.errors import InputError
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.sptt.group_sharded import Embeddings, GroupSharded, table_configs, table_weights

__all__ = ["DataParallelTables", "GroupShardedEBC", "RowWiseOutputs", "in_order", "output_keys", "refuse_gradient"]

StartMean = Callable[[Tensor], Callable[[], None]]
"""Starts to average a gradient over ranks in place, and returns a function that waits for the end."""


class GroupShardedEBC(OpenShardedEBC, GroupSharded):
    """TorchRec's sharded collection over any group of ranks, all four schemes in one collection, with these fixes.

    - `DataParallelTables` replaces DDP for data-parallel tables, whose first weights come from the first rank of
      ``data_parallel_group`` (TorchRec broadcasts from global rank 0, which may not be in it).
    - Mean pooling of row-wise tables divides those tables only. TorchRec divides every table of the collection by the
      lengths of its bags (plus 1e-6), tables of other schemes a second time, and fails on a rank without samples.
    - Row-wise tables take batches of unequal sizes, by `RowWiseOutputs`: gloo cannot gather unequal gradients.

    Args:
        module: the unsharded collection.
        sharding: sharding of each table by name; ``ranks`` are group ranks, shard placements name global ranks.
        group: the ranks over which tables are sharded.
        data_parallel_group: the ranks that hold a copy of the data-parallel tables.
        over_hosts: two groups, the data-parallel ranks of this host and those in this rank's position on every host.
            Gradients are summed over the first, then over the second. None: one sum over ``data_parallel_group``.
        moment_scales: factor c of AdaGrad's moments (`dmt.sharding.optimizers`) by table; tables that are not listed
            have 1. Data-parallel tables must have 1: their gradients are averaged over all replicas.
        options: the arguments ``fused_params``, ``device`` and perhaps ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        *,
        group: ProcessGroup,
        data_parallel_group: ProcessGroup,
        over_hosts: tuple[ProcessGroup, ProcessGroup] | None = None,
        moment_scales: Mapping[str, float],
        options: Mapping[str, Any],
    ) -> None:
        self._data_parallel_group, self._over_hosts = data_parallel_group, over_hosts
        self._configs = table_configs(module)
        self._schemes = {table.name: sharding[table.name].sharding_type for table in self._configs}
        with self.scale_moments(table_weights(module), moment_scales, options["fused_params"]):
            super().__init__(module, sharding, group_env(group), **options)
        self.share_output_dtype(options["fused_params"])
        # TorchRec's optimizer leaves out data-parallel tables, which it expects a dense optimizer to update.
        data_parallel = [lookup.optimizer for lookup in self.lookups if isinstance(lookup, DataParallelTables)]
        for weight in (weight for optimizer in data_parallel for weight in optimizer.params.values()):
            if not weight.is_meta:  # each rank has drawn its own, or copied them from a module built on its GPU
                broadcast_tensor(weight.data, data_parallel_group)
        fused = [optimizer for _, optimizer in super().fused_optimizer.optimizers]
        for optimizer in fused:
            self.adapt(optimizer)
        self._optimizer = CombinedOptimizer([("", optimizer) for optimizer in (*fused, *data_parallel)])
        for i, (scheme, _) in enumerate(self.tables_by_lookup):
            if scheme == "row_wise":
                self.output_dists[i] = RowWiseOutputs(self.output_dists[i], group.rank())
        names, self._widths = zip(*self.output_columns, strict=True)
        # No rank of a row-wise table has a whole bag: ranks add partial sums, and the total is divided on arrival.
        feature_by_name = {
            feature if feature in names else f"{feature}@{table.name}": feature
            for table in self._configs
            if table.pooling is PoolingType.MEAN and self._schemes[table.name] == "row_wise"
            for feature in table.feature_names
        }
        self._divided_by = [feature_by_name.get(name) for name in names]
        self.leave_out_mean_pooling()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        return self._optimizer

    def init_data_parallel(self) -> None:
        """Wraps data-parallel lookups; called by TorchRec's constructor, which would wrap them in DDP."""
        for i, (scheme, tables) in enumerate(self.tables_by_lookup):
            if scheme == "data_parallel":
                weights: dict[str, Tensor] = dict(self.lookups[i].named_parameters_by_table())
                settings = {table.name: dict(table.fused_params or {}) for table in tables}
                start_mean = functools.partial(
                    _start_group_mean, group=self._data_parallel_group, over_hosts=self._over_hosts
                )
                self.lookups[i] = DataParallelTables(self.lookups[i], weights, settings, start_mean)

    def reset_parameters(self) -> None:
        """Initializes this rank's shards with each table's ``init_fn``."""
        for table in self._configs:
            table.init_fn(self.embedding_bags[table.name].weight)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Starts the id exchange inside the group."""
        awaitable = super().input_dist(ctx, features)
        if any(self._divided_by):
            ctx.divisor = self._divisor(features)
        return awaitable

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up the ids, and starts to send the embeddings to the ranks of their samples."""
        awaitable = super().compute_and_output_dist(ctx, input)
        if any(self._divided_by):
            awaitable.callbacks.append(
                lambda sums: KeyedTensor(
                    # FP16 over an FP32 divisor would make the embeddings of the whole collection FP32.
                    *(sums.keys(), sums.length_per_key(), (sums.values() / ctx.divisor).to(sums.values().dtype))
                )
            )
        return awaitable

    def _divisor(self, features: Any) -> Tensor:
        """Returns divisors [B, columns], FP32: bag lengths in the columns of mean-pooled row-wise tables, else 1."""
        lengths = features.lengths().view(len(features.keys()), -1)
        position = {key: i for i, key in enumerate(features.keys())}
        # Columns of other tables are means already, or sums; they are divided by 1.
        ones = torch.ones_like(lengths[0])
        # The mean of an empty bag is zero, not 0 / 0.
        columns = [ones if key is None else lengths[position[key]].clamp(min=1) for key in self._divided_by]
        # Views, since `repeat_interleave` would copy the widths to a GPU in every batch, and wait for it.
        return torch.cat([c[:, None].expand(-1, n) for c, n in zip(columns, self._widths, strict=True)], dim=1).float()


def refuse_gradient(weights: Tensor) -> None:
    """Raises `InputError` if table weights have a gradient, which comes from a loss of the weights themselves."""
    if weights.grad is not None:  # else a lookup was used
        weights.grad = None  # as large as the table
        raise InputError(
            "The loss uses the weights of a sharded table, but only gradients of looked-up embeddings train it: "
            "this part of the loss would have no effect. Penalize the embeddings of the batch, or set weight_decay."
        )


class DataParallelTables(nn.Module):
    """A lookup of rows that several ranks hold; averages their gradients, and replaces DDP around TorchRec's lookup.

    The forward pass sends nothing. The backward pass averages each gradient over the ranks, perhaps while the rest of
    the pass runs; it ends with the update.

    Args:
        lookup: TorchRec's or FBGEMM's lookup, with dense gradients; stored as ``module``, which TorchRec 1.8 unwraps.
        weights: weights [rows, columns] by table, views of the parameters of the lookup.
        settings: settings of the fused optimizer by table.
        start_mean: starts to average a parameter's gradient in place over the ranks that hold the rows, and returns a
            function that waits for the end.
    """

    def __init__(
        self,
        lookup: nn.Module,
        weights: Mapping[str, Tensor],
        settings: Mapping[str, Mapping[str, Any]],
        start_mean: StartMean,
    ) -> None:
        super().__init__()
        self.module = lookup
        self.optimizer = DataParallelOptimizer(weights, settings)
        self._start_mean = start_mean
        self._pending: list[tuple[Tensor, Callable[[], None]]] = []
        for weight in weights.values():
            mark_updated_in_backward(weight, self.optimizer)
        # A weak reference: the garbage collector cannot see a cycle through autograd, and would never free the tables.
        reduce = weakref.WeakMethod(self._reduce)
        for _, parameter in lookup.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: (living := reduce()) and living(parameter))

    def forward(self, *features: Any) -> Tensor:
        """Returns the embeddings of the ids, as the wrapped lookup does; sends nothing."""
        self.settle()
        return self.module(*features)

    def settle(self, *, update: bool = False) -> None:
        """Waits for averages of gradients in flight, updates the tables with them if ``update``, and clears them."""
        # Cleared first: else a second call would wait for the same averages again after an exception.
        pending, self._pending = self._pending, []
        try:
            for _, end in pending:
                end()
            if pending and update:
                self.optimizer.update()
        finally:
            for parameter, _ in pending:
                parameter.grad = None

    def named_parameters_by_table(self) -> Iterator[tuple[str, Any]]:
        """Yields name and weights of each table; TorchRec 1.9 calls it on this module, because it unwraps only DDP."""
        yield from self.module.named_parameters_by_table()  # type: ignore[operator]

    def flush(self) -> None:
        """Called by TorchRec before it reads weights; they are always up to date."""

    def purge(self) -> None:
        """Called by TorchRec before it loads weights; nothing is cached."""

    def _reduce(self, parameter: Tensor) -> None:
        # Queued for each parameter, though the first call settles all: an error in a pass drops its callbacks.
        at_end_of_backward(lambda: self.settle(update=True))
        assert parameter.grad is not None, "called once the gradient is there"
        self._pending.append((parameter, self._start_mean(parameter.grad)))


def _start_group_mean(
    gradient: Tensor, group: ProcessGroup, over_hosts: tuple[ProcessGroup, ProcessGroup] | None
) -> Callable[[], None]:
    """Starts to average a gradient over a group, in place; returns a function that waits for the end."""
    # Each rank has the gradient of its own mean loss; all take the same step, by the mean (Neo, section 4).
    if over_hosts is None:
        work = start_sum(gradient, group)

        def end() -> None:
            work.wait()
            gradient.div_(group.size())

    else:
        end_sum = start_sum_over_hosts(gradient.flatten(), *over_hosts)

        def end() -> None:
            torch.div(end_sum().view_as(gradient), group.size(), out=gradient)

    return end


class RowWiseOutputs(nn.Module):
    """Reduce-scatter of partial sums inside a tower (SPTT step d of row-wise tables) for batches of any sizes.

    Every rank passes partial sums [sum over ranks of B, columns] over the rows that it holds, for the samples of all
    ranks, and gets whole sums [B, columns] for its samples; gradients are gathered. Blocks of unequal size are padded
    with zeros to the largest and cut again, because gloo's all-gather takes equal parts only.
    """

    def __init__(self, exchange: nn.Module, rank: int) -> None:
        super().__init__()
        self._exchange, self._rank = exchange, rank

    def forward(self, partial_sums: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """Starts the exchange; ``sharding_ctx`` has the batch size of every rank."""
        sizes = sharding_ctx.batch_size_per_rank
        # Equal batches, the usual case, need no copy.
        if len(set(sizes)) <= 1:
            return self._exchange(partial_sums, sharding_ctx)
        largest = max(sizes)
        padded = [nn.functional.pad(part, (0, 0, 0, largest - len(part))) for part in partial_sums.split(sizes)]
        even = EmbeddingShardingContext(batch_size_per_rank=[largest] * len(sizes))
        sums = self._exchange(torch.cat(padded), even)
        sums.callbacks.append(lambda rows: rows[: sizes[self._rank]])
        return sums


def in_order(arrived: Embeddings, keys: Sequence[str]) -> Embeddings:
    """Returns embeddings (a ``KeyedTensor`` [B, columns], or sequences) with their keys in the order of ``keys``.

    Example:
        >>> arrived = KeyedTensor(["b", "a"], [1, 2], torch.tensor([[3.0, 1.0, 2.0]]))
        >>> in_order(arrived, ["a", "b"]).values().tolist()
        [[1.0, 2.0, 3.0]]
    """
    if list(arrived.keys()) == list(keys):
        return arrived
    assert sorted(arrived.keys()) == sorted(keys), f"embeddings of {list(arrived.keys())} arrived for keys {list(keys)}"
    if not isinstance(arrived, KeyedTensor):
        return {key: arrived[key] for key in keys}
    by_key = arrived.to_dict()
    return KeyedTensor(list(keys), [by_key[key].shape[1] for key in keys], torch.cat([by_key[k] for k in keys], dim=1))


def output_keys(tables: Sequence[Any]) -> list[str]:
    """Returns the keys of an unsharded collection's result: features, or ``feature@table`` if two tables look it up."""
    return [key for of_table in get_embedding_names_by_table(list(tables)) for key in of_table]
