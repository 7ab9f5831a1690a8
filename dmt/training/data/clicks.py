"""`open_source`: one interface to all data: prepared Parquet, synthetic clicks, rows of the user's own.

Each rank finds its rows by arithmetic (`dmt.training.data.deal`) and reads them by itself, a thread ahead of training.
Rows are tables of Arrow with the columns of a prepared folder until a batch is made.

Legend: V lanes, W ranks, B rows of a rank's batch; a global batch has W * B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.plan.tables import TableFormat, TableSpec
from dmt.training.data.columns import Columns, Feature, check_features, explicit_config, shared_tables, tables_of
from dmt.training.data.config import DataConfig
from dmt.training.data.deal import Deal, Span
from dmt.training.data.files import REQUEST, Manifest, read_manifest
from dmt.training.data.own import OwnRows
from dmt.training.data.parquet import ParquetRows
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
        data_type: TableFormat = "FP32",
        column_splits: Mapping[str, Sequence[int]] | None = None,
        cache: Path | None = None,
        eval_only: bool = False,
    ) -> None:
        self.config = config
        self._dims: dict[str, Any] = {"embedding_dims": embedding_dims or {}, "data_type": data_type}
        self._embedding_dim, self._splits = embedding_dim, column_splits or {}
        self._parts: dict[Split, ParquetRows | SyntheticRows] = {}
        self._manifest: Manifest | None = None
        self._own: OwnRows | None = None
        self._own_state: str | None = None
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
        check_features("model.embedding_dims", embedding_dims or {}, self.feature_names)
        check_features("column_splits of the tower plan", self._splits, self.feature_names)

    def _open_synthetic(self) -> Columns:
        config, clicks = self.config, synthetic_clicks(self.config.synthetic)
        is_log = config.dense_transform == "signed_log1p"
        self._parts = {split: SyntheticRows(clicks, split, signed_log1p=is_log) for split in _SPLITS}
        rows = dict.fromkeys(clicks.feature_names, config.synthetic.rows_per_table)
        features = [
            Feature(name=name, rows=rows[name], table=table, is_bag=name in clicks.multi_hot)
            for name, table in shared_tables(config, rows).items()
        ]
        return Columns(dense=clicks.dense_names, features=tuple(features), label="label")

    def _open_files(self, cache: Path | None, *, eval_only: bool) -> Columns:
        """Opens a prepared folder, or prepares the files first."""
        if self.config.prepared:
            folder, place = Path(self.config.prepared), f"data.prepared={self.config.prepared!r}"
        else:
            from dmt.training.data.prepare import prepare_once  # which loads DuckDB

            folder = prepare_once(self.config, cache, eval_only=eval_only)
            place = f"the prepared rows {folder}"
        self._manifest = manifest = read_manifest(folder, place)
        self._parts = {split: ParquetRows(folder / split, manifest.columns) for split in _SPLITS}
        if manifest.raw is not None:
            self.raw = DataConfig.model_validate(manifest.raw)
        return manifest.columns

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Dense columns, in the order of a batch's."""
        return self.columns.dense

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Categorical features, in the order of a batch's keys (which name the shards of those that are cut)."""
        return self.columns.feature_names

    @property
    def tables(self) -> list[TableSpec]:
        """One table ``t_<feature>`` for each categorical feature, ``t_<name>`` for those of ``data.shared_tables``.

        Raises:
            InputError: features that share a table have other numbers of rows or columns.
        """
        assert self._embedding_dim is not None, "ClickData.tables needs embedding_dim"
        return tables_of(self.columns, embedding_dim=self._embedding_dim, **self._dims)

    def files(self, split: Split) -> list[tuple[str, int, int]]:
        """Returns name without folders, bytes and CRC-32 of every file of a split, in order.

        Of training rows the files that were prepared come first, without a checksum: they are those that a user knows.
        """
        if self._manifest is None:
            return []
        raw = dict.fromkeys((Path(file).name, size, 0) for file, size, _ in self._manifest.sources if split == "train")
        names = f"the rows of {shorten([name for name, *_ in raw], ', ')}" if raw else ""
        files = [(Path(file), version) for file, version in sorted(self._manifest.files.items())]
        return [*raw, *((names or file.name, *version) for file, version in files if file.parent.name == split)]

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
            InputError: there is no such split, rank or batch; no row, or, from row 0, too few to train on; a row that
                does not fit.
        """
        if split not in _SPLITS or batch_size < 1 or not 0 <= rank < world_size:
            raise InputError(
                f"split={split!r}, rank={rank}, world_size={world_size}, batch_size={batch_size}: need 'train' or "
                "'eval', 0 <= rank < world_size and batch_size of at least 1."
            )
        if self._own is not None:
            state, self._own_state = self._own_state if split == "train" else None, None
            start = rows // world_size
            stream = self._own.stream(split, rank=rank, world_size=world_size, epoch=epoch, start=start, state=state)
            batches = self._own_batches(stream, split, batch_size)
            return batches if group is None else self._agreed(batches, split, batch_size, group)
        is_moved = split == "train" and self.config.shuffle_pieces and self.config.kind != "synthetic"
        seed = (self.config.shuffle_seed, epoch)
        deal = Deal(
            self._parts[split].sizes,
            lanes if lanes is not None and split == "train" else world_size,
            seed if is_moved else None,
        )
        self._check_enough(split, deal.num_rows, world_size * batch_size if split == "train" and not rows else 1)
        return prefetched(self._dealt(deal, split, epoch, rows, rank, world_size, batch_size))

    def _dealt(
        self, deal: Deal, split: Split, epoch: int, start: int, rank: int, world_size: int, batch_size: int
    ) -> Iterator[ClickBatch]:
        """Yields the batches of a rank, from row ``start`` of the epoch on."""
        global_batch = world_size * batch_size
        lanes = _Lanes(deal, self._parts[split], self.config, epoch if split == "train" else None, world_size)
        while start + (global_batch if split == "train" else 1) <= deal.num_rows:
            stop = min(start + global_batch, deal.num_rows)
            spans = deal.of_rank(start, stop, rank=rank, world_size=world_size)
            yield self._batch_of([part for span in spans for part in lanes.rows(span)], batch_size)
            start = stop

    def _own_batches(self, stream: Iterator[pa.Table], split: Split, batch_size: int) -> Iterator[ClickBatch]:
        """Yields batches of the user's own rows; the last rows that fill none are evaluated only."""
        waiting: list[pa.Table] = []
        for part in stream:
            waiting.append(part)
            if sum(table.num_rows for table in waiting) >= batch_size:
                joined = pa.concat_tables(waiting)
                whole = joined.num_rows // batch_size * batch_size
                for start in range(0, whole, batch_size):
                    yield self._batch_of([joined.slice(start, batch_size)], batch_size)
                waiting = [joined.slice(whole)]
        if split == "eval" and any(table.num_rows for table in waiting):
            yield self._batch_of(waiting, batch_size)

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
                yield self._batch_of([], batch_size)
            if number < _AGREED:
                return

    def _batch_of(self, parts: Sequence[pa.Table], batch_size: int) -> ClickBatch:
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        rows = pa.concat_tables(parts) if parts else self.columns.schema.empty_table()
        return make_batch(rows, self.columns, batch_size).split_columns(self._splits)

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


