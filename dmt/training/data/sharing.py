"""Reading shared out among ranks: each piece is parsed by one of them, and its rows go to the ranks that train on them.

The ranks take the pieces in turns (piece i is read by rank i mod W), tell one another how many rows they found, and
each computes from these numbers alone where every row of the stream belongs, just as if it had read all of them:
batches have the same bits however many ranks read. In a round of W pieces the ranks exchange their reports and rows.

Legend: W ranks, B rows of a rank's batch, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dmt.collectives import run_on_all_or_raise, start_exchange
from dmt.errors import InputError
from dmt.training.data.encode import FileBlock
from dmt.training.data.packed import PackedRows, RowLayout
from dmt.training.data.pieces import Piece
from dmt.training.data.readers import FileReader
from dmt.training.data.rows import Block, Rows, SelectedRows, every_row
from dmt.training.data.source import ShardPosition

__all__ = ["Chunk", "HeldRows", "PieceReader", "PieceReport", "RankShare", "read_in_turns"]

Chunk = tuple[list[Block], NDArray[np.int64]]
"""Blocks of rows, and the order in which they come; see `dmt.training.data.rows.shuffled`."""

_EXCHANGE_ROWS = 1 << 14  # of each rank, at least, in one exchange
_UNFIT = np.iinfo(np.uint16).max  # in the place of a rank
# To find the rows of a piece that cannot be encoded; one takes some 15. After the last, rows near one pass for one.
_MOST_TRIES = 256
_TAG = 1 << 20  # of the messages, which may pass those of a training step


@dataclass(frozen=True, kw_only=True)
class PieceReport:
    """Report on a piece, which the rank that has read it makes for all ranks."""

    num_rows: int = 0
    """Well-formed rows, of those before the fault."""
    num_bad: int = 0
    """Malformed rows that were left out."""
    requests: NDArray[np.int64] | None = None
    """Number of each row's request, with ``data.group_by`` [n]."""
    values_met: frozenset[str] = frozenset()
    """Some values of the split column, if there is one."""
    fault: str | None = None
    """The message of an `InputError` after these rows, which is raised when the stream comes to the place."""
    position: ShardPosition | None = None
    """Place in the shard of a source after these rows."""
    unfit: tuple[tuple[int, int, str], ...] = ()
    """Rows that cannot be encoded, from one to another, with a message that is raised if one of them is used."""


@dataclass(frozen=True)
class PieceReader:
    """Reads, checks and encodes one piece after another; goes to worker processes."""

    open_reader: Callable[[], FileReader]
    """Makes a reader of the files' format."""
    layout: RowLayout
    """The layout of the packed rows."""

    def __call__(self, piece: Piece) -> tuple[PieceReport, PackedRows]:
        """Returns the report and the rows of a piece; faults of the data are in the report."""
        reader = self.open_reader()
        rows, requests, unfit, fault = [self.layout.empty()], [np.zeros(0, np.int64)], _Unfit(), None
        by_request = reader.encoder.group_by is not None
        try:
            for block in reader.blocks(piece):
                requests += [block.requests] if by_request else []
                rows += self._packed(block, every_row(block), unfit)
        except InputError as error:
            fault = str(error)
        except Exception as error:
            raise RuntimeError(f"{piece}: cannot be read ({type(error).__name__}: {error})") from error
        found = PackedRows.concat(rows)
        report = PieceReport(
            num_rows=len(found.words),
            num_bad=reader.counts[piece.file],
            requests=np.concatenate(requests) if by_request else None,
            values_met=frozenset(reader.splits_seen),
            fault=fault,
            unfit=tuple(unfit.found),
        )
        return report, found

    def _packed(self, block: FileBlock, index: NDArray[np.int64], unfit: _Unfit) -> list[PackedRows]:
        """Encodes and packs rows; those that cannot be encoded are noted and become zeros."""
        try:
            packed = self.layout.pack(block.rows(index))
        except InputError as error:
            unfit.tries += 1
            if len(index) > 1 and unfit.tries < _MOST_TRIES:
                half = len(index) // 2
                return self._packed(block, index[:half], unfit) + self._packed(block, index[half:], unfit)
            unfit.found.append((unfit.row, unfit.row + len(index), str(error)))
            packed = self.layout.zeros(len(index))
        unfit.row += len(index)
        return [packed]


