"""Rows of the user's own: ``data.source = "package.module:function"``.

The function is called with those of these arguments that it names, and returns an iterable of batches: a generator, an
``IterableDataset``, a data loader.

- ``split``: ``"train"`` or ``"eval"``. A function that does not name it has one stream of rows, which
  ``data.split_column`` or ``data.eval_fraction`` divides;
- ``shard``, ``num_shards``: the part of the rows to yield, 0 to ``data.source_shards`` - 1, and their number;
- ``seed``, ``epoch``: ``data.shuffle_seed`` and the number of the pass, for an order of its own in each. Training rows
  alone may change places: ``epoch`` needs ``split`` or ``data.split_column``, since ``data.eval_fraction`` counts
  rows in their order;
- ``options``: the section ``[data.options]``, as a dict.

A batch is a ``pyarrow.Table`` or ``RecordBatch``, any other table that Arrow can take over (pandas, polars), or a dict
of columns: arrays, tensors and lists of one dimension; of two, or a TorchRec ``JaggedTensor``, for bags of ids.

Each call must give the same rows for the same arguments, in the same order: after a stop, reading goes on where it was.
If what the function returns, or its iterator, has ``state_dict`` and ``load_state_dict``, these do it (a state that is
taken after a batch describes what comes after it, and holds numbers, texts, lists, dicts and tensors); otherwise the
batches that were used are asked for again and left out.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import torch

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.functions import call_named, load_function, named_arguments

__all__ = ["RowSource", "ShardPosition", "ShardStream", "as_table"]

_ARGUMENTS = ("split", "shard", "num_shards", "seed", "epoch", "options")
_REMEDY = "Put settings of your own into [data.options]."
_WANTED = "a pyarrow.Table or RecordBatch, a table of pandas or polars, or a dict of columns"


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """A place between two batches of a shard; plain data."""

    batches: int = 0
    """Batches before it."""
    rows: int = 0
    """Their rows."""
    ended: bool = False
    """True: no batch comes after it."""
    state: str | None = None
    """The ``state_dict`` there, as text; None of a source that has none."""


class RowSource:
    """The function of ``data.source``.

    Args:
        config: the data section of the run's configuration, with a ``source``.

    Raises:
        InputError: there is no such function, it takes other arguments, or does not know of shards or splits that the
            configuration wants.
    """

    def __init__(self, config: DataConfig) -> None:
        assert config.source is not None, "of kind 'source'"
        self.name, self._config = f"data.source={config.source!r}", config
        self._function = load_function("data.source", config.source)
        names = named_arguments(self.name, self._function, _ARGUMENTS, _REMEDY)
        self.has_splits = "split" in names
        """True: training and evaluation rows come from different calls."""
        self._made: WeakSet[Any] = WeakSet()
        if config.source_shards > 1 and not {"shard", "num_shards"} <= set(names):
            raise InputError(
                f"{self.name} does not name the arguments shard and num_shards, so each of data.source_shards="
                f"{config.source_shards} would have the same rows. Name them, or leave data.source_shards out."
            )
        if self.has_splits and config.split_column:
            raise InputError(
                f"{self.name} names the argument split, so data.split_column={config.split_column!r} has no meaning. "
                "Leave out one of them."
            )
        # Requests do not help: a row without a value of data.group_by is one by its number.
        if "epoch" in names and not (self.has_splits or config.split_column):
            raise InputError(
                f"{self.name} names the argument epoch, but data.eval_fraction={config.eval_fraction} counts rows in "
                "their order: in another order, evaluation rows would be trained on. Name the argument split, give "
                "data.split_column, or leave out epoch (data.shuffle_rows shuffles)."
            )

    def shard(self, split: Literal["train", "eval"], shard: int, *, epoch: int, start: ShardPosition) -> ShardStream:
        """Opens a shard at a position; the function is called when the first batch is asked for."""
        return ShardStream(self, split, shard, epoch, start)

    def first_batch(self) -> pa.Table:
        """Returns the first training batch with rows, for its columns and their types.

        Raises:
            InputError: it is no table, or there is none.
        """
        empty = None
        for shard in range(self._config.source_shards):
            stream = self.shard("train", shard, epoch=0, start=ShardPosition())
            try:
                while (table := stream.next_batch(None)) is not None:
                    if table.num_rows:
                        return table
                    empty = table if empty is None else empty
            finally:
                stream.close()
        if empty is None:
            parts = f"{self.name} (train)" if self.has_splits else self.name
            raise InputError(f"{parts} has no batch. Yield at least one.")
        return empty

    def _call(self, split: str, shard: int, epoch: int) -> Any:
        config = self._config
        given = {
            "split": split,
            "shard": shard,
            "num_shards": config.source_shards,
            "seed": config.shuffle_seed,
            "epoch": epoch,
            "options": dict(config.options),
        }
        found = call_named(self.name, self._function, given, _REMEDY)
        single = isinstance(found, pa.Table | pa.RecordBatch | Mapping | str)
        if single or not hasattr(found, "__iter__"):
            raise InputError(
                f"{self.name} returned a value of type {type(found).__name__}, expected an iterable of batches. "
                "Return a generator, an IterableDataset or a list of batches."
            )
        if isinstance(found, Iterator) and found in self._made:
            raise InputError(
                f"{self.name} returned an iterator that it has returned before, whose first rows are gone. Make a new "
                "one in each call."
            )
        if isinstance(found, Iterator):
            with suppress(TypeError):  # of no weak reference: an iterator of a list
                self._made.add(found)
        return found


class ShardStream:
    """The batches of a shard, one after another; made by `RowSource.shard`."""

    def __init__(self, source: RowSource, split: str, shard: int, epoch: int, start: ShardPosition) -> None:
        self._source, self._call = source, (split, shard, epoch)
        shards = source._config.source_shards  # noqa: SLF001 - the same file
        kinds = [split] if source.has_splits else []
        parts = [*kinds, *([f"shard {shard} of {shards}"] if shards > 1 else [])]
        self.place = source.name + (f" ({', '.join(parts)})" if parts else "")
        """Name of the stream, for messages."""
        self._iterator: Iterator[Any] | None = None
        self._state_of: Any = None
        self._start = start
        self.batches, self.rows, self.ended = start.batches, start.rows, start.ended

    def next_batch(self, names: Sequence[str] | None) -> pa.Table | None:
        """Returns the columns of these names (None: all) of the next batch, or None at the end.

        Raises:
            InputError: the batch is no table, or a column is absent or cannot be read as one.
            RuntimeError: the user's code has failed.
        """
        if self.ended:
            return None
        if self._iterator is None:
            self._open(names)
        return self._take(names)

    def position(self) -> ShardPosition:
        """Returns the place after the last batch.

        Raises:
            InputError: the source's state holds what cannot be saved, or there is none to be had.
        """
        state = None
        if self._state_of is not None and not self.ended:
            try:
                found = self._state_of.state_dict()
            except Exception as error:
                raise InputError(
                    f"{self.place}: its state_dict() has failed ({type(error).__name__}: {error}). Correct it or leave "
                    "out state_dict and load_state_dict."
                ) from error
            state = _state_text(found, self.place)
        return ShardPosition(batches=self.batches, rows=self.rows, ended=self.ended, state=state)

    def close(self) -> None:
        """Ends the user's generator, if it is one."""
        if (close := getattr(self._iterator, "close", None)) is not None:
            close()
        self._iterator, self.ended = None, True

    def _open(self, names: Sequence[str] | None) -> None:
        start = self._start
        try:
            made = self._source._call(*self._call)  # noqa: SLF001 - the same file
            stateful = [made] if _has_state(made) else []
            if stateful and start.state is not None:
                made.load_state_dict(_state_of(start.state))
            self._iterator = iterator = iter(made)
            if not stateful and _has_state(iterator):
                stateful = [iterator]
                if start.state is not None:
                    stateful[0].load_state_dict(_state_of(start.state))
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self.place}: {type(error).__name__}: {error}") from error
        self._state_of = stateful[0] if stateful else None
        if start.state is not None and self._state_of is None:
            raise InputError(f"{self.place} had a state_dict when the run was saved, and has none now. Give it back.")
        if start.state is not None or not start.batches:
            return
        # Without a state, what was used is asked for again.
        self.batches = self.rows = 0
        while self.batches < start.batches and self._take(names) is not None:
            pass
        if (self.batches, self.rows) != (start.batches, start.rows):
            raise InputError(
                f"{self.place} had {start.rows} rows in {start.batches} batches before the run was stopped, and has "
                f"{self.rows} in {self.batches} now. The same arguments must give the same batches, or the source "
                "needs state_dict and load_state_dict."
            )

    def _take(self, names: Sequence[str] | None) -> pa.Table | None:
        assert self._iterator is not None, "opened before"
        place = f"{self.place}, batch {self.batches + 1}"
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.ended = True
            return None
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
        table = as_table(batch, place, names)
        self.batches, self.rows = self.batches + 1, self.rows + table.num_rows
        return table


