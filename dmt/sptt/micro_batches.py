"""`run_in_micro_batches`: the exchange of one micro-batch runs while the dense part of the model computes another.

A batch crosses the slow links twice, as tower outputs and as their gradients, and the dense part of the model computes
in between: links and processors wait for each other. Cut into micro-batches (the term of GPipe, arXiv 1811.06965), the
outputs of each are sent as soon as its towers have computed them, and the dense part computes each as soon as it has
arrived; in the backward pass the gradients of one are in flight while those of the next are computed. Unlike gradient
accumulation nothing changes in what is computed: one id exchange, one lookup, one loss, one backward pass, one update
of the tables and of the dense part for the batch.

With ``schedule="1f1b"`` (one forward, one backward: PipeDream, arXiv 1806.03377) the backward pass of a micro-batch
through the dense part comes right after its forward pass, so that its gradients travel while the dense part computes
the next. What they come from, towers and lookup, has its backward pass at the end, once, as before:

========== ====================================== ==========================================
           all forward passes first               1F1B
========== ====================================== ==========================================
dense part F0 F1 F2 loss B2 B1 B0                 F0 B0 F1 B1 F2, then in ``backward()``: B2
gradients           of 2, 1, 0                       of 0  of 1                      of 2
towers                            2, 1, 0                                                2, 1, 0
========== ====================================== ==========================================

Everything here wraps the dataflow (`dmt.sptt.dataflow`): between the lookup and the result its steps `run_towers` and
`exchange_outputs` are called once for each micro-batch.

Legend: B the local batch, K micro-batches, P samples of all peers (one rank of each tower).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt.collectives import check_agreement
from dmt.errors import InputError
from dmt.sptt.dataflow import SPTTContext, SPTTModule
from dmt.sptt.id_routes import Deferred
from dmt.sptt.peer_exchange import PendingOutputs
from dmt.sptt.results import CachedAwaitable, split_rows
from dmt.sptt.rows import micro_batch_sizes

__all__ = ["MicroBatches", "ResultInParts", "Schedule", "run_in_micro_batches"]


Schedule = Literal["all_forward", "1f1b"]
"""Order of the passes of micro-batches: all forward passes first, or each backward pass after its forward pass."""
Cut = tuple[Tensor, Tensor]
"""Result of `dmt.sptt.peer_exchange.PendingOutputs.cut`."""
_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def run_in_micro_batches(
    module: nn.Module, num_micro_batches: int = 4, *, schedule: Schedule = "all_forward"
) -> MicroBatches:
    """Makes a sharded model run in micro-batches; training loop and pipelines stay as they are.

    The module must map samples to samples: every tensor it is given or returns has one row for each sample, and no row
    depends on another (no batch norm). So it is the model without its loss. Tensors among its arguments are cut, also
    inside lists, tuples, dicts and dataclasses; the ``KeyedJaggedTensor`` is handed on whole, to the towers, and so are
    single numbers and everything that is no tensor. Collective: every rank calls it.

    Results are those without micro-batches but for rounding: a matrix product of fewer rows may round differently, and
    gradients of the dense part are summed micro-batch by micro-batch. INT8 exchanges share scales among other numbers.

    With ``schedule="1f1b"`` the module is the one that computes the loss: it returns the mean of a loss over its
    samples, a single number, alone or as the first of a tuple whose other tensors have a row for each sample. The
    backward passes of all micro-batches but the last are in its forward pass, so clear gradients before that
    (``zero_grad``), not between it and ``backward()``, and call ``backward()`` on the loss as it is, not scaled: an
    `InputError`, but on GPUs a scaled loss fails an assertion of the device, so that nothing waits. Each loss is of one
    micro-batch: it must not have a term of tower weights, such as a regulariser, which is not detected.

    Args:
        module: the ``DistributedModelParallel`` of the model, or the module inside whose forward is to be run in
            micro-batches, such as ``model.module.model`` of a task that adds the loss.
        num_micro_batches: K; the same on every rank. Any batch size works, including one smaller than K: the module is
            then also called with no samples.
        schedule: order of the passes; the same on every rank.

    Returns:
        A handle; its ``detach()`` makes the module run on whole batches again.

    Raises:
        InputError: K is not positive, or not the same on all ranks; the module has no tower sharder's module inside, or
            one of TorchRec's that would run K times, or one with the global id route; it runs in micro-batches already.
            With 1F1B also: ``unique`` inputs, a single tower, batch norm, parameters shared by towers and dense part.

    Example::

        model = DistributedModelParallel(task, plan=plan, sharders=[TowerCollectionSharder(mesh)])
        run_in_micro_batches(model.module.model, num_micro_batches=4)
        loss, _ = model(batch)
    """
    return MicroBatches(module, num_micro_batches=num_micro_batches, schedule=schedule)


class MicroBatches:
    """Handle of a module that runs in micro-batches; made by `run_in_micro_batches`, which has the same arguments.

    ``MicroBatches(module, num_micro_batches=4)`` is the spelling of earlier releases.
    """

    def __init__(self, module: nn.Module, *, num_micro_batches: int, schedule: Schedule = "all_forward") -> None:
        if isinstance(module, DistributedModelParallel):
            module = module.module
        self._module = module
        self._num = num_micro_batches
        self._schedule = schedule
        self._sparse = [part for part in module.modules() if isinstance(part, SPTTModule)]
        self._of_towers = {id(parameter) for part in self._sparse for parameter in part.parameters()}
        self._dense = [parameter for parameter in module.parameters() if id(parameter) not in self._of_towers]
        self._check()
        self._forward: Callable[..., Any] = module.forward
        self._restore = [_replace(module, "forward", self)]
        for part in self._sparse if num_micro_batches > 1 else []:
            run = functools.partial(_run_in_parts, part, num=num_micro_batches, is_1f1b=schedule == "1f1b")
            self._restore.append(_replace(part, "compute_and_output_dist", run))
        self._set_number(num_micro_batches)

    def detach(self) -> None:
        """Makes the module run on whole batches again, with the forward that it had.

        Raises:
            InputError: somebody has replaced the module's forward since.
        """
        if vars(self._module).get("forward") is not self:
            raise InputError(
                f"The forward of this {type(self._module).__name__} is no longer that of these MicroBatches: they are "
                "detached already, or another has been put over them, which must be taken off first."
            )
        for restore in self._restore:
            restore()
        self._set_number(1)

    def _set_number(self, num: int) -> None:
        for part in self._sparse:
            part.num_micro_batches = num

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward micro-batch by micro-batch.

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
                f"Micro-batches need the batch size of the KeyedJaggedTensor that {type(self._module).__name__} is "
                f"given; its arguments hold {len(batch_sizes)} different ones. Call run_in_micro_batches with the "
                "module that is given the sparse features."
            )
        sizes = micro_batch_sizes(batch_sizes.pop(), self._num)
        owner = type(self._module).__name__
        parts = _split((args, kwargs), sizes, owner)
        mean = _MeanLoss(owner, self._dense, sizes) if self._schedule == "1f1b" else None
        servers = [_Server(part) for part in self._sparse]
        try:
            outputs = []
            for number, (own_args, own_kwargs) in enumerate(parts, start=1):
                output = self._forward(*own_args, **own_kwargs)
                for server in servers:
                    server.check_calls(number)
                outputs.append(output if mean is None else mean.add(output, [server.cut() for server in servers]))
        finally:
            for server in servers:
                server.remove()
        if mean is None:
            return _join(outputs, sizes, owner)
        return (mean.total, *_join(outputs, sizes, owner)) if mean.has_more else mean.total

    def _check(self) -> None:
        own, modules = type(self._module).__name__, self._module.modules()
        others = [type(m).__name__ for m in modules if isinstance(m, ShardedModule) and m not in self._sparse]
        if others or not self._sparse:
            found = f"holds a {others[0]}, which would look up and send K times" if others else "has none inside"
            raise InputError(
                f"run_in_micro_batches needs a model whose sharded modules are all from dmt's sharders, after "
                f"DistributedModelParallel; this {own} {found}."
            )
        runs_already = isinstance(vars(self._module).get("forward"), MicroBatches)
        # First: a rank that is refused alone would leave the others waiting.
        arguments = {
            "num_micro_batches": self._num,
            "schedule": self._schedule,
            "a module that runs in micro-batches already": runs_already,
            # Each rank has the parameters of its own tower only.
            "a parameter both in a tower and in the dense part": bool(tied := self._tied()),
        }
        check_agreement("run_in_micro_batches", arguments, self._sparse[0].mesh.global_group)
        if self._num < 1:
            raise InputError(f"num_micro_batches={self._num} must be at least 1.")
        if runs_already:
            raise InputError(f"This {own} runs in micro-batches already; detach() the first ones.")
        # The global route brings samples to the ranks in another order.
        if self._num > 1 and any(part.id_route == "global" for part in self._sparse):
            raise InputError("Micro-batches need id_route='peer'; this model was sharded with id_route='global'.")
        if self._schedule not in get_args(Schedule):
            raise InputError(f"schedule={self._schedule!r} is unknown; use one of {list(get_args(Schedule))}.")
        if self._schedule == "1f1b":
            self._check_1f1b(tied)

    def _tied(self) -> list[str]:
        """Names of parameters that 1F1B could not tell apart: in a tower, and in the dense part too."""
        if self._schedule != "1f1b":
            return []
        paths = [f"{path}." for path, own in self._module.named_modules(remove_duplicate=False) if own in self._sparse]
        named = self._module.named_parameters(remove_duplicate=False)
        return [name for name, own in named if id(own) in self._of_towers and not name.startswith(tuple(paths))]

    def _check_1f1b(self, tied: Sequence[str]) -> None:
        obstacle = ""
        if any(part.mesh.topology.num_towers == 1 for part in self._sparse):
            obstacle = "needs two towers or more; in one, no gradients are sent to others"
        elif any(part.unique != "off" for part in self._sparse):
            obstacle = "needs unique='off': samples of several micro-batches may share a row, and so its gradient"
        elif over := [type(part).__name__ for part in self._module.modules() if isinstance(part, _OVER_SAMPLES)]:
            obstacle = f"needs a loss that is a mean over samples, but {over[0]} makes each depend on the others"
        elif tied:
            obstacle = f"needs parameters of their own in towers and dense part, but they share {tied[0]!r}"
        if obstacle:
            raise InputError(f"schedule='1f1b' {obstacle}. Use schedule='all_forward'.")


def _replace(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one module, and returns what restores it."""
    own = vars(module).get(name)
    setattr(module, name, method)

    def restore() -> None:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)

    return restore


