"""A GPU that is not there: `pretended_gpu` runs code for ``cuda:0`` on a CPU, and raises where a GPU would.

Tensors on it are CPU tensors, of which the storage has a mark. Each call of a function of torch carries the mark on,
and raises if it mixes devices. So a test without a GPU notices a tensor that was made on the wrong device.

There is one GPU. What C++ or another thread makes has no mark and mixes with both. Streams do nothing, NCCL is not
there, and FBGEMM's tables run their CPU kernels: what these do on a GPU is not tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import fbgemm_gpu.split_table_batched_embeddings_ops_training as fbgemm
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["GPU", "MixedDevicesError", "pretended_gpu"]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_ATTRIBUTES: Any = Tensor  # whose getters are functions of torch
# Setters, getters and copies may have tensors of both.
_MIX = ("__get__", "__set__", "copy_", "_has_compatible_shallow_copy_type")
# A GPU's tensor may be indexed by one on the CPU.
_INDEX = ("__getitem__", "__setitem__", "index_put_")


class MixedDevicesError(AssertionError):
    """Code mixes devices; on a GPU it would fail."""


def _device(given: torch.device | str | int) -> torch.device:
    return GPU if isinstance(given, int) or str(given).startswith("cuda") else torch.device(given)


def _mark(tensor: Tensor) -> torch.device | None:
    """Returns the device that a tensor is on: pretended, or None if that is not known."""
    if tensor.is_meta or isinstance(tensor, ShardedTensor | DTensor):
        return None
    return getattr(tensor.untyped_storage(), "pretended", None)


def _marked(tensor: Tensor, device: torch.device | None) -> Tensor:
    if device is not None and not tensor.is_meta and not isinstance(tensor, ShardedTensor | DTensor):
        tensor.untyped_storage().pretended = device  # type: ignore[attr-defined]
    return tensor


def _moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    return tensor if _mark(tensor) == device and not copy else _marked(tensor.clone(), device)


def _select(*, values: Tensor, lengths: Tensor, indices: Tensor, weights: Tensor | None, **_: Any) -> list[Tensor]:
    """Does for TorchRec what FBGEMM's ``keyed_jagged_index_select_dim1`` does on GPUs; it has no kernel for CPUs."""
    chosen, picked, of_picked = torch.ops.fbgemm.permute_1D_sparse_data(indices.int(), lengths, values, weights)
    return [picked, chosen, *([] if of_picked is None else [of_picked])]