@dataclass
class _Unfit:
    """Rows of a piece that cannot be encoded."""

    row: int = 0
    """The rows until now."""
    tries: int = 0
    found: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class HeldRows:
    """The rows of a piece, as a `Block`; only the rank that has read it holds them."""

    holder: int
    """That rank."""
    report: PieceReport
    packed: PackedRows | None = field(repr=False)
    """Those rows; None on other ranks."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.report.num_rows

    @property
    def requests(self) -> NDArray[np.int64]:
        """Number of each row's request [n]."""
        assert self.report.requests is not None, "read without group_by"
        return self.report.requests

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Refuses to decode the rows: most are on other ranks."""
        raise NotImplementedError("rows of a piece are shared out, see RankShare.exchanged")


def read_in_turns(
    own: Iterator[tuple[PieceReport, PackedRows]], number: int, group: dist.ProcessGroup | None
) -> Iterator[HeldRows]:
    """Yields the rows of ``number`` pieces in order; collective over the group.

    Args:
        own: this rank's pieces, read: piece r, r + W, r + 2 W and so on for rank r.
        number: pieces of all ranks.
        group: the ranks; None: this one reads all by itself.

    Raises:
        InputError: a piece is at fault, which one rank has found; raised on all ranks, at that piece.
        RankError: reading failed in another way on some rank; on all of them.
    """
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    for first in range(0, number, world_size):
        packed: list[PackedRows] = []

        def read(packed: list[PackedRows] = packed, first: int = first) -> PieceReport | None:
            if first + rank >= number:
                return None
            report, rows = next(own)
            packed.append(rows)
            return report

        reports = [read()] if group is None else run_on_all_or_raise(read, group)
        for holder, report in enumerate(reports):
            if report is None:
                return
            yield HeldRows(holder, report, packed[0] if holder == rank else None)
            if report.fault is not None:
                raise InputError(report.fault)


@dataclass(frozen=True)
class RankShare:
    """The share of a rank in a stream of rows: row g, counted from ``start_row``, belongs to rank ``g // B mod W``."""

    rank: int
    world_size: int
    batch_size: int
    layout: RowLayout
    group: dist.ProcessGroup | None
    """The ranks that hold rows of the stream; None: this one holds all."""

    def decoded(self, chunks: Iterable[Chunk], start_row: int) -> Iterator[tuple[PackedRows, int]]:
        """Yields this rank's rows of each chunk, in stream order, and the rows of the chunk; decodes no others.

        Example:
            >>> layout = RowLayout(num_dense=0, is_bag=(), wide=False)
            >>> block = Rows(np.arange(6, dtype=np.float32), np.zeros((6, 0), np.float32), ())
            >>> share = RankShare(rank=1, world_size=2, batch_size=2, layout=layout, group=None)
            >>> [(layout.unpack(rows).labels.tolist(), n) for rows, n in share.decoded([([block], np.arange(6))], 0)]
            [([2.0, 3.0], 6)]
        """
        at = -start_row
        for blocks, order in chunks:
            mine = order[self._takers(at, len(order)) == self.rank]
            at += len(order)
            # Decode block by block in reading order (columns are encoded per block), then bring into stream order.
            reading = np.sort(mine)
            bounds = np.cumsum([0, *(block.num_rows for block in blocks)])
            parts = np.split(reading, np.searchsorted(reading, bounds[1:-1]))
            packed = [
                self.layout.pack(block.rows(part - first))
                for block, part, first in zip(blocks, parts, bounds, strict=False)
                if len(part)
            ]
            rows = PackedRows.concat(packed or [self.layout.empty()])
            in_order = (np.diff(mine) > 0).all()
            yield rows if in_order else rows.take(np.searchsorted(reading, mine)), len(order)

    def exchanged(self, chunks: Iterable[Chunk], start_row: int) -> Iterator[tuple[PackedRows, int]]:
        """Yields this rank's rows of chunks of `HeldRows`, some at a time; collective over the group.

        Yields:
            The rows of this rank, in stream order; and how many rows of the stream that covers.

        Raises:
            InputError: the stream has come to rows that cannot be read or encoded; on all ranks.
        """
        waiting: list[Chunk] = []
        covered, at = 0, -start_row
        enough = 1 if self.group is None else self.world_size * _EXCHANGE_ROWS
        chunks, fault, more = iter(chunks), None, True
        while more:
            try:
                waiting.append(next(chunks))
                covered += len(waiting[-1][1])
            except StopIteration:
                more = False
            except InputError as error:  # on all ranks: the rows before it come first
                fault, more = error, False
            if waiting and (covered >= enough or not more):
                rows, usable, message = self._own_rows(waiting, at)
                yield rows, usable
                if message is not None:
                    raise InputError(message)
                waiting, covered, at = [], 0, at + covered
        if fault is not None:
            raise fault

    def _takers(self, start: int, number: int) -> NDArray[np.int64]:
        """Returns the rank that each of these rows belongs to; -1 of rows before row 0, which are nobody's."""
        position = np.arange(start, start + number)
        return np.where(position < 0, -1, position // self.batch_size % self.world_size)

    def _own_rows(self, chunks: Sequence[Chunk], start: int) -> tuple[PackedRows, int, str | None]:
        """Shares consecutive chunks out, the first row of which is row ``start``.

        Returns:
            This rank's rows; the number of rows covered: all, or those before one that cannot be encoded; and then the
            message of that one.
        """
        held: dict[int, tuple[int, PackedRows]] = {}  # pieces of this rank, each with the place of its first row
        messages: list[str] = []
        holders, places = zip(*(self._rows_of(chunk, held, messages) for chunk in chunks), strict=True)
        holder, place = np.concatenate(holders), np.concatenate(places)
        begin, end, message = max(-start, 0), len(holder), None
        if messages and len(unfit := np.flatnonzero(holder[begin:] == _UNFIT)):
            end = begin + int(unfit[0])
            message = messages[place[end]]
        holder, place = holder[begin:end], place[begin:end]
        taker = self._takers(start + begin, len(holder)).astype(np.uint16)
        mine = np.flatnonzero(taker == self.rank)
        source = [packed for _, packed in held.values()] or [self.layout.empty()]
        if self.group is None:
            return PackedRows.take_from(source, place[mine]), end, message
        sent = np.flatnonzero(holder == self.rank)
        sent = sent[np.argsort(taker[sent], kind="stable")]
        by_holder = np.argsort(holder[mine], kind="stable")
        arrived = self._exchange(
            PackedRows.take_from(source, place[sent]),
            np.bincount(taker[sent], minlength=self.world_size),
            np.bincount(holder[mine], minlength=self.world_size),
        )
        order = np.empty(len(mine), np.int64)
        order[by_holder] = np.arange(len(mine))
        return arrived.take(order), end, message

    def _rows_of(
        self, chunk: Chunk, held: dict[int, tuple[int, PackedRows]], messages: list[str]
    ) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Returns for each row of a chunk the rank that holds it, and its place among those of this rank [n].

        Rows that cannot be encoded are held by ``_UNFIT``, and their place is that of their message.
        """
        blocks, order = chunk
        holders, places = [], []
        for block in blocks:
            index = None
            while isinstance(block, SelectedRows):
                index = block.index if index is None else block.index[index]
                block = block.block
            assert isinstance(block, HeldRows), f"{type(block).__name__} was not read in turns"
            index = every_row(block) if index is None else index
            holders.append(np.full(len(index), block.holder, np.uint16))
            places.append(np.zeros(len(index), np.int64))
            if block.packed is not None:
                if id(block.packed) not in held:
                    first = sum(len(packed.words) for _, packed in held.values())
                    held[id(block.packed)] = first, block.packed
                places[-1] = held[id(block.packed)][0] + index
            for start, stop, message in block.report.unfit:
                is_unfit = (start <= index) & (index < stop)
                holders[-1][is_unfit], places[-1][is_unfit] = _UNFIT, len(messages)
                messages.append(message)
        return np.concatenate(holders)[order], np.concatenate(places)[order]

    def _exchange(self, sent: PackedRows, counts: NDArray[np.int64], expected: NDArray[np.int64]) -> PackedRows:
        """Sends rows, which lie in order of their takers; returns those for this rank, in order of their holders."""
        width = self.layout.num_words
        words = self._send(torch.from_numpy(sent.words).reshape(-1), counts * width, expected * width)
        found = words.numpy().reshape(-1, width)
        if not any(self.layout.is_bag):
            return PackedRows(found, sent.ids[:0], np.zeros(len(found), np.int64))
        lengths = self.layout.num_ids(found)
        ids = self._send(torch.from_numpy(sent.ids), _sums(sent.lengths, counts), _sums(lengths, expected))
        return PackedRows(found, ids.numpy(), lengths)

    def _send(self, numbers: Tensor, counts: NDArray[np.int64], expected: NDArray[np.int64]) -> Tensor:
        assert self.group is not None, "there are other ranks"
        parts = numbers.split(counts.tolist())
        pending, arrived = start_exchange(parts, expected.tolist(), self.group, tag=_TAG)
        pending.wait()
        return torch.cat(arrived)


def _sums(numbers: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sums of consecutive parts of the numbers; ``counts`` are the lengths of the parts."""
    total = np.concatenate([[0], np.cumsum(numbers)])
    ends = np.cumsum(counts)
    return total[ends] - total[ends - counts]
