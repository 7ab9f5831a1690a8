"""Rows of the user's own: ``data.source = "package.module:function"``.

The function is called with those of these arguments that it names, and returns an iterable of batches: a generator, an
``IterableDataset``, a data loader.

- ``split``: ``"train"`` or ``"eval"``. A function that does not name it has one stream of rows, which
  ``data.split_column`` or ``data.eval_fraction`` divides;
- ``shard``, ``num_shards``: the part of the training rows to yield, and the number of parts: a rank and the number of
  ranks. Evaluation rows are asked for as part 0 of 1. Without these names every rank goes through all rows and keeps
  its own;
- ``seed``, ``epoch``: ``data.shuffle_seed`` and the number of the pass, for an order of its own in each;
- ``options``: the section ``[data.options]``, as a dict.

A batch is a ``pyarrow.Table`` or ``RecordBatch``, any other table that Arrow can take over (pandas, polars), or a dict
of columns: arrays, tensors and lists of one dimension; of two, or a TorchRec ``JaggedTensor``, for bags of ids.

Each call must give the same rows for the same arguments, in the same order: after a stop, reading goes on where it was.
If what the function returns, or its iterator, has ``state_dict`` and ``load_state_dict``, these do it (a state that is
taken after a batch describes what comes after it, and holds numbers, texts, lists, dicts and tensors); otherwise the
rows that were used are asked for again and left out.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import Columns
from dmt.training.data.config import DataConfig
from dmt.training.data.parquet import RawRows, decode_rows
from dmt.training.data.rows import Rows
from dmt.training.functions import call_named, load_function, named_arguments

__all__ = ["OwnRows", "as_table"]

_ARGUMENTS = ("split", "shard", "num_shards", "seed", "epoch", "options")
_REMEDY = "Put settings of your own into [data.options]."
_WANTED = "a pyarrow.Table or RecordBatch, a table of pandas or polars, or a dict of columns"
_MILLIONTHS = 1_000_000
_UNSHUFFLED = 16_384


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Rows that are shuffled together."""

    rows: Rows
    before: int
    """Rows of the stream before it."""
    state: str | None
    """State of the source before it; None of a source that has none."""


