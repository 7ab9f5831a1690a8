"""`open_source`: one interface to all data: prepared and other Parquet files, synthetic clicks, rows of the user's own.

Each rank finds its rows by arithmetic (`dmt.training.data.deal`) and reads them by itself, a thread ahead of training.

Legend: V lanes, W ranks, B rows of a rank's batch; a global batch has W * B rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.training.data.columns import (
    Columns,
    Feature,
    check_features,
    expand_path,
    find_columns,
    shared_tables,
    tables_of,
)
from dmt.training.data.columns import table_name as table_name
from dmt.training.data.config import DataConfig
from dmt.training.data.deal import Deal, LaneRows
from dmt.training.data.own import OwnRows, shuffled_order
from dmt.training.data.parquet import ParquetRows, footer_identity, parquet_schema
from dmt.training.data.prepared import prepared_sources, raw_settings
from dmt.training.data.rows import Rows
from dmt.training.data.synthetic import BLOCK_ROWS, SyntheticClicks, SyntheticRows

if TYPE_CHECKING:
    import torch.distributed as dist

    from dmt.training.data.batch import ClickBatch

__all__ = ["ClickData", "Split", "open_source", "prefetched"]

Split = Literal["train", "eval"]
_SPLITS: tuple[Split, ...] = ("train", "eval")
_UNSHUFFLED = 8192  # rows that are read together where none are shuffled
_AHEAD = 4
_AGREED = 16  # batches of a source between two agreements of the ranks
_Item = TypeVar("_Item")


class ClickData:
    """Rows of clicks as batches for W ranks. Finds the files, the columns and the tables; reads no row yet.

    Args:
        config: the data section of the run's configuration.
        embedding_dim: columns of every table; only `ClickData.tables` needs it.
        embedding_dims: columns of single tables, by feature.
        data_type: number format of the tables' weights.
        column_splits: features whose tables the model cuts into column shards (`TowerPlan.column_splits`): batches
            have their ids once for each shard. `ClickData.tables` and ``feature_names`` stay those of the data.
        cache: folder into which text, and Parquet that needs it, is prepared once (`dmt.training.data.cache`); None
            refuses such data.

    Raises:
        InputError: no file matches, a column is absent or unfit, a setting names no feature, or rows cannot be used.

    Example:
        >>> from dmt.training.data.config import SyntheticConfig
        >>> synthetic = SyntheticConfig(num_features=2, num_groups=1, num_rows=100, num_eval_rows=10)
        >>> data = ClickData(DataConfig(synthetic=synthetic), embedding_dim=16)
        >>> [(table.name, table.num_embeddings) for table in data.tables]
        [('t_C1', 1000), ('t_C2', 1000)]
        >>> [len(batch.labels) for batch in data.batches("train", rank=0, world_size=2, batch_size=16)]
        [16, 16, 16]
        >>> [int(batch.weights.sum()) for batch in data.batches("eval", rank=1, world_size=2, batch_size=6)]
        [5]
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        embedding_dim: int | None = None,
        embedding_dims: Mapping[str, int] | None = None,
        data_type: Literal["FP32", "FP16"] = "FP32",
        column_splits: Mapping[str, Sequence[int]] | None = None,
        cache: Path | None = None,
    ) -> None:
        if config.kind in ("criteo_tsv", "columns"):
            from dmt.training.data.cache import prepare_if_needed  # which loads DuckDB only if it must

            config = prepare_if_needed(config, cache)
        self.config = config
        self._dims: dict[str, Any] = {
            "embedding_dim": embedding_dim,
            "embedding_dims": embedding_dims or {},
            "data_type": data_type,
        }
        self._splits = column_splits or {}
        self._files: dict[Split, list[str]] = {"train": [], "eval": []}
        self._identities: dict[Split, list[tuple[str, int, int]]] = {}
        self._parts: dict[Split, ParquetRows | SyntheticRows] = {}
        self._clicks: SyntheticClicks | None = None
        self._own: OwnRows | None = None
        self._own_state: str | None = None
        self.columns = self._open()
        """The columns of the rows as they are read."""
        self.raw, self.raw_columns = raw_settings(config, self.columns)
        """Settings and columns that turn raw rows into the same ids, with every column by name; of prepared rows those
        that they were prepared with."""
        check_features("model.embedding_dims", self._dims["embedding_dims"], self.num_embeddings)
        for feature in self._splits:
            if feature not in self.num_embeddings:
                raise InputError(
                    f"column_splits of the tower plan cuts the table of feature {feature!r}, which is not a "
                    f"categorical feature of the data ({len(self.num_embeddings)} features)."
                    f"{did_you_mean(feature, self.num_embeddings)} Make a new tower plan for these data."
                )

    def _open(self) -> Columns:
        config = self.config
        if config.kind == "synthetic":
            self._clicks = clicks = SyntheticClicks(config.synthetic)
            for split in _SPLITS:
                most = config.max_train_rows if split == "train" else config.max_eval_rows
                log = config.dense_transform == "signed_log1p"
                self._parts[split] = SyntheticRows(clicks, split, most=most, signed_log1p=log)
            rows = dict.fromkeys(clicks.feature_names, config.synthetic.rows_per_table)
            features = [
                Feature(
                    name=name, rows=rows[name], table=table, salt=name, id_mode="index", is_bag=name in clicks.multi_hot
                )
                for name, table in shared_tables(config, rows).items()
            ]
            return Columns(dense=clicks.dense_names, features=tuple(features), years={})
        if config.kind == "source":
            self._own = OwnRows(config)
            return find_columns(config, self._own.first_batch().schema, f"{self._own.name}, batch 1")
        self._files["train"] = expand_path("train_path", config.train_path or "", columns=True)
        shares = config.eval_path is None
        self._files["eval"] = (
            self._files["train"] if shares else expand_path("eval_path", config.eval_path or "", columns=True)
        )
        columns = find_columns(config, parquet_schema(self._files["train"][0]), self._files["train"][0])
        for split in _SPLITS:
            self._parts[split] = ParquetRows(config, columns, self._files[split], split, shares_files=shares)
        return columns

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Dense columns, in the order of a batch's."""
        return self.columns.dense

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Categorical features, in the order of a batch's keys (which name the shards of those that are cut)."""
        return tuple(feature.name for feature in self.columns.features)

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Rows of the table of each feature."""
        return {feature.name: feature.rows for feature in self.columns.features}

    @property
    def multi_hot(self) -> frozenset[str]:
        """Categorical features with bags of ids; the others have one id in each row."""
        return frozenset(feature.name for feature in self.columns.features if feature.is_bag)

    @property
    def tables(self) -> list[TableSpec]:
        """One table ``t_<feature>`` for each categorical feature, ``t_<name>`` for those of ``data.shared_tables``.

        Raises:
            InputError: ``embedding_dim`` was not given, or features that share a table have other numbers of columns.
        """
        if self._dims["embedding_dim"] is None:
            raise InputError("ClickData.tables needs embedding_dim; give it to open_source.")
        return tables_of(self.columns, **self._dims)

    @property
    def planted_groups(self) -> list[list[str]] | None:
        """The feature groups of synthetic data; None for files."""
        return self._clicks.planted_groups if self._clicks else None

    def files(self, split: Split) -> list[tuple[str, int, int]]:
        """Returns name without folders, bytes and a checksum of the footer of every file of a split, in order.

        Of prepared training rows the files that were prepared come first, without a checksum.

        They are those of the first call; a split that shares the files of the other one has none of its own.
        """
        if split not in self._identities:
            shares = split == "eval" and self.config.eval_path is None
            found = [] if shares else [footer_identity(file) for file in self._files[split]]
            if split == "train" and (sources := prepared_sources(self.config.train_path)):
                # The user knows the files that were prepared.
                rows = f"the rows of {shorten([name for name, _ in sources], ', ')}"
                found = [
                    *((name, size, 0) for name, size in sources),
                    *((rows, size, footer) for _, size, footer in found),
                ]
            self._identities[split] = found
        return self._identities[split]

    def num_rows(self, split: Split) -> int | None:
        """Returns the rows of a split; None of rows of the user's own, which nobody has counted."""
        return None if self._own is not None else int(self._parts[split].sizes.sum())

    def source_state(self, epoch: int, rows: int, *, world_size: int) -> str | None:
        """Returns this rank's state of the user's source where ``rows`` rows of an epoch are used; None without one."""
        if self._own is None:
            return None
        return self._own.state(epoch, rows // world_size if self._own.has_shards else rows)

    def load_source_state(self, state: str | None) -> None:
        """Takes over a state of `source_state` for the next pass over training rows, on the same rank of as many."""
        self._own_state = state

    def batches(
        self,
        split: Split,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        epoch: int = 0,
        rows: int = 0,
        lanes: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[ClickBatch]:
        """Yields a rank's batches of one pass, or of the rest of one.

        Every rank gets the same number of batches of the same size. Training leaves out the last rows of an epoch that
        do not fill a global batch: the last ones of every lane, which ``data.shuffle_pieces`` makes others in each
        epoch. Evaluation fills the last batches up with rows of weight 0, so that it sees each row exactly once.

        With the same lanes, ranks that divide them and ``lanes / W * b`` rows a rank, global batches are the same for
        any number of ranks. On any other number each remaining row of the epoch is used at most once.

        Args:
            split: the part of the data, ``"train"`` or ``"eval"``.
            rank: 0 to W - 1.
            world_size: W.
            batch_size: B (`rank_batch` of `dmt.training.data.deal` tells it for a run that has begun on other ranks).
            epoch: training rows come in another order in each epoch.
            rows: training rows of this epoch that are used already. If less than a global batch is left there is no
                batch: that epoch is over.
            lanes: V, the ranks of the first run; None: W.
            group: the W ranks, which agree on the end of an epoch of the user's own rows; collective then.

        Raises:
            InputError: an argument is out of range; no row, or, from row 0, too few to train on; a row that does not
                fit.
        """
        if split not in _SPLITS:
            raise InputError(f"split={split!r} is unknown; use 'train' or 'eval'.")
        if batch_size < 1 or not 0 <= rank < world_size:
            raise InputError(
                f"rank={rank}, world_size={world_size}, batch_size={batch_size}: need 0 <= rank < "
                "world_size and batch_size of at least 1."
            )
        if rows < 0 or (rows and split == "eval") or (lanes is not None and lanes < 1):
            raise InputError(
                f"rows={rows}, lanes={lanes} with split={split!r}: training starts at a row of at least 0 of at least "
                "one lane, evaluation always at the first row."
            )
        if self._own is not None:
            return self._own_batches(split, rank, world_size, batch_size, epoch, rows, group)
        deal = self._deal(split, epoch, world_size if lanes is None or split == "eval" else lanes)
        self._check_enough(split, deal.num_rows, world_size * batch_size if split == "train" and not rows else 1)
        return prefetched(self._dealt(deal, split, epoch, rows, rank, world_size, batch_size))

    def _deal(self, split: Split, epoch: int, lanes: int) -> Deal:
        config = self.config
        moves = split == "train" and config.shuffle_pieces and self._clicks is None
        return Deal(self._parts[split].sizes, lanes, (config.shuffle_seed, epoch) if moves else None)

    def _dealt(
        self, deal: Deal, split: Split, epoch: int, start: int, rank: int, world_size: int, batch_size: int
    ) -> Iterator[ClickBatch]:
        """Yields the batches of a rank, from row ``start`` of the epoch on."""
        whole, shuffles = world_size * batch_size, split == "train" and self._clicks is None
        window = self.config.shuffle_rows // deal.lanes if shuffles and self.config.shuffle_rows else 0
        seed = (self.config.shuffle_seed, epoch) if window else None
        readers: dict[int, _LaneReader] = {}
        groups: _Latest | None = None
        while start + (whole if split == "train" else 1) <= deal.num_rows:
            stop = min(start + whole, deal.num_rows)
            own = deal.of_rank(start, stop, rank=rank, world_size=world_size)
            if groups is None:
                groups = _Latest(self._parts[split], len(own) + 1)
            parts = []
            for rows in own:
                if rows.lane not in readers:
                    size = max(window, 1) if seed else BLOCK_ROWS if self._clicks else _UNSHUFFLED
                    readers[rows.lane] = _LaneReader(deal, rows.lane, groups, size, seed)
                parts += readers[rows.lane].rows(rows.start, rows.stop)
            yield self._batch_of(Rows.concat(parts) if parts else self._no_rows(groups), batch_size)
            start = stop

    def _no_rows(self, groups: _Latest) -> Rows:
        """No rows of these columns: evaluation has fewer rows left than ranks."""
        return groups.decode([groups.get(0).slice(0, 0)])

    def _own_batches(
        self,
        split: Split,
        rank: int,
        world_size: int,
        batch_size: int,
        epoch: int,
        start: int,
        group: dist.ProcessGroup | None,
    ) -> Iterator[ClickBatch]:
        """Yields batches of the user's own rows: of this rank's own shard, or of every rank's rows in turns."""
        assert self._own is not None, "of kind 'source'"
        alone = split == "train" and self._own.has_shards
        shard, num_shards = (rank, world_size) if alone else (0, 1)
        first, state = start // world_size if alone else start, self._own_state if split == "train" else None
        self._own_state = None
        stream = self._own.stream(
            self.columns, split, shard=shard, num_shards=num_shards, epoch=epoch, start=first, state=state
        )
        whole = batch_size if alone else batch_size * world_size
        mine = 0 if alone else rank * batch_size

        def whole_batches() -> Iterator[ClickBatch]:
            waiting: list[Rows] = []
            seen = 0
            for part in stream:
                waiting.append(part)
                seen += part.num_rows
                if sum(rows.num_rows for rows in waiting) < whole:
                    continue
                joined = Rows.concat(waiting)
                number = joined.num_rows // whole
                for i in range(number):
                    yield self._batch_of(joined.slice(i * whole + mine, i * whole + mine + batch_size), batch_size)
                waiting = [joined.slice(number * whole, joined.num_rows)]
            left = Rows.concat(waiting) if waiting else None
            if split == "eval" and left is not None and left.num_rows:
                mine_left = left.slice(min(mine, left.num_rows), min(mine + batch_size, left.num_rows))
                yield self._batch_of(mine_left, batch_size)
            if not (alone and group is not None):  # the ranks agree that there is none
                self._check_enough(split, seen, whole if split == "train" and not start else 1)

        return _agreed(whole_batches(), group) if alone and group is not None else whole_batches()

    def _batch_of(self, rows: Rows, batch_size: int) -> ClickBatch:
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        is_bag = [feature.is_bag for feature in self.columns.features]
        return make_batch(rows, self.feature_names, is_bag, batch_size).split_columns(self._splits)

    def _check_enough(self, split: Split, rows: int, needed: int) -> None:
        if rows and (rows >= needed or split == "eval" or self._own is not None):
            return
        if rows:
            raise InputError(
                f"The training data has {rows} rows, fewer than one global batch of world_size * batch_size = "
                f"{needed}. Use a smaller batch_size."
            )
        files, config = [self._own.name] if self._own else self._files[split], self.config
        why = "Give more data."
        if config.split_column:
            why = f"None has {config.split_column} == {config.split_value(split)!r}. Set {split}_split."
        elif self._clicks is None and config.eval_path is None:
            why = f"Give more data, or change eval_fraction={config.eval_fraction}."
        raise InputError(f"The {split} split has no rows in {shorten(files, most=1)}. {why}")


open_source = ClickData
"""Opens the data of a run."""


class _Latest:
    """The row groups that were read last."""

    def __init__(self, part: ParquetRows | SyntheticRows, most: int) -> None:
        self._part, self._most = part, most
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self.decode: Callable[[Sequence[Any]], Rows] = part.decode

    def get(self, group: int) -> Any:
        if group not in self._groups:
            while len(self._groups) >= self._most:
                self._groups.popitem(last=False)
            self._groups[group] = self._part.read(group)
        self._groups.move_to_end(group)
        return self._groups[group]


class _LaneReader:
    """The rows of a lane, a window at a time, shuffled inside it where there is a seed."""

    def __init__(self, deal: Deal, lane: int, groups: _Latest, window: int, seed: tuple[int, int] | None) -> None:
        self._deal, self._lane, self._groups, self._window, self._seed = deal, lane, groups, window, seed
        self._length = (deal.num_rows + deal.lanes - 1 - lane) // deal.lanes
        self._number = -1
        self._rows: Rows | None = None
        self._order: NDArray[np.int64] | None = None

    def rows(self, start: int, stop: int) -> list[Rows]:
        """Returns rows ``start`` to ``stop`` of the lane, in parts."""
        parts = []
        while start < stop:
            number = start // self._window
            first = number * self._window
            end = min(stop, first + self._window)
            if number != self._number:
                self._number = number
                self._load(first, min(first + self._window, self._length))
            assert self._rows is not None, "loaded before"
            if self._order is None:
                parts.append(self._rows.slice(start - first, end - first))
            else:
                parts.append(self._rows.take(self._order[start - first : end - first]))
            start = end
        return parts

    def _load(self, start: int, stop: int) -> None:
        pieces = self._deal.pieces(LaneRows(self._lane, start, stop))
        parts = [self._groups.get(piece.group).slice(piece.start, piece.stop) for piece in pieces]
        self._rows = self._groups.decode(parts)
        if self._seed is not None:
            self._order = shuffled_order(self._rows, (*self._seed, self._lane, start))


def prefetched(items: Iterator[_Item], ahead: int = _AHEAD) -> Iterator[_Item]:
    """Yields items that a thread makes ahead; what goes wrong with one is raised where it is asked for."""
    queue: Queue[tuple[Any, BaseException | None]] = Queue(ahead)
    stopped = Event()

    def put(item: Any, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                queue.put((item, error), timeout=0.1)
                return
            except Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # it belongs to the one who asks
            put(None, error)

    thread = Thread(target=work, daemon=True, name="batches")
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
        thread.join(timeout=1.0)


def _agreed(batches: Iterator[_Item], group: dist.ProcessGroup) -> Iterator[_Item]:
    """Yields equally many batches on all ranks of a group: as many as the rank with the fewest has; collective."""
    from itertools import islice

    from dmt.collectives import gather_objects

    while True:
        waiting = list(islice(batches, _AGREED))
        fewest = min(gather_objects(len(waiting), group))
        yield from waiting[:fewest]
        if fewest < _AGREED:
            return
