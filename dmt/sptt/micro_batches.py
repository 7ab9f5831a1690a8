"""`MicroBatches`: the exchange of one micro-batch runs while the dense part of the model computes another.

A batch crosses the slow links twice, as tower outputs and as their gradients, and the dense part of the model computes
in between: links and processors wait for each other. Cut into micro-batches (the term of GPipe, arXiv 1811.06965), the
outputs of all are sent at once, and the dense part computes each as soon as it has arrived; in the backward pass the
gradients of one are on their way while those of the next are computed. Unlike gradient accumulation nothing changes in
what is computed: one lookup, one loss, one backward pass, one update of the tables and of the dense part for the batch.

Legend: B the local batch, K micro-batches, T peers (one rank of each tower).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt.collectives import ranks_that_differ
from dmt.errors import InputError
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.parts import ResultInParts, micro_batch_sizes

__all__ = ["MicroBatches"]


class MicroBatches:
    """Makes a sharded model run in micro-batches; training loop and pipelines stay as they are.

    The module must map samples to samples: every tensor it is given or returns has one row for each sample, and no row
    depends on another (no batch norm). So it is the model without its loss. Tensors among its arguments are cut, also
    inside lists, tuples, dicts and dataclasses; the ``KeyedJaggedTensor`` is handed on whole, to the towers, and so is
    what is no tensor, or a single number. Collective: every rank makes one.

    Results are those without micro-batches but for rounding: a matrix product of fewer rows may round differently, and
    gradients of the dense part are summed micro-batch by micro-batch. INT8 exchanges share scales among other numbers.

    Args:
        module: what ``DistributedModelParallel`` made of the model, or the module inside whose forward is to be run in
            micro-batches, such as ``model.module.model`` of a task that adds the loss.
        num_micro_batches: K; the same on every rank. Any batch size goes, also one smaller than K.

    Raises:
        InputError: K is not positive, or not the same on all ranks; the module has no tower sharder's module inside, or
            one of TorchRec's that would run K times, or one with the global id route; it runs in micro-batches already.

    Example::

        model = DistributedModelParallel(task, plan=plan, sharders=[TowerCollectionSharder(mesh)])
        MicroBatches(model.module.model, num_micro_batches=4)
        loss, _ = model(batch)
    """

    def __init__(self, module: nn.Module, *, num_micro_batches: int) -> None:
        if isinstance(module, DistributedModelParallel):
            module = module.module
        if num_micro_batches < 1:
            raise InputError(f"num_micro_batches={num_micro_batches} must be at least 1.")
        if isinstance(vars(module).get("forward"), MicroBatches):
            raise InputError(f"This {type(module).__name__} runs in micro-batches already; detach() the first ones.")
        self._module = module
        self._num = num_micro_batches
        self._sparse = [part for part in module.modules() if isinstance(part, SPTTModule)]
        others = [type(p).__name__ for p in module.modules() if isinstance(p, ShardedModule) and p not in self._sparse]
        if others or not self._sparse:
            found = f"holds a {others[0]}, which would look up and send K times" if others else "has none inside"
            raise InputError(
                f"MicroBatches needs a model whose sharded modules are all from dmt's sharders, after "
                f"DistributedModelParallel; this {type(module).__name__} {found}."
            )
        if ranks := ranks_that_differ(num_micro_batches, self._sparse[0].mesh.global_group):
            raise InputError(
                f"num_micro_batches={num_micro_batches} on this rank, but ranks {ranks} were given another than "
                "the first rank; make them equal."
            )
        for part in self._sparse:
            part.check_micro_batches(num_micro_batches)
        for part in self._sparse:
            part.set_micro_batches(num_micro_batches)
        self._replaced = _ReplacedForward(module, self)
        self._forward: Callable[..., Any] = self._replaced.forward

    def detach(self) -> None:
        """Takes the module back to whole batches, and to the forward that it had.

        Raises:
            InputError: somebody has replaced the module's forward since.
        """
        if vars(self._module).get("forward") is not self:
            raise InputError(
                f"The forward of this {type(self._module).__name__} is no longer that of these MicroBatches: they are "
                "detached already, or another has been put over them, which must be taken off first."
            )
        self._replaced.restore()
        for part in self._sparse:
            part.set_micro_batches(1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, micro-batch by micro-batch.

        Raises:
            InputError: no ``KeyedJaggedTensor`` among the arguments, an argument or output that has not one row for
                each sample, or a sharded module that is not called once.
        """
        batch_sizes = {ids.stride() for ids in _leaves((args, kwargs)) if isinstance(ids, KeyedJaggedTensor)}
        is_traced = any(isinstance(leaf, torch.fx.Proxy) for leaf in _leaves((args, kwargs)))  # by a train pipeline
        if is_traced or self._num == 1:
            return self._forward(*args, **kwargs)
        if len(batch_sizes) != 1:
            raise InputError(
                f"MicroBatches reads the batch size off the KeyedJaggedTensor that {type(self._module).__name__} is "
                f"given; its arguments hold {len(batch_sizes)} different ones. Put them around the module that is "
                "given the sparse features."
            )
        sizes = micro_batch_sizes(batch_sizes.pop(), self._num)
        parts = _split((args, kwargs), sizes, type(self._module).__name__)
        servers = [_Server(part) for part in self._sparse]
        try:
            outputs = []
            for number, (own_args, own_kwargs) in enumerate(parts, start=1):
                outputs.append(self._forward(*own_args, **own_kwargs))
                for server in servers:
                    server.check_calls(number)
        finally:
            for server in servers:
                server.remove()
        return _join(outputs, sizes, type(self._module).__name__)