def as_table(batch: Any, place: str, names: Sequence[str] | None = None) -> pa.Table:
    """Turns a batch of a source into a table of the columns of these names; None: of all.

    Raises:
        InputError: it is no batch, lacks a column, or has one that is no column of rows; ``place`` names the batch.

    Example:
        >>> table = as_table({"d": torch.tensor([0.5, 2.0]), "c": [["a"], []]}, "batch 1")
        >>> table.schema.field("c").type, table.column("d").to_pylist()
        (ListType(list<item: string>), [0.5, 2.0])
    """
    try:
        if isinstance(batch, pa.RecordBatch):
            batch = pa.Table.from_batches([batch])
        elif not isinstance(batch, pa.Table | Mapping) and hasattr(batch, "__arrow_c_stream__"):
            batch = pa.table(batch)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{place}: {type(batch).__name__} cannot be read as a table ({error}).") from error
    if isinstance(batch, pa.Table):
        found = list(batch.column_names)
    elif isinstance(batch, Mapping):
        found = [str(name) for name in batch]
    else:
        raise InputError(f"{place}: expected {_WANTED}, found {type(batch).__name__}.")
    if doubled := sorted({name for name in found if found.count(name) > 1}):
        raise InputError(f"{place}: column {doubled[0]!r} is there {found.count(doubled[0])} times. Name each once.")
    absent = [name for name in names or () if name not in found]
    if absent:
        raise InputError(
            f"{place}: column {absent[0]!r} is missing; all batches must have the columns of the first training batch."
        )
    wanted = found if names is None else names
    if isinstance(batch, pa.Table):
        return _without_views(batch if names is None else batch.select(list(wanted)))
    given = dict(zip(found, batch.values(), strict=True))
    columns = {name: _column(given[name], f"{place}: column {name!r}") for name in wanted}
    sizes = {name: len(column) for name, column in columns.items()}
    other = [name for name, size in sizes.items() if size != sizes[wanted[0]]]
    if other:
        raise InputError(
            f"{place}: column {other[0]!r} has {sizes[other[0]]} rows, but column {wanted[0]!r} has "
            f"{sizes[wanted[0]]}. Give all columns of a batch the same number of rows."
        )
    return _without_views(pa.table(columns))


