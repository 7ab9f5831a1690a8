"""`FilePass`: one pass over the files of a split, by this rank alone or in turns with others, maybe from a bookmark."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder
from dmt.training.data.pieces import Piece, shuffled_pieces
from dmt.training.data.readers import ColumnReader, CriteoReader, FileReader
from dmt.training.data.rows import Block, spread_split
from dmt.training.data.sharing import PieceReader, read_in_turns

__all__ = ["Bookmark", "FilePass", "Split", "check_same", "make_reader"]

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class Bookmark:
    """A place between two pieces of a pass, from which its other rows can be read, by any number of ranks."""

    epoch: int
    piece: int
    """Number of the piece that comes next, in the order of this epoch."""
    file: str
    """Its file's name, without folders."""
    start: int
    """Its first byte or row group."""
    raw: int
    """Rows before it, with those of the other split where rows are set apart by their number."""
    kept: int
    """Rows of the split before it."""
    bad: Mapping[str, int] = field(default_factory=dict)
    """Malformed rows left out before it, by the number of their file in the order of names."""


class _Mark(NamedTuple):
    """A place that the pass has come by: what its piece does not tell."""

    piece: int
    raw: int
    kept: int
    bad: int
    """Malformed rows in the piece before."""


def make_reader(config: DataConfig, encoder: Encoder, split_value: str | None = None, **shared: Any) -> FileReader:
    """Makes a reader of the config's kind of files, of all rows or of those with a value in the split column.

    ``shared``: fields of `FileReader` that passes share.
    """
    shared |= {"encoder": encoder, "skip_bad_lines": config.skip_bad_lines}
    if config.kind == "criteo_tsv":
        return CriteoReader(**shared)
    return ColumnReader(config=config, split=split_value, **shared)


