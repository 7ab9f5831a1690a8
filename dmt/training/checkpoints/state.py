"""What of a model and its optimizer goes into a checkpoint: tensors and shards of tensors, by names without a layout.

``model.<parameter>`` and ``optimizer.<parameter>.<state>``, parameters named as in the unsharded model: towers by their
number in the model, tables by name, never a rank or host. Everything is a tensor, the schedules' counts too.

Row-wise AdaGrad keeps one number for each row of a table, but for a table cut column-wise one for each row of each
shard (the mean over *its* columns), which TorchRec lays behind one another: [rows * K], shard k from rows * k on. A
`Piece` of such a state knows its columns, so it can be read into any other cut (`dmt.training.checkpoints.dcp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from dmt.errors import InputError

__all__ = ["Piece", "State", "collect_state"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of this rank, or a shard of one."""

    name: str
    tensor: Tensor
    """The live one, not a copy."""
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where this part begins in it."""
    table: str = ""
    """The table whose optimizer state this is."""
    columns: tuple[int, int] | None = None
    """Of a state with one number for each row: first column of the table that it is about, and one past the last."""
    first_row: int = 0
    """Of such a state: row of the table that the first number is of."""
    num_rows: int = 0
    """Of such a state: rows of the table."""

    @property
    def is_moment(self) -> bool:
        """Whether this is the sum of squared gradients of a table's AdaGrad."""
        return bool(self.table) and self.name.endswith(f".{self.table}.momentum1")

    def copied(self) -> Piece:
        """The same with a copy of its numbers in the memory of the CPU."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


@dataclass(kw_only=True)
class State:
    """All that this rank holds of a model and its optimizer."""

    pieces: list[Piece] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, also of tensors that only other ranks hold a part of; [rows] for states with one number a row."""
    column_shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Widths of the column shards of states that have one number for each row of each shard, by name."""


def collect_state(model: Mapping[str, Any], optimizer: KeyedOptimizer | None) -> State:
    """Names what this rank holds; nothing is copied.

    Args:
        model: its ``state_dict()``.
        optimizer: of everything; None leaves it out.

    Raises:
        InputError: something is no tensor.

    Example:
        >>> from torch import nn
        >>> collect_state(nn.Linear(2, 3).state_dict(), None).sizes
        {'model.weight': (3, 2), 'model.bias': (3,)}
    """
    state = State()
    for name, value in model.items():
        _add(state, f"model.{name}", value)
    if optimizer is not None:
        states = optimizer.state
        for key, weight in optimizer.params.items():
            # Not by get(): a defaultdict would make a state for every parameter.
            for name, value in states[weight].items() if weight in states else ():
                _add_optimizer(state, f"optimizer.{key}.{name}", value, weight)
    return state


def _add(state: State, name: str, value: Any, **of_table: Any) -> None:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__}; checkpoints hold tensors only. Register it as a tensor, or leave it "
            "out of the state dict."
        )
    size = _size(value)
    state.sizes[name] = size
    for offsets, tensor in _shards(value):
        if tensor.numel() or 0 in size:  # a rank can have an empty share of a table
            state.pieces.append(Piece(name=name, tensor=tensor, size=size, offsets=offsets, **of_table))


def _shards(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def _add_optimizer(state: State, name: str, value: Any, weight: Tensor) -> None:
    # FBGEMM's and our own states are named after the table, those of PyTorch's optimizers are not.
    table = name.rpartition(".")[0].rpartition(".weight.")[2] if ".embedding_bags." in name else ""
    if not table or not isinstance(value, Tensor):
        _add(state, name, value)
        return
    rows = _size(weight)[0]
    widths = _column_widths(weight)
    if isinstance(value, ShardedTensor) and name.endswith(".iter"):
        # The count of steps of FBGEMM's Adam: one for each shard, all alike.
        for _, count in _shards(value):
            _add(state, name, count.reshape(()), table=table)
        state.sizes[name] = ()
        return
    if len(_size(value)) != 1:
        _add(state, name, value, table=table)
        return
    shards = list(pairwise(accumulate(widths, initial=0)))
    for offsets, tensor in _shards(value):
        if tensor.numel():
            number, row = divmod(offsets[0], rows)
            state.pieces.append(
                Piece(
                    name=name,
                    tensor=tensor,
                    size=_size(value),
                    offsets=offsets,
                    table=table,
                    columns=shards[number],
                    first_row=row,
                    num_rows=rows,
                )
            )
    state.sizes[name] = (rows,)
    if len(widths) > 1:
        state.column_shards[name] = widths


def _column_widths(weight: Tensor) -> tuple[int, ...]:
    """Widths of a table's column shards from left to right; one for a table that is not cut by columns."""
    num_columns = _size(weight)[1]
    if not isinstance(weight, ShardedTensor):
        return (num_columns,)
    shards = sorted(weight.metadata().shards_metadata, key=lambda shard: shard.shard_offsets[1])
    is_cut = len(shards) > 1 and shards[0].shard_sizes[1] < num_columns
    return tuple(shard.shard_sizes[1] for shard in shards) if is_cut else (num_columns,)


def _size(value: Tensor) -> tuple[int, ...]:
    # A sharded tensor warns when it is asked itself.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.size())