def _run_in_parts(
    module: SPTTModule, ctx: SPTTContext, dist_input: KJTList, *, num: int, is_1f1b: bool
) -> ResultInParts:
    """Stands in for ``compute_and_output_dist``: one lookup, then tower and exchange of each of K micro-batches."""
    embeddings = module.look_up(ctx, module.arrived_ids(ctx, dist_input, num))
    rows = [part.num_rows for part in ctx.parts]
    by_micro_batch = zip(*(split_rows(of_collection, rows) for of_collection in embeddings), strict=True)
    started = []
    for number, (part, of_part) in enumerate(zip(by_micro_batch, ctx.parts, strict=True)):
        # In flight while the tower computes the next.
        started.append(module.exchange_outputs(ctx, module.run_towers(part, of_part), number))
    if ctx.hot is not None and is_1f1b:
        raise InputError("schedule='1f1b' does not go with hot rows. Use schedule='all_forward'.")
    # With 1F1B, and where something will have a backward pass.
    cuts = [one for one in started if isinstance(one, PendingOutputs)] if is_1f1b else []
    is_full = any(map(any, ctx.parts[-1].sent))  # this rank has samples in the last micro-batch
    before = [one.cut() for one in cuts[: len(cuts) - is_full]] if torch.is_grad_enabled() else []
    return ResultInParts(module.taken(ctx, started), module.finish, before)


