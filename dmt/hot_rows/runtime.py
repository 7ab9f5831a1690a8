"""`HotRows`: copies of the most-read rows on all ranks of a flat model, chosen again as data changes (OPER, section 4).

Each rank counts the ids of its batches. At a refresh the counts of all ranks are summed, the rows that save bytes
between hosts are chosen (`dmt.hot_rows.choice`), and the copies (`dmt.hot_rows.copies`) are replaced: dropped rows are
written back to their tables with their optimizer states, new rows are read from the tables.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import check_agreement, gather_objects, gather_on_first, max_over_ranks, run_on_all_or_raise
from dmt.errors import InputError, check_instance, did_you_mean
from dmt.formatting import shorten
from dmt.hot_rows.choice import choose_rows
from dmt.hot_rows.copies import HotCopies
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import ID_BYTES, TableSpec, table_specs
from dmt.sharding.optimizers import data_parallel_obstacle, optimizer_name
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.flat import ShardedSPTTEmbeddingBagCollection
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.options import refuse
from dmt.sptt.rows import wrap
from dmt.sptt.sharder import HomeTable

__all__ = ["HotRows", "HotRowsState", "why_no_copies"]

RowsByTable = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class HotRowsState:
    """State of `HotRows` between two steps, apart from the tables."""

    rows: RowsByTable
    """Rows of each table that have copies, int64 [n], ascending."""
    counts: AccessProfile
    """Accesses by all ranks since the last choice of rows; empty on all ranks but the first."""
    steps: int
    """Training steps so far."""
    batch_size: int
    """Samples of the largest batch of any rank since the last choice of rows."""


# Steps that are counted before rows are chosen for the first time, unless ``refresh_every`` is less.
_FIRST_STEPS = 100
# Ids are counted once this many wait (2 MB of int64), or once they take as many bytes as copies may, if that is more.
_LEAST_COUNTED = 2**18


class HotRows:
    """Keeps copies of the most-read rows on every rank, where that saves bytes between hosts.

    Construct it after ``DistributedModelParallel``, and call `step` on every rank after every training step. Results
    change only by rounding: each copy is updated by its table's optimizer, with the mean gradient of all ranks. The
    model's ``state_dict`` and parameters, and ``params`` and ``state`` of its ``fused_optimizer``, hold the trained
    rows whenever they are read. Tensors fetched before a training step may lack that step, so fetch them again; tensors
    in ``param_groups`` and in TorchRec's collection inside the sharded module may lag, too. ``load_state_dict`` of the
    model or its optimizer refreshes the copies; after any other change of a table, call ``hot.replicate(hot.rows)``.

    Tables that cannot have copies are left out, see `left_out`. Bags of several ids gain nothing (`docs/hot_rows.md`),
    so `refresh` chooses no rows for them; `replicate` takes any rows.

    Args:
        model: holds one collection sharded by ``SPTTEmbeddingBagCollectionSharder``.
        mesh: the process groups of this job.
        extra_memory: limit on the number of weights in a rank's copies, as a share of those in all tables, in (0, 1].
            Ids that wait to be counted may take as many bytes again, or 2 MB if that is more.
        refresh_every: training steps between two choices of rows; the first choice comes after at most 100 steps. None:
            rows change only when you call `refresh` or `replicate`.

    Raises:
        InputError: an argument has the wrong type, is out of range or differs between ranks; the model does not have
            exactly one such collection, has tower modules, replicas or the global id route; or no table can be copied.

    Example::

        model = DistributedModelParallel(model, plan=plan, sharders=[SPTTEmbeddingBagCollectionSharder(mesh, towers)])
        hot = HotRows(model, mesh)
        for batch in batches:
            train_step(model, batch)
            hot.step()
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: TowerMesh,
        *,
        extra_memory: float = 0.01,
        refresh_every: int | None = 1000,
    ) -> None:
        check_instance("mesh", mesh, TowerMesh)
        arguments = {"extra_memory": extra_memory, "refresh_every": refresh_every}
        check_agreement("HotRows", arguments, mesh.global_group)
        if not isinstance(extra_memory, int | float) or not 0 < extra_memory <= 1:
            raise InputError(f"HotRows: extra_memory={extra_memory!r} must be a share above 0 and at most 1.")
        if refresh_every is not None and (not isinstance(refresh_every, int) or refresh_every < 1):
            raise InputError(
                f"HotRows: refresh_every={refresh_every!r} must be a whole number of steps, at least 1, or None."
            )
        self._module, self._mesh = _flat_collection(model, mesh), mesh
        homes = self._module.home_tables
        self.left_out: dict[str, str] = why_no_copies(homes)
        """Reason why a table cannot have copies, by table name; only tables that cannot."""
        if len(self.left_out) == len(homes):
            name, reason = next(iter(self.left_out.items()))
            raise InputError(
                f"HotRows: no table can have copies; table {name!r} cannot, because {reason}. Leave HotRows out."
            )
        self._tables = table_specs([home.config for name, home in homes.items() if name not in self.left_out])
        sizes = (home.config.num_embeddings * home.config.embedding_dim * 4 for home in homes.values())
        self._budget = extra_memory * sum(sizes)
        self._refresh_every = refresh_every
        self._steps = self._batch_size = 0
        self._counter = _Counter(self._tables, self._budget)
        # New groups: on shared groups, ranks could start these collectives and others in different orders.
        topology = mesh.topology
        self._inside = mesh.new_group(topology.host_groups())
        self._across = mesh.new_group(topology.across_host_groups())
        self._everyone = mesh.new_group([list(range(topology.world_size))])
        self._owned = self._owned_tables()
        self._copies: HotCopies | None = None
        self._module.before_lookup = self._count

    @property
    def rows(self) -> RowsByTable:
        """Rows of each table that have copies, int64 [n], ascending; only tables that have copies."""
        return {} if self._copies is None else {name: rows.numpy().copy() for name, rows in self._copies.rows.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of this rank's copies, without their optimizer states."""
        rows = self.rows
        return sum(4 * table.embedding_dim * len(rows.get(table.name, ())) for table in self._tables)

    def step(self) -> None:
        """Counts a training step, and calls `refresh` when one is due. Call it on every rank after every step."""
        self._steps += 1
        every = self._refresh_every
        if every is not None and (self._steps % every == 0 or self._steps == _FIRST_STEPS < every):
            self.refresh()

    def refresh(self) -> None:
        """Chooses rows by the accesses since the last choice, and copies them as `replicate` does. Collective.

        Does nothing if no rank has trained on a batch since the last choice: the choice depends on the batch size.
        """
        now = self.state()
        if not now.batch_size:
            return
        topology, encoder = self._mesh.topology, self._module.encoder
        distinct = encoder is not None and encoder.shares_equal
        # The first rank, which has the counts, chooses for all: other processors may round a row's gain differently.
        chosen, *_ = run_on_all_or_raise(
            lambda: choose_rows(
                now.counts, self._tables, topology, batch_size=now.batch_size, distinct=distinct, max_bytes=self._budget
            ),
            self._everyone,
        )
        self.replicate(chosen)
        # Counting starts afresh: earlier counts would keep rows that are no longer read.
        self._counter, self._batch_size = _Counter(self._tables, self._budget), 0

    def replicate(self, rows: Mapping[str, Any]) -> None:
        """Copies exactly ``rows`` to every rank, and writes all other copies back to their tables. Collective.

        Args:
            rows: the rows to copy, integers by table; the same on all ranks.

        Raises:
            InputError: a table is unknown or left out, a row is not an integer or not in its table, or ranks pass
                different rows.
        """
        wanted: RowsByTable = {}
        # A rank with wrong rows must not leave the others waiting.
        run_on_all_or_raise(lambda: wanted.update(self._checked(rows)), self._everyone)
        digest = hashlib.sha256(b"".join(name.encode() + of_table.tobytes() for name, of_table in wanted.items()))
        check_agreement("HotRows.replicate", {"rows": digest.hexdigest()}, self._everyone)
        self._module.write_back()
        # Dropped rows are back in their tables; rows that stay are read from the tables again, bit for bit.
        self._copies = None
        if wanted:
            rows = {name: torch.from_numpy(of_table) for name, of_table in wanted.items()}
            self._copies = HotCopies(
                self._module, rows, inside=self._inside, across=self._across, whole=self._everyone, owned=self._owned
            )
            # Read at once: a check of the run may compare copies before any batch reads them.
            self._module.flush()  # not in `read`: between forward and backward pass, rows must stay in their cache
            self._copies.read()
        self._module.hot = self._copies
        wrap(self._module, take_out=None if self._copies is None else self._copies.split)

    def _checked(self, rows: Mapping[str, Any]) -> RowsByTable:
        """Returns the rows of each table that has some, int64 [n], ascending; raises `InputError` for wrong rows."""
        homes, row_numbers = self._module.home_tables, {}
        for name, of_table in sorted(rows.items()):
            numbers = np.unique(np.asarray(of_table))
            if not numbers.size:
                continue
            if name not in homes or name in self.left_out:
                why = self.left_out.get(name, "the model has no such table")
                hint = " Remove" if name in homes else f"{did_you_mean(name, homes)} Correct the name, or remove"
                raise InputError(f"HotRows: table {name!r} cannot have copies: {why}.{hint} {name!r} from rows.")
            num_rows = homes[name].config.num_embeddings
            if numbers.dtype.kind not in "iu" or numbers[0] < 0 or numbers[-1] >= num_rows:
                raise InputError(
                    f"HotRows: table {name!r} has rows 0..{num_rows - 1}, but the given numbers are {numbers.dtype} "
                    f"from {numbers[0]} to {numbers[-1]}. Give integers in this range; if you have a boolean mask, "
                    "give np.flatnonzero(mask)."
                )
            row_numbers[name] = numbers.astype(np.int64)
        return row_numbers

    def state(self) -> HotRowsState:
        """Returns what a run needs to resume as if uninterrupted; the first rank gets the counts of all ranks.

        Collective; call it when you save the model. The counts on other ranks are empty.
        """
        mine, summed = self._counter.profile(), AccessProfile(self._tables)
        most = torch.tensor([len(mine[table.name].rows) for table in self._tables], device=self._module.device)
        # Several tables at once, up to some size: the counts of all tables and ranks may be large.
        batches = (max_over_ranks(most, self._everyone).cumsum(0) // _LEAST_COUNTED).tolist()
        for batch in dict.fromkeys(batches):
            names = [table.name for table, other in zip(self._tables, batches, strict=True) if other == batch]
            for parts in zip(*gather_on_first([(name, mine[name]) for name in names], self._everyone), strict=True):
                rows, places = np.unique(np.concatenate([of_rank.rows for _, of_rank in parts]), return_inverse=True)
                counts = np.bincount(places, np.concatenate([of_rank.counts for _, of_rank in parts]))
                summed.put(parts[0][0], RowCounts(rows, counts.astype(np.int64)))  # exact below 2^53
        sizes, numbers = zip(*gather_objects((self._batch_size, mine.num_samples), self._everyone), strict=True)
        summed.num_samples = sum(numbers)
        return HotRowsState(rows=self.rows, counts=summed, steps=self._steps, batch_size=max(sizes))

    def load_state(self, state: HotRowsState) -> None:
        """Resumes from a `state`, possibly of a job with more or fewer ranks. Collective; load the model's state first.

        Ignores tables that this model lacks, has in another form or cannot copy. ``extra_memory`` applies from the next
        choice of rows. On the same number of ranks, training continues bit for bit as if uninterrupted.
        """
        names = {table.name for table in self._tables if table in state.counts.tables}
        self._steps, self._batch_size, loaded = state.steps, state.batch_size, AccessProfile(self._tables)
        # On the first rank only, since a choice sums the counts over ranks.
        if self._everyone.rank() == 0:
            loaded.num_samples = state.counts.num_samples
            for name in names:
                loaded.put(name, state.counts[name])
        self._counter = _Counter(self._tables, self._budget, loaded)
        self.replicate({name: of_table for name, of_table in state.rows.items() if name in names})

    def _count(self, ids: KeyedJaggedTensor, is_training_pass: bool) -> None:
        if is_training_pass and ids.stride():  # TorchRec cannot split an empty batch by feature
            self._batch_size = max(self._batch_size, ids.stride())
            self._counter.add(ids)

    def _owned_tables(self) -> list[str]:
        """Returns the tables whose learning rate this rank sends to the others: those that no lower rank updates."""
        mine = [name for collection in self._module.collections for name in collection.settings_now()]
        of_ranks, rank = gather_objects(mine, self._everyone), self._everyone.rank()
        before = {name for of_rank in of_ranks[:rank] for name in of_rank}
        return [name for name in mine if name not in before]


class _Counter:
    """Counts ids exactly, on their device and many batches at a time, so that a GPU rarely has to sync."""

    def __init__(self, tables: Sequence[TableSpec], max_bytes: float, before: AccessProfile | None = None) -> None:
        self._total = before or AccessProfile(tables)
        self._waiting: list[dict[str, Tensor]] = []
        self._num_waiting = 0
        self._enough = max(_LEAST_COUNTED, max_bytes / ID_BYTES)

    def add(self, ids: KeyedJaggedTensor) -> None:
        """Keeps the ids of a batch; counts all kept ids once they take more than both ``max_bytes`` and 2 MB."""
        self._total.num_samples += ids.stride()
        self._waiting.append(dict(zip(ids.keys(), ids.values().split(ids.length_per_key()), strict=True)))
        self._num_waiting += ids.values().numel()
        if self._num_waiting > self._enough:
            self.profile()

    def profile(self) -> AccessProfile:
        """Counts the ids kept by `add`, and returns the accesses of all ids so far."""
        tables = self._total.tables if self._waiting else ()
        kept = [[batch[feature] for batch in self._waiting for feature in table.feature_names] for table in tables]
        sizes = itertools.accumulate(sum(map(Tensor.numel, of_table)) for of_table in kept)
        # Several tables at once, up to some size: thousands of tables would take thousands of calls and syncs.
        batches = [size // _LEAST_COUNTED for size in sizes]
        for _, batch in itertools.groupby(range(len(tables)), batches.__getitem__):
            self._count({tables[i]: kept[i] for i in batch})
        self._waiting, self._num_waiting = [], 0
        return self._total

    def _count(self, kept: Mapping[TableSpec, Sequence[Tensor]]) -> None:
        """Counts ids, given by table, by one search; ignores those that are no rows."""
        ids = torch.cat([part for parts in kept.values() for part in parts]).long()
        sizes = torch.tensor([sum(map(Tensor.numel, parts)) for parts in kept.values()], device=ids.device)
        table_of = torch.arange(len(kept), device=ids.device).repeat_interleave(sizes, output_size=len(ids))
        num_rows = torch.tensor([table.num_embeddings for table in kept], device=ids.device)
        is_row = (ids >= 0) & (ids < num_rows[table_of])
        # Each table has keys of its own.
        span = max(table.num_embeddings for table in kept)
        keys, counts = (part.cpu().numpy() for part in (ids + span * table_of)[is_row].unique(return_counts=True))
        begins = np.searchsorted(keys, span * np.arange(len(kept) + 1))
        for i, table in enumerate(kept):
            of_table = slice(begins[i], begins[i + 1])
            self._total.put(table.name, RowCounts(keys[of_table] - i * span, counts[of_table]))


def why_no_copies(tables: Mapping[str, HomeTable]) -> dict[str, str]:
    """Returns, by table, the reason why its rows cannot have copies that train like them; only tables with a reason."""
    users: dict[str, list[str]] = {}
    for name, table in tables.items():
        for feature in table.config.feature_names:
            users.setdefault(feature, []).append(name)
    return {name: reason for name, table in tables.items() if (reason := _why_no_copies(table, users))}


def _why_no_copies(table: HomeTable, users: Mapping[str, Sequence[str]]) -> str:
    config, output = table.config, str(table.settings.get("output_dtype", "FP32"))
    if table.is_outside:
        return "it is outside towers, where every rank holds all rows"
    if "MEAN" in str(config.pooling):
        return "its bags are averaged, and the rank that sums the cold ids of a bag does not know how many are hot"
    if "FP32" not in str(config.data_type) or "FP32" not in output.upper():
        return f"its weights are {config.data_type} and its lookups return {output}, but copies are FP32"
    if table.scheme == "column_wise" and optimizer_name(table.settings) == "rowwise_adagrad":
        return "it is cut by columns, and row-wise AdaGrad has a separate state for each part of a row"
    for feature in config.feature_names:
        if others := [name for name in users[feature] if name != config.name]:
            return f"its feature {feature!r} is also looked up in {shorten(others, ', ')}"
    return data_parallel_obstacle(table.settings).replace("data-parallel tables", "copies")


def _flat_collection(model: nn.Module, mesh: TowerMesh) -> ShardedSPTTEmbeddingBagCollection:
    modules = [part for part in model.modules() if isinstance(part, SPTTModule)]
    has_towers = any(not isinstance(part, ShardedSPTTEmbeddingBagCollection) for part in modules)
    route = next((part.id_route for part in modules if part.id_route != "peer"), "peer")
    refuse(hot_rows=True, has_towers=has_towers, id_route=route, num_replicas=mesh.topology.num_replicas)
    if len(modules) != 1:
        raise InputError(
            "HotRows needs a model with exactly one collection sharded by SPTTEmbeddingBagCollectionSharder; this one "
            f"has {len(modules)}. Merge several into one EmbeddingBagCollection, and pass the DistributedModelParallel."
        )
    return modules[0]
