"""`run_in_micro_batches`: the exchange of one micro-batch runs while the dense part of the model computes another.

A batch crosses the slow links twice, as tower outputs and as gradients, and the dense part computes in between: links
and processors wait for each other. So the batch is cut into micro-batches (GPipe, arXiv 1811.06965). While the outputs
of one micro-batch are in flight, the dense part computes another; in the backward pass the gradients of one are in
flight while those of the next are computed. Unlike gradient accumulation, the whole batch still has one id exchange,
lookup, loss, backward pass and update.

Between lookup and result (`dmt.sptt.dataflow`), `run_towers` and `exchange_outputs` run once for each micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt._torchrec import tree_flatten, tree_unflatten
from dmt.collectives import check_agreement, gather_objects
from dmt.errors import InputError
from dmt.sptt.dataflow import SPTTContext, SPTTModule
from dmt.sptt.group_sharded import Embeddings, join_rows, split_rows
from dmt.sptt.peer_exchange import Pending, Rows
from dmt.sptt.rows import part_sizes, wrap

__all__ = ["MicroBatches", "ResultInParts", "run_in_micro_batches"]


def run_in_micro_batches(module: nn.Module, num_micro_batches: int = 4) -> MicroBatches:
    """Makes a sharded model run in micro-batches; the training loop and train pipelines need no change.

    The module must map samples to samples, so it is the model without its loss: each tensor that it takes or returns,
    including those in lists, tuples and dicts, has one row per sample, and no row depends on other samples (no batch
    norm, no pairwise scores). A ``KeyedJaggedTensor``, scalar tensors, numbers, strings and None are passed unchanged;
    other objects, such as a dataclass of tensors, are refused. Results equal those without micro-batches up to
    rounding. Collective: every rank calls it.

    Args:
        module: the ``DistributedModelParallel`` of the model, or the module inside it whose forward is to run in
            micro-batches, such as ``model.module.model`` of a task that adds the loss.
        num_micro_batches: K, the same on every rank. Any batch size works; if the batch has fewer than K samples, some
            calls of the module get none.

    Returns:
        A handle; its ``detach()`` makes the module run on whole batches again.

    Raises:
        InputError: K is below 1 or differs between ranks; the module has no part sharded by a tower sharder, or has a
            part sharded by TorchRec, which would run K times; it has batch norm; or it already runs in micro-batches.

    Example::

        model = DistributedModelParallel(task, plan=plan, sharders=[TowerCollectionSharder(mesh)])
        run_in_micro_batches(model.module.model, num_micro_batches=4)
        loss, _ = model(batch)
    """
    return MicroBatches(module, num_micro_batches=num_micro_batches)


class MicroBatches:
    """Handle of a module that runs in micro-batches; made by `run_in_micro_batches`, which explains the arguments."""

    def __init__(self, module: nn.Module, *, num_micro_batches: int) -> None:
        if isinstance(module, DistributedModelParallel):
            module = module.module
        self._module = module
        self._num = num_micro_batches
        self._has_checked_pairs = False
        self._sparse = [part for part in module.modules() if isinstance(part, SPTTModule)]
        self._check()
        self._forward: Callable[..., Any] = module.forward
        self._restore = [_replace(module, "forward", self)]
        for part in self._sparse if num_micro_batches > 1 else []:
            run = functools.partial(_run_in_parts, part, num_micro_batches)
            self._restore.append(_replace(part, "compute_and_output_dist", run))
            wrap(part, num_parts=num_micro_batches)

    def detach(self) -> None:
        """Makes the module run on whole batches again, with its former forward method.

        Raises `InputError` if the handle is already detached, or the module's forward has been replaced since.
        """
        if vars(self._module).get("forward") is not self:
            raise InputError(
                f"MicroBatches.detach: this handle no longer wraps the forward of its {type(self._module).__name__}: "
                "it is already detached, or another wrapper was put over it. Remove that wrapper first."
            )
        for restore in self._restore:
            restore()
        for part in self._sparse:
            wrap(part, num_parts=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward micro-batch by micro-batch.

        Raises `InputError` if the arguments contain no ``KeyedJaggedTensor``, or some of different batch sizes; an
        argument or output has an unsupported type or lacks one row per sample; an output depends on other samples; or
        the forward does not call each sharded module once per micro-batch.
        """
        leaves, _ = _leaves((args, kwargs))
        batch_sizes = {leaf.stride() for leaf in leaves if isinstance(leaf, KeyedJaggedTensor)}
        is_traced = any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves)  # by a train pipeline
        if is_traced or self._num == 1:
            return self._forward(*args, **kwargs)
        if len(batch_sizes) != 1:
            found = f"their batch sizes are {sorted(batch_sizes)}. Give all of them one batch size."
            nothing = "there are none. Call run_in_micro_batches with the module that receives the sparse features."
            raise InputError(
                f"In micro-batches, the arguments of {type(self._module).__name__} must contain KeyedJaggedTensors, "
                f"all of one batch size, but {found if batch_sizes else nothing}"
            )
        sizes = part_sizes(batch_sizes.pop(), self._num)
        owner = type(self._module).__name__
        parts = _split((args, kwargs), sizes, owner)
        # One backward pass covers the forward passes of all parts, so every update happens once.
        outputs = []
        with ExitStack() as stack:
            served = [stack.enter_context(_served_in_parts(part)) for part in self._sparse]
            for number, (part_args, part_kwargs) in enumerate(parts, start=1):
                outputs.append(self._forward(*part_args, **part_kwargs))
                if any(len(results) != number for results in served):
                    raise InputError(
                        f"{owner} called its sharded modules {list(map(len, served))} times in the first {number} of "
                        f"{self._num} micro-batches. Its forward must call each exactly once per micro-batch."
                    )
        if len(set(sizes)) == 1 and not self._has_checked_pairs:
            self._look_for_pairs(outputs[0], [results[0].wait() for results in served], sizes[0])
        return _join(outputs, sizes, owner)

    def _look_for_pairs(self, output: Any, results: Sequence[Any], size: int) -> None:
        """Refuses pairwise scores of samples; their shape looks right if all micro-batches have ``size`` samples.

        A row of such scores has gradients with respect to the embeddings of other samples. These gradients are computed
        once, and only for outputs [size, size, ...].
        """
        leaves = [leaf.wait() if isinstance(leaf, Awaitable) else leaf for leaf in tree_flatten(output)[0]]
        rows = [leaf[0].flatten() for leaf in leaves if isinstance(leaf, Tensor) and [*leaf.shape[:2]] == [size, size]]
        columns = [result.values() if isinstance(result, KeyedTensor) else result for result in results]
        columns = [values for values in columns if isinstance(values, Tensor) and values.requires_grad]
        for row in rows if columns and size > 1 else ():
            if not row.requires_grad:
                continue
            self._has_checked_pairs = True
            # Weighted, because the plain sum of a softmax has no gradient.
            weights = torch.arange(1.0, len(row) + 1, device=row.device)
            gradients = torch.autograd.grad((row * weights).sum(), columns, retain_graph=True, allow_unused=True)
            if any(gradient is not None and gradient[1:].any() for gradient in gradients):
                raise InputError(
                    f"{type(self._module).__name__} returned a tensor [{size}, {size}] for a micro-batch of {size} "
                    "samples, and its rows depend on other samples. Call run_in_micro_batches with the inner model "
                    "that compares no samples."
                )

    def _check(self) -> None:
        owner, modules = type(self._module).__name__, self._module.modules()
        others = [type(m).__name__ for m in modules if isinstance(m, ShardedModule) and m not in self._sparse]
        if others or not self._sparse:
            fault = f"has a {others[0]}, which would send once per micro-batch" if others else "has no sharded module"
            raise InputError(
                f"run_in_micro_batches: this {owner} {fault}. Shard all its tables with dmt's sharders first."
            )
        runs_already = isinstance(vars(self._module).get("forward"), MicroBatches)
        # Checked first: if only one rank raised below, the others would wait for it.
        arguments = {"num_micro_batches": self._num, "already running in micro-batches": runs_already}
        check_agreement("run_in_micro_batches", arguments, self._sparse[0].mesh.global_group)
        if self._num < 1:
            raise InputError(f"run_in_micro_batches: num_micro_batches={self._num} must be at least 1.")
        if runs_already:
            raise InputError(f"This {owner} already runs in micro-batches; call detach() on its handle first.")
        parts = (part for root in (self._module, *(p.local_parts for p in self._sparse)) for part in root.modules())
        norm = next((type(part).__name__ for part in parts if isinstance(part, _BatchNorm)), "")
        # Of all ranks: each holds the modules of its own tower.
        norm = max(gather_objects(norm, self._sparse[0].mesh.global_group))
        if norm and self._num > 1:
            raise InputError(f"{owner} holds a {norm}, which would normalize each micro-batch alone. Use LayerNorm.")


