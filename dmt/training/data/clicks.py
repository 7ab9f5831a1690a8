"""`open_source`: one interface to all data: prepared Parquet, synthetic clicks, rows of the user's own.

Each rank finds its rows by arithmetic (`dmt.training.data.deal`) and reads them by itself, a thread ahead of training.

Legend: V lanes, W ranks, B rows of a rank's batch; a global batch has W * B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.training.data.columns import Columns, Feature, check_features, explicit_config, shared_tables, tables_of
from dmt.training.data.config import DataConfig
from dmt.training.data.deal import Deal, LaneRows, Rows
from dmt.training.data.files import MANIFEST, Manifest, ParquetRows, read_manifest
from dmt.training.data.own import OwnRows
from dmt.training.data.synthetic import BLOCK_ROWS, SyntheticRows, synthetic_clicks

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
        cache: folder into which raw files are prepared once (`dmt.training.data.prepare.prepare_once`); None refuses
            them.
        eval_only: all rows of ``train_path`` are evaluation rows, in their order.

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
        eval_only: bool = False,
    ) -> None:
        self.config = config
        self._dims: dict[str, Any] = {
            "embedding_dim": embedding_dim,
            "embedding_dims": embedding_dims or {},
            "data_type": data_type,
        }
        self._splits = column_splits or {}
        self._parts: dict[Split, ParquetRows | SyntheticRows] = {}
        self._manifest: Manifest | None = None
        self._own: OwnRows | None = None
        self._own_state: str | None = None
        self.planted_groups: list[list[str]] | None = None
        """The feature groups of synthetic data; None of others."""
        self.raw: DataConfig = config
        """Settings that turn raw rows into the ids of these, with every column by name."""
        if config.kind == "synthetic":
            self.columns = self._open_synthetic()
        elif config.kind == "source":
            self._own = OwnRows(config)
            self.columns = self._own.columns
            self.raw = explicit_config(config, self.columns)
        else:
            self.columns = self._open_files(cache, eval_only=eval_only)
        check_features("model.embedding_dims", self._dims["embedding_dims"], self.num_embeddings)
        for feature in self._splits:
            if feature not in self.num_embeddings:
                raise InputError(
                    f"column_splits of the tower plan cuts the table of feature {feature!r}, which is not a "
                    f"categorical feature of the data ({len(self.num_embeddings)} features)."
                    f"{did_you_mean(feature, self.num_embeddings)} Make a new tower plan for these data."
                )

    def _open_synthetic(self) -> Columns:
        config, clicks = self.config, synthetic_clicks(self.config.synthetic)
        for split in _SPLITS:
            log = config.dense_transform == "signed_log1p"
            self._parts[split] = SyntheticRows(clicks, split, signed_log1p=log)
        self.planted_groups = clicks.planted_groups
        rows = dict.fromkeys(clicks.feature_names, config.synthetic.rows_per_table)
        features = [
            Feature(name=name, rows=rows[name], table=table, is_bag=name in clicks.multi_hot)
            for name, table in shared_tables(config, rows).items()
        ]
        return Columns(dense=clicks.dense_names, features=tuple(features))

    def _open_files(self, cache: Path | None, *, eval_only: bool) -> Columns:
        """Opens a prepared folder, or one of its two parts, or prepares the files first."""
        if self.config.prepared:
            path, place = Path(self.config.prepared), f"data.prepared={self.config.prepared!r}"
            is_part = path.name in _SPLITS and not (path / MANIFEST).exists()
            folder = path.parent if is_part else path
            parts = {split: path.name if is_part else split for split in _SPLITS}
        else:
            from dmt.training.data.prepare import prepare_once  # which loads DuckDB

            folder = prepare_once(self.config, cache, eval_only=eval_only)
            place, parts = f"the prepared rows {folder}", {split: split for split in _SPLITS}
        self._manifest = manifest = read_manifest(folder, place)
        self._parts = {split: ParquetRows(manifest, folder / parts[split]) for split in _SPLITS}
        if manifest.raw is not None:
            self.raw = DataConfig.model_validate(manifest.raw)
        return manifest.columns

    @property
    def has_labels(self) -> bool:
        """Whether the rows have a label; only those that ``dmt score`` has prepared may have none."""
        return self._manifest is None or self._manifest.label is not None

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

    def files(self, split: Split) -> list[tuple[str, int, int]]:
        """Returns name without folders, bytes and CRC-32 of every file of a split, in order.

        Of training rows the files that were prepared come first, without a checksum: they are those that a user knows.
        """
        part = self._parts.get(split)
        if self._manifest is None or not isinstance(part, ParquetRows):
            return []
        sources = dict.fromkeys(self._manifest.sources if split == "train" else ())
        names = [(Path(file).name, size, 0) for file, size, _ in sources]
        rows = f"the rows of {shorten([name for name, *_ in names], ', ')}" if names else None
        return [*names, *((rows or name, size, checksum) for name, size, checksum in part.identities)]

    def num_rows(self, split: Split) -> int | None:
        """Returns the rows of a split; None of rows of the user's own, which nobody has counted."""
        return None if self._own is not None else int(self._parts[split].sizes.sum())

    def source_state(self, epoch: int, rows: int, *, world_size: int) -> str | None:
        """Returns this rank's state of the user's source where ``rows`` rows of an epoch are used; None without one."""
        return None if self._own is None else self._own.state(epoch, rows // world_size)

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
            state, self._own_state = self._own_state if split == "train" else None, None
            stream = self._own.stream(
                split, rank=rank, world_size=world_size, epoch=epoch, start=rows // world_size, state=state
            )
            own = self._own_batches(stream, split, batch_size)
            return own if group is None else self._agreed(own, split, batch_size, group)
        deal = self._deal(split, epoch, world_size if lanes is None or split == "eval" else lanes)
        self._check_enough(split, deal.num_rows, world_size * batch_size if split == "train" and not rows else 1)
        return prefetched(self._dealt(deal, split, epoch, rows, rank, world_size, batch_size))

    def _deal(self, split: Split, epoch: int, lanes: int) -> Deal:
        config = self.config
        moves = split == "train" and config.shuffle_pieces and config.kind != "synthetic"
        return Deal(self._parts[split].sizes, lanes, (config.shuffle_seed, epoch) if moves else None)

    def _dealt(
        self, deal: Deal, split: Split, epoch: int, start: int, rank: int, world_size: int, batch_size: int
    ) -> Iterator[ClickBatch]:
        """Yields the batches of a rank, from row ``start`` of the epoch on."""
        whole, is_drawn = world_size * batch_size, self.config.kind == "synthetic"
        shuffled = 0 if split == "eval" or is_drawn else self.config.shuffle_rows
        window = max(shuffled // deal.lanes, 1) if shuffled else BLOCK_ROWS if is_drawn else _UNSHUFFLED
        seed = (self.config.shuffle_seed, epoch) if shuffled else None
        readers: dict[int, _LaneReader] = {}
        read = lru_cache(maxsize=-(-deal.lanes // world_size) + 2)(self._parts[split].read)
        while start + (whole if split == "train" else 1) <= deal.num_rows:
            stop = min(start + whole, deal.num_rows)
            parts = []
            for rows in deal.of_rank(start, stop, rank=rank, world_size=world_size):
                if rows.lane not in readers:
                    readers[rows.lane] = _LaneReader(deal, rows.lane, read, window, seed)
                parts += readers[rows.lane].rows(rows.start, rows.stop)
            yield self._batch_of(Rows.concat(parts) if parts else self._no_rows(), batch_size)
            start = stop

    def _no_rows(self) -> Rows:
        """No rows of these columns: evaluation has fewer rows left than ranks."""
        bags = [feature for feature in self.columns.features if feature.is_bag]
        empty, single = (np.zeros(0, np.int64), np.zeros(1, np.int64)), len(self.columns.features) - len(bags)
        dense = np.zeros((len(self.dense_names), 0), np.float32)
        return Rows(np.zeros(0, np.float32), dense, np.zeros((single, 0), np.int64), (empty,) * len(bags))

    def _own_batches(self, stream: Iterator[Rows], split: Split, batch_size: int) -> Iterator[ClickBatch]:
        """Yields batches of the user's own rows; the last rows that fill none are evaluated only."""
        waiting: list[Rows] = []
        for part in stream:
            waiting.append(part)
            if sum([rows.num_rows for rows in waiting]) >= batch_size:
                joined = Rows.concat(waiting)
                whole = joined.num_rows // batch_size * batch_size
                for start in range(0, whole, batch_size):
                    yield self._batch_of(joined.slice(start, start + batch_size), batch_size)
                waiting = [joined.slice(whole, joined.num_rows)]
        if split == "eval" and any([rows.num_rows > 0 for rows in waiting]):
            yield self._batch_of(Rows.concat(waiting), batch_size)

    def _agreed(
        self, batches: Iterator[ClickBatch], split: Split, batch_size: int, group: dist.ProcessGroup
    ) -> Iterator[ClickBatch]:
        """Yields equally many batches on all ranks of a group; collective.

        Of training rows as many as the rank with the fewest has, of evaluation rows as many as that with the most,
        where those of others have no row that counts.
        """
        from dmt.collectives import gather_objects

        while True:
            waiting = list(islice(batches, _AGREED))
            numbers = gather_objects(len(waiting), group)
            number = min(numbers) if split == "train" else max(numbers)
            yield from waiting[:number]
            for _ in range(number - len(waiting)):
                yield self._batch_of(self._no_rows(), batch_size)
            if number < _AGREED:
                return

    def _batch_of(self, rows: Rows, batch_size: int) -> ClickBatch:
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        is_bag = [feature.is_bag for feature in self.columns.features]
        return make_batch(rows, self.feature_names, is_bag, batch_size).split_columns(self._splits)

    def _check_enough(self, split: Split, rows: int, needed: int) -> None:
        if rows >= needed or (rows and split == "eval"):
            return
        if rows:
            raise InputError(
                f"The training data has {rows} rows, fewer than one global batch of world_size * batch_size = "
                f"{needed}. Use a smaller batch_size."
            )
        raw, files = self.raw, [name for name, *_ in self.files("train")] or ["synthetic clicks"]
        value = raw.train_split if split == "train" else raw.eval_split
        why = f"None has {raw.split_column} == {value!r}. Set {split}_split." if raw.split_column else "Give more data."
        raise InputError(f"The {split} split has no rows in {shorten(files, most=1)}. {why}")


open_source = ClickData
"""Opens the data of a run."""


class _LaneReader:
    """The rows of a lane, a window at a time, shuffled inside it where there is a seed."""

    def __init__(
        self, deal: Deal, lane: int, read: Callable[[int], Rows], window: int, seed: tuple[int, int] | None
    ) -> None:
        self._deal, self._lane, self._read, self._window, self._seed = deal, lane, read, window, seed
        self._length = (deal.num_rows + deal.lanes - 1 - lane) // deal.lanes
        self._number, self._rows = -1, list[Rows]()

    def rows(self, start: int, stop: int) -> list[Rows]:
        """Returns rows ``start`` to ``stop`` of the lane, in parts."""
        parts = []
        while start < stop:
            number = start // self._window
            first = number * self._window
            end = min(stop, first + self._window)
            if number != self._number:
                self._number, self._rows = number, []  # the old window makes room first
                self._rows = [self._load(first, min(first + self._window, self._length))]
            parts.append(self._rows[0].slice(start - first, end - first))
            start = end
        return parts

    def _load(self, start: int, stop: int) -> Rows:
        pieces = self._deal.pieces(LaneRows(self._lane, start, stop))
        rows = Rows.concat([self._read(piece.group).slice(piece.start, piece.stop) for piece in pieces])
        return rows if self._seed is None else rows.take(_shuffled_order(rows, (*self._seed, self._lane, start)))


def _shuffled_order(rows: Rows, seed: Sequence[int]) -> NDArray[np.int64]:
    """Returns a random order of rows; those of a request stay together, in their order."""
    random = np.random.default_rng(list(seed))
    if rows.requests is None:
        return random.permutation(rows.num_rows)
    keys, request = np.unique(rows.requests, return_inverse=True)
    return np.argsort(random.permutation(len(keys))[request], kind="stable")


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
