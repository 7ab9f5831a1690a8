"""Names the tensors and shards of a model and its optimizer that go into a checkpoint, independently of the layout.

``model.<parameter>`` and ``optimizer.<parameter>.<state>``, with parameters named as in the unsharded model: towers by
their number in the model, tables by name, never a rank or host. Everything is a tensor, also the schedules' counts.

Row-wise AdaGrad keeps one number for each row of a table, but for a table cut column-wise one for each row of each
shard (the mean over *its* columns), which TorchRec concatenates: [rows * K], shard k from rows * k on. A `Piece` of
such a state knows its columns, so it can be read into any other cut (`dmt.training.checkpoints.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from dmt.errors import InputError
from dmt.sharding.schemes import column_widths

# Numbers looked at in one go: tables are too large for a copy.
_CHUNK = 2**20

__all__ = ["Piece", "State", "chunks", "collect_state", "is_finite", "non_finite"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of this rank, or a shard of one.

    The last three fields are for row-wise state, which has one number for each row of each column shard.
    """

    name: str
    tensor: Tensor
    """The live tensor, not a copy."""
    size: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    """Position of this piece in the whole tensor."""
    table: str = ""
    """The table whose optimizer state this is."""
    columns: tuple[int, int] | None = None
    """Half-open column range of the table that the piece covers."""
    first_row: int = 0
    """Row of the table that the first number belongs to."""
    num_rows: int = 0
    """Rows of the table."""

    @property
    def is_moment(self) -> bool:
        """True for the sum of squared gradients of a table's AdaGrad."""
        return bool(self.table) and self.name.endswith(f".{self.table}.momentum1")

    def copied(self) -> Piece:
        """Returns the piece with a copy of its numbers in the CPU's memory."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


@dataclass(kw_only=True)
class State:
    """All that this rank holds of a model and its optimizer."""

    pieces: list[Piece] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes by name, also of tensors that only other ranks hold a part of; [rows] for row-wise state."""
    column_shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Widths of the column shards, by the name of a state with one number for each row of each shard."""


def collect_state(model: Mapping[str, Any], optimizer: KeyedOptimizer | None) -> State:
    """Names what this rank holds of a model's ``state_dict()`` and its optimizer; nothing is copied.

    Raises:
        InputError: something is no tensor.
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


def non_finite(pieces: Iterable[Piece]) -> list[str]:
    """Returns the names of pieces with NaN or an infinite number; reads each once."""
    return list(dict.fromkeys(name for name, chunk in chunks(pieces) if not is_finite(chunk)))


def chunks(pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Yields the pieces in parts of about a million numbers, each with its name; views of the live tensors."""
    for piece in pieces:
        rows = piece.tensor.detach() if piece.tensor.dim() else piece.tensor.detach().unsqueeze(0)
        yield from ((piece.name, chunk) for chunk in rows.split(max(1, _CHUNK * len(rows) // max(1, rows.numel()))))


def is_finite(numbers: Tensor) -> bool:
    """Returns whether no number is NaN or infinite; reads the tensor once."""
    # A sum takes a fortieth of the time; that of finite numbers may be infinite.
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())


def _add(state: State, name: str, value: Any, table: str = "") -> None:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__}; checkpoints hold tensors only. Register it as a tensor, or leave it "
            "out of the state dict."
        )
    size = _size(value)
    state.sizes[name] = size
    for offsets, tensor in _shards(value):
        if tensor.numel() or 0 in size:  # a rank can have an empty shard of a table
            state.pieces.append(Piece(name=name, tensor=tensor, size=size, offsets=offsets, table=table))


def _add_optimizer(state: State, name: str, value: Any, weight: Tensor) -> None:
    # FBGEMM's and our own states are named after the table, those of PyTorch's optimizers are not.
    table = name.rpartition(".")[0].rpartition(".weight.")[2] if ".embedding_bags." in name else ""
    if not table or not isinstance(value, Tensor):
        _add(state, name, value)
    elif isinstance(value, ShardedTensor) and name.endswith(".iter"):
        # The step count of FBGEMM's Adam: one for each shard, all alike.
        for _, count in _shards(value):
            _add(state, name, count.reshape(()), table)
        state.sizes[name] = ()
    elif len(_size(value)) == 1:
        _add_row_wise(state, name, value, weight, table)
    else:
        _add(state, name, value, table)


def _add_row_wise(state: State, name: str, value: Tensor, weight: Tensor, table: str) -> None:
    rows, widths = _size(weight)[0], _column_widths(weight)
    shards = list(pairwise(accumulate(widths, initial=0)))
    for offsets, tensor in _shards(value):
        if tensor.numel():
            number, row = divmod(offsets[0], rows)
            piece = Piece(name=name, tensor=tensor, size=_size(value), offsets=offsets, table=table)
            state.pieces.append(replace(piece, columns=shards[number], first_row=row, num_rows=rows))
    state.sizes[name] = (rows,)
    if len(widths) > 1:
        state.column_shards[name] = widths


def _column_widths(weight: Tensor) -> tuple[int, ...]:
    """Returns the widths of a table's column shards from left to right; one width for a table not cut by columns."""
    if not isinstance(weight, ShardedTensor):
        return (_size(weight)[1],)
    return tuple(column_widths(weight.metadata().shards_metadata))


def _shards(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields offsets and tensor of each part that this rank holds."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def _size(value: Tensor) -> tuple[int, ...]:
    # A sharded tensor warns when asked for its size itself.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.size())
