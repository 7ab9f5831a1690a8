"""Rows of the user's own: ``data.source = "package.module:function"``, an iterable of batches for each rank.

The function is called with those of these arguments that it names:

- ``split``: ``"train"`` or ``"eval"``;
- ``shard``, ``num_shards``: the part of the rows to yield, and the number of parts: a rank and the number of ranks;
- ``seed``, ``epoch``: ``data.shuffle_seed`` and the number of the pass, for an order of its own in each;
- ``options``: the section ``[data.options]``, as a dict.

A batch is what ``pyarrow.table`` takes: a dict of columns (arrays, lists), a table of Arrow, pandas or polars. If what
the function returns has ``state_dict`` and ``load_state_dict``, a run goes on by these; else the rows that were used
are asked for again and left out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import torch

from dmt.errors import InputError
from dmt.training.data.columns import find_columns
from dmt.training.data.config import DataConfig
from dmt.training.functions import call_named, load_function, named_arguments

__all__ = ["OwnRows"]

_ARGUMENTS = ("split", "shard", "num_shards", "seed", "epoch", "options")
_REMEDY = "Put settings of your own into [data.options]."


class OwnRows:
    """The function of ``data.source``.

    Args:
        config: the data section of the run's configuration, with a ``source``.

    Raises:
        InputError: there is no such function, it takes other arguments, or it has no training row.
    """

    def __init__(self, config: DataConfig) -> None:
        from dmt.training.data.raw import Converter  # which loads DuckDB

        assert config.source is not None, "of kind 'source'"
        self._name, self._config = f"data.source={config.source!r}", config
        self._function = load_function("data.source", config.source)
        names = named_arguments(self._name, self._function, _ARGUMENTS, _REMEDY)
        if absent := [name for name in _ARGUMENTS[:3] if name not in names]:
            raise InputError(f"{self._name} does not take {absent[0]!r}. Name {', '.join(_ARGUMENTS[:3])}.")
        self._states: list[tuple[int, int, str]] = []  # epoch, rows before, state: of each training batch
        tables = (_table(batch, f"{self._name}, batch {i}") for i, batch in enumerate(self._call("train", 0, 1, 0), 1))
        first = next((table for table in tables if table.num_rows), None)
        if first is None:
            raise InputError(f"{self._name} has no batch with rows. Yield at least one.")
        self.columns = find_columns(config, first.schema, self._name)
        self._converter = Converter(config, self.columns)

    def state(self, epoch: int, rows: int) -> str | None:
        """Returns the state from which this rank's rows from ``rows`` on can be read; None without one."""
        known = [entry for entry in self._states if entry[0] == epoch and entry[1] <= rows]
        return None if not known else f"{known[-1][1]} {known[-1][2]}"

    def stream(
        self, split: Literal["train", "eval"], *, rank: int, world_size: int, epoch: int, start: int, state: str | None
    ) -> Iterator[pa.Table]:
        """Yields the rows of a rank from row ``start`` on, batch by batch, as prepared rows.

        Raises:
            InputError: a batch is no table or has a value that does not fit.
        """
        from dmt.training.data.prepare import prepared_schema, prepared_table
        from dmt.training.data.raw import table_block, used_columns

        batches, before = self._call(split, rank, world_size, epoch), 0
        has_state = split == "train" and hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        if has_state and state is not None:
            used_rows, _, text = state.partition(" ")
            before = int(used_rows)
            batches.load_state_dict(torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))
        if split == "train":
            self._states = []
        schema, used = prepared_schema(self._config, self.columns), used_columns(self._config, self.columns)
        text = _state_text(batches, self._name) if has_state else ""
        for number, batch in enumerate(batches, start=1):
            place = f"{self._name}, batch {number}"
            table = _table(batch, place)
            if find_columns(self._config, table.schema, place) != self.columns:
                raise InputError(f"{place}: its columns are of other kinds than those of the first batch.")
            if has_state:
                self._states.append((epoch, before, text))
                text = _state_text(batches, self._name)
            if before + table.num_rows > start:
                typed, rejects = self._converter.convert(table_block(place, table.select(used)))
                if rejects:
                    wrong = rejects[0]
                    raise InputError(f"{place}, row {wrong.line}: column {wrong.column!r}: {wrong.reason}.")
                yield prepared_table(typed, schema, self.columns, {}).slice(max(start - before, 0))
            before += table.num_rows

    def _call(self, split: str, shard: int, num_shards: int, epoch: int) -> Any:
        given = {"split": split, "shard": shard, "num_shards": num_shards, "seed": self._config.shuffle_seed}
        given |= {"epoch": epoch, "options": dict(self._config.options)}
        return call_named(self._name, self._function, given, _REMEDY)


def _table(batch: Any, place: str) -> pa.Table:
    try:
        return pa.table(batch)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(
            f"{place}: {type(batch).__name__} cannot be read as a table ({error}). Yield a dict of columns, each an "
            "array or list with a value (or a list of them) for each row, or a table of Arrow, pandas or polars."
        ) from error


def _state_text(source: Any, place: str) -> str:
    """Returns the state of a source as text that reading it runs no code from."""
    stream = io.BytesIO()
    try:
        torch.save(source.state_dict(), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:  # pickle's are many, and so are the user's
        raise InputError(
            f"{place}: its state_dict() cannot be saved ({str(error).partition('.')[0]}). Give numbers, texts, lists, "
            "dicts and tensors."
        ) from error
    return base64.b64encode(stream.getvalue()).decode()
