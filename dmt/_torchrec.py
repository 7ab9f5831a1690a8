"""Public wrappers around private names of TorchRec (1.8, 1.9), FBGEMM and torch; no other file uses those names.

``tests/dmt/test_torchrec_seam.py`` lists the private names and fails with a clear message when a release moves one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = [
    "OpenShardedEBC",
    "OpenShardedEC",
    "PipelinedModule",
    "add_dense_hook",
    "assert_in_graph",
    "at_end_of_backward",
    "complete_adam",
    "fused_kernels",
    "fused_settings",
    "group_env",
    "group_timeout",
    "in_backward_pass",
    "is_fwd_grad_enabled",
    "lookups_of",
    "mark_updated_in_backward",
    "move",
    "on_weight_gradient",
    "place_globally",
    "scale_learning_rate",
    "set_output_of_empty",
    "settings_on_parameters",
    "tables_on_meta",
    "tree_flatten",
    "tree_unflatten",
]

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
# False in the forward of a torch.autograd.Function and under inference_mode, but True under no_grad.
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled


class PipelinedModule(ShardedEmbeddingModule[Any, Any, Any, Any]):
    """A sharded module whose id exchange TorchRec's train pipelines can start one batch ahead.

    The pipelines read ``_has_uninitialized_input_dist`` and iterate over ``_input_dists``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_uninitialized_input_dist = True
        self.id_exchanges: list[Any] = self._input_dists
        """Holds the module that sends ids; empty before the first batch."""

    def set_id_exchange(self, exchange: nn.Module) -> None:
        """Installs the id exchange once the batch's features are known."""
        self.id_exchanges.append(exchange)
        self._has_uninitialized_input_dist = False

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this module only: DMP's data parallelism must not find the data-parallel modules inside."""
        yield prefix, self


class OpenShardedEBC(ShardedEmbeddingBagCollection):
    """TorchRec's ``ShardedEmbeddingBagCollection`` with public names for the parts that a subclass reads or changes.

    It can also load column shards of unequal widths: TorchRec's hook views each with the width of the first.
    """

    @property
    def tables_by_lookup(self) -> list[tuple[str, list[Any]]]:
        """The sharding scheme of each lookup, and the tables that it reads on this rank, in the lookup's order."""
        groups = [sharding._grouped_embedding_configs for sharding in self._embedding_shardings]
        tables = [[table for group in of_lookup for table in group.embedding_tables] for of_lookup in groups]
        return list(zip(self._sharding_types, tables, strict=True))

    @property
    def output_dists(self) -> list[nn.Module]:
        """TorchRec's output exchange of each lookup; a subclass may replace entries."""
        return self._output_dists

    @property
    def output_columns(self) -> list[tuple[str, int]]:
        """Name and width of each output embedding, from left to right."""
        return list(zip(self._embedding_names, self._embedding_dims, strict=True))

    def leave_out_mean_pooling(self) -> None:
        """Stops TorchRec from dividing embeddings for mean pooling."""
        self._has_mean_pooling_callback = False

    @staticmethod
    def _pre_load_state_dict_hook(self: OpenShardedEBC, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Static, because TorchRec registers it as a function that takes the module.
        taken = {}
        for key in [f"{prefix}embedding_bags.{name}.weight" for name in self.embedding_bags]:
            if isinstance(state_dict.get(key), ShardedTensor):
                shards = [shard.tensor for shard in state_dict.pop(key).local_shards()]
                # A rank's shards of a table are equally wide, and stacked in one parameter.
                taken[key] = torch.cat(shards) if len(shards) > 1 else shards[0] if shards else torch.empty(0)
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *rest)
        state_dict.update(taken)


