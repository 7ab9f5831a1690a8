"""`HotCopies`: copies of hot rows on every rank, their lookup, training and write-back to tables (OPER, section 4.3).

The ids of a batch are split before they are sent (`HotCopies.split`): ids of hot rows are looked up in this rank's
copies, the others are sent as usual, and the two results are added. A bag whose ids are all hot is sent empty, and
all empty bags of a feature share a row (`dmt.sptt.rows`), so that hot rows cost next to nothing between hosts. What is
left to send is the gradient of the copies: it is summed inside each host first and then once between hosts.

The tables remain authoritative. `HotCopies.write_back` writes weights and optimizer states of the hot rows to them
before the tensors of a table are returned; it needs no communication, because every rank has all copies.
`HotCopies.read` copies the hot rows from the tables, bit for bit. In between, the tables' hot rows are not used.

Legend: F features, B samples of this rank, n hot rows of a table, N its columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torch.distributed import ProcessGroup
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import start_together
from dmt.errors import InputError
from dmt.hot_rows.touched_sum import TouchedRowsSum
from dmt.sharding.data_parallel import UpdateSettings
from dmt.sptt.flat import ShardedSPTTEmbeddingBagCollection
from dmt.sptt.peer_exchange import Piece
from dmt.sptt.state import table_tensors
from dmt.sptt.tower_lookup import DataParallelTables

__all__ = ["HotBags", "HotCopies"]


class HotBags(NamedTuple):
    """The hot ids of a batch, which `HotCopies.split` took out of it."""

    copies: HotCopies
    ids: Tensor
    """Positions of the rows among the copies of their table, int64 [ids], feature by feature."""
    offsets: Tensor
    """Index of each bag's first id, then the number of ids: int64 [F * B + 1], for the F features with hot rows."""
    weights: Tensor | None
    """Weight of each id, [ids]; None if bags are not weighted."""

    def columns(self, pieces: Sequence[Piece]) -> Tensor:
        """Looks up the ids; see `HotCopies.columns`."""
        return self.copies.columns(self, pieces)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the ids until the work queued on ``stream`` is done."""
        for part in (self.ids, self.offsets, self.weights):
            if part is not None:
                part.record_stream(stream)


class HotCopies:
    """This rank's copies of hot rows; all ranks hold the same copies.

    Args:
        module: the sharded collection.
        rows: the hot rows by table, int64 [n], ascending and not empty; at least one table.
        inside: ranks of this host.
        across: the ranks in this rank's position on every host.
        whole: all ranks.
        owned: tables whose learning rate and number of updates this rank sends to the others; one rank owns each table.
    """

    def __init__(
        self,
        module: ShardedSPTTEmbeddingBagCollection,
        rows: Mapping[str, Tensor],
        *,
        inside: ProcessGroup,
        across: ProcessGroup,
        whole: ProcessGroup,
        owned: Collection[str],
    ) -> None:
        self.rows = dict(rows)
        self._module = module
        self._inside, self._across, self._whole = inside, across, whole
        self._owned = set(owned)
        self._device, tables = module.device, module.home_tables
        table_of = {feature: table.config for table in tables.values() for feature in table.config.feature_names}
        self._features = [feature for feature in module.features if table_of[feature].name in rows]
        """Features with hot rows, in the order in which ids are sent."""
        self._widths = [table_of[feature].embedding_dim for feature in self._features]
        # Each feature's hot rows have keys of their own, so that one search finds the hot ids of all features.
        self._span = 1 + max(table.config.num_embeddings for table in tables.values())
        hot = [rows.get(table_of[name].name, torch.empty(0, dtype=torch.int64)) for name in module.features]
        self._keys = torch.cat([i * self._span + of_feature for i, of_feature in enumerate(hot)]).to(self._device)
        sizes = torch.tensor([len(of_feature) for of_feature in hot])
        self._begins = (sizes.cumsum(0) - sizes).to(self._device)
        self._hot_features = sizes.nonzero().flatten().to(self._device)
        self._is_newer, self._must_read = False, True
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self.lookup = self._make_lookup([name for name in tables if name in rows])
        """The lookup of all copies."""
        self._parts = self._home_parts()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Live weights [n, N] and optimizer states of all copies, by name, FP32; the same bits on every rank."""
        return {f"the hot rows of {table}.{part}": tensor for (table, part), tensor in self._tensors.items()}

    def split(self, ids: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, HotBags]:
        """Splits ids (features in sending order) into cold ids, in the same bags, some now empty, and hot ids."""
        self.lookup.settle()  # before anything is sent: other ranks may wait for it
        num_bags, num_samples = ids.lengths().numel(), ids.stride()
        lengths, values, weights = ids.lengths(), ids.values().long(), ids.weights_or_none()
        bag_of = torch.arange(num_bags, device=values.device).repeat_interleave(lengths, output_size=values.numel())
        feature = bag_of // max(1, num_samples)
        # An id that is no row of its table gets the key of no row, not that of another feature's.
        keys = values.clamp(-1, self._span - 1) + self._span * feature
        places = torch.searchsorted(self._keys, keys).clamp(max=len(self._keys) - 1)
        is_hot = self._keys[places] == keys
        hot_lengths = torch.bincount(bag_of[is_hot], minlength=num_bags)
        of_hot_features = hot_lengths.view(len(ids.keys()), num_samples)[self._hot_features].flatten()
        bags = HotBags(
            copies=self,
            ids=(places - self._begins[feature])[is_hot],
            offsets=torch.cat([of_hot_features.new_zeros(1), of_hot_features.cumsum(0)]),
            weights=None if weights is None else weights[is_hot],
        )
        cold = KeyedJaggedTensor(
            keys=ids.keys(),
            values=ids.values()[~is_hot],
            weights=None if weights is None else weights[~is_hot],
            # Bags keep their places: one whose ids are all hot is sent empty, and adds zero to the copies' result.
            lengths=lengths - hot_lengths.to(lengths.dtype),
        )
        return cold, bags

    def columns(self, bags: HotBags, pieces: Sequence[Piece]) -> Tensor:
        """Looks up hot ids: [B, columns of the pieces], zeros where a feature has no hot rows; differentiable.

        The first call after construction or `read_again` is collective, unless `read` was called in between.
        """
        if self._must_read:
            self.read()
        found = self.lookup(bags.ids, bags.offsets, bags.weights)
        if found.requires_grad:
            # The hook also keeps these copies alive while a backward pass may still reach them.
            found.register_hook(self._check_in_use)
        by_feature = dict(zip(self._features, found.split(self._widths, dim=1), strict=True))
        zeros = found.new_zeros(1)
        parts = [by_feature[n] if n in by_feature else zeros.expand(len(found), width) for n, width in pieces]
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def write_back(self) -> None:
        """Writes trained copies to this rank's tables; called before the tensors of a table are returned."""
        if not self._is_newer:
            return
        self._module.flush()
        for part in self._parts:
            part.home[part.rows] = part.copy[part.places]
        self._is_newer = False

    def read_again(self) -> None:
        """Marks the copies as outdated after tables were loaded: the next use reads them again. Call on all ranks."""
        self._must_read, self._is_newer = True, False

    @torch.no_grad()
    def read(self) -> None:
        """Copies weights and optimizer states of the hot rows from the tables; collective."""
        for tensor in self._tensors.values():
            tensor.zero_()
        for part in self._parts:
            if part.is_sender:
                part.copy[part.places] = part.home[part.rows]
        # One rank has the value, the others zeros; a sum of integers keeps every bit.
        bits = [tensor.view(-1).view(torch.int32) for tensor in self._tensors.values()]
        start_together(bits, self._whole, mean=False).wait()
        self._must_read = self._is_newer = False

    def _make_lookup(self, names: Sequence[str]) -> DataParallelTables:
        tables = self._module.home_tables
        specs = [(len(self.rows[name]), tables[name].config.embedding_dim) for name in names]
        number = {feature: i for i, name in enumerate(names) for feature in tables[name].config.feature_names}
        # The kernel draws initial weights, which `read` replaces: this must not change the random numbers of the run.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            kernel = DenseTableBatchedEmbeddingBagsCodegen(
                specs,
                feature_table_map=[number[feature] for feature in self._features],
                use_cpu=self._device.type == "cpu",
            )
        ends = kernel.weights_physical_offsets
        weights = {
            name: TableBatchedEmbeddingSlice(kernel.weights, ends[i], ends[i + 1], *specs[i])
            for i, name in enumerate(names)
        }
        # The settings of the table's optimizer, so that a copy trains as its row would (OPER, section 4.3).
        settings = {name: tables[name].settings for name in names}
        # Weakly: copies no longer in use are freed at once, not when the garbage collector runs.
        living = weakref.WeakMethod(self._start_mean)

        def start_mean(gradient: Tensor) -> Callable[[], None]:
            method = living()
            assert method is not None, "the graph that calls this keeps its copies alive"
            return method(gradient)

        lookup = DataParallelTables(kernel, weights, settings, start_mean)
        states = {name: lookup.optimizer.state[weight] for name, weight in weights.items()}
        self._sum = TouchedRowsSum(specs, self._inside, self._across)
        self._tensors = {(name, "weight"): weight.detach() for name, weight in weights.items()}
        self._tensors |= {
            (name, key.removeprefix(f"{name}.")): value
            for name, of_table in states.items()
            for key, value in of_table.items()
            if value.is_floating_point()
        }
        return lookup

    def _home_parts(self) -> list[_HomePart]:
        parts = []
        for home in table_tensors(self._module):
            copy = self._tensors.get((home.table, home.part))
            if copy is None:
                continue
            if copy.dim() > 1:
                # A column shard has its columns of each row, and of AdaGrad's and Adam's states.
                copy = copy.narrow(1, home.offsets[1], home.tensor.shape[1])
            rows, first = self.rows[home.table], home.offsets[0]
            places = ((rows >= first) & (rows < first + len(home.tensor))).nonzero().flatten()
            # Every rank of the tower has all rows of a data-parallel table: only the first one sends them.
            is_sender = home.is_replicated or self._module.mesh.local == 0
            where = (rows[places] - first).to(self._device)
            parts.append(_HomePart(home.tensor, copy, where, places.to(self._device), is_sender))
        return parts

    def _start_mean(self, gradient: Tensor) -> Callable[[], None]:
        """Starts the mean of the copies' gradient over all ranks; also sends the settings of the tables' next update.

        A rank that holds no part of a table does not know its learning rate, which a schedule may change at any time.
        """
        now = {name: value for part in self._module.collections for name, value in part.settings_now().items()}
        # All ranks but the owner send zeros: the sum is the owner's value.
        names = list(self.rows)
        sent = [number for name in names for number in (now[name] if name in self._owned else (0, 0))]
        # In flight while the rest of the backward pass runs.
        end_sum = self._sum.start(gradient.view(-1), gradient.new_tensor(sent))

        def end() -> None:
            settings = end_sum().view(-1, 2).tolist()
            gradient.div_(self._whole.size())
            pairs = zip(names, settings, strict=True)
            self.lookup.optimizer.follow({name: UpdateSettings(rate, round(n)) for name, (rate, n) in pairs})
            self._is_newer = True

        return end

    def _check_in_use(self, _: Tensor) -> None:
        if self._module.hot is not self:
            raise InputError(
                "HotRows: the hot rows changed between the forward and the backward pass of a batch. Call step(), "
                "refresh(), replicate() and load_state() after the backward pass, before the next batch's forward pass."
            )


class _HomePart(NamedTuple):
    """The hot rows in one tensor of a table on this rank, and the places of their copies."""

    home: Tensor  # the table's weights or an optimizer state, or this rank's shard of it
    copy: Tensor  # the columns of the copies that ``home`` has
    rows: Tensor  # indices of the hot rows in ``home``
    places: Tensor  # indices of these rows in ``copy``
    is_sender: bool  # True if this rank sends the rows to the others