class _PretendedGPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == _ATTRIBUTES.device.__get__:
            return args[0].device if args[0].is_meta else _mark(args[0]) or GPU
        if func == _ATTRIBUTES.is_cuda.__get__:
            return not args[0].is_meta and _mark(args[0]) != CPU
        if func == _ATTRIBUTES.is_cpu.__get__:
            return not args[0].is_meta and _mark(args[0]) == CPU
        if func == _ATTRIBUTES.grad.__get__:
            gradient = func(*args)
            return None if gradient is None else _marked(gradient, _mark(args[0]))
        if func in (Tensor.numpy, Tensor.__array__) and _mark(args[0]) == GPU:
            raise MixedDevicesError(f"{name} of a tensor on a GPU")
        if func is Tensor.pin_memory:
            return _moved(args[0], CPU, copy=True)
        if func in (Tensor.cpu, Tensor.cuda):
            return _moved(args[0], CPU if func is Tensor.cpu else GPU)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        return self._checked(func, name, args, kwargs)

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """Changes data type and device; a tensor among the arguments gives both."""
        for given in (*args, kwargs.get("dtype"), kwargs.get("device")):
            if isinstance(given, torch.dtype | Tensor):
                dtype = given if isinstance(given, torch.dtype) else given.dtype
                changed = tensor.to(dtype)
                tensor = changed if changed is tensor else _marked(changed, _mark(tensor))
            if isinstance(given, torch.device | str | int | Tensor) and not isinstance(given, bool):
                device = (_mark(given) or GPU) if isinstance(given, Tensor) else _device(given)
                tensor = tensor.to(device) if device.type == "meta" else _moved(tensor, device)
        return tensor.clone() if copy else tensor

    def _checked(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marks = {device for tensor in tensors if (device := _mark(tensor)) is not None}
        on_cpu = [tensor for tensor in tensors if _mark(tensor) == CPU and tensor.dim() > 0]
        may_mix = name in _MIX or "split_embedding" in name or (name in _INDEX and _mark(args[0]) == GPU)
        if GPU in marks and on_cpu and not may_mix:
            shapes = [(tuple(tensor.shape), str(_mark(tensor))) for tensor in tensors]
            raise MixedDevicesError(f"{name} mixes devices: {shapes}")
        device = GPU if GPU in marks else CPU if marks or not tensors else None
        if kwargs.get("device") is not None:
            device = _device(kwargs["device"])
            kwargs["device"] = CPU if device == GPU else device
        made = (_select if name == "keyed_jagged_index_select_dim1" else func)(*args, **kwargs)
        for leaf in tree_leaves(made) if name != "__set__" else ():
            if isinstance(leaf, Tensor) and _mark(leaf) is None:
                _marked(leaf, device)
        return made


def _on_gpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """Pretends in ``call`` too, which autograd calls in a backward pass, where no mode is active; marks gradients."""

    @functools.wraps(call)
    def run(*args: Any) -> Any:
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and _mark(leaf) is None:
                _marked(leaf, GPU)
        # A backward function may start another backward pass; a mode inside a mode would put new tensors on the CPU.
        with nullcontext() if torch._C._len_torch_function_stack() else _PretendedGPU():
            return call(*args)

    return run


def _in_backward_passes(stack: ExitStack) -> None:
    """Pretends in the backward passes of functions, hooks of tensors on the GPU, DDP's hooks and final callbacks."""
    function, engine = torch.autograd.function.BackwardCFunction, torch.autograd.Variable._execution_engine
    stack.enter_context(patch.object(function, "apply", _on_gpu(function.apply)))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = getattr(Tensor, name)
        hooked = lambda t, hook, register=register: register(t, hook if _mark(t) == CPU else _on_gpu(hook))  # noqa: E731
        stack.enter_context(patch.object(Tensor, name, hooked))
    communicate = DistributedDataParallel.register_comm_hook
    told = lambda model, state, hook: communicate(model, state, _on_gpu(hook))  # noqa: E731
    stack.enter_context(patch.object(DistributedDataParallel, "register_comm_hook", told))
    last = SimpleNamespace(run_backward=engine.run_backward, queue_callback=lambda c: engine.queue_callback(_on_gpu(c)))
    stack.enter_context(patch.object(torch.autograd.Variable, "_execution_engine", last))


@functools.wraps(fbgemm.SplitTableBatchedEmbeddingBagsCodegen.__init__)
def _on_cpu(tables: Any, embedding_specs: Any, *args: Any, **kwargs: Any) -> None:
    """Makes FBGEMM's tables on the CPU, and marks them."""
    make = _on_cpu.__wrapped__
    specs = [(*spec[:2], EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU) for spec in embedding_specs]
    device = kwargs.get("device")
    make(tables, specs, *args, **kwargs | {"device": device if device == torch.device("meta") else CPU})
    for tensor in (*tables.parameters(), *tables.buffers()):
        _marked(tensor, GPU)
    tables.current_device = GPU


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Makes code believe, for a ``with`` block, that it runs on a machine with a GPU."""
    values: dict[str, Any] = {"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0}
    values |= {"current_stream": MagicMock(), "default_stream": MagicMock(), "max_memory_allocated": 1}
    values |= {"get_device_properties": SimpleNamespace(total_memory=2**36), "get_rng_state": torch.zeros(16).byte()}
    found: Any = {name: lambda *_, value=value: value for name, value in values.items()}
    found |= {name: MagicMock() for name in ("set_device", "set_rng_state", "synchronize", "Event", "Stream")}
    found |= {name: MagicMock() for name in ("stream", "device", "manual_seed_all")}
    from_numpy, make_future = torch.from_numpy, torch.futures.Future.__init__
    with ExitStack() as stack:
        for change in (
            patch.multiple(torch.cuda, **found),
            patch.object(torch.accelerator, "current_stream", lambda *_: SimpleNamespace(is_capturing=lambda: False)),
            patch.object(torch, "get_device_module", lambda _=None: torch.cuda),
            patch.object(torch, "from_numpy", lambda array: _marked(from_numpy(array), CPU)),  # in threads, too
            patch.object(torch.futures.Future, "__init__", lambda future, **_: make_future(future)),
            patch.object(Tensor, "record_stream", lambda *_: None),
            patch.object(fbgemm.SplitTableBatchedEmbeddingBagsCodegen, "__init__", _on_cpu),
        ):
            stack.enter_context(change)
        _in_backward_passes(stack)
        stack.enter_context(_PretendedGPU())
        yield