class OpenShardedEC(ShardedEmbeddingCollection):
    """TorchRec's ``ShardedEmbeddingCollection``, extended to load state dicts that lack tables."""

    @staticmethod
    def _pre_load_state_dict_hook(self: OpenShardedEC, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        keys = {f"{prefix}embeddings.{name}.weight": name for name in self._model_parallel_name_to_sharded_tensor}
        # TorchRec's hook for bags skips missing keys; its hook for sequences fails.
        missing = {key: name for key, name in keys.items() if key not in state_dict}
        state_dict.update({key: self._model_parallel_name_to_sharded_tensor[name] for key, name in missing.items()})
        ShardedEmbeddingCollection._pre_load_state_dict_hook(self, state_dict, prefix, *rest)
        for key in missing:
            del state_dict[key]


def group_env(group: ProcessGroup) -> ShardingEnv:
    """Returns a TorchRec environment that shards over ``group``.

    ``ShardingEnv(...)`` itself would build a device mesh of ranks 0..size-1, even if the group has other ranks.
    """
    env = ShardingEnv.from_local(group.size(), group.rank())
    env.process_group = group
    return env


def group_timeout(group: ProcessGroup) -> timedelta:
    """Returns how long a collective of ``group`` waits for the other ranks before it fails."""
    devices: Any = group._device_types
    options = [group._get_backend(device).options for device in devices]
    # A backend that carries nothing has no options.
    return next((of_backend._timeout for of_backend in options if of_backend is not None), default_pg_timeout)


def place_globally(sharding: ParameterSharding, ranks: Sequence[int], devices: Sequence[str]) -> ParameterSharding:
    """Returns a copy of ``sharding`` whose shard placements name global ranks; its ``ranks`` stay group-local.

    ``ranks`` and ``devices`` hold the global rank and the device of each group rank, such as 5 and ``"cuda:1"``.
    """
    placed = copy.deepcopy(sharding)
    spec: Any = placed.sharding_spec
    for shard in spec.shards if spec is not None else ():  # a data-parallel table has none
        local = shard.placement.rank()
        shard.placement = torch.distributed._remote_device(f"rank:{ranks[local]}/{devices[local]}")
    return placed


def add_dense_hook(dmp: DistributedModelParallel, hook: Callable[[GradBucket], Any]) -> None:
    """Adds a DDP communication hook to the dense part of ``dmp``; does nothing if that part is not wrapped in DDP."""
    wrapped: Any = dmp._dmp_wrapped_module
    if isinstance(wrapped, DistributedDataParallel):
        # DDP checks annotations, which are strings in this file; a lambda has none.
        wrapped.register_comm_hook(hook, lambda state, bucket: state(bucket))


def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Calls ``callback`` at the end of the running backward pass, once every gradient is computed."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def in_backward_pass() -> bool:
    """Returns whether autograd is running a backward pass on this thread, whichever code started it."""
    return torch._C._current_graph_task_id() != -1


def mark_updated_in_backward(parameter: Tensor, optimizer: Any) -> None:
    """Marks a parameter that ``optimizer`` updates in the backward pass; ``in_backward_optimizer_filter`` skips it."""
    parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]


def lookups_of(module: Any) -> list[Any]:
    """Returns the list of this rank's lookups if ``module`` is a sharded collection of TorchRec, else an empty list."""
    is_sharded = isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
    return module._lookups if is_sharded else []


def set_output_of_empty(lookups: Sequence[Any], dtype: torch.dtype) -> None:
    """Sets the dtype of the empty output of lookups without tables: all ranks must send the same dtype."""
    for lookup in lookups:
        if hasattr(lookup, "_dummy_embs_tensor"):
            lookup._dummy_embs_tensor = torch.empty_like(lookup._dummy_embs_tensor, dtype=dtype, requires_grad=True)


def fused_kernels(lookup: Any) -> dict[str, Any]:
    """Returns FBGEMM's kernel for each table of a fused lookup, by table name; tables may share a kernel."""
    return {table.name: kernel.emb_module for kernel in lookup._emb_modules for table in kernel.config.embedding_tables}


