"""`SourcePass`: one pass over the rows of a `RowSource`, shared by ranks like the pieces of files.

The stream of a pass is made of turns: some batches of shard 0, then of shard 1, and so on, again and again until all
shards have ended. It depends on the source and ``data.source_shards`` only. Rank r of W reads the shards r, r + W, ...
and the rows go to the ranks that train on them (`dmt.training.data.sharing`), so that all ranks have equally many steps
however uneven the shards are.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder, Place
from dmt.training.data.packed import PackedRows
from dmt.training.data.pieces import Piece
from dmt.training.data.readers import ColumnReader, Part, readable_part
from dmt.training.data.rows import Block, spread_split
from dmt.training.data.schema import check_types
from dmt.training.data.sharing import HeldRows, PieceReader, PieceReport, read_in_turns
from dmt.training.data.source import RowSource, ShardPosition, ShardStream

__all__ = ["SourcePass"]

logger = logging.getLogger(__name__)

_TURN_ROWS = 1 << 14
"""Rows of a turn, at least; batches stay whole."""
_PART_ROWS = 1 << 14
_MOST_MARKS = 512
_MARK_BYTES = 2**26
"""Bytes of the states of a source in all bookmarks of a pass, beyond four of them."""
_ENDLESS = 2**62


@dataclass(frozen=True)
class _BatchPlace(Place):
    """Positions of rows in the batches of a turn; rows are numbered through the shard, from 1."""

    first_rows: tuple[int, ...] = ()
    """Rows before each batch of the turn, in the shard."""
    first_batch: int = 1

    def text(self, counted: int) -> str:
        batch = bisect_right(self.first_rows, counted - 1) - 1
        return f"{self.file}, batch {self.first_batch + batch}, row {counted - self.first_rows[batch]}"


@dataclass(kw_only=True)
class _TurnReader(ColumnReader):
    """Reads the batches of one turn."""

    tables: list[pa.Table] = field(default_factory=list)
    """The batches, with all columns in use."""
    before: ShardPosition = field(default_factory=ShardPosition)
    """Place in the shard before the turn."""

    def _open(self, piece: Piece) -> tuple[str, Iterator[Part]]:
        return "row", self._parts(piece.file)

    def _parts(self, place: str) -> Iterator[Part]:
        number, row = self.before.batches + 1, self.before.rows + 1
        # Batches of other types are not joined: numbers of a wider type may be rounded.
        for schema, group in groupby(self.tables, key=lambda table: table.schema):
            check_types(self._columns, schema, f"{place}, batch {number}", self.config)
            same = list(group)
            table = pa.concat_tables(same)
            for start in range(0, table.num_rows, _PART_ROWS):
                part = table.slice(start, _PART_ROWS).combine_chunks()
                yield readable_part(part, np.arange(row + start, row + start + part.num_rows))
            number, row = number + len(same), row + table.num_rows

    def _place(self, piece: Piece, unit: str, numbers: NDArray[np.int64]) -> Place:
        sizes = [table.num_rows for table in self.tables]
        first_rows = (self.before.rows + np.cumsum([0, *sizes[:-1]])).tolist()
        batch = self.before.batches + 1
        return _BatchPlace(piece.file, unit, numbers, first_rows=tuple(first_rows), first_batch=batch)


class SourcePass:
    """One pass; see `blocks`. It can be used in the place of a `FilePass`.

    Args:
        config: of the data.
        encoder: of the columns.
        source: the user's function.
        split: whose rows they are; None: those of the training stream, undivided, to be checked.
        epoch: number of the pass.
        group: the ranks that share the reading; None: this one reads all.
        values_met: some values of the split column that were met; passes share it.
    """

    is_in_turns = True
    """Blocks are `HeldRows`, to be shared out by `shares`."""

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder,
        source: RowSource,
        *,
        split: Literal["train", "eval"] | None,
        epoch: int,
        group: dist.ProcessGroup | None,
        values_met: set[str],
    ) -> None:
        self._config, self._encoder, self._source = config, encoder, source
        self._split, self._epoch, self.group, self._values_met = split, epoch, group, values_met
        self._positions = [ShardPosition()] * config.source_shards
        self._raw = self._kept = 0
        self._marks: list[tuple[int, dict[str, Any]]] = []
        self.bad_lines = {source.name: 0}
        """Malformed rows left out so far."""

    @property
    def split_value(self) -> str | None:
        """The split column's value in the rows of the split; None where there is no such column."""
        return self._config.split_value(self._split)

    def start_at(self, saved: Mapping[str, Any] | None, before: int) -> int | None:
        """Makes the pass start at a saved bookmark, if that lies at or before row ``before`` of this split and fits.

        Returns:
            The rows of the split before the start; None if the pass starts at its first row.
        """
        if saved is None:
            return None
        try:
            positions = [ShardPosition(**shard) for shard in saved["shards"]]
            raw, kept, bad = (int(saved[name]) for name in ("raw", "kept", "bad"))
            if saved["epoch"] != self._epoch or len(positions) != len(self._positions):
                raise ValueError("it is of another pass")
            if not 0 <= kept <= min(before, raw) or bad < 0:
                raise ValueError("it is of other rows")
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("The bookmark does not fit (%s): %s is read from its start.", error, self._source.name)
            return None
        self._positions, self._raw, self._kept = positions, raw, kept
        self.bad_lines[self._source.name] = bad
        return kept

    def bookmark(self, epoch: int, before: int) -> dict[str, Any] | None:
        """Returns the last bookmark at or before row ``before`` that the pass has come by, as plain data, or None."""
        found = sum(kept <= before for kept, _ in self._marks)
        if epoch != self._epoch or not found:
            return None
        del self._marks[: found - 1]  # training does not go back
        return self._marks[0][1]

    def blocks(self) -> Iterator[Block]:
        """Yields the rows of the split from the start on; collective over the group.

        Raises:
            InputError: a malformed row or batch, with its place; on all ranks of the group.
        """
        blocks: Iterator[Block] = self._turns()
        if self._split and not (self._source.has_splits or self._config.split_column):
            chosen, by_request = self._split == "eval", self._config.group_by is not None
            fraction = self._config.eval_fraction
            blocks = spread_split(blocks, fraction, chosen=chosen, by_request=by_request, start=self._raw)
        for block in blocks:
            self._kept += block.num_rows
            yield block

    def _turns(self) -> Iterator[HeldRows]:
        """Yields the rows of all turns, before they are divided into splits; collective over the group."""
        rank, world_size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        shards, last = len(self._positions), -(-len(self._positions) // world_size) * world_size - 1
        streams = {
            number: self._source.shard(self._split or "train", number, epoch=self._epoch, start=self._positions[number])
            for number in range(rank, shards, world_size)
        }
        self._note()
        own = (self._turn(streams.get(at)) for _ in range(_ENDLESS) for at in range(rank, last + 1, world_size))
        try:
            for turn, held in enumerate(read_in_turns(own, _ENDLESS, self.group)):
                number = turn % (last + 1)
                if number < shards:
                    report = held.report
                    assert report.position is not None, "of a turn"
                    self._positions[number] = report.position
                    self.bad_lines[self._source.name] += report.num_bad
                    self._values_met |= report.values_met
                    self._raw += held.num_rows
                    if held.num_rows:
                        yield held
                if number == last:
                    # Its fault comes next, if there is one.
                    if held.report.fault is None and all(position.ended for position in self._positions):
                        return
                    self._note()
        finally:
            for stream in streams.values():
                stream.close()

    def _turn(self, stream: ShardStream | None) -> tuple[PieceReport, PackedRows]:
        """Reads the next turn of a shard; None: of one that is there to give every rank equally many."""
        layout = self._encoder.layout
        if stream is None:
            return PieceReport(), layout.empty()
        shared: dict[str, Any] = {"encoder": self._encoder, "skip_bad_lines": self._config.skip_bad_lines}
        reader = _TurnReader(config=self._config, split=self.split_value, **shared)
        fault, rows = None, 0
        try:
            while rows < _TURN_ROWS:
                if (table := stream.next_batch(reader.used)) is None:
                    break
                if not reader.tables:
                    # The first batch may have come after others that were left out.
                    reader.before = ShardPosition(batches=stream.batches - 1, rows=stream.rows - table.num_rows)
                reader.tables.append(table)
                rows += table.num_rows
        except InputError as error:  # after the rows that came before
            fault = str(error)
        report, packed = PieceReader(lambda: reader, layout)(Piece(stream.place))
        return replace(report, fault=report.fault or fault, position=stream.position()), packed

    def _note(self) -> None:
        """Notes where the next turn of every shard begins."""
        if self._split != "train":
            return
        positions = [asdict(position) for position in self._positions]
        mark = {"epoch": self._epoch, "raw": self._raw, "kept": self._kept, "shards": positions}
        self._marks.append((self._kept, mark | {"bad": self.bad_lines[self._source.name]}))
        held = sum(len(position.state or "") for position in self._positions)
        most = min(_MOST_MARKS, max(_MARK_BYTES // max(held, 1), 4))
        while len(self._marks) > most:
            del self._marks[-2:0:-2]  # it stays dense near the end, which is where a run resumes
