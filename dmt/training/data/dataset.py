"""`open_source`: one interface to all data. All ranks see the same stream of rows; each gets its own part of it.

Files become blocks of rows (`dmt.training.data.passes`), blocks are limited, split and shuffled as a stream
(`dmt.training.data.rows`), and a rank's own rows of it are made into batches. Ranks with a process group share the
reading (`dmt.training.data.sharing`); one that has none reads all files and decodes its own rows only.

Legend: W ranks, B rows of a rank's batch, a global batch has W * B rows.
"""

from __future__ import annotations

import copy
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder, FileBlock
from dmt.training.data.packed import PackedRows
from dmt.training.data.passes import FilePass, Split, check_same
from dmt.training.data.pieces import Piece, pieces_of
from dmt.training.data.readers import count_value
from dmt.training.data.rows import Block, Rows, cut, every_row, shuffled, spread_split
from dmt.training.data.schema import expand_path, resolve_columns
from dmt.training.data.sharing import Chunk, RankShare
from dmt.training.data.source import RowSource
from dmt.training.data.source_pass import SourcePass
from dmt.training.data.storage import file_version, is_remote
from dmt.training.data.synthetic import BLOCK_ROWS, SyntheticBlock, SyntheticClicks
from dmt.training.data.times import PART_ROWS, TimePart

if TYPE_CHECKING:
    import torch.distributed as dist

    from dmt.training.data.batch import ClickBatch

__all__ = ["ClickData", "Split", "ValidationReport", "open_source", "table_name"]

logger = logging.getLogger(__name__)

_SPLITS: tuple[Split, ...] = ("train", "eval")
_END_BYTES = 2**16
_LINE_BYTES = 250  # about, of a line of text such as Criteo's
_BLOCKS, _BLOCK_BYTES = 64, 2**12


@dataclass(frozen=True)
class ValidationReport:
    """Number of rows that a check before training has read."""

    train_rows: int
    """Rows of ``train_path`` checked (of both splits where they share files)."""
    eval_rows: int
    """Rows of ``eval_path`` checked."""
    bad_rows: int
    """Malformed rows that were left out (only with ``skip_bad_lines``)."""