def _replace(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one module; returns a function that restores the former one."""
    before = vars(module).get(name)
    setattr(module, name, method)

    def restore() -> None:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)

    return restore


def _run_in_parts(module: SPTTModule, num: int, ctx: SPTTContext, dist_input: KJTList) -> ResultInParts:
    """Looks up once, then runs the tower and step f for each micro-batch; replaces ``compute_and_output_dist``."""
    embeddings_PN = module.look_up(ctx)
    if ctx.code is None:
        # Every sample is a row, and rows arrive peer by peer. Peers cut the rows that a rank sent as the rank cuts its
        # samples, so no sizes are exchanged.
        by_peer = [part_sizes(of_peer[0], num) for of_peer in ctx.parts[0].arrived]
        own_sizes = by_peer[module.mesh.tower]
        ctx.parts = [Rows([[sizes[k]] for sizes in by_peer], [[own_sizes[k]]] * len(by_peer)) for k in range(num)]
        parts = [_part_by_part(of_collection, by_peer) for of_collection in embeddings_PN]
    else:
        sizes = [part.num_rows for part in ctx.parts]
        parts = [split_rows(of_collection, sizes) for of_collection in embeddings_PN]
    started = []
    for number, (part_PN, rows) in enumerate(zip(zip(*parts, strict=True), ctx.parts, strict=True)):
        # In flight while the tower computes the next micro-batch.
        started.append(module.exchange_outputs(ctx, module.run_towers(part_PN, rows), number))
    return ResultInParts(module.columns(ctx, started), module.finish)


def _part_by_part(embeddings_PN: Embeddings, by_peer: Sequence[Sequence[int]]) -> list[Embeddings]:
    """Groups rows by part, within a part peer by peer; ``by_peer[i][k]`` is the number of rows of peer i in part k.

    Example:
        >>> from torchrec import KeyedTensor
        >>> embeddings = KeyedTensor(["f"], [1], torch.arange(5.0).unsqueeze(1))
        >>> [part["f"].flatten().tolist() for part in _part_by_part(embeddings, [[1, 1], [2, 1]])]  # 0 1 | 2 3 4
        [[0.0, 2.0, 3.0], [1.0, 4.0]]
    """
    num = len(by_peer[0])
    blocks = split_rows(embeddings_PN, [size for sizes in by_peer for size in sizes])
    return [join_rows(blocks[k::num]) for k in range(num)]


@contextmanager
def _served_in_parts(module: SPTTModule) -> Iterator[list[Any]]:
    """Makes a sharded module exchange at its first call only, and return a part per call; yields the returned parts."""
    forward = module.forward  # maybe that of a train pipeline
    parts: list[Any] = []
    served: list[Any] = []

    def serve(*args: Any, **kwargs: Any) -> Any:
        # Every call gets the ids of the whole batch.
        if not parts:
            parts.extend(forward(*args, **kwargs).parts)
        # The caller counts the calls after each forward, and reports a call too many.
        served.append(parts[min(len(served), len(parts) - 1)])
        return served[-1]

    restore = _replace(module, "forward", serve)
    try:
        yield served
    finally:
        restore()


class ResultInParts(Pending):
    """The result of a batch in flight: as a whole [B, columns], or in `parts` [B of the micro-batch, columns]."""

    def __init__(self, exchanges: Sequence[Any], finish: Callable[[Tensor], Any]) -> None:
        def end(*started: Any) -> Any:
            columns = [columns.wait() for columns in started]
            return finish(columns[0] if len(columns) == 1 else torch.cat(columns))

        super().__init__(end, *exchanges)
        self.parts = [Pending(end, started) for started in exchanges]
        """Result of each micro-batch."""


def _leaves(value: Any) -> tuple[list[Any], Any]:
    """Returns the values inside nested lists, tuples and dicts, and their structure."""
    return tree_flatten(value, is_leaf=lambda part: not isinstance(part, list | tuple | dict))


def _split(value: Any, sizes: Sequence[int], owner: str) -> list[Any]:
    """Returns for each micro-batch the same structure, in which tensors have only the rows of that micro-batch."""
    leaves, structure = _leaves(value)
    columns: list[list[Any]] = []
    for leaf in leaves:
        # Only tensors are cut: the sharded module itself cuts the embeddings of the ids, others apply to all samples.
        if not isinstance(leaf, Tensor | KeyedJaggedTensor | bool | int | float | str | None):
            raise InputError(
                f"{owner} was called with a {type(leaf).__name__}, which cannot be cut into micro-batches. "
                "Pass tensors and a KeyedJaggedTensor, or lists, tuples or dicts of them."
            )
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            columns.append([leaf] * len(sizes))
            continue
        if leaf.shape[0] != sum(sizes):
            # Never passed whole: a batch with as many samples as the tensor has rows would still cut it.
            raise InputError(
                f"{owner} was called with a tensor of shape {list(leaf.shape)} for a batch of {sum(sizes)} samples; in "
                "micro-batches every tensor among its arguments must have one row per sample. Keep other tensors in "
                "the module."
            )
        columns.append(list(leaf.split(list(sizes))))
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(len(sizes))]


def _join(outputs: Sequence[Any], sizes: Sequence[int], owner: str) -> Any:
    """Joins the outputs of all micro-batches into one output of the same structure."""
    leaves, structures = zip(*(tree_flatten(output) for output in outputs), strict=True)
    kinds = {tuple(map(type, of_output)) for of_output in leaves}
    if len(kinds) > 1 or any(structure != structures[0] for structure in structures):
        raise InputError(
            f"{owner} returned different structures for different micro-batches ({outputs[0]!r:.60} for the first). "
            "Return the same structure for each."
        )
    return tree_unflatten([_join_leaf(parts, sizes, owner) for parts in zip(*leaves, strict=True)], structures[0])


def _join_leaf(parts: Sequence[Any], sizes: Sequence[int], owner: str) -> Any:
    if isinstance(parts[0], Awaitable):
        return _join([part.wait() for part in parts], sizes, owner)
    if parts[0] is None:
        return None
    shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if any(shape != [size, *shapes[0][1:]] for shape, size in zip(shapes, sizes, strict=True)):
        raise InputError(
            f"{owner} returned {shapes} for micro-batches of {list(sizes)} samples; it must return tensors with one "
            "row per sample and the same other dimensions in each, or lists, tuples or dicts of them. Call "
            "run_in_micro_batches with the inner model that computes no loss and compares no samples."
        )
    return torch.cat(list(parts))
