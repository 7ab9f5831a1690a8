"""`SourceRows`: rows from a user's function, ``data.source = "package.module:function"``, called on each rank.

docs/data.md ("Rows of your own") describes the arguments of the function and the batches that it yields.
"""

from __future__ import annotations

import base64
import io
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import pyarrow as pa
import torch
import torch.distributed as dist

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.training.data.columns import find_columns
from dmt.training.data.config import DataConfig
from dmt.training.data.raw import Block, Converter, connect, used_columns
from dmt.training.functions import call_named, load_function

__all__ = ["SourceRows", "SourceState"]

_AGREED = 16  # batches that each rank reads between two agreements of the ranks
SourceState = tuple[int, str]
"""A state of a rank's source: number of rows read before it, and ``state_dict()`` by ``torch.save``, in base64."""


class SourceRows:
    """Rows that the function ``data.source`` yields, as prepared rows. The constructor calls it for a first batch.

    Args:
        config: section ``data`` of the run's configuration, with a ``source``.

    Raises:
        InputError: the function does not exist, does not accept the arguments, or yields no training row; or its
            first batch is not a table, or its columns do not fit the settings.
    """

    def __init__(self, config: DataConfig) -> None:
        assert config.source is not None, "the config has kind 'source'"
        self._name, self._config = f"data.source={config.source!r}", config
        self._function = load_function("data.source", config.source)
        self.start_state: SourceState | None = None
        """State, saved on as many ranks, from which the next pass over training rows starts; None: the first row."""
        self._epoch, self._states = 0, deque[SourceState]()
        first = next((table for _, table in self._tables_of(self._call("train", 0, 1, 0))), None)
        if first is None:
            raise InputError(f"{self._name} has no batch with rows. Yield at least one row for split='train'.")
        self.columns = find_columns(config, first.schema, self._name)
        self._converter = Converter(config, self.columns, connect())

    def state(self, epoch: int, rows: int) -> SourceState | None:
        """Returns the last state at or before this rank's row ``rows`` of an epoch, if any, and drops earlier ones."""
        while len(self._states) > 1 and self._states[1][0] <= rows:
            self._states.popleft()
        return self._states[0] if self._states and epoch == self._epoch else None

    def tables(
        self,
        split: Literal["train", "eval"],
        rank: int,
        world_size: int,
        *,
        batch_size: int,
        epoch: int,
        start: int,
        group: dist.ProcessGroup | None,
    ) -> Iterator[pa.Table]:
        """Yields a table for each batch of a rank, from the rank's row ``start`` on; collective with a ``group``.

        All ranks of a group yield the same number of tables: in training, that of the rank with fewest full batches;
        in evaluation, that of the rank with most batches, where other ranks yield smaller or empty tables.

        Raises:
            InputError: a batch is not a table, has other columns or an invalid value, or a state cannot be saved.
            RankError: with a group, the function raised another exception. All ranks of a group raise the same error.
        """
        tables = _cut(self._rows(split, rank, world_size, epoch, start), batch_size, keep_rest=split == "eval")
        waiting: list[pa.Table] = []

        def read() -> int:
            waiting[:] = islice(tables, _AGREED)
            return len(waiting)

        while True:
            numbers = [read()] if group is None else run_on_all_or_raise(read, group)
            number = min(numbers) if split == "train" else max(numbers)
            yield from [*waiting[:number], *[self.columns.schema.empty_table()] * (number - len(waiting))]
            if number < _AGREED:
                return

    def _rows(self, split: str, rank: int, world_size: int, epoch: int, start: int) -> Iterator[pa.Table]:
        """Yields a rank's prepared rows from row ``start`` on, a table per batch of the source; records its states."""
        source, before, state = self._call(split, rank, world_size, epoch), 0, self.start_state
        has_state = split == "train" and hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        if split == "train":
            self._epoch, self._states, self.start_state = epoch, deque(), None
        if has_state and state is not None and state[0] <= start:
            before = state[0]
            source.load_state_dict(torch.load(io.BytesIO(base64.b64decode(state[1])), weights_only=True))
        used = used_columns(self._config, self.columns)
        text = self._state_of(source) if has_state else ""
        schema: pa.Schema | None = None
        for place, table in self._tables_of(source):
            if table.schema != schema:  # finding columns takes a second for thousands of them
                if find_columns(self._config, table.schema, place) != self.columns:
                    problem = "columns are not those of the first batch for 'train'. Yield the same in every batch."
                    raise InputError(f"{place} for split={split!r}, shard {rank} of {world_size}: {problem}")
                schema = table.schema
            if has_state:
                # The state before this batch: the source has moved on.
                self._states.append((before, text))
                text = self._state_of(source)
            if before + table.num_rows > start:
                rows, rejects = self._converter.convert(Block.of(place, table.select(used)))
                if rejects:
                    wrong = rejects[0]
                    raise InputError(f"{place}, row {wrong.line}: column {wrong.column!r}: {wrong.reason}. Correct it.")
                yield rows.slice(max(start - before, 0))
            before += table.num_rows

    def _call(self, split: str, shard: int, num_shards: int, epoch: int) -> Any:
        given = {"split": split, "shard": shard, "num_shards": num_shards, "seed": self._config.shuffle_seed}
        given |= {"epoch": epoch, "options": dict(self._config.options)}
        return call_named(self._name, self._function, given, takes_all=True)

    def _tables_of(self, source: Any) -> Iterator[tuple[str, pa.Table]]:
        """Yields each batch of the source that has rows: its name for messages, and the batch as a table."""
        for number, batch in enumerate(source, start=1):
            place = f"{self._name}, batch {number}"
            try:
                if (table := pa.table(batch)).num_rows:  # without rows, a list of text would be a column of nulls
                    yield place, table
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise InputError(
                    f"{place}: {type(batch).__name__} cannot be read as a table ({error}). Yield a dict of columns "
                    "(arrays, lists), or a table of Arrow, pandas or polars."
                ) from error

    def _state_of(self, source: Any) -> str:
        stream = io.BytesIO()
        try:
            torch.save(source.state_dict(), stream)
            torch.load(io.BytesIO(stream.getvalue()), weights_only=True)  # loading a checkpoint must not run code
        except Exception as error:  # pickle and the user's method may raise anything
            raise InputError(
                f"{self._name}: its state_dict() cannot be saved ({str(error).partition('.')[0]}). Return only "
                "numbers, strings, lists, dicts and tensors."
            ) from error
        return base64.b64encode(stream.getvalue()).decode()


def _cut(tables: Iterator[pa.Table], rows: int, *, keep_rest: bool) -> Iterator[pa.Table]:
    """Joins tables and yields them in pieces of ``rows`` rows; ``keep_rest`` yields the shorter rest, too."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(part.num_rows for part in waiting) >= rows:
            joined = pa.concat_tables(waiting)
            whole = joined.num_rows // rows * rows
            yield from (joined.slice(first, rows) for first in range(0, whole, rows))
            waiting = [joined.slice(whole)]
    if keep_rest and any(table.num_rows for table in waiting):
        yield pa.concat_tables(waiting)