def fused_settings(parameter: Tensor, fused_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fused-optimizer settings of a table: ``fused_params`` of its sharder, overridden by the parameter's.

    ``apply_optimizer_in_backward`` stores the optimizer's class and arguments on the unsharded module's parameter.
    """
    classes, arguments = (getattr(parameter, f"_optimizer_{part}", []) for part in ("classes", "kwargs"))
    settings = dict(fused_params or {})
    for kind, kwargs in zip(classes, arguments, strict=True):
        # PyTorch's name of the learning rate overrides FBGEMM's, as in TorchRec.
        rate = {"learning_rate": kwargs["lr"]} if "lr" in kwargs else {}
        others = {key: value for key, value in kwargs.items() if key != "lr"}
        settings |= {"optimizer": optimizer_type_to_emb_opt_type(kind), **others, **rate}
    return settings


def complete_adam(optimizer: Any) -> None:
    """Gives Adam's states the names that data-parallel tables use, and adds its step count, which TorchRec omits."""
    for states in optimizer.state.values():
        for key in list(states):
            table, _, state = key.rpartition(".")
            if state == "exp_avg_sq":
                states[f"{table}.momentum2"] = states.pop(key)
            if state in ("exp_avg_sq", "iter"):
                # The tensor that the kernel counts in; it reads its buffer ``iter`` only while this is 0.
                states[f"{table}.iter"] = optimizer._emb_module.iter_cpu.view(())


def on_weight_gradient(lookup: Any, hook: Callable[[Tensor], None]) -> None:
    """Calls ``hook`` in backward passes with weights of fused kernels; ``grad`` is None if they were only looked up."""
    for kernel in set(fused_kernels(lookup).values()):
        for parameter in filter(Tensor.numel, kernel.parameters()):
            parameter.register_post_accumulate_grad_hook(hook)


def scale_learning_rate(optimizer: Any, factor: float) -> None:
    """Divides the rates in ``param_groups`` by ``factor``; the kernel multiplies each rate it gets by ``factor``."""
    kernel = optimizer._emb_module
    for group in optimizer.param_groups:
        group["lr"] /= factor
    # Replaced on this kernel only: TorchRec's optimizer passes the rate to its kernel before every update.
    kernel.set_learning_rate = lambda rate: type(kernel).set_learning_rate(kernel, rate * factor)


@contextmanager
def settings_on_parameters(settings: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> Iterator[None]:
    """Context manager that sets fused-optimizer settings on table weights, as ``apply_optimizer_in_backward`` does.

    TorchRec prefers a weight's settings to the sharder's, so tables can differ. Restores earlier settings at the end.
    """
    names = ("_optimizer_classes", "_optimizer_kwargs")
    before = [{name: vars(weight)[name] for name in names if name in vars(weight)} for weight, _ in settings]
    for weight, of_table in settings:
        weight._optimizer_classes, weight._optimizer_kwargs = [None], [of_table]  # type: ignore[attr-defined]
    log = logging.getLogger("torchrec.distributed.utils")
    was_disabled, log.disabled = log.disabled, True  # it warns about every data-parallel table
    try:
        yield
    finally:
        log.disabled = was_disabled
        # Only these two: TorchRec sets further attributes in the block, which must stay.
        for (weight, _), attributes in zip(settings, before, strict=True):
            for name in names:
                delattr(weight, name)
            vars(weight).update(attributes)


@contextmanager
def tables_on_meta() -> Iterator[None]:
    """Context manager in which TorchRec's collections create their tables on the meta device and ignore ``device``."""
    before = {kind: kind.__init__ for kind in (EmbeddingBagCollection, EmbeddingCollection)}

    def on_meta(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def start(*args: Any, **kwargs: Any) -> None:
            bound = signature(init).bind(*args, **kwargs)
            bound.arguments["device"] = torch.device("meta")
            init(*bound.args, **bound.kwargs)

        return start

    try:
        for kind, init in before.items():
            kind.__init__ = on_meta(init)
        yield
    finally:
        for kind, init in before.items():
            kind.__init__ = init


def move(module: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers of a module to a device, in place, except those on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Raises `RuntimeError` if ``condition``, a boolean scalar tensor, is false; ``torch.export`` keeps the check."""
    torch.ops.aten._assert_async.msg(condition, message)
