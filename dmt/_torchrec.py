"""THE ONE FILE that touches private names of TorchRec and FBGEMM. Written for TorchRec 1.8.0.

``tests/dmt/test_torchrec_seam.py`` fails with a clear message when one of the names below moves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin, ParameterSharding, ShardingEnv

__all__ = ["PRIVATE_NAMES", "LazyResult", "PipelinedModule", "group_env", "key_mismatch", "place_globally"]

PRIVATE_NAMES: Mapping[str, str] = {
    "torchrec.distributed.embedding_types.ShardedEmbeddingModule": "_input_dists _lookups _output_dists",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_load_state_dict",
    "torch.nn.modules.module": "_IncompatibleKeys",
    "torch.distributed": "_remote_device",
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
    for shard in spec.shards:
        local = shard.placement.rank()
        shard.placement = torch.distributed._remote_device(f"rank:{ranks[local]}/{devices[local]}")
    return placed
