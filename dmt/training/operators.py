"""`count_operators`: every operator that a model runs in a training step, with its FLOPs and the bytes it moves.

The model is built on the meta device (`dmt.models.complexity`) and runs forward and backward at two batch sizes: what
grows with the batch belongs to samples, the rest, above all weights and their gradients, to each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dmt.errors import InputError
from dmt.models.complexity import MetaTables, meta_batch, tower_modules
from dmt.simulator.steps import Operator, PartWork

__all__ = ["ModelWork", "count_operators", "operators_of"]

_SIZES = (2, 4)  # samples


class ModelWork(NamedTuple):
    """Operators of a training step by part of the model; tables count nothing."""

    towers: tuple[PartWork, ...]
    """Operators of each tower module; none in a flat model."""
    dense_arch: PartWork
    """Operators of the bottom MLP, which needs no embeddings; nothing in a model that names no part so."""
    rest: PartWork


def count_operators(model: nn.Module, dense_in_features: int) -> ModelWork:
    """Counts the parts of a model on the meta device whose tables are `MetaTables` or `MetaTowers`.

    Example:
        >>> from dmt.models.complexity import MetaTables
        >>> from dmt.models import DLRM, ModelOptions, criteo_1tb_tables
        >>> model = DLRM(tables=criteo_1tb_tables(8), dense_in_features=3, make_sparse_arch=MetaTables,
        ...     options=ModelOptions(dense_arch_layer_sizes=(6,), over_arch_layer_sizes=(4, 1), device="meta"))
        >>> work = count_operators(model, 3)
        >>> sum(one.flops for one in work.dense_arch.forward)  # 3 x 6 and 6 x 8 multiply-accumulates
        132.0
    """
    few, more = (_count(model, dense_in_features, size) for size in _SIZES)
    found = [
        PartWork(forward=_per_sample(small[0], large[0]), backward=_per_sample(small[1], large[1]))
        for small, large in zip(few, more, strict=True)
    ]
    *towers, dense_arch, rest = (
        part._replace(weight_bytes=sum(p.nbytes for p in own)) for part, own in zip(found, _weights(model), strict=True)
    )
    return ModelWork(tuple(towers), dense_arch, rest)


def operators_of(run: Callable[[], Any]) -> int:
    """The number of operators that compute or copy something in a call."""
    with _Counter() as counter:
        run()
    return len(counter.found)


def _weights(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    parts = [*tower_modules(model), getattr(model, "dense_arch", None) or nn.Module()]
    tables = [module for module in model.modules() if isinstance(module, MetaTables)]
    others = {id(parameter) for module in (*parts, *tables) for parameter in module.parameters()}
    yield from (list(part.parameters()) for part in parts)
    yield [parameter for parameter in model.parameters() if id(parameter) not in others]


_Counted = list[tuple[float, float]]  # FLOPs and bytes of each operator


def _count(model: nn.Module, dense_in_features: int, size: int) -> list[tuple[_Counted, _Counted]]:
    """Operators forward and backward of each tower module, of the bottom MLP and of the rest, at a batch size."""
    towers = dict.fromkeys(tower_modules(model))
    # Of hundreds of towers most are alike.
    first = {_shape(tower): tower for tower in reversed(towers)}
    parts = {tower: _Part(tower) for tower in first.values()}
    dense_arch = _Part(getattr(model, "dense_arch", None) or nn.Module())
    with ExitStack() as stack:
        rest = stack.enter_context(_Counter())
        for part in (*parts.values(), dense_arch):
            stack.enter_context(part.apart(rest))
        for module in model.modules():
            tower: Any = getattr(module, "interaction", None)
            if tower in towers and tower not in parts:
                stack.enter_context(_replaced(module, size, tower.out_features))
            elif isinstance(module, MetaTables):
                stack.enter_context(_without(module, rest))
        output = model(*meta_batch(dense_in_features, size))
    forward, rest.found = rest.found, []
    with rest:
        # Part by part: here the ways back end where another part begins.
        _backward(output)
    counted = {tower: part.counted() for tower, part in parts.items()}
    return [*(counted[first[_shape(tower)]] for tower in towers), dense_arch.counted(), (forward, rest.found)]


def _shape(tower: Any) -> tuple[Any, ...]:
    """Towers of equal shape run the same operators."""
    return type(tower), tower.in_features, tower.out_features, *(parameter.shape for parameter in tower.parameters())


@contextmanager
def _replaced(module: Any, size: int, out_features: int) -> Iterator[None]:
    """While it is on, a tower, tables and all, only gives an output of the right size."""
    module.forward = lambda *_: torch.empty(size, out_features, device="meta", requires_grad=True)
    yield
    del module.forward


class _Part:
    """A module whose operators are counted by themselves, and whose gradient is computed by itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: _Counted = []
        self._outputs: list[Any] = []

    @contextmanager
    def apart(self, rest: _Counter) -> Iterator[None]:
        """While it is on, the operators of the module are not counted in ``rest``."""
        found: list[_Counted] = []

        def before(_: nn.Module, args: Any) -> Any:
            found.append(rest.found)
            rest.found = self._forward
            return _leaf(args)

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            rest.found = found.pop()
            self._outputs.append(output)
            return _leaf(output)

        handles = [self._module.register_forward_pre_hook(before), self._module.register_forward_hook(after)]
        yield
        for handle in handles:
            handle.remove()

    def counted(self) -> tuple[_Counted, _Counted]:
        with _Counter() as counter:
            for output in self._outputs:
                _backward(output)
        return self._forward, counter.found


@contextmanager
def _without(module: nn.Module, rest: _Counter) -> Iterator[None]:
    """While it is on, a module is not counted, and gradients end at its output."""
    part = _Part(module)
    with part.apart(rest):
        yield


def _leaf(value: Any) -> Any:
    """Returns the same values, from which gradients go no further back."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _backward(output: Any) -> None:
    """Computes the gradients of all that an output was made of, and keeps none."""
    ends = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
    leaves = list({id(leaf): leaf for tensor in ends for leaf in _leaves(tensor.grad_fn)}.values())
    if ends and leaves:
        # Not backward(): it would add to .grad and set off optimizers that are fused into the backward pass.
        torch.autograd.grad(ends, leaves, [torch.empty_like(tensor) for tensor in ends], allow_unused=True)


def _leaves(node: Any) -> list[Tensor]:
    seen, open_nodes, found = {node}, [node], []
    while open_nodes:
        for parent, _ in open_nodes.pop().next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                open_nodes.append(parent)
                if hasattr(parent, "variable"):
                    found.append(parent.variable)
    return found


class _Counter(TorchDispatchMode):
    """Takes down every operator that computes or copies something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: _Counted = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and takes it down."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if not func.is_view and "empty" not in packet.__name__:
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.found.append((float(flops), float(sum(tensor.nbytes for tensor in tensors))))
        return result


def _per_sample(few: _Counted, more: _Counted) -> tuple[Operator, ...]:
    if len(few) != len(more):
        raise InputError(
            f"The model runs {len(few)} operators for {_SIZES[0]} samples and {len(more)} for {_SIZES[1]}, so that a "
            "step cannot be counted. Write its forward (model.factory) without a loop over the samples."
        )
    small, large = _SIZES
    found = []
    for (flops, size), (_, larger) in zip(few, more, strict=True):
        slope = (larger - size) / (large - small)
        found.append(Operator(flops / small, slope, max(size - small * slope, 0.0)))
    return tuple(found)