class ClickData:
    """Rows of clicks as batches for W ranks. Finds the files, the columns and the tables; reads no row yet.

    Args:
        config: the data section of the run's configuration.
        embedding_dim: columns of every table; only `ClickData.tables` needs it.
        embedding_dims: columns of single tables, by feature.
        data_type: number format of the tables' weights.
        column_splits: features whose tables the model cuts into column shards (`TowerPlan.column_splits`): batches
            have their ids once for each shard. `ClickData.tables` and ``feature_names`` stay those of the data.

    Raises:
        InputError: no file matches, a column is absent or unfit, ``num_embeddings_per_feature`` names no feature, or
            ``column_splits`` names none.

    Example:
        >>> from dmt.training.data.config import SyntheticConfig
        >>> synthetic = SyntheticConfig(num_features=2, num_groups=1, num_rows=100, num_eval_rows=10)
        >>> data = ClickData(DataConfig(synthetic=synthetic), embedding_dim=16)
        >>> [(table.name, table.num_embeddings) for table in data.tables]
        [('t_C1', 1000), ('t_C2', 1000)]
        >>> [len(batch.labels) for batch in data.batches("train", rank=0, world_size=2, batch_size=16)]
        [16, 16, 16]
        >>> [int(batch.weights.sum()) for batch in data.batches("eval", rank=1, world_size=2, batch_size=6)]
        [4]
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        embedding_dim: int | None = None,
        embedding_dims: Mapping[str, int] | None = None,
        data_type: Literal["FP32", "FP16"] = "FP32",
        column_splits: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.config = config
        self._embedding_dim, self._embedding_dims = embedding_dim, embedding_dims or {}
        self._data_type = data_type
        self._splits = column_splits or {}
        self._bad_lines: dict[str, dict[str, int]] = {}  # of the latest pass over each split, by file
        self._pieces: dict[Split, list[Piece]] = {}
        self._passes: dict[Split, FilePass | SourcePass] = {}  # the latest
        self._warned: set[str] = set()
        self._splits_seen: set[str] = set()
        self._num_rows: dict[Split, int] = {}
        self._fingerprints: dict[Split, list[tuple[str, int, int, int]]] = {}
        self._clicks: SyntheticClicks | None = None
        self._source: RowSource | None = None
        self._files: dict[Split, list[str]] = {"train": [], "eval": []}
        self.times: dict[str, TimePart] = {}
        """Sources of the dense columns and features that are parts of times (`DataConfig.timestamps`)."""
        if config.kind == "synthetic":
            self._clicks = SyntheticClicks(config.synthetic)
            self.dense_names, multi_hot = self._clicks.dense_names, self._clicks.multi_hot
            self.num_embeddings = dict.fromkeys(self._clicks.feature_names, config.synthetic.rows_per_table)
            for split in _SPLITS:
                rows = self._clicks.num_rows(split)
                self._num_rows[split] = min(rows, self._most_rows(split) or rows)
        else:
            if config.kind == "source":
                self._source = RowSource(config)
                schema = self._source.first_batch().schema
                found = resolve_columns(config, f"{self._source.name}, batch 1", schema)
            else:
                columns = config.kind == "columns"
                self._files["train"] = expand_path("train_path", config.train_path or "", columns=columns)
                if config.eval_path:
                    self._files["eval"] = expand_path("eval_path", config.eval_path, columns=columns)
                found = resolve_columns(config, self._files["train"][0])
            times = [TimePart(column, part) for column in found.timestamps for part in config.timestamp_parts]
            self.times = {time.name: time for time in times}
            numbers = (name for name, time in self.times.items() if time.part not in PART_ROWS)
            self.dense_names = (*found.dense, *numbers)
            multi_hot = found.multi_hot
            self.num_embeddings = _table_rows(config, found.categorical, times)
        _check_features("model.embedding_dims", self._embedding_dims, self.num_embeddings)
        self._table_of = _shared_tables(config, self.num_embeddings)
        for feature in self._splits:
            if feature not in self.num_embeddings:
                raise InputError(
                    f"column_splits of the tower plan cuts the table of feature {feature!r}, which is not a "
                    f"categorical feature of the data ({len(self.num_embeddings)} features)."
                    f"{did_you_mean(feature, self.num_embeddings)} Make a new tower plan for these data."
                )
        self._encoder = Encoder(
            dense=self.dense_names,
            num_embeddings=self.num_embeddings,
            multi_hot=multi_hot,
            list_separator=config.list_separator,
            id_mode=config.id_mode,
            signed_log1p=config.dense_transform == "signed_log1p",
            group_by=config.group_by,
            times=self.times,
            salts={name: table for name, table in self._table_of.items() if table in config.shared_tables},
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Categorical features, in the order of a batch's keys (which name the shards of those that are cut)."""
        return tuple(self.num_embeddings)

    @property
    def tables(self) -> list[TableSpec]:
        """One table ``t_<feature>`` for each categorical feature, ``t_<name>`` for those of ``data.shared_tables``.

        Raises:
            InputError: ``embedding_dim`` was not given, or features that share a table have other numbers of columns.
        """
        if self._embedding_dim is None:
            raise InputError("ClickData.tables needs embedding_dim; give it to open_source.")
        features: dict[str, list[str]] = {}
        for name in self.num_embeddings:
            features.setdefault(self._table_of[name], []).append(name)
        tables = []
        for table, names in features.items():
            dims = {self._embedding_dims.get(name, self._embedding_dim) for name in names}
            if len(dims) > 1:
                raise InputError(
                    f"model.embedding_dims: the features {names} share a table, but have {sorted(dims)} columns. Give "
                    "all of them the same number."
                )
            tables.append(
                TableSpec(
                    name=table_name(table),
                    num_embeddings=self.num_embeddings[names[0]],
                    embedding_dim=dims.pop(),
                    feature_names=tuple(names),
                    data_type=self._data_type,
                )
            )
        return tables

    @property
    def multi_hot(self) -> frozenset[str]:
        """Categorical features with bags of ids; the others have one id in each row."""
        return self._encoder.multi_hot

    @property
    def salts(self) -> Mapping[str, str]:
        """Texts that salt the hashes of features which share a table; others are salted by their own names."""
        return self._encoder.salts

    @property
    def planted_groups(self) -> list[list[str]] | None:
        """The feature groups of synthetic data; None for files."""
        return self._clicks.planted_groups if self._clicks else None

    @property
    def bad_lines(self) -> dict[str, int]:
        """Number of malformed rows left out of each file in its latest reading (final once a pass is complete)."""
        files = {file for counts in self._bad_lines.values() for file in counts}
        return {file: max(counts.get(file, 0) for counts in self._bad_lines.values()) for file in sorted(files)}

    def files(self, split: Split) -> list[tuple[str, int, int, int]]:
        """Returns name without folders, bytes and `fingerprint` of every file of a split, in the order of reading.

        They are those of the first call: files may grow while they are read.
        """
        if split not in self._fingerprints:
            files = self._files[split]
            self._fingerprints[split] = [(Path(f).name, file_version(f)[0], *fingerprint(f)) for f in files]
        return self._fingerprints[split]

    def rows(self, split: Split) -> Iterator[Rows]:
        """Yields the rows of a split in the order of a pass (epoch 0), a block at a time; errors as in `batches`."""
        seen = 0
        for packed, number in self._own_rows(split, 0, 1, 1, 0, 0, None, None):
            seen = number
            yield self._encoder.layout.unpack(packed)
        self._check_not_empty(split, seen)

    def with_hashes(self, number: int) -> ClickData:
        """Returns the same data with the values of every feature hashed into as many rows as that; its tables stay."""
        data, sizes = copy.copy(self), dict.fromkeys(self.num_embeddings, number)
        data.__dict__["_encoder"] = replace(self._encoder, id_mode="hash", num_embeddings=sizes)
        return data

    def estimated_rows(self) -> int:
        """Returns about how many training rows there are, by the size of the files; 0 of a source."""
        if self._clicks is not None:
            return self._num_rows["train"]
        pieces = self._pieces_of("train") if self._files["train"] else []
        text = sum((piece.stop or 0) - piece.start for piece in pieces if piece.num_rows is None)
        return sum(piece.num_rows or 0 for piece in pieces) + text // _LINE_BYTES

    def num_rows(self, split: Split) -> int | None:
        """Returns the rows of a split if known: of synthetic data at once, of files after a whole pass; else None.

        Training rows of files are also known on a rank that has checked all of them (`validate`).
        """
        return self._num_rows.get(split)

    def bookmark(self, split: Split, *, epoch: int, row: int) -> dict[str, Any] | None:
        """Returns a place in the files from which rows ``row`` and later of the latest pass can be read, to be saved.

        It is plain data for `batches`, and the same for any number of ranks; None if there is none: a pass that has
        not come there, or synthetic data.
        """
        there = self._passes.get(split)
        return None if there is None else there.bookmark(epoch, self._first_of_block(split, row))

    def batches(
        self,
        split: Split,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        epoch: int = 0,
        start_row: int = 0,
        bookmark: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[ClickBatch]:
        """Yields a rank's batches of one pass, or of the rest of one.

        The rows are cut into global batches of ``world_size * batch_size`` rows; rank r has rows r * batch_size to
        (r + 1) * batch_size of each. Every rank gets the same number of batches of the same size: training drops the
        ragged last global batch, evaluation fills it up with rows of weight 0, so that it sees each row exactly once.

        A run that stopped goes on with ``start_row``, also with other W and B: global batches are cut from that row on.
        With the same W and B, ``start_row=k * W * B`` gives what the whole pass gives from its batch k on, bit for bit.
        Files are read from ``bookmark`` on, and without one from their start.

        Args:
            split: the part of the data, ``"train"`` or ``"eval"``.
            rank: r, 0 to W - 1.
            world_size: W.
            batch_size: B.
            epoch: training rows are shuffled differently in each epoch (see ``DataConfig.shuffle_rows``).
            start_row: training rows left out at the start of this epoch's shuffled stream. If less than a global batch
                is left there is no batch: that epoch is over.
            bookmark: of ``start_row``, by `bookmark`.
            group: the W ranks, which then read files as ``data.reading`` and ``data.workers`` say. All must ask for
                their batches at the same points: it is collective. None: this rank reads alone, without workers.

        Raises:
            InputError: an argument is out of range; no row, or, from row 0, too few to train on; a malformed row or an
                id out of range (see `validate`, which finds them before training), on all ranks of the group.

        Example:
            >>> from dmt.training.data.config import SyntheticConfig
            >>> data = ClickData(DataConfig(synthetic=SyntheticConfig(num_rows=100)))
            >>> whole = data.batches("train", rank=0, world_size=2, batch_size=16)
            >>> rest = data.batches("train", rank=0, world_size=2, batch_size=16, start_row=64)
            >>> [batch.labels.equal(list(whole)[2].labels) for batch in rest]
            [True]
        """
        if split not in _SPLITS:
            raise InputError(f"split={split!r} is unknown; use 'train' or 'eval'.")
        if batch_size < 1 or not 0 <= rank < world_size:
            raise InputError(
                f"rank={rank}, world_size={world_size}, batch_size={batch_size}: need 0 <= rank < "
                "world_size and batch_size of at least 1."
            )
        if start_row < 0 or (start_row and split == "eval"):
            raise InputError(
                f"start_row={start_row} with split={split!r}: training starts at a row of at least 0, evaluation "
                "always at the first. Fix it or leave it out."
            )
        if group is not None and (group.rank(), group.size()) != (rank, world_size):
            raise InputError(
                f"rank={rank}, world_size={world_size}: the group has rank {group.rank()} of {group.size()}. Give the "
                "group of just these ranks, or none."
            )
        own = self._own_rows(split, rank, world_size, batch_size, epoch, start_row, bookmark, group)
        return self._batches(split, own, batch_size, start_row, rank=rank, world_size=world_size)

    def validate(self, *, rank: int = 0) -> ValidationReport:
        """Reads and decodes the first ``validate_rows`` rows of the files, as training would, and keeps nothing.

        One rank can call it, or all. Only rank 0 logs. Synthetic data need no check.

        Raises:
            InputError: a malformed row (file and line or row number), an id outside its table, an infinite dense
                value, or a split without rows.
        """
        checked, training = {"train": 0, "eval": 0}, 0
        if self.config.validate_rows == 0 or self._clicks:
            return ValidationReport(0, 0, 0)
        most = None if self.config.validate_rows < 0 else self.config.validate_rows
        # Splits that share files are checked together: the first rows of the files, whichever split they are in.
        for split in _SPLITS:
            if not self._has_own_rows(split):
                continue
            there = self._pass(split, undivided=True, quiet=rank != 0)
            self._bad_lines[split] = there.bad_lines
            blocks = cut(there.blocks(), 0, most)
            if self._source is not None:
                alone = RankShare(rank=0, world_size=1, batch_size=1, layout=self._encoder.layout, group=None)
                checked[split] = sum(number for _, number in alone.exchanged(_in_order(blocks), 0))
                continue
            for block in blocks:
                block.rows(every_row(block))
                if self.config.group_by:
                    _ = block.requests
                if split == "train" and isinstance(block, FileBlock):  # a cut one is not the end of the files
                    training += self._training_rows(block, checked[split])
                checked[split] += block.num_rows
        if self._source is None and (most is None or checked["train"] < most):  # they were all
            self._num_rows["train"] = min(training, self.config.max_train_rows or training)
        report = ValidationReport(checked["train"], checked["eval"], sum(self.bad_lines.values()))
        for split in _SPLITS:
            first = cut(self._pass(split).blocks(), 0, 1)
            self._check_not_empty(split, sum(block.num_rows for block in first))
        if rank == 0:
            logger.info("Checked %d rows of train_path and %d of eval_path.", report.train_rows, report.eval_rows)
        return report

    def _has_own_rows(self, split: Split) -> bool:
        """Tells whether a split has files or calls of the source that are not those of the other split."""
        if self._source is not None:
            return split == "train" or self._source.has_splits
        return bool(self._files[split])

    def _training_rows(self, block: FileBlock, start: int) -> int:
        """Counts the training rows among rows of ``train_path``, the first of which is row ``start``."""
        config = self.config
        if config.split_column:
            return count_value(block.table, config.split_column, config.train_split)
        if config.eval_path:
            return block.num_rows
        by_request = config.group_by is not None
        apart = spread_split([block], config.eval_fraction, chosen=False, by_request=by_request, start=start)
        return sum(part.num_rows for part in apart)

    def _batches(
        self,
        split: Split,
        own: Iterator[tuple[PackedRows, int]],
        batch_size: int,
        start_row: int,
        *,
        rank: int,
        world_size: int,
    ) -> Iterator[ClickBatch]:
        """Makes batches of this rank's rows, which come with the rows of the stream seen so far."""
        global_batch = world_size * batch_size
        seen = emitted = 0
        waiting = [self._encoder.layout.empty()]
        for part, seen in own:
            waiting.append(part)
            ready = max(seen - start_row, 0) // global_batch - emitted
            if ready:
                # Own rows of an incomplete global batch wait: it may turn out to be the ragged last one.
                rows = PackedRows.concat(waiting)
                for i in range(ready):
                    yield self._batch_of(rows.slice(i * batch_size, (i + 1) * batch_size), batch_size)
                waiting = [rows.slice(ready * batch_size, rows.num_rows)]
                emitted += ready
        self._check_not_empty(split, seen)
        self._num_rows[split] = seen
        ragged = max(seen - start_row, 0) - emitted * global_batch
        if split == "eval" and ragged:
            yield self._batch_of(PackedRows.concat(waiting), batch_size)
        if split == "train":
            if not emitted and not start_row:
                raise InputError(
                    f"The training data has {seen} rows, fewer than one global batch of world_size * batch_size = "
                    f"{world_size} * {batch_size} = {global_batch}. Use a smaller batch_size."
                )
            if ragged and rank == 0:
                logger.info("Left out the last %d of %d training rows: less than a global batch.", ragged, seen)

    def _batch_of(self, rows: PackedRows, batch_size: int) -> ClickBatch:
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        return make_batch(rows, self._encoder.layout, self.feature_names, batch_size).split_columns(self._splits)

    def _own_rows(
        self,
        split: Split,
        rank: int,
        world_size: int,
        batch_size: int,
        epoch: int,
        start_row: int,
        bookmark: Mapping[str, Any] | None,
        group: dist.ProcessGroup | None,
    ) -> Iterator[tuple[PackedRows, int]]:
        """Yields a rank's rows in stream order, some at a time, and the rows of the stream seen by then."""
        seen, first, most = 0, self._first_of_block(split, start_row), self._most_rows(split)
        share, is_in_turns = RankShare(rank, world_size, batch_size, self._encoder.layout, None), False
        if self._clicks is not None:
            blocks = cut(self._draw(split), 0, most)
        else:
            workers = 0 if group is None else self.config.workers
            if self.config.reading == "shared" or world_size == 1:
                group = None
            if group is not None and self._source is None:
                check_same(lambda: self._pieces_of(split), group)
            there = self._pass(split, epoch, group, workers=workers, quiet=rank != 0)
            self._passes[split] = there
            self._bad_lines[split], is_in_turns = there.bad_lines, there.is_in_turns
            share = replace(share, group=there.group)
            before = there.start_at(bookmark, first)
            seen = 0 if before is None else first
            begin = before or 0
            blocks = cut(there.blocks(), seen - begin, None if most is None else most - begin)
        chunks = _in_order(blocks)
        if size := self._shuffled_rows(split):
            seed, by_request = (self.config.shuffle_seed, epoch), self.config.group_by is not None
            chunks = shuffled(blocks, size, seed=seed, by_request=by_request, number=seen // size)
        for rows, number in (share.exchanged if is_in_turns else share.decoded)(chunks, start_row - seen):
            seen += number
            yield rows, seen

    def _shuffled_rows(self, split: Split) -> int:
        """Rows of the blocks that are shuffled; 0 if none are."""
        return self.config.shuffle_rows if split == "train" and self._clicks is None else 0

    def _first_of_block(self, split: Split, row: int) -> int:
        """Returns the first row of the shuffled block that a row is in."""
        size = self._shuffled_rows(split) or 1
        return row // size * size

    def _most_rows(self, split: Split) -> int | None:
        return self.config.max_train_rows if split == "train" else self.config.max_eval_rows

    def _draw(self, split: Split) -> Iterator[Block]:
        assert self._clicks is not None, "files have no generator"
        total = self._clicks.num_rows(split)
        for index in range(-(-total // BLOCK_ROWS)):
            rows = min(BLOCK_ROWS, total - index * BLOCK_ROWS)
            yield SyntheticBlock(self._clicks, split, index, rows, self._encoder.signed_log1p)

    def _pieces_of(self, split: Split) -> list[Piece]:
        files = self._files[split] or self._files["train"]
        if split not in self._pieces:
            self._pieces[split] = pieces_of(files)
        return self._pieces[split]

    def _pass(
        self,
        split: Split,
        epoch: int | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        workers: int = 0,
        quiet: bool = True,
        undivided: bool = False,
    ) -> FilePass | SourcePass:
        """Prepares a pass over the rows of a split; by default, this rank looks at them alone.

        ``undivided``: with those of the other split where they share files or a stream.
        """
        shared: dict[str, Any] = {"group": group, "values_met": self._splits_seen}
        if self._source is not None:
            shared["split"] = split if self._source.has_splits or not undivided else None
            return SourcePass(self.config, self._encoder, self._source, epoch=epoch or 0, **shared)
        return FilePass(
            self.config.model_copy(update={"workers": workers}),
            self._encoder,
            self._pieces_of(split),
            split=None if undivided else split,
            epoch=epoch if split == "train" else None,
            warned=None if quiet else self._warned,
            **shared,
        )

    def _check_not_empty(self, split: Split, rows: int) -> None:
        if rows:
            return
        files = [self._source.name] if self._source else self._files[split] or self._files["train"]
        why = "Give more data."
        if self.config.split_column:
            value = self._pass(split).split_value
            met = ", ".join(repr(v) for v in sorted(self._splits_seen)) or "none"
            why = f"None has {self.config.split_column} == {value!r} (values met: {met}). Set {split}_split."
        elif not self._has_own_rows("eval"):
            why = f"Give more data, or change eval_fraction={self.config.eval_fraction}."
        raise InputError(f"The {split} split has no rows in {shorten(files, most=1)}. {why}")


def _in_order(blocks: Iterable[Block]) -> Iterator[Chunk]:
    return (([block], every_row(block)) for block in blocks)


open_source = ClickData
"""Opens the data of a run."""


def fingerprint(file: str) -> tuple[int, int]:
    """Returns two CRC-32 of a file: of its first and last 64 KiB, and of 64 blocks of 4 KiB spread evenly over it.

    It differs for another day's rows, for rows in another order and for a column with new values. A few changed bytes
    between the ends are noticed with a chance of 256 KiB / size: always in files up to that size. Of a remote file,
    the first is the number of its `file_version`, the second 0.
    """
    if is_remote(file):
        return file_version(file)[1], 0
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_END_BYTES)
        stream.seek(max(0, size - _END_BYTES))
        ends, blocks = zlib.crc32(stream.read(_END_BYTES), zlib.crc32(first)), 0
        for number in range(_BLOCKS):
            stream.seek(size * number // _BLOCKS)
            blocks = zlib.crc32(stream.read(_BLOCK_BYTES), blocks)
        return ends, blocks


def file_text(name: str, size: int, *fingerprints: int) -> str:
    """Describes a file of data by its name, bytes and fingerprints."""
    return f"{name} of {size:,} bytes (CRC-32 {' '.join(f'{crc:08x}' for crc in fingerprints)})"


def table_name(feature: str) -> str:
    """Returns a feature's table name; dots, which PyTorch forbids in a module's name, are percent-encoded.

    Example:
        >>> table_name("user.country")
        't_user%2Ecountry'
    """
    return "t_" + feature.replace("%", "%25").replace(".", "%2E")


def _table_rows(config: DataConfig, categorical: Iterable[str], times: Iterable[TimePart]) -> dict[str, int]:
    parts = {time.name: PART_ROWS[time.part] for time in times if time.part in PART_ROWS}
    rows = {**dict.fromkeys(categorical, config.num_embeddings), **parts}
    _check_features("num_embeddings_per_feature", config.num_embeddings_per_feature, rows)
    for name, number in config.num_embeddings_per_feature.items():
        if number < parts.get(name, 0):
            raise InputError(
                f"num_embeddings_per_feature: {name!r} has {number} rows, but a table of it has {parts[name]}: one for "
                "each of its values and one for a missing time. Leave it out."
            )
    return {**rows, **config.num_embeddings_per_feature}


def _check_features(setting: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises `InputError` for a name that is no categorical feature."""
    known = list(names)
    for name in given:
        if name not in known:
            raise InputError(
                f"{setting}: {name!r} is not a categorical feature.{did_you_mean(name, known)} "
                f"Features: {shorten(known, ', ', most=12)}."
            )


def _shared_tables(config: DataConfig, num_embeddings: Mapping[str, int]) -> dict[str, str]:
    """Returns the name of each feature's table, without the ``t_``: its own, or that in ``shared_tables``."""
    found = {name: name for name in num_embeddings}
    for table, features in config.shared_tables.items():
        _check_features(f"shared_tables.{table}", features, num_embeddings)
        if table in num_embeddings and table not in features:
            raise InputError(f"shared_tables: {table!r} is the name of another feature. Name the table otherwise.")
        rows = {num_embeddings[name] for name in features}
        if len(rows) > 1:
            raise InputError(
                f"shared_tables.{table}: its features have {sorted(rows)} rows. Give all of them the same number "
                "(num_embeddings_per_feature)."
            )
        for name in features:
            if found[name] != name or (name != table and name in config.shared_tables):
                raise InputError(f"shared_tables: feature {name!r} is in more than one table. Name it once.")
            found[name] = table
    return found
