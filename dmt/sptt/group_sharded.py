"""TorchRec's sharded collections over any group of ranks: code common to bags and sequences, and `GroupShardedEC`.

`GroupShardedEC` looks up sequences, which have an embedding for each id; `dmt.sptt.tower_lookup.GroupShardedEBC` looks
up bags, which have one for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dmt._torchrec import (
    OpenShardedEC,
    complete_adam,
    fused_kernels,
    fused_settings,
    group_env,
    lookups_of,
    place_globally,
    scale_learning_rate,
    set_output_of_empty,
    settings_on_parameters,
)
from dmt.collectives import gather_objects
from dmt.sharding.data_parallel import DataParallelOptimizer, UpdateSettings
from dmt.sharding.optimizers import moment_scaled

__all__ = [
    "Embeddings",
    "GroupSharded",
    "GroupShardedEC",
    "embedding_values",
    "join_rows",
    "place_in_group",
    "split_rows",
    "table_configs",
    "table_weights",
]

Embeddings: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""Embeddings of P samples from a collection: bags [P, columns], or sequences [sum of lengths, columns] by feature."""


class GroupSharded:
    """Methods common to TorchRec's sharded collections of bags and of sequences, over any group of ranks."""

    moment_scales: dict[str, float]
    """Factor c of AdaGrad's moments (`dmt.sharding.optimizers`) by table; tables that are not listed have 1."""
    fused_optimizer: Any
    """The tables' optimizers, which update in the backward pass."""

    @property
    def lookups(self) -> list[Any]:
        """TorchRec's lookups on this rank; a subclass may replace entries."""
        return lookups_of(self)

    def settings_now(self) -> dict[str, UpdateSettings]:
        """Returns the settings of the next update of this rank's tables, by name; call it after the forward pass."""
        settings: dict[str, UpdateSettings] = {}
        for lookup in self.lookups:
            optimizer = getattr(lookup, "optimizer", None)
            if isinstance(optimizer, DataParallelOptimizer):
                settings |= optimizer.settings_now()
            else:
                kernels = fused_kernels(lookup)
                now = {k: UpdateSettings(k.get_learning_rate(), int(k.iter_cpu)) for k in set(kernels.values())}
                settings |= {name: now[kernel] for name, kernel in kernels.items()}
        return settings

    def flush(self) -> None:
        """Writes rows that are cached on an accelerator back to their tables, and empties the cache."""
        for lookup in self.lookups:
            lookup.flush()
            lookup.purge()

    def scale_moments(
        self, weights: Mapping[str, Tensor], scales: Mapping[str, float], fused_params: Mapping[str, Any] | None
    ) -> AbstractContextManager[None]:
        """Stores the scales; returns a context in which TorchRec's constructor finds the scaled optimizer settings."""
        self.moment_scales = {name: scale for name, scale in scales.items() if scale != 1.0}
        # TorchRec's constructor takes fused_params for all tables, but prefers the settings on a table's parameter.
        return settings_on_parameters(
            [
                (weights[name], moment_scaled(fused_settings(weights[name], fused_params), scale))
                for name, scale in self.moment_scales.items()
            ]
        )

    def share_output_dtype(self, fused_params: Mapping[str, Any] | None) -> None:
        """Makes lookups without tables return ``output_dtype`` too, since all ranks must exchange one dtype."""
        if output_dtype := (fused_params or {}).get("output_dtype"):
            set_output_of_empty(self.lookups, output_dtype.as_dtype())

    def adapt(self, optimizer: Any) -> None:
        """Completes Adam's states; restores the user's rate in ``param_groups``, which the kernel then scales."""
        complete_adam(optimizer)
        scales = {self.moment_scales.get(key.split(".")[-2], 1.0) for key in optimizer.params}
        assert len(scales) <= 1, f"FBGEMM groups tables by their settings, but a kernel has moment scales {scales}"
        # Algorithm 1 divides the moment by c under the root: steps grow by a factor of sqrt(c), see `moment_scaled`.
        factor = math.sqrt(scales.pop()) if scales else 1.0
        if factor != 1.0:
            scale_learning_rate(optimizer, factor)