class _Server:
    """Stands in for a sharded module's forward: exchanges at the first call, then returns part after part."""

    def __init__(self, module: SPTTModule) -> None:
        self._module = module
        self._result: ResultInParts | None = None
        self._calls = 0
        self._forward: Callable[..., Any] = module.forward  # of a train pipeline, perhaps
        self.remove = _replace(module, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._result is None:
            self._result = self._forward(*args, **kwargs)
            assert isinstance(self._result, ResultInParts), "the module was told to send in parts"
        self._calls += 1
        if self._calls > len(self._result.parts):
            raise self._wrong_calls(len(self._result.parts))
        return self._result.parts[self._calls - 1]

    def cut(self) -> Cut | None:
        """Returns where the graph of the part that was handed out last was cut, None where it was not."""
        assert self._result is not None, "called after a micro-batch"
        return self._result.cuts[self._calls - 1] if self._calls <= len(self._result.cuts) else None

    def check_calls(self, expected: int) -> None:
        if self._calls != expected:
            raise self._wrong_calls(expected)

    def _wrong_calls(self, expected: int) -> InputError:
        return InputError(
            f"The {type(self._module).__name__} inside was called {self._calls} times in {expected} micro-batches; a "
            "module that runs in micro-batches must call its sharded modules exactly once in each."
        )


class ResultInParts(CachedAwaitable):
    """Result of several exchanges of [B of the micro-batch, columns] in flight, used as a whole or part by part.

    ``cuts`` are, with 1F1B, what `PendingOutputs.cut` returned for all exchanges but the last one with samples.
    """

    def __init__(self, exchanges: Sequence[Any], finish: Callable[[Tensor], Any], cuts: Sequence[Cut] = ()) -> None:
        parts = [CachedAwaitable(exchange) for exchange in exchanges]
        super().__init__(Deferred(lambda: torch.cat([rows.wait() for rows in parts])), finish)
        self.parts = [CachedAwaitable(rows, finish) for rows in parts]
        """Result of each micro-batch."""
        self.cuts = list(cuts)


class _MeanLoss:
    """The mean loss of a batch from those of its micro-batches, whose backward passes it runs: all but the last.

    The last one's also, where this rank has fewer samples than micro-batches: peers take part in all of them.
    """

    def __init__(self, owner: str, dense: Sequence[nn.Parameter], sizes: Sequence[int]) -> None:
        self._owner, self._sizes = owner, list(sizes)
        self._dense = [parameter for parameter in dense if parameter.requires_grad]
        self._cuts: list[Tensor] = []
        self._gradients: list[tuple[nn.Parameter, Tensor, int]] = []
        self._number = 0
        self.total: Tensor
        """Loss of the batch; that of the micro-batches so far."""
        self.has_more = False
        """True if the module returns more than the loss."""

    def add(self, output: Any, cuts: Sequence[Cut | None]) -> Any:
        """Runs the backward pass of a micro-batch, of the last one later; returns its other outputs."""
        loss, *others = output if isinstance(output, (tuple, list)) else [output]
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            shown = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise InputError(
                f"schedule='1f1b' needs a module that returns the mean loss of its samples first, a single number; "
                f"{self._owner} returns {shown}. Give it the module with the loss."
            )
        self.has_more = bool(others)
        size, samples = self._sizes[self._number], sum(self._sizes)
        self._number += 1
        is_last = self._number == len(self._sizes)
        # The mean over no sample is no number, which is the loss of an empty batch, but of no part of another.
        part = loss * (size / samples) if size else loss if is_last and not samples else loss.new_zeros(())
        used: list[nn.Parameter] = []
        if loss.requires_grad and not (is_last and size):
            used = self._run_backward(part if size else loss, [cut for cut in cuts if cut is not None], adds=size > 0)
            part = part.detach()
        self.total = part if self._number == 1 else self.total + part
        if loss.requires_grad and is_last:
            found = [(p, p.grad) for p in self._dense if p.grad is not None]
            self._gradients = [(p, grad, grad._version) for p, grad in found]  # noqa: SLF001 - autograd's own
            self.total = _JoinLoss.apply(self.total, self, *self._cuts, *used)
        return tuple(others)

    def _run_backward(self, part: Tensor, cuts: Sequence[Cut], *, adds: bool) -> list[nn.Parameter]:
        """Starts the exchange of the gradients of the outputs, and adds to those of the dense part that it returns.

        With ``adds=False`` nothing is added: without samples, there may be what is no number.
        """
        starts = [start for _, start in cuts]
        # Not by backward(): DDP would count it, and reduce the gradients of the first micro-batches.
        found = torch.autograd.grad(part, [*self._dense, *starts], allow_unused=True)
        used = [(p, gradient) for p, gradient in zip(self._dense, found, strict=False) if gradient is not None]
        for parameter, gradient in used if adds else []:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._cuts += [before for before, _ in cuts]
        return [parameter for parameter, _ in used]

    def check_gradients(self) -> None:
        """Raises `InputError` if gradients of the first micro-batches were changed before the last one's."""
        # Cleared in place, as by zero_grad(set_to_none=False), they are the same tensors of another version.
        if any(p.grad is not own or own._version != found for p, own, found in self._gradients):  # noqa: SLF001
            raise InputError(
                "schedule='1f1b' has computed gradients in the forward pass, but they were cleared or changed before "
                "backward(). Call zero_grad() before the forward pass, and backward() before the next one."
            )


class _JoinLoss(Function):
    """Hands a loss on; its backward pass also goes through what was cut off its micro-batches.

    Where the last one is empty also to the parameters of the dense part, since DDP waits for their gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, mean: _MeanLoss, *others: Tensor) -> Tensor:
        ctx.mean, ctx.others = mean, [(other.shape, other.dtype, other.device) for other in others]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.mean.check_gradients()
        _check_unscaled(gradients[0])
        # Their own gradients came by the exchange.
        nothing = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return gradients[0], None, *nothing


def _check_unscaled(gradient: Tensor) -> None:
    """Refuses a gradient of the loss other than 1: `InputError` on a CPU, an assertion of the device elsewhere."""
    done = "schedule='1f1b' has computed gradients of the loss in the forward pass, but backward() is called with"
    what_to_do = "Call it on the loss as it is; scale it inside the module."
    if gradient.device.type != "cpu":  # to read the number would be a wait
        message = f"{done} a multiple of the loss. {what_to_do}"
        torch._assert_async(gradient == 1.0, message)  # noqa: SLF001 - the one assertion without a wait
    elif float(gradient) != 1.0:
        raise InputError(f"{done} {float(gradient)} times the loss. {what_to_do}")


def _children(value: Any) -> list[Any] | None:
    """Parts of a list, tuple, dict or dataclass; None for anything else."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value) if field.init]
    return None


def _rebuilt(value: Any, children: Sequence[Any]) -> Any:
    """Makes the same structure of other parts."""
    if isinstance(value, dict):
        return dict(zip(value, children, strict=True))
    if isinstance(value, (list, tuple)):
        return value._make(children) if hasattr(value, "_make") else type(value)(children)
    return replace(value, **dict(zip([f.name for f in fields(value) if f.init], children, strict=True)))


def _leaves(value: Any) -> list[Any]:
    children = _children(value)
    return [value] if children is None else [leaf for part in children for leaf in _leaves(part)]


def _split(value: Any, sizes: Sequence[int], owner: str) -> list[Any]:
    """Makes the same structure for each micro-batch, with tensors cut."""
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape[0] != sum(sizes):
            # Handed on whole, it would be cut one day, in the batch that happens to have as many samples.
            raise InputError(
                f"{owner} is given a tensor of shape {list(value.shape)} with a batch of {sum(sizes)} samples; in "
                "micro-batches every tensor among its arguments must have one row for each. Keep others in the module."
            )
        return list(value.split(list(sizes)))
    children = _children(value)
    if children is None:
        return [value] * len(sizes)
    columns = [_split(part, sizes, owner) for part in children]
    return [_rebuilt(value, [column[i] for column in columns]) for i in range(len(sizes))]


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
                "return one row for each. Call run_in_micro_batches with the model inside that computes no loss."
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
    if isinstance(first, (dict, list, tuple)):
        by_part = zip(*(_children(output) or () for output in outputs), strict=True)
        return _rebuilt(first, [_join(of_part, sizes, owner) for of_part in by_part])
    raise InputError(
        f"{owner} returned a {type(first).__name__}, which cannot be put together from micro-batches; return tensors, "
        "or lists, tuples or dicts of them."
    )
