"""THE ONE FILE that touches private names of TorchRec and FBGEMM. Written for TorchRec 1.8.0.

``tests/dmt/test_torchrec_seam.py`` fails with a clear message when one of the names below moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.sharding.optimizers import moment_scaled

__all__ = [
    "PRIVATE_NAMES",
    "ReplaceableKeyedTensor",
    "PipelinedModule",
    "add_dense_hook",
    "at_end_of_backward",
    "fused_settings",
    "group_env",
    "key_mismatch",
    "mark_updated_in_backward",
    "place_globally",
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


class ReplaceableKeyedTensor(KeyedTensor):
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
    for shard in spec.shards if spec is not None else ():  # a data-parallel table has none
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