class _Lanes:
    """The rows of lanes, a window of each at a time, shuffled inside it in training."""

    def __init__(
        self, deal: Deal, part: ParquetRows | SyntheticRows, config: DataConfig, epoch: int | None, world_size: int
    ) -> None:
        self._deal = deal
        is_drawn = config.kind == "synthetic"
        is_shuffled = epoch is not None and config.shuffle_rows > 0 and not is_drawn
        unshuffled = BLOCK_ROWS if is_drawn else _UNSHUFFLED
        self._window = max(config.shuffle_rows // deal.lanes, 1) if is_shuffled else unshuffled
        self._seed, self._epoch = config.shuffle_seed, epoch if is_shuffled else None
        # Lanes that follow one another read the same row groups.
        self._read = lru_cache(maxsize=-(-deal.lanes // world_size) + 2)(part.read)
        self._windows: dict[int, tuple[int, pa.Table]] = {}

    def rows(self, span: Span) -> Iterator[pa.Table]:
        """Yields rows of a lane, in parts."""
        lane, start, stop = span
        while start < stop:
            number, first = divmod(start, self._window)
            if lane not in self._windows or self._windows[lane][0] != number:
                self._windows.pop(lane, None)  # the old window makes room first
                self._windows[lane] = number, self._load(lane, number * self._window)
            rows = min(stop - start, self._window - first)
            yield self._windows[lane][1].slice(first, rows)
            start += rows

    def _load(self, lane: int, start: int) -> pa.Table:
        """Reads the window of a lane from row ``start`` on."""
        stop = min(start + self._window, int(self._deal.in_lane(self._deal.num_rows, lane)))
        groups = self._deal.groups(Span(lane, start, stop))
        rows = pa.concat_tables([self._read(number).slice(first, end - first) for number, first, end in groups])
        return rows if self._epoch is None else rows.take(_shuffled_order(rows, (self._seed, self._epoch, lane, start)))


def _shuffled_order(rows: pa.Table, seed: Sequence[int]) -> NDArray[np.int64]:
    """Returns a random order of rows; those of a request stay together, in their order."""
    random = np.random.default_rng(list(seed))
    if REQUEST not in rows.column_names:
        return random.permutation(rows.num_rows)
    keys, request = np.unique(rows.column(REQUEST), return_inverse=True)
    return np.argsort(random.permutation(len(keys))[request], kind="stable")


def prefetched(items: Iterator[_Item], ahead: int = _AHEAD) -> Iterator[_Item]:
    """Yields items that a thread makes ahead; what goes wrong with one is raised where it is asked for."""
    pool, end = ThreadPoolExecutor(1, "batches"), object()
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