class OwnRows:
    """The function of ``data.source``.

    Args:
        config: the data section of the run's configuration, with a ``source``.

    Raises:
        InputError: there is no such function, it takes other arguments, or evaluation rows could be trained on.
    """

    def __init__(self, config: DataConfig) -> None:
        assert config.source is not None, "of kind 'source'"
        self.name, self._config = f"data.source={config.source!r}", config
        self._function = load_function("data.source", config.source)
        names = named_arguments(self.name, self._function, _ARGUMENTS, _REMEDY)
        self.has_splits, self.has_shards = "split" in names, {"shard", "num_shards"} <= set(names)
        self._states: list[tuple[int, int, str]] = []  # epoch, rows before, state: of the windows of training
        if self.has_splits and config.split_column:
            raise InputError(
                f"{self.name} names the argument split, so data.split_column={config.split_column!r} has no meaning. "
                "Leave out one of them."
            )
        if not (self.has_splits or config.split_column) and (self.has_shards or "epoch" in names):
            given = "shard" if self.has_shards else "epoch"
            raise InputError(
                f"{self.name} names the argument {given}, but data.eval_fraction={config.eval_fraction} counts rows in "
                "their order: in another order, evaluation rows would be trained on. Name the argument split, or give "
                f"data.split_column, or leave out {given}."
            )

    def first_batch(self) -> pa.Table:
        """Returns the first training batch with rows, for its columns and their types.

        Raises:
            InputError: it is no table, or there is none.
        """
        empty = None
        for batch in self._batches(self._call("train", 0, 1, 0), None):
            if batch.num_rows:
                return batch
            empty = batch
        if empty is None:
            raise InputError(f"{self.name} has no batch. Yield at least one.")
        return empty

    def state(self, epoch: int, rows: int) -> str | None:
        """Returns the state from which the rows of a rank's stream from ``rows`` on can be read; None without one."""
        known = [entry for entry in self._states if entry[0] == epoch and entry[1] <= rows]
        return None if not known else f"{known[-1][1]} {known[-1][2]}"

    def stream(
        self,
        columns: Columns,
        split: Literal["train", "eval"],
        *,
        shard: int,
        num_shards: int,
        epoch: int,
        start: int,
        state: str | None,
    ) -> Iterator[Rows]:
        """Yields the rows of a part from row ``start`` of the stream on, shuffled in training.

        Raises:
            InputError: a batch is no table or has a value that does not fit.
            RuntimeError: the user's code has failed.
        """
        made, before = self._call(split, shard, num_shards, epoch), 0
        if state is not None and _has_state(made):
            text, _, saved = state.partition(" ")
            before = int(text)
            made.load_state_dict(_state_of(saved))
        self._states = self._states if split == "eval" else []
        for window in self._windows(made, columns, split, before):
            if split == "train" and window.state is not None:
                self._states.append((epoch, window.before, window.state))
            if window.before + window.rows.num_rows <= start:
                continue
            rows = window.rows
            if split == "train" and self._config.shuffle_rows:
                rows = rows.take(shuffled_order(rows, (self._config.shuffle_seed, epoch, shard, window.before)))
            yield rows.slice(max(start - window.before, 0), rows.num_rows)

    def _windows(self, made: Any, columns: Columns, split: Literal["train", "eval"], before: int) -> Iterator[_Window]:
        """Yields whole batches together, of ``data.shuffle_rows`` rows or a little more."""
        config, waiting, number = self._config, [], 0
        most = config.shuffle_rows if split == "train" and config.shuffle_rows else _UNSHUFFLED
        limit = config.max_train_rows if split == "train" else config.max_eval_rows
        names = _used(config, columns)
        state, seen = _saved(made, self.name), 0
        for count, table in enumerate(self._batches(made, names), start=1):
            place = f"{self.name}, batch {count}"
            chosen = self._chosen(table, split, seen)
            seen += table.num_rows
            numbers = np.flatnonzero(chosen) + 1
            table = table.filter(pa.array(chosen)) if not chosen.all() else table
            try:
                rows = decode_rows([RawRows(table, numbers, place)], config, columns)
            except (pa.ArrowException, AttributeError) as error:
                raise InputError(f"{place}: its columns have other types than those of the first ({error}).") from error
            if limit is not None and before + number + rows.num_rows >= limit:
                waiting.append(rows.slice(0, limit - before - number))
                break
            waiting.append(rows)
            number += rows.num_rows
            if number >= most:
                yield _Window(rows=Rows.concat(waiting), before=before, state=state)
                before, waiting, number = before + number, [], 0
                state = _saved(made, self.name)
        if sum(rows.num_rows for rows in waiting):
            yield _Window(rows=Rows.concat(waiting), before=before, state=state)

    def _chosen(self, table: pa.Table, split: Literal["train", "eval"], seen: int) -> NDArray[np.bool_]:
        config = self._config
        if self.has_splits:
            return np.ones(table.num_rows, dtype=bool)
        if config.split_column:
            text = table.column(config.split_column).combine_chunks().cast(pa.string())
            equal = pc.equal(text, config.split_value(split)).fill_null(False)
            return np.asarray(equal.to_numpy(zero_copy_only=False))
        share, row = round(config.eval_fraction * _MILLIONTHS), seen + np.arange(table.num_rows)
        apart = (row + 1) * share // _MILLIONTHS > row * share // _MILLIONTHS
        return np.asarray(apart == (split == "eval"))

    def _batches(self, made: Any, names: Sequence[str] | None) -> Iterator[pa.Table]:
        number = 0
        try:
            for number, batch in enumerate(made, start=1):
                yield as_table(batch, f"{self.name}, batch {number}", names)
        except InputError:
            raise
        except Exception as error:  # the user's program may do anything
            raise RuntimeError(f"{self.name}, batch {number + 1}: {type(error).__name__}: {error}") from error

    def _call(self, split: str, shard: int, num_shards: int, epoch: int) -> Any:
        config = self._config
        given = {"split": split, "shard": shard, "num_shards": num_shards, "seed": config.shuffle_seed, "epoch": epoch}
        try:
            made = call_named(self.name, self._function, given | {"options": dict(config.options)}, _REMEDY)
            single = isinstance(made, pa.Table | pa.RecordBatch | Mapping | str)
            if not single and hasattr(made, "__iter__"):
                return made if _has_state(made) else iter(made)
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self.name}: {type(error).__name__}: {error}") from error
        raise InputError(
            f"{self.name} returned a value of type {type(made).__name__}, expected an iterable of batches. Return a "
            "generator, an IterableDataset or a list of batches."
        )


def shuffled_order(rows: Rows, seed: Sequence[int]) -> NDArray[np.int64]:
    """Returns a random order of rows; those of a request stay together, in their order."""
    random = np.random.default_rng(list(seed))
    if rows.requests is None:
        return random.permutation(rows.num_rows)
    keys, request = np.unique(rows.requests, return_inverse=True)
    return np.argsort(random.permutation(len(keys))[request], kind="stable")


def _used(config: DataConfig, columns: Columns) -> list[str]:
    single = [name for name in (config.label, config.split_column, config.group_by) if name]
    return list(dict.fromkeys([*single, *columns.dense, *(feature.name for feature in columns.features)]))


def _saved(made: Any, place: str) -> str | None:
    return _state_text(made.state_dict(), place) if _has_state(made) else None


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