class _ReplacedForward:
    """A forward put on a module, and the one that was there."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._own = vars(module).get("forward")
        self.forward: Callable[..., Any] = module.forward
        module.forward = forward

    def restore(self) -> None:
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own


class _Server:
    """Stands in for a sharded module's forward: exchanges at the first call, hands out one after another."""

    def __init__(self, module: SPTTModule) -> None:
        self._module = module
        self._result: ResultInParts | None = None
        self._calls = 0
        self._replaced = _ReplacedForward(module, self)  # of a train pipeline, perhaps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._result is None:
            self._result = self._replaced.forward(*args, **kwargs)
            assert isinstance(self._result, ResultInParts), "the module was told to send in parts"
        self._calls += 1
        if self._calls > self._result.num_parts:
            raise self._wrong_calls(self._result.num_parts)
        return self._result.part(self._calls - 1)

    def check_calls(self, expected: int) -> None:
        if self._calls != expected:
            raise self._wrong_calls(expected)

    def remove(self) -> None:
        self._replaced.restore()

    def _wrong_calls(self, expected: int) -> InputError:
        return InputError(
            f"The {type(self._module).__name__} inside was called {self._calls} times in {expected} micro-batches; a "
            "module that runs in micro-batches must call its sharded modules exactly once in each."
        )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in fields(value) for leaf in _leaves(getattr(value, field.name))]
    return [value]


def _split(value: Any, sizes: Sequence[int], owner: str) -> list[Any]:
    """The same structure for each micro-batch, with tensors cut."""
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape[0] != sum(sizes):
            # Handed on whole, it would be cut one day, in the batch that happens to have as many samples.
            raise InputError(
                f"{owner} is given a tensor of shape {list(value.shape)} with a batch of {sum(sizes)} samples; in "
                "micro-batches every tensor among its arguments must have one row for each. Keep others in the module."
            )
        return list(value.split(list(sizes)))
    if isinstance(value, dict):
        parts = {key: _split(part, sizes, owner) for key, part in value.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(len(sizes))]
    if isinstance(value, (list, tuple)):
        columns = [_split(part, sizes, owner) for part in value]
        make = type(value)._make if hasattr(value, "_make") else type(value)
        return [make(column[i] for column in columns) for i in range(len(sizes))]
    if is_dataclass(value) and not isinstance(value, type):
        by_field = {f.name: _split(getattr(value, f.name), sizes, owner) for f in fields(value) if f.init}
        return [replace(value, **{name: part[i] for name, part in by_field.items()}) for i in range(len(sizes))]
    return [value] * len(sizes)


def _join(outputs: Sequence[Any], sizes: Sequence[int], owner: str) -> Any:
    outputs = [output.wait() if isinstance(output, Awaitable) else output for output in outputs]
    first = outputs[0]
    if isinstance(first, KeyedTensor):
        values = _join([output.values() for output in outputs], sizes, owner)
        return KeyedTensor(first.keys(), first.length_per_key(), values)
    if isinstance(first, Tensor):
        shapes = [list(output.shape) for output in outputs]
        if any(shape[:1] != [size] for shape, size in zip(shapes, sizes, strict=True)):
            raise InputError(
                f"{owner} returned tensors of shape {shapes} for micro-batches of {list(sizes)} samples; it must "
                "return one row for each. Put MicroBatches around the model inside that computes no loss."
            )
        return torch.cat(list(outputs))
    if all(output is None for output in outputs):
        return None
    kinds = {(type(output), tuple(output) if isinstance(output, dict) else None) for output in outputs}
    if len(kinds) > 1:
        raise InputError(
            f"{owner} returned something else for one micro-batch than for another ({first!r:.60} for the first); it "
            "must return the same structure for each."
        )
    if isinstance(first, dict):
        return {key: _join([output[key] for output in outputs], sizes, owner) for key in first}
    if isinstance(first, (list, tuple)):
        make = type(first)._make if hasattr(first, "_make") else type(first)
        return make(_join(column, sizes, owner) for column in zip(*outputs, strict=True))
    raise InputError(
        f"{owner} returned a {type(first).__name__}, which cannot be put together from micro-batches; return tensors, "
        "or lists, tuples or dicts of them."
    )
