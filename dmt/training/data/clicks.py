"""`ClickData` turns prepared files, synthetic clicks, or rows of a user's function into batches for each rank.

For files and synthetic clicks, each rank computes which rows it reads (`dmt.training.data.deal`), and a thread reads
them ahead of training. Rows are Arrow tables with the columns of a prepared folder until they are shuffled.

Legend: V lanes, W ranks, B rows of a rank's batch; a global batch has W * B rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dmt.formatting import shorten
from dmt.training.access import load_profile
from dmt.training.data.columns import Columns, explicit_config, find_columns
from dmt.training.data.config import DataConfig, data_section
from dmt.training.data.deal import Deal, Span
from dmt.training.data.files import MANIFEST, REQUEST, Manifest, read_manifest
from dmt.training.data.parquet import ParquetRows, Rows, pack_rows

if TYPE_CHECKING:
    import torch.distributed as dist

    from dmt.training.data.batch import ClickBatch
    from dmt.training.data.source import SourceRows
    from dmt.training.data.synthetic import SyntheticRows

__all__ = ["ClickData", "Split", "prefetched"]

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]
_SPLITS: tuple[Split, ...] = ("train", "eval")
_UNSHUFFLED = 8192  # rows of a lane that are read together when rows are not shuffled
_AHEAD = 4  # batches that are read ahead
_Item = TypeVar("_Item")


class ClickData:
    """Rows of clicks as batches for W ranks. The constructor finds the columns, and prepares raw files if needed.

    Args:
        config: section ``data`` of the run's configuration.
        cache: folder for the prepared copies of raw files (`prepare_once`); None refuses raw files.
        eval_only: use all rows of raw files for evaluation, in file order unless there is a ``group_by``.

    Raises:
        InputError: no file matches, a file cannot be read, a column is missing or has an unsuitable type, a setting
            names an unknown feature, or a raw row is invalid; or see `SourceRows`.

    Example:
        >>> from dmt.training.data.config import SyntheticConfig
        >>> synthetic = SyntheticConfig(num_features=2, num_groups=1, num_rows=100, num_eval_rows=10)
        >>> data = ClickData(DataConfig(synthetic=synthetic))
        >>> data.columns.feature_names
        ('C1', 'C2')
        >>> [len(batch.labels) for batch in data.batches("train", rank=0, world_size=2, batch_size=16)]
        [16, 16, 16]
        >>> [int(batch.weights.sum()) for batch in data.batches("eval", rank=1, world_size=2, batch_size=6)]
        [5]
    """

    def __init__(self, config: DataConfig, *, cache: Path | None = None, eval_only: bool = False) -> None:
        self.config = config
        self.columns: Columns
        """Columns of the rows, in the order in which a batch has them."""
        self.raw: DataConfig = config
        """Settings that convert raw rows to these rows, without globs; ``config`` if no such settings are known."""
        self.source: SourceRows | None = None
        """Rows of the user's function, with ``data.source``; None for other kinds of data."""
        self.notes = ""
        """Up to three notes of ``dmt prepare`` on the data, and the file that has all; empty if there are none."""
        self._parts: dict[Split, ParquetRows | SyntheticRows] = {}
        self._manifest: Manifest | None = None
        self._counts: Path | None = None
        self._distinct: dict[int, dict[str, float]] = {}
        if config.kind == "synthetic":
            self._open_synthetic()
        elif config.kind == "source":
            from dmt.training.data.source import SourceRows  # which loads torch and DuckDB

            self.source = SourceRows(config)
            self.columns = self.source.columns
            self.raw = explicit_config(config, self.columns)
        else:
            self._open_files(cache, eval_only=eval_only)

    def _open_synthetic(self) -> None:
        from dmt.training.data.synthetic import SyntheticRows, synthetic_clicks  # which loads torch

        clicks = synthetic_clicks(self.config.synthetic)
        self._parts = {split: SyntheticRows(clicks, split) for split in _SPLITS}
        named = {"dense": clicks.dense_names, "categorical": clicks.feature_names}
        config = self.config.model_copy(update={**named, "num_embeddings": self.config.synthetic.rows_per_table})
        self.columns = find_columns(config, clicks.draw("train", 0).schema, "The synthetic clicks")

    def _open_files(self, cache: Path | None, *, eval_only: bool) -> None:
        """Opens the prepared folder; prepares raw files first."""
        if self.config.prepared:
            folder, place = Path(self.config.prepared), f"data.prepared={self.config.prepared!r}"
        else:
            from dmt.training.data.prepare import prepare_once  # which loads DuckDB

            folder = prepare_once(self.config, cache, eval_only=eval_only)
            place = f"the prepared rows {folder}"
        self._manifest = manifest = read_manifest(folder, place)
        self._counts = folder / manifest.access_counts if manifest.access_counts else None
        self.columns = manifest.columns
        for split in _SPLITS:
            files = [folder / name for name, *_ in self.files(split) if name.endswith(".parquet")]
            self._parts[split] = ParquetRows(files, self.columns)
            if unlisted := sorted(str(file) for file in {*folder.glob(f"{split}/*.parquet")}.difference(files)):
                logger.warning("%s: files that it does not list are not read: %s", folder / MANIFEST, shorten(unlisted))
        if noticed := manifest.summary.get("notes"):
            few = shorten([note if len(note) <= 1000 else f"{note[:1000]} ..." for note in noticed], " ")
            self.notes = f"{few} (summary in {folder / MANIFEST})"
        if manifest.raw is not None:
            self.raw = data_section(manifest.raw, f"{place}: raw in its manifest", "Prepare the data again.")

    def files(self, split: Split) -> list[tuple[str, int, int]]:
        """Returns (path in the folder, bytes, CRC-32) of each prepared file of a split, sorted; [] without files."""
        files = {} if self._manifest is None else self._manifest.files
        return [(name, *version) for name, version in sorted(files.items()) if name.startswith(f"{split}/")]

    @property
    def ids_per_row(self) -> dict[str, float]:
        """Mean number of ids per training row, by list feature; only for those of which ``dmt prepare`` counted ids."""
        counts = {} if self._manifest is None else self._manifest.summary.get("features", {})
        bags = [feature.name for feature in self.columns.features if feature.is_bag]
        means = {name: float(counts.get(name, {}).get("ids_per_row", 0)) for name in bags}
        return {name: mean for name, mean in means.items() if mean > 0}

    def distinct_inputs(self, batch_size: int) -> dict[str, float]:
        """Returns the expected number of distinct ids in a batch, by feature; empty if ``dmt prepare`` counted none.

        Ids are counted by table, so features that share a table get equal numbers. Right only for features with at most
        one id per row, and if rows are independent (no ``data.group_by``). The first call reads the counts.
        """
        if self._counts is not None and batch_size not in self._distinct:
            counts = load_profile(self._counts)
            rows = counts.distinct_rows(batch_size)
            self._distinct[batch_size] = {
                name: max(rows[table.name] / len(table.feature_names), 1.0)
                for table in counts.tables
                for name in table.feature_names
            }
        return self._distinct.get(batch_size, {})

    def num_rows(self, split: Split) -> int | None:
        """Returns the number of rows of a split; None for the rows of a user's function, which are not counted."""
        return None if self.source is not None else int(self._parts[split].sizes.sum())

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
        """Returns an iterator over one rank's batches of an epoch, or of the rest of an epoch.

        Every rank gets equally many batches of B rows. Rows of files and synthetic clicks are dealt to V lanes;
        training drops the last rows of the epoch that fill no global batch. With a user's function, training stops with
        the rank that has the fewest full batches. Evaluation uses all rows, and pads batches with rows of weight 0.

        With B = V / W * b for a fixed b, global batches are the same for every W that divides V. On any other number of
        ranks each remaining row of the epoch is used at most once.

        Args:
            split: the part of the data, ``"train"`` or ``"eval"``.
            rank: this rank, 0 to W - 1.
            world_size: W.
            batch_size: B; for a run that began on another number of ranks, see `dmt.training.data.deal.rank_batch`.
            epoch: number of the epoch, from 0. Each epoch shuffles the training rows of files again.
            rows: training rows of this epoch that all ranks together have used. The iterator is empty if fewer rows
                than a global batch are left.
            lanes: V, the number of ranks on which the run began; None: W, as always in evaluation.
            group: the W ranks. With a user's function they agree on the last batch, so iterating is collective; None:
                this rank's function alone decides.

        Raises:
            InputError: while iterating, if rows are unreadable or invalid (`ParquetRows.read`, `SourceRows.tables`).
        """
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        if self.source is not None:
            tables = self.source.tables(
                split, rank, world_size, batch_size=batch_size, epoch=epoch, start=rows // world_size, group=group
            )
            # Not in a thread, which would use the process group at the same time as training.
            return (make_batch([pack_rows(table, self.columns)], self.columns, batch_size) for table in tables)
        is_train = split == "train"
        seed = (self.config.shuffle_seed, epoch) if is_train and self.config.kind != "synthetic" else None
        lanes = lanes if lanes is not None and is_train else world_size
        deal = Deal(self._parts[split].sizes, lanes, seed if self.config.shuffle_pieces else None)
        step, end = world_size * batch_size, deal.num_rows
        starts = range(rows, end - step + 1 if is_train else end, step)
        spans = (deal.of_rank(at, min(at + step, end), rank=rank, world_size=world_size) for at in starts)
        # Consecutive lanes read the same row groups.
        read = lru_cache(maxsize=-(-lanes // world_size) + 2)(self._parts[split].read)
        seed = seed if self.config.shuffle_rows else None
        window = max(self.config.shuffle_rows // lanes, 1) if seed else _UNSHUFFLED
        return _Lanes(deal, read, self.columns, window, seed).batches(spans, batch_size)

    def part(self, rank: int, world_size: int, batch_size: int) -> tuple[int, Iterator[ClickBatch]]:
        """Splits the evaluation rows into W contiguous parts, and returns one rank's part.

        The last parts may be shorter; padding rows of weight 0 give every rank the same number of batches.

        Returns:
            The index of the part's first row, in file order, and an iterator over the part's batches of B rows.
        """
        assert self.source is None, "the rows of a source are not numbered"
        deal = Deal(self._parts["eval"].sizes, 1)
        rows = -(-deal.num_rows // world_size)
        first, end = rank * rows, min((rank + 1) * rows, deal.num_rows)
        spans = ([Span(0, at, min(at + batch_size, end))] for at in range(first, first + rows, batch_size))
        read = lru_cache(maxsize=2)(self._parts["eval"].read)
        return first, _Lanes(deal, read, self.columns).batches(spans, batch_size)


@dataclass
class _Lanes:
    """Reads lanes window by window, and shuffles the rows of each window if there is a ``seed``."""

    deal: Deal
    read: Callable[[int], pa.Table]
    columns: Columns
    window: int = _UNSHUFFLED
    seed: tuple[int, int] | None = None
    loaded: dict[int, tuple[int, Rows]] = field(default_factory=dict)  # number and rows of each lane's last window

    def batches(self, spans: Iterator[list[Span]], batch_size: int) -> Iterator[ClickBatch]:
        """Returns an iterator over batches of ``batch_size`` rows: the rows of each list of spans, then padding."""
        from dmt.training.data.batch import make_batch  # TorchRec takes seconds to import

        parts = ([part for span in of_batch for part in self.rows(span)] for of_batch in spans)
        return prefetched(make_batch(rows, self.columns, batch_size) for rows in parts)

    def rows(self, span: Span) -> Iterator[Rows]:
        """Yields the rows of a span of a lane, by window."""
        lane, start, stop = span
        while start < stop:
            number, first = divmod(start, self.window)
            if lane not in self.loaded or self.loaded[lane][0] != number:
                self.loaded.pop(lane, None)  # the old window makes room first
                self.loaded[lane] = number, self._load(lane, number * self.window)
            rows = min(stop - start, self.window - first)
            words, bags = self.loaded[lane][1]
            yield words[:, first : first + rows], bags.slice(first, rows)
            start += rows

    def _load(self, lane: int, start: int) -> Rows:
        """Reads the window of a lane that begins at row ``start``, shuffled if there is a seed."""
        stop = min(start + self.window, int(self.deal.in_lane(self.deal.num_rows, lane)))
        groups = self.deal.groups(Span(lane, start, stop))
        rows = pa.concat_tables([self.read(number).slice(first, end - first) for number, first, end in groups])
        order = None if self.seed is None else _shuffled_order(rows, (*self.seed, lane, start))
        return pack_rows(rows, self.columns, order)


def _shuffled_order(rows: pa.Table, seed: Sequence[int]) -> NDArray[np.int64]:
    """Returns a random permutation of n rows, int64 [n]; the rows of a request stay together and in order."""
    random = np.random.default_rng(list(seed))
    if REQUEST not in rows.column_names:
        return random.permutation(rows.num_rows)
    keys, request = np.unique(np.from_dlpack(rows.column(REQUEST).combine_chunks()), return_inverse=True)
    return np.argsort(random.permutation(len(keys))[request], kind="stable")


def prefetched(items: Iterator[_Item], ahead: int = _AHEAD) -> Iterator[_Item]:
    """Yields ``items``, computed by a thread up to ``ahead`` items early; an error is raised when its item is due."""
    pool, end = ThreadPoolExecutor(1, "batches"), object()
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
