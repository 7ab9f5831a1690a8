"""`HotRows`: the rows that pay on every rank of a flat model over SPTT, chosen again as data changes (OPER, section 4).

Each rank counts the ids of its batches. At a refresh the counts of all ranks are summed, the rows that save bytes
between hosts are chosen (`dmt.hot_rows.costs`), and the copies of `dmt.sptt.hot` change to them: rows that leave return
to their tables with their optimizer states, rows that come are read from there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.hot_rows.costs import has_single_ids, saved_bytes
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec, table_specs
from dmt.sharding.optimizers import data_parallel_obstacle, optimizer_name
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.flat import ShardedSPTTEmbeddingBagCollection
from dmt.sptt.hot import HomeTable, HotCopies, HotGroups
from dmt.sptt.mesh import TowerMesh

__all__ = ["HotRows", "choose_rows", "why_no_copies"]

Rows = dict[str, NDArray[np.int64]]

# Steps that are counted before rows are chosen for the first time.
_FIRST_STEPS = 100


class HotRows:
    """Keeps copies of the rows that are read most on every rank, where that saves bytes between hosts.

    Make it after ``DistributedModelParallel``, and call `step` after every training step of every rank. Training stays
    what it is: each copy is updated with the mean gradient of all ranks by the optimizer of its table. Whoever asks the
    model for its ``state_dict``, parameters or ``fused_optimizer`` is given tables with the trained rows. Tensors that
    were obtained before a training step lack that step: ask again, or call `write_back`; so do those of TorchRec's
    collection inside the sharded module. After loading through ``load_state_dict`` of the model or of its optimizer the
    copies are read again by themselves, after other changes in place call `restart`.

    Tables that cannot have copies are left out, see `left_out`. Bags of several ids gain nothing (`docs/hot_rows.md`),
    so `refresh` chooses no rows for them; `replicate` takes any rows.

    Args:
        model: holds one collection sharded by ``SPTTEmbeddingBagCollectionSharder``.
        mesh: the groups.
        extra_memory: bytes that the copies of a rank may have, as a share of the weights of all tables.
        refresh_every: training steps from one choice of rows to the next; the first choice comes after 100 steps at the
            latest. None: rows stay as ``profile`` or `replicate` say.
        profile: accesses to make the first choice by, after the first step; the same on all ranks.

    Raises:
        InputError: an argument is out of range or not the same on all ranks; the model has no such collection, several,
            or towers; it has replicas or the global id route; no table can have copies.

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
        profile: AccessProfile | None = None,
    ) -> None:
        arguments = {"extra_memory": extra_memory, "refresh_every": refresh_every, "profile": _digest(profile)}
        check_agreement("HotRows", arguments, mesh.global_group)
        if profile is not None and not isinstance(profile, AccessProfile):
            raise InputError(
                f"HotRows: profile={profile!r} must be an AccessProfile. Read the file of `dmt profile --out` with "
                "dmt.training.access.load_profile."
            )
        if isinstance(extra_memory, bool) or not isinstance(extra_memory, int | float) or not 0 < extra_memory <= 1:
            raise InputError(f"HotRows: extra_memory={extra_memory!r} must be a share above 0, at most 1.")
        is_number = isinstance(refresh_every, int) and not isinstance(refresh_every, bool)
        if refresh_every is not None and (not is_number or refresh_every < 1):
            raise InputError(f"HotRows: refresh_every={refresh_every!r} must be a number of steps from 1 on, or None.")
        self._module, self._mesh = _flat_collection(model, mesh), mesh
        homes = self._module.home_tables
        self.left_out: dict[str, str] = why_no_copies(homes)
        """Tables that have no copies, with the reason."""
        self.not_chosen: dict[str, str] = {}
        """Tables of which the last choice took no row because of their bags, with the reason."""
        if len(self.left_out) == len(homes):
            name, reason = next(iter(self.left_out.items()))
            raise InputError(f"HotRows: no table can have copies; of table {name!r}, {reason}.")
        specs = table_specs([home.config for home in homes.values()])
        self._tables = [table for table in specs if table.name not in self.left_out]
        self._budget = extra_memory * sum(table.num_bytes for table in specs)
        if profile is not None and (missing := [table.name for table in self._tables if table not in profile.tables]):
            raise InputError(
                f"HotRows: the profile does not have table {missing[0]!r} as the model does ({len(missing)} such "
                "tables). Collect it from the same model and data."
            )
        self._refresh_every, self._profile = refresh_every, profile
        # A profile chooses as soon as a batch was counted.
        self._first = None if profile is not None or refresh_every is None else min(_FIRST_STEPS, refresh_every)
        self._steps = self._batches = self._samples = 0
        self._counts = AccessProfile(self._tables)
        topology = mesh.topology
        # Groups of their own: nothing else on them can come in another order on another rank.
        hosts = topology.host_groups()
        groups = (hosts, [list(ranks) for ranks in zip(*hosts, strict=True)], topology.sharding_groups())
        self._groups = HotGroups(*(mesh.new_group(ranks) for ranks in groups))
        self._owned = self._owned_tables()
        self.replicate({})

    @property
    def rows(self) -> Rows:
        """Rows of each table that have copies, int64 [n], ascending; tables without are left out."""
        return {name: rows.numpy().copy() for name, rows in self._copies.rows.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of this rank's copies; optimizer states come on top."""
        return sum(4 * table.embedding_dim * len(self._copies.rows.get(table.name, ())) for table in self._tables)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that a rank hands to the sum over all ranks in a step: gradients, and two numbers for each table.

        Those are learning rate and number of steps; two more say whether something is wrong on the rank.
        """
        tables = len(self._copies.rows)
        return self.num_bytes + 8 * (tables + 1) if tables else 0

    def step(self) -> None:
        """To be called after every training step: chooses rows when it is time. Collective over the job."""
        self._steps += 1
        every = self._refresh_every
        is_due = self._steps == self._first or (every is not None and self._steps % every == 0)
        if is_due or self._profile is not None:
            self.refresh()

    def refresh(self) -> None:
        """Chooses rows by what was counted, or by the profile if it was not used yet, and copies them. Collective.

        Before the first training batch it does nothing: the choice depends on the size of a batch.
        """
        num_batches = max(self._batches, 1)
        total_samples = sum(gather_objects(self._samples / num_batches, self._groups.whole))
        if not total_samples:
            return
        batch_size = max(round(total_samples / self._groups.whole.size()), 1)
        profile, self._profile = self._profile or self._summed_counts(batch_size), None
        topology, distinct = self._mesh.topology, self._module.unique != "off"
        self.not_chosen = _why_not_chosen(profile, self._tables)
        choose = functools.partial(
            choose_rows,
            profile,
            self._tables,
            topology,
            batch_size=batch_size,
            distinct=distinct,
            max_bytes=self._budget,
        )
        # One rank chooses: processors of another kind may round a row's gain otherwise.
        is_first = self._groups.whole.rank() == 0
        chosen: Rows | None = run_on_all_or_raise(lambda: choose() if is_first else None, self._groups.whole)[0]
        assert chosen is not None, "the first rank has chosen"
        self.replicate(chosen)
        # Counts of before would keep rows that nobody reads any more; even one step has thousands of ids.
        self._counts = AccessProfile(self._tables)
        self._batches = self._samples = 0

    def replicate(self, rows: Mapping[str, Any]) -> None:
        """Copies exactly these rows to every rank, and returns others to their tables. Collective.

        Args:
            rows: for each table the rows that shall have copies, whole numbers, the same on all ranks.

        Raises:
            InputError: a table is unknown or left out, a row is outside it or no whole number, or ranks were given
                others.
        """
        wanted: Rows = {}
        # Also an array that NumPy cannot read must not leave the other ranks waiting.
        run_on_all_or_raise(lambda: wanted.update(_row_numbers(rows)), self._groups.whole)
        digest = hashlib.sha256(b"".join(name.encode() + of_table.tobytes() for name, of_table in wanted.items()))
        check_agreement("HotRows.replicate", {"rows": digest.hexdigest()}, self._groups.whole)
        homes = self._module.home_tables
        for name, of_table in wanted.items():
            if name not in homes or name in self.left_out:
                why = self.left_out.get(name, f"the model has no such table{did_you_mean(name, homes)}")
                raise InputError(f"HotRows: table {name!r} cannot have copies: {why}.")
            num_rows = homes[name].config.num_embeddings
            if of_table[0] < 0 or of_table[-1] >= num_rows:
                worst = of_table[0] if of_table[0] < 0 else of_table[-1]
                raise InputError(f"HotRows: table {name!r} has {num_rows} rows, and none has the number {worst}.")
        run_on_all_or_raise(self._module.write_back, self._groups.whole)
        self._copies = HotCopies(
            self._module,
            homes,
            {name: torch.from_numpy(of_table) for name, of_table in wanted.items()},
            groups=self._groups,
            owned=self._owned,
            count=self._count,
        )
        self._module.replicate(self._copies)

    def restart(self) -> None:
        """Reads the copies from the tables again, for tables that were changed in place. Collective.

        Raises:
            InputError: what was changed had not been obtained since the last training step.
        """
        # What the copies have learned since they were written back is not lost.
        run_on_all_or_raise(self._copies.write_back, self._groups.whole)
        self._copies.read_again()

    def write_back(self) -> None:
        """Brings the tables of this rank up to date, for tensors of them that were obtained earlier; not collective."""
        self._copies.write_back()

    def _count(self, ids: KeyedJaggedTensor) -> None:
        if not self._module.training:
            return
        self._batches += 1
        self._samples += ids.stride()
        if not ids.stride():  # TorchRec does not take an empty batch apart
            return
        # The device is waited for once, not for every feature.
        ends = np.cumsum(ids.length_per_key())[:-1]
        by_feature = dict(zip(ids.keys(), np.split(ids.values().cpu().numpy(), ends), strict=True))
        read = {}
        for table in self._tables:
            for feature in table.feature_names:
                values = by_feature[feature]
                read[feature] = values[(values >= 0) & (values < table.num_embeddings)]
        self._counts.add(read, num_samples=ids.stride())

    def _summed_counts(self, batch_size: int) -> AccessProfile:
        """Accesses on all ranks of those rows that may pay; of a row that pays, one rank has 1 / W at least."""
        group, mine = self._groups.whole, self._counts
        names = [table.name for table in self._tables]
        parts = gather_objects(({name: mine[name].total for name in names}, mine.num_samples), group)
        summed = AccessProfile(self._tables)
        summed.num_samples = sum(samples for _, samples in parts)
        totals = {name: sum(of_rank[name] for of_rank, _ in parts) for name in names}
        topology, distinct = self._mesh.topology, self._module.unique != "off"
        candidates = {}
        for table in self._tables:
            own = mine[table.name]
            most = RowCounts(own.rows, own.counts * group.size(), totals[table.name])
            num_ids = batch_size * totals[table.name] / max(summed.num_samples * len(table.feature_names), 1)
            gain = saved_bytes(most, table, topology, num_ids=num_ids, distinct=distinct)
            candidates[table.name] = own.rows[gain >= 0]
        of_ranks = gather_objects(candidates, group)
        rows = {name: np.unique(np.concatenate([of_rank[name] for of_rank in of_ranks])) for name in names}
        counts = gather_objects({name: mine[name].counts_of(rows[name]) for name in names}, group)
        for name in names:
            summed.put(name, RowCounts(rows[name], sum(of_rank[name] for of_rank in counts), totals[name]))
        return summed

    def _owned_tables(self) -> list[str]:
        """Tables whose learning rate this rank tells: it is the first that updates them."""
        mine = [name for collection in self._module.collections for name in collection.settings_now()]
        of_ranks, rank = gather_objects(mine, self._groups.whole), self._groups.whole.rank()
        before = {name for of_rank in of_ranks[:rank] for name in of_rank}
        return [name for name in mine if name not in before]


def choose_rows(
    profile: AccessProfile,
    tables: Sequence[TableSpec],
    topology: Any,
    *,
    batch_size: int,
    distinct: bool,
    max_bytes: float,
) -> Rows:
    """Chooses the rows whose copies save bytes between hosts, those that save most for their size first.

    Args:
        profile: accesses.
        tables: those that may have copies.
        topology: towers and ranks of a replica.
        batch_size: samples of a rank.
        distinct: True if each rank sends its distinct ids only.
        max_bytes: bytes of the weights of the copies of a rank.

    Returns:
        For each table with such rows their numbers, int64, ascending.

    Example:
        >>> from dmt import TowerTopology
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> profile = AccessProfile([table])
        >>> profile.add({"f": [1, 7, 7, 7]}, num_samples=4)
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> settings = {"batch_size": 4, "distinct": False}
        >>> chosen = [choose_rows(profile, [table], topology, **settings, max_bytes=size) for size in (64, 63)]
        >>> [{name: rows.tolist() for name, rows in one.items()} for one in chosen]
        [{'t': [1, 7]}, {'t': [7]}]
    """
    found = []
    for number, table in enumerate(tables):
        counts = profile[table.name]
        if not has_single_ids(profile, table):
            continue
        num_ids = batch_size * profile.ids_per_sample(table)
        gain = saved_bytes(counts, table, topology, num_ids=num_ids, distinct=distinct)
        pays, size = gain > 0, 4 * table.embedding_dim
        rows = counts.rows[pays]
        found.append((gain[pays] / size, np.full(len(rows), number), rows, np.full(len(rows), size)))
    if not found:
        return {}
    gains, numbers, rows, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((rows, numbers, -gains))
    kept = order[np.cumsum(sizes[order]) <= max_bytes]
    by_table = {table.name: np.sort(rows[kept][numbers[kept] == number]) for number, table in enumerate(tables)}
    return {name: of_table for name, of_table in by_table.items() if len(of_table)}


def _row_numbers(rows: Mapping[str, Any]) -> Rows:
    """Returns the rows of each table that has some, int64 [n], ascending."""
    found = {}
    for name, of_table in sorted(rows.items()):
        numbers = np.asarray(of_table)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise InputError(
                f"HotRows: the rows of table {name!r} are {numbers.dtype}, but must be whole numbers. Of a mask give "
                "np.flatnonzero(mask)."
            )
        if numbers.size:
            found[name] = np.unique(numbers.astype(np.int64))
    return found


def _why_not_chosen(profile: AccessProfile, tables: Sequence[TableSpec]) -> dict[str, str]:
    means = {table.name: profile.ids_per_sample(table) for table in tables if not has_single_ids(profile, table)}
    return {
        name: f"its bags have {mean:.3g} ids on average, and the sum over the cold ids of a bag is as long as the whole"
        for name, mean in means.items()
    }


def why_no_copies(tables: Mapping[str, HomeTable]) -> dict[str, str]:
    """Returns the tables whose rows cannot have copies that train alike, with the reason.

    Args:
        tables: all tables of a collection, by name.
    """
    users: dict[str, list[str]] = {}
    for name, table in tables.items():
        for feature in table.config.feature_names:
            users.setdefault(feature, []).append(name)
    reasons = {name: _why_no_copies(table, users) for name, table in tables.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_no_copies(table: HomeTable, users: Mapping[str, Sequence[str]]) -> str:
    config = table.config
    if "MEAN" in str(config.pooling):
        return "its bags are averaged, and the rank that sums the cold ids of a bag does not know how many are hot"
    if "FP32" not in str(config.data_type):
        return f"its weights are {config.data_type}, and copies are FP32"
    if table.scheme == "column_wise" and optimizer_name(table.settings) == "rowwise_adagrad":
        return "it is cut by columns, and row-wise AdaGrad has a state of its own for each part of a row"
    for feature in config.feature_names:
        if len(users[feature]) > 1:
            return f"its feature {feature!r} is also looked up in {shorten(users[feature], ', ')}"
    return data_parallel_obstacle(table.settings).replace("data-parallel tables", "copies")


def _flat_collection(model: nn.Module, mesh: TowerMesh) -> ShardedSPTTEmbeddingBagCollection:
    found = [part for part in model.modules() if isinstance(part, SPTTModule)]
    if any(not isinstance(part, ShardedSPTTEmbeddingBagCollection) for part in found):
        raise InputError(
            "HotRows: the model has tower modules, and with them copies save nothing: a tower sends its module's "
            "outputs, whichever rows they were computed from. Leave HotRows out."
        )
    if len(found) != 1:
        raise InputError(
            "HotRows needs a model with one collection that SPTTEmbeddingBagCollectionSharder has sharded; this one "
            f"has {len(found)}. Give it the DistributedModelParallel."
        )
    module = found[0]
    if module.hot is not None:
        raise InputError("HotRows: this model has a HotRows already; use that one.")
    if mesh.topology.num_replicas > 1:
        raise InputError(
            f"HotRows: num_replicas={mesh.topology.num_replicas}, but copies are kept equal within one replica only. "
            "Use num_replicas=1, or leave HotRows out."
        )
    if module.id_route == "global":
        raise InputError("HotRows needs id_route='peer'; the global route sends every sample's ids and outputs.")
    return module


def _digest(profile: AccessProfile | None) -> Any:
    if not isinstance(profile, AccessProfile):
        return repr(profile)
    digest = hashlib.sha256()
    for table in profile.tables:
        counts = profile[table.name]
        digest.update(table.name.encode() + counts.rows.tobytes() + counts.counts.tobytes())
    return profile.num_samples, digest.hexdigest()