def _without_views(table: pa.Table) -> pa.Table:
    """Casts views of texts, which polars gives, to texts; also those in lists."""
    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    schema = pa.schema(fields, metadata=table.schema.metadata)
    return table if schema.equals(table.schema) else table.cast(schema)


def _plain_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_large_list(type_):
        return pa.large_list(type_.value_field.with_type(_plain_type(type_.value_type)))
    if pa.types.is_list(type_) or pa.types.is_fixed_size_list(type_):
        size = -1 if pa.types.is_list(type_) else type_.list_size
        return pa.list_(type_.value_field.with_type(_plain_type(type_.value_type)), size)
    if pa.types.is_dictionary(type_):
        return pa.dictionary(type_.index_type, _plain_type(type_.value_type), type_.ordered)
    return type_


def _column(values: Any, place: str) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        if callable(getattr(values, "values", None)) and callable(getattr(values, "lengths", None)):
            return _bags(values)
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
        if isinstance(values, np.ndarray):
            # A copy: Arrow would share the memory, which the source may fill with its next batch.
            values = values.copy()
        if isinstance(values, np.ndarray) and values.ndim == 2:
            rows, width = values.shape
            offsets = np.arange(rows + 1, dtype=np.int64) * width
            return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
        if getattr(values, "ndim", 1) != 1:
            raise ValueError(f"has {values.ndim} dimensions")
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise TypeError(f"is of type {type(values).__name__}")
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{place} cannot be read ({error}). Give an array, a tensor or a list with a value for each row, or with "
            "two dimensions or a JaggedTensor for bags."
        ) from error


def _bags(jagged: Any) -> pa.Array:
    """Returns a TorchRec ``JaggedTensor`` as lists."""
    if getattr(jagged, "weights_or_none", lambda: None)() is not None:
        raise ValueError("its ids have weights, which the models do not take")
    values, lengths = (part().detach().cpu().numpy().copy() for part in (jagged.values, jagged.lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] != len(values):
        raise ValueError(f"lengths sum to {offsets[-1]}, but there are {len(values)} values")
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _state_text(state: Any, place: str) -> str:
    """Returns a state as text that reading it runs no code from."""
    stream = io.BytesIO()
    try:
        torch.save(state, stream)
        text = base64.b64encode(stream.getvalue()).decode()
        _state_of(text)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{place}: its state_dict() holds what cannot be saved ({str(error).partition('.')[0]}). Give numbers, "
            "texts, lists, dicts and tensors."
        ) from error
    return text


def _state_of(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