class FilePass:
    """One pass; see `blocks`.

    Args:
        config: of the data.
        encoder: of the columns.
        pieces: of the files, in their order.
        split: whose rows they are; None: those of both splits, undivided.
        epoch: number of the pass, by which pieces are shuffled; None: they are not.
        group: the ranks that share the reading; None: this one reads all.
        warned: files that need no warning about left-out rows any more, which passes share; None: no file does.
        values_met: some values of the split column that were met; passes share it.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder,
        pieces: Sequence[Piece],
        *,
        split: Split | None,
        epoch: int | None,
        group: dist.ProcessGroup | None,
        warned: set[str] | None,
        values_met: set[str],
    ) -> None:
        self._config, self._encoder, self._split = config, encoder, split
        self._epoch, self.group = epoch or 0, group
        self._warned, self._values_met = warned, values_met
        self._files = {file: number for number, file in enumerate(dict.fromkeys(piece.file for piece in pieces))}
        self._shuffles, self._pieces = epoch is not None and config.shuffle_pieces, list(pieces)
        if self._shuffles:
            self._pieces = shuffled_pieces(pieces, seed=(config.shuffle_seed, self._epoch))
        self._has_long = any(piece.is_long for piece in pieces)
        self._first = self._raw = self._kept = 0
        self._marks: list[_Mark] = []
        self._bad: dict[str, int] = {}  # malformed rows before the first of these marks, by file
        self._noted: dict[str, int] = {}  # and before the last
        self.bad_lines = dict.fromkeys(self._files, 0)
        """Malformed rows left out so far, by file."""

    @property
    def is_in_turns(self) -> bool:
        """True if blocks are `HeldRows`, to be shared out by `shares`; False if they are decoded when asked for.

        Pieces that are long (`Piece.is_long`) are not read in one go: every rank reads all files in small parts.
        """
        return (self.group is not None or self._config.workers > 0) and not self._has_long

    def start_at(self, saved: Mapping[str, Any] | None, before: int) -> int | None:
        """Makes the pass start at a saved bookmark, if that lies at or before row ``before`` of this split and fits.

        Returns:
            The rows of the split before the start; None if the pass starts at its first row.
        """
        if saved is None:
            return None
        try:
            mark, files = Bookmark(**saved), list(self._files)
            piece, bad = self._pieces[mark.piece], {files[int(number)]: count for number, count in mark.bad.items()}
            if (mark.epoch, mark.file, mark.start) != (self._epoch, Path(piece.file).name, piece.start):
                raise ValueError("it is of other pieces")
            if not (0 <= mark.kept <= before and mark.kept <= mark.raw and mark.piece >= 0):
                raise ValueError("it is of other rows")
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            if self._warned is not None:
                logger.warning("The bookmark %s does not fit (%s): files are read from their start.", saved, error)
            return None
        self._first, self._raw, self._kept = mark.piece, mark.raw, mark.kept
        self._bad, self._noted = bad, dict(bad)
        self.bad_lines |= bad
        return mark.kept

    def bookmark(self, epoch: int, before: int) -> dict[str, Any] | None:
        """Returns the last bookmark at or before row ``before`` that the pass has come by, as plain data, or None."""
        found = sum(mark.kept <= before for mark in self._marks)
        if epoch != self._epoch or not found:
            return None
        # Training does not go back: earlier ones are needed no more.
        for mark in self._marks[:found]:
            if mark.bad:
                file = self._pieces[mark.piece - 1].file
                self._bad[file] = self._bad.get(file, 0) + mark.bad
        mark = self._marks[found - 1]
        self._marks[:found] = [mark._replace(bad=0)]
        piece = self._pieces[mark.piece]
        bookmark = Bookmark(
            epoch=epoch,
            piece=mark.piece,
            file=Path(piece.file).name,
            start=piece.start,
            raw=mark.raw,
            kept=mark.kept,
            bad={str(self._files[file]): count for file, count in self._bad.items()},
        )
        return asdict(bookmark)

    def blocks(self) -> Iterator[Block]:
        """Yields the rows of the split from the start on; collective over the group.

        Raises:
            InputError: see `FileReader.blocks`; on all ranks of the group.
        """
        blocks: Iterator[Block] = self._in_turns() if self.is_in_turns else self._alone()
        if self._split and not (self._config.eval_path or self._config.split_column):
            chosen, by_request = self._split == "eval", self._config.group_by is not None
            fraction = self._config.eval_fraction
            blocks = spread_split(blocks, fraction, chosen=chosen, by_request=by_request, start=self._raw)
        for block in blocks:
            self._kept += block.num_rows
            yield block
        self._warn(list(self._files))

    @property
    def split_value(self) -> str | None:
        """The split column's value in the rows of the split; None where there is no such column."""
        return self._config.split_value(self._split)

    def _alone(self) -> Iterator[Block]:
        shared: dict[str, Any] = {"counts": self.bad_lines, "splits_seen": self._values_met}
        reader = make_reader(self._config, self._encoder, self.split_value, **shared)
        for number, piece in enumerate(self._pieces[self._first :], self._first):
            self._pass_by(number)
            for block in reader.blocks(piece):
                self._raw += block.num_rows
                yield block

    def _in_turns(self) -> Iterator[Block]:
        rank, world_size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        pieces = self._pieces[self._first :]
        open_reader = partial(make_reader, self._config, self._encoder, self.split_value)
        read = PieceReader(open_reader, self._encoder.layout)
        own = pieces[rank::world_size]
        if self._config.workers and own:
            from dmt.training.data.workers import read_ahead

            ahead = read_ahead(read, own, self._config.workers)
        else:
            ahead = map(read, own)
        for number, held in enumerate(read_in_turns(ahead, len(pieces), self.group), self._first):
            self._pass_by(number)
            self.bad_lines[self._pieces[number].file] += held.report.num_bad
            self._values_met |= held.report.values_met
            self._raw += held.num_rows
            if held.num_rows:
                yield held

    def _pass_by(self, number: int) -> None:
        """Notes where the next piece begins."""
        bad = 0
        if number > self._first:
            earlier = self._pieces[number - 1].file
            bad = self.bad_lines[earlier] - self._noted.get(earlier, 0)
            self._noted[earlier] = self.bad_lines[earlier]
            if earlier != self._pieces[number].file and not self._shuffles:
                self._warn([earlier])
        if self._split == "train":
            self._marks.append(_Mark(number, self._raw, self._kept, bad))

    def _warn(self, files: Sequence[str]) -> None:
        """Warns once of each of these files, which have been read, if it had malformed rows."""
        for file in files:
            if self._warned is not None and self.bad_lines[file] and file not in self._warned:
                self._warned.add(file)
                logger.warning("%s: left out %d malformed rows (skip_bad_lines=true).", file, self.bad_lines[file])


def check_same(pieces: Callable[[], Sequence[Piece]], group: dist.ProcessGroup) -> None:
    """Checks that all ranks of the group would read the same pieces; collective.

    Raises:
        InputError: they would not, or a file cannot be read on some rank; on all ranks.
    """

    def told() -> tuple[int, int]:
        named = [replace(piece, file=Path(piece.file).name) for piece in pieces()]
        return len(named), zlib.crc32(repr(named).encode())

    sums = run_on_all_or_raise(told, group)
    for rank, other in enumerate(sums):
        if other != sums[0]:
            raise InputError(
                f"Rank {rank} finds other pieces in its files ({other[0]}) than rank 0 ({sums[0][0]}). Give "
                "every host the same files, which must not change in training, or set data.reading='shared'."
            )