class GroupShardedEC(OpenShardedEC, GroupSharded):
    """TorchRec's sharded collection of sequences over any group of ranks; tables are table-wise or row-wise.

    Embeddings return to the rank that sent the ids, inside the tower: [sum of the lengths of its P samples, columns].
    TorchRec fails on a rank without samples (P = 0), so such a rank sends one sample without ids.

    Args:
        module: the unsharded collection.
        sharding: sharding of each table by name; ``ranks`` are group ranks, shard placements name global ranks.
        group: the ranks over which tables are sharded.
        moment_scales: factor c of AdaGrad's moments by table; tables that are not listed have 1.
        options: the arguments ``fused_params`` and ``device`` of TorchRec's class.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        sharding: dict[str, ParameterSharding],
        *,
        group: ProcessGroup,
        moment_scales: Mapping[str, float],
        options: Mapping[str, Any],
    ) -> None:
        with self.scale_moments(table_weights(module), moment_scales, options["fused_params"]):
            super().__init__(module, sharding, group_env(group), **options)
        self.share_output_dtype(options["fused_params"])
        for _, optimizer in self.fused_optimizer.optimizers:
            self.adapt(optimizer)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Starts the id exchange inside the group."""
        ctx.is_filled_up = features.stride() == 0
        if ctx.is_filled_up:
            # The other ranks wait for this rank in every exchange, so it must take part.
            keys, weights = features.keys(), features.weights_or_none()
            lengths = features.lengths().new_zeros(len(keys))
            features = KeyedJaggedTensor(keys, features.values(), weights, lengths)
        return super().input_dist(ctx, features)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up the ids, and starts to send the embeddings to the ranks of their samples."""
        awaitable = super().compute_and_output_dist(ctx, input)
        if ctx.is_filled_up:
            awaitable.callbacks.append(lambda sequences: split_rows(sequences, [0, 1])[0])
        return awaitable


def place_in_group(
    plan: Mapping[str, ParameterSharding], group: ProcessGroup, device: torch.device | None
) -> dict[str, ParameterSharding]:
    """Returns the plan with shards placed on global ranks and their devices; ``ranks`` stay the group's. Collective."""
    own_device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device or "cpu"
    devices, ranks = gather_objects(str(own_device), group), get_process_group_ranks(group)
    return {name: place_globally(sharding, ranks, devices) for name, sharding in plan.items()}


def table_configs(collection: EmbeddingBagCollection | EmbeddingCollection) -> list[Any]:
    """Returns the table configs of a collection of bags or sequences."""
    is_sequence = isinstance(collection, EmbeddingCollection)
    return list(collection.embedding_configs() if is_sequence else collection.embedding_bag_configs())


def table_weights(collection: EmbeddingBagCollection | EmbeddingCollection) -> dict[str, nn.Parameter]:
    """Returns the weights of a collection of bags or sequences, by table name."""
    tables = collection.embeddings if isinstance(collection, EmbeddingCollection) else collection.embedding_bags
    return {name.split(".")[0]: weight for name, weight in tables.named_parameters()}


def embedding_values(embeddings: Embeddings) -> list[Tensor]:
    """Returns the tensors that hold the embeddings: [samples, columns] of bags, or [ids, columns] of each sequence."""
    if isinstance(embeddings, KeyedTensor):
        return [embeddings.values()]
    return [sequences.values() for sequences in embeddings.values()]


def split_rows(embeddings: Embeddings, rows: Sequence[int]) -> list[Embeddings]:
    """Splits the embeddings of sum(rows) samples into blocks; block i has those of ``rows[i]`` samples."""
    if isinstance(embeddings, KeyedTensor):
        keys, widths = embeddings.keys(), embeddings.length_per_key()
        return [KeyedTensor(keys, widths, block) for block in embeddings.values().split(list(rows))]
    blocks = {key: _split_sequences(sequences, list(rows)) for key, sequences in embeddings.items()}
    return [{key: of_key[i] for key, of_key in blocks.items()} for i in range(len(rows))]


def join_rows(blocks: Sequence[Any]) -> Embeddings:
    """Concatenates the embeddings of blocks of samples; the inverse of `split_rows`."""
    first = blocks[0]
    if isinstance(first, KeyedTensor):
        return KeyedTensor(first.keys(), first.length_per_key(), torch.cat([block.values() for block in blocks]))
    return {key: _join_sequences([block[key] for block in blocks]) for key in first}


def _split_sequences(sequences: JaggedTensor, rows: list[int]) -> list[JaggedTensor]:
    lengths = sequences.lengths().split(rows)
    # On a GPU, one sync for all blocks.
    numbers = torch.stack([of_block.sum() for of_block in lengths]).tolist()
    values = sequences.values().split(numbers)
    weights = sequences.weights_or_none()
    of_blocks = [None] * len(rows) if weights is None else weights.split(numbers)
    return [JaggedTensor(v, lengths=n, weights=w) for v, n, w in zip(values, lengths, of_blocks, strict=True)]


def _join_sequences(blocks: Sequence[JaggedTensor]) -> JaggedTensor:
    parts = [(block.values(), block.lengths(), block.weights_or_none()) for block in blocks]
    values, lengths, weights = zip(*parts, strict=True)
    joined = None if weights[0] is None else torch.cat(weights)
    return JaggedTensor(torch.cat(values), lengths=torch.cat(lengths), weights=joined)
