"""Semantic-preserving tower transform (SPTT), step by step: the dataflow that every tower sharder's module shares.

DMT (arXiv 2403.00877) section 3.1, Figure 7. With the peer route, the default, the paper's steps are these; see
`dmt.sptt.id_routes` for the other route and docs/sptt.md for a worked example.

======  ===========================================================  =====  ==================  =======================
step    what                                                         group  method              file
======  ===========================================================  =====  ==================  =======================
a, c    ids to the peer whose tower owns the feature, in peer order  peer   `_exchange_ids`     ``id_routes.py``
a       from there to the rank that holds the table or shard         tower  `_exchange_ids`     ``tower_lookup.py``
b       lookup                                                       -      `look_up`           FBGEMM's kernels
d, e    partial embeddings to the tower's ranks: [P, N]              tower  `look_up`           ``tower_lookup.py``
-       tower module: [P, N] -> [P, O]                               -      `run_towers`        ``towers.py``
f       outputs to the peers: [P, O] -> [B, S]                       peer   `exchange_outputs`  ``peer_exchange.py``
======  ===========================================================  =====  ==================  =======================

Peers send in peer order, so the peer permute (step c) needs no code here; `GlobalInputDist` has the explicit one.
``dmt/sptt/tower_lookup.py`` is TorchRec's sharded collection on the ranks of the tower, with its all-to-all and,
for row-wise tables, the reduce-scatter of `RowWiseOutputs`. Embeddings arrive as step e's view and are read by key.

Shape suffixes: B samples of this rank; P samples of all T peers, in tower order (the sum of their B); N columns of the
embeddings of this tower's features side by side; O columns of this tower's output; S sum of O over the towers.

With hot rows (`dmt.sptt.hot`) each rank looks up the ids of those itself, and adds them to what arrives.

With ``unique`` a row serves all samples of a peer that have the same input (`dmt.sptt.unique`): P is then a number of
rows, and may be smaller for one group of features than for another.

Only bytes move: the result is the unsharded module's, in its column order, on any placement. Gradients divide by T
crossing the peers and by L crossing the tower, so tables, tower modules and dense parts all see the mean over ranks of
their local losses' gradients: the mean over the job's samples when local batches are equal.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from dmt.collectives import check_agreement, gather_objects, profiler_range
from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.sptt.id_routes import Deferred, GlobalIdRoute, PeerIdRoute
from dmt.sptt.peer_exchange import PeerExchange
from dmt.sptt.results import CachedAwaitable
from dmt.sptt.rows import (
    PartRows,
    arrived_pieces,
    by_micro_batch,
    filled_up,
    in_micro_batches,
    micro_batch_sizes,
    numbers_of,
    rows_by_part,
    sent_numbers,
    taken_rows,
)
from dmt.sptt.sharder import TowerSharder, TowerState
from dmt.sptt.tower_lookup import GroupShardedEBC
from dmt.sptt.unique import DistinctInputs, distinct_inputs

if TYPE_CHECKING:
    from dmt.sptt.hot import HotBags, HotCopies

__all__ = ["AgreedOutputs", "Piece", "SPTTContext", "SPTTModule", "TowerOutput"]

Piece = tuple[Any, int]
"""Name and number of columns of a part of a tower's output."""


class TowerOutput(NamedTuple):
    """Output of this rank's tower for some samples of its peers."""

    columns_PO: Tensor
    """[P, O]."""
    pieces: list[Piece]
    """Parts of its columns, from left to right."""


@dataclass(frozen=True)
class AgreedOutputs:
    """Shapes and dtype of the outputs that the peers exchanged in the first batch; later batches must match."""

    own_pieces: list[Piece]
    """Pieces of this tower's output."""
    all_pieces: list[list[Piece]]
    """Pieces of all towers' outputs, in tower order."""
    groups: list[list[int]]
    """For each tower the group of features whose rows each piece has."""
    exchange: PeerExchange
    """The exchange made for them (step f); its dtype is the widest of all towers' outputs."""

    @functools.cached_property
    def widths(self) -> list[list[int]]:
        """For each tower the columns of each piece."""
        return [_widths(pieces) for pieces in self.all_pieces]


@dataclass
class _ExchangeContext(EmbeddingShardingContext):
    """TorchRec's context of an id exchange, with a mark that it has been waited for."""

    output_splits: list[int] = field(default_factory=list)
    """Number of ids from each rank."""


@dataclass
class SPTTContext(Multistreamable):
    """State of one batch from the id exchange to the output exchange."""

    sharding_contexts: list[_ExchangeContext] = field(default_factory=lambda: [_ExchangeContext()])
    """TorchRec's own; the id exchange writes the batch sizes of the ranks it crosses into it."""
    peers: slice = field(default_factory=lambda: slice(None))
    """Positions of the peers, in tower order, among those ranks."""

    request: Awaitable[Awaitable[KJTList]] | None = None
    """The id exchange."""
    ids: KeyedJaggedTensor | None = None
    """Ids of the batch."""
    hot: HotBags | None = None
    """Ids of hot rows, which are not sent."""
    split_by: HotCopies | None = None
    """Copies whose ids were split off."""
    distinct: DistinctInputs | None = None
    """Rows that this rank asks the towers for; None where every sample is one."""
    parts: list[PartRows] = field(default_factory=list)
    """Rows of each micro-batch, once the ids have arrived."""
    in_tower: list[tuple[Any, Any]] = field(default_factory=list)
    """The second hop: for each sharded collection of the tower its own context, and its ids."""

    @property
    def is_identity(self) -> bool:
        """True if every sample of this rank has a row of its own."""
        return self.distinct is None or self.distinct.is_identity

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of what pipelines make on another stream until this one has done its work."""
        made = [part for of_collection in self.in_tower for part in of_collection]
        own = [self.ids, *(self.hot[1:] if self.hot else []), self.distinct.inverse if self.distinct else None]
        for part in [*made, *(part for part in own if part is not None)]:
            part.record_stream(stream)


class SPTTModule(TowerState):
    """TorchRec's ``ShardedModule`` protocol over a `TowerMesh`; subclasses define what a tower computes.

    TorchRec calls `input_dist`, maybe one batch ahead (train pipelines), then `compute` and `output_dist`. A tower's
    output consists of pieces side by side (the outputs of its logical towers, or the embeddings of its features);
    subclasses put them in order by their names, wherever they were computed.

    ``input_groups`` has for each mesh tower groups of its features; with ``unique``, rows of a group are told apart by
    all its features.

    Raises:
        InputError: the device cannot do a number format.
    """

    def __init__(
        self,
        sharder: TowerSharder[Any],
        sharding: Mapping[str, ParameterSharding],
        *,
        input_groups: Sequence[Sequence[Sequence[str]]],
        is_weighted: bool,
        device: torch.device | None,
    ) -> None:
        super().__init__(sharder, sharding)
        self.id_route, self.peer_precision = sharder.id_route, sharder.peer_precision
        self.unique = sharder.unique
        self.num_micro_batches = 1
        """Parts in which `compute_and_output_dist` runs a batch, for which ids are arranged as they arrive."""
        self._is_weighted = is_weighted
        self._target_device = device or torch.device("cpu")
        # A feature that several tables of a tower look up is sent there once.
        self._features_by_tower = [list(dict.fromkeys(f for group in groups for f in group)) for groups in input_groups]
        whole = [[features] for features in self._features_by_tower]
        apart = [
            groups if sum(map(len, groups)) == len(features) else [features]
            for groups, features in zip(input_groups, self._features_by_tower, strict=True)
        ]
        self._set_groups(apart if self.unique else whole)
        self._route: PeerIdRoute | GlobalIdRoute  # set once the sharded collections exist
        self._dtypes: dict[str, Any] = {}  # of the first batch
        self._tag = next(self.mesh.tags)

    def _set_groups(self, groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Sets for each tower the groups of features whose samples may share rows."""
        self._groups = [list(of_tower) for of_tower in groups]
        self._rows_sent = [0] * sum(map(len, groups))
        self._samples_sent = 0
        self._outputs: AgreedOutputs | None = None

    @property
    def features(self) -> list[str]:
        """Features of all towers, in the order in which their ids are sent."""
        return [feature for features in self._features_by_tower for feature in features]

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._target_device

    def replicate(self, hot: HotCopies) -> None:
        """Looks up hot rows in copies from now on; batches whose ids are on their way are split again.

        Every rank calls it between the same batches.
        """
        if self.hot is None:
            self._set_groups([[[feature] for feature in features] for features in self._features_by_tower])
        self.hot = hot

    def build_input_dist(self, collections: Iterable[GroupShardedEBC]) -> None:
        """Makes the id route into the sharded collections of this rank's tower; subclasses call it once they exist."""
        # A plain list: subclasses register them, under their own names.
        self.collections = list(collections)
        if self.id_route == "global":
            self._route = GlobalIdRoute(self.mesh, self.collections)
        else:
            self._route = PeerIdRoute(self.mesh, self.collections, self._features_by_tower)

    @abc.abstractmethod
    def tower_output(self, embeddings: Sequence[KeyedTensor], rows: PartRows) -> TowerOutput:
        """Computes this tower's output from the embeddings of each sharded collection, [samples, columns]."""

    @abc.abstractmethod
    def result(self, columns_BS: Tensor, pieces: Sequence[Piece]) -> Any:
        """Turns the columns of all towers, with their pieces as they arrived, into the unsharded module's result."""

    @abc.abstractmethod
    def feature_of(self, piece: Any) -> str:
        """Returns a feature of the group whose rows a piece of this tower's output has."""

    @property
    def rows_sent(self) -> dict[str, float]:
        """Rows that this rank has sent for each sample so far, by the features that share a row; for ``unique``."""
        names = [f"tower {i}: {shorten(group, ', ')}" for i, groups in enumerate(self._groups) for group in groups]
        return {name: rows / max(1, self._samples_sent) for name, rows in zip(names, self._rows_sent, strict=True)}

    def create_context(self) -> SPTTContext:
        """Makes a context for one batch."""
        return SPTTContext(peers=self._route.peers)

    def input_dist(
        self,
        ctx: SPTTContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the id exchange of one batch (steps a, c).

        Keys may come in any order, further keys are ignored, and weights unless the bags are weighted. The ids of
        weighted bags may be the second argument, in the way of ``EmbeddingTowerCollection``.

        Raises:
            InputError: a feature is missing, weights are missing, or the batch size varies by feature.
        """
        wanted, other = (weighted_features, features) if self._is_weighted else (features, weighted_features)
        ids = other if wanted is None else wanted
        if ids is None:
            raise InputError("No sparse features were given; pass a KeyedJaggedTensor.")
        self._check_batch(ids)
        if not self._is_weighted and ids.weights_or_none() is not None:
            # TorchRec's sharded lookups would apply them; the unsharded module does not.
            ids = KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride())
        return self._exchange_ids(ctx, ids, self.num_micro_batches)

    def compute(self, ctx: SPTTContext, dist_input: KJTList) -> TowerOutput:
        """Computes this tower's output for the samples of all peers (steps b, d, e and the tower module)."""
        embeddings = self.look_up(ctx, self.arrived_ids(ctx, dist_input))
        return self.run_towers(embeddings, ctx.parts[0])

    def output_dist(self, ctx: SPTTContext, output: TowerOutput) -> LazyAwaitable[Any]:
        """Starts the return of the outputs to the peers whose samples they belong to (step f).

        Raises:
            InputError: a tower's output has another width or a wider dtype than in the first batch.
        """
        return CachedAwaitable(self.taken(ctx, [self.exchange_outputs(ctx, output)])[0], self.finish)

    def arrived_ids(self, ctx: SPTTContext, dist_input: KJTList, num_micro_batches: int = 1) -> Any:
        """Ids that the exchange of a batch brought `look_up`, by micro-batch; its context has their rows then."""
        has_arrived = bool(ctx.in_tower if self._route.num_hops == 2 else ctx.sharding_contexts[0].output_splits)
        if not has_arrived and ctx.request is not None:
            # A train pipeline that is attached again starts the exchange of its next batch again, in a new context, and
            # goes on with the ids that it has: nobody has waited for this exchange.
            dist_input = ctx.request.wait().wait()
        ctx.request = None
        in_parts = num_micro_batches if ctx.distinct is None else len(ctx.distinct.parts)
        if ctx.split_by is not self.hot or in_parts != num_micro_batches:
            # Hot rows are others than when the batch was split, or micro-batches began or ended.
            dist_input = self._exchanged_again(ctx, num_micro_batches)
        if self.hot is not None and ctx.ids is not None:
            # Here, and not where they are sent: a checkpoint between the two has batches of the steps before only.
            self.hot.count(ctx.ids)
        if isinstance(self._route, GlobalIdRoute):
            return self._arranged(ctx, dist_input[0], num_micro_batches)
        if len(ctx.parts) != num_micro_batches:
            # Samples were arranged for another number of micro-batches.
            self._start_in_tower(ctx, num_micro_batches, dist_input[0])()
        return ctx.in_tower

    def _exchanged_again(self, ctx: SPTTContext, num: int) -> KJTList:
        """Exchanges the ids of a batch once more; its context forgets the exchange before."""
        assert ctx.ids is not None, "the batch was exchanged before"
        fresh = self.create_context()
        dist_input = self._exchange_ids(fresh, ctx.ids, num).wait().wait()
        for part in fields(fresh):
            setattr(ctx, part.name, getattr(fresh, part.name))
        ctx.request = None
        return dist_input

    @torch.no_grad()
    def _start_in_tower(self, ctx: SPTTContext, num: int, ids: KeyedJaggedTensor) -> Callable[[], Any]:
        """Starts the hop to the rank that holds the table or shard (step a); returns what ends it and has the ids."""
        assert isinstance(self._route, PeerIdRoute), "the global route has one hop"
        started = self._route.start(self._arranged(ctx, ids, num))

        def end() -> KeyedJaggedTensor:
            ctx.in_tower = [(context, request.wait()) for context, request in started]
            return ids

        return end

    def _arranged(self, ctx: SPTTContext, ids: KeyedJaggedTensor, num: int) -> KeyedJaggedTensor:
        """Puts ids in the order of the micro-batches, and their numbers of rows in the context."""
        tower = self.mesh.tower
        if ctx.distinct is None:
            batch_sizes = ctx.sharding_contexts[0].batch_size_per_rank[ctx.peers]
            by_part = [batch_sizes] if num == 1 else by_micro_batch(batch_sizes, num)
            ctx.parts = [PartRows([[size] for size in part], [[part[tower]] for _ in part]) for part in by_part]
            return ids if num == 1 else in_micro_batches(ids, batch_sizes, num)
        sizes = [len(group) for group in self._groups[tower]]
        asked = [iter(of_part) for of_part in ctx.distinct.parts]
        sent = [[[next(rows) for _ in groups] for groups in self._groups] for rows in asked]
        ctx.parts = [PartRows(*rows) for rows in zip(rows_by_part(ids, sizes, num), sent, strict=True)]
        return filled_up(ids, ctx.parts, sizes)

    @profiler_range("exchange_ids")
    @torch.no_grad()
    def _exchange_ids(self, ctx: SPTTContext, ids: KeyedJaggedTensor, num: int) -> Awaitable[Awaitable[KJTList]]:
        """Steps a and c: ids of each feature to the peer (or the rank) that looks it up, samples in peer order.

        They come out in ``num`` micro-batches.
        """
        dtypes = {
            f"dtype of {part}": None if values is None else values.dtype
            for part, values in (("ids", ids.values()), ("lengths", ids.lengths()), ("weights", ids.weights_or_none()))
        }
        if not self.id_exchanges:
            # Bytes of another dtype would be read as other ids, or too few of them.
            check_agreement("The first batch", dtypes, self.mesh.sharding_group)
            self._dtypes = dtypes
            device = ids.device() if self._target_device.type == "meta" else self._target_device
            self.set_id_exchange(self._route.exchange(ids.keys(), device))
        if dtypes != self._dtypes:
            ids = _with_dtypes(ids, *self._dtypes.values())
        ctx.ids, ctx.split_by = ids, self.hot
        if not self.unique and self.hot is None:
            started = self.id_exchanges[0](ids)
        else:
            sizes = [len(group) for groups in self._groups for group in groups]
            exchange = self.id_exchanges[0]
            ids = exchange.by_tower(ids)
            if self.hot is not None:
                ids, ctx.hot = self.hot.split(ids)
            ids, ctx.distinct = distinct_inputs(
                ids, sizes, share=self.unique, micro_batches=micro_batch_sizes(ids.stride(), num)
            )
            self._samples_sent += ctx.distinct.inverse.shape[1]
            started = exchange.send(ids)
            self._rows_sent = [sum(pair) for pair in zip(self._rows_sent, ctx.distinct.rows, strict=True)]
        ctx.request = KJTListSplitsAwaitable([started], ctx)
        if self._route.num_hops == 2:
            first, start = ctx.request.wait(), functools.partial(self._start_in_tower, ctx, num)
            both_hops = Deferred(lambda: Deferred(start(first.wait()[0])))
            ctx.request = KJTListSplitsAwaitable([both_hops], ctx)
        return ctx.request

    @profiler_range("look_up")
    def look_up(self, ctx: SPTTContext, ids: Any) -> list[KeyedTensor]:
        """Steps b, d and e: looks up `arrived_ids`, brings embeddings to the ranks of the tower: [P, columns] each."""
        if self.replicas_ready is not None:
            self.replicas_ready(self.training and torch.is_grad_enabled())
        elif self.mesh.topology.num_replicas > 1:
            raise InputError(
                f"num_replicas={self.mesh.topology.num_replicas}, but nothing keeps the replicas equal: they would "
                "drift apart. Make dmt.ReplicaSync(model, mesh) after loading weights, and call its step() after every "
                "training step."
            )
        pending = self._route.look_up(ids, ctx.sharding_contexts[0].batch_size_per_rank)
        found = [lazy.wait() for lazy in pending]
        if self.mesh.topology.num_replicas > 1:
            for columns in (embeddings.values() for embeddings in found):
                if columns.requires_grad:
                    # Tables are updated in the backward pass, of whatever mode.
                    columns.register_hook(self._note_update)
        return found

    def _note_update(self, _: Tensor) -> None:
        self.replicas_drifted = True

    @profiler_range("run_towers")
    def run_towers(self, embeddings: Sequence[KeyedTensor], rows: PartRows) -> TowerOutput:
        """Runs the tower module: the embeddings of this tower's features [P, N] -> [P, O]."""
        return self.tower_output(embeddings, rows)

    def exchange_outputs(self, ctx: SPTTContext, output: TowerOutput, part: int = 0) -> Awaitable[Tensor]:
        """Step f: starts the exchange of rows for columns among peers, [P, O] -> what `taken` makes [B, S] of.

        ``part`` is the number of the micro-batch.
        """
        rows, tower = ctx.parts[part], self.mesh.tower
        self._outputs = agreed = self._outputs or self._connect(output)
        self._check_output(output, rows.num_rows)
        numbers, exchange = output.columns_PO.to(agreed.exchange.dtype), agreed.exchange
        if ctx.distinct is None:
            return exchange(numbers, [size for [size] in rows.arrived])
        own = agreed.groups[tower], agreed.widths[tower]
        sizes = [numbers_of(of_peer, *own) for of_peer in rows.arrived]
        if ctx.is_identity:
            arriving: list[tuple[int, ...]] = [(rows.sent[0][0], columns) for columns in exchange.output_sizes]
        else:
            by_tower = zip(rows.sent, agreed.groups, agreed.widths, strict=True)
            arriving = [(numbers_of(*of_tower),) for of_tower in by_tower]
        return exchange.exchange(sent_numbers(numbers, rows.arrived, *own), sizes, arriving)

    def taken(self, ctx: SPTTContext, exchanges: Sequence[Awaitable[Tensor]]) -> list[Awaitable[Tensor]]:
        """Columns of each micro-batch, [B, S], from the rows that its exchange and those before it bring.

        Hot rows are looked up here, while the others are on their way.
        """
        cold = self._taken_rows(ctx, exchanges)
        if ctx.hot is None:
            return cold
        hot_BS = ctx.hot.copies.columns(ctx.hot, self._pieces())
        blocks = hot_BS.split(micro_batch_sizes(len(hot_BS), len(cold)))
        return [CachedAwaitable(rows, block.add) for rows, block in zip(cold, blocks, strict=True)]

    def _taken_rows(self, ctx: SPTTContext, exchanges: Sequence[Awaitable[Tensor]]) -> list[Awaitable[Tensor]]:
        if ctx.is_identity:
            return list(exchanges)
        agreed = self._outputs
        assert agreed is not None, "something was exchanged"
        assert ctx.distinct is not None, "rows are shared"
        rows, starts = ctx.distinct.inverse, [0, *itertools.accumulate(map(len, self._groups))]
        of_pieces = [start + group for start, own in zip(starts, agreed.groups, strict=False) for group in own]
        cut = functools.partial(arrived_pieces, groups=agreed.groups, widths=agreed.widths)
        parts = [
            CachedAwaitable(exchange, functools.partial(cut, rows=part.sent))
            for exchange, part in zip(exchanges, ctx.parts, strict=True)
        ]
        blocks = rows[of_pieces].split(micro_batch_sizes(rows.shape[1], len(exchanges)), dim=1)
        # Each micro-batch also needs the rows that it shares with those before it.
        return [Deferred(functools.partial(taken_rows, parts[:k], block)) for k, block in enumerate(blocks, start=1)]

    def finish(self, columns_BS: Tensor) -> Any:
        """Turns the columns that step f delivered into the unsharded module's result."""
        return self.result(columns_BS, self._pieces())

    def _pieces(self) -> list[Piece]:
        """Returns the pieces of all towers' outputs, in the order in which they arrive."""
        assert self._outputs is not None, "something was exchanged"
        return [piece for pieces in self._outputs.all_pieces for piece in pieces]

    def _connect(self, output: TowerOutput) -> AgreedOutputs:
        """Gathers the peers' pieces and dtypes, once: only running a tower module shows what it returns."""
        own = {feature: number for number, group in enumerate(self._groups[self.mesh.tower]) for feature in group}
        groups = [own[self.feature_of(name)] if len(set(own.values())) > 1 else 0 for name, _ in output.pieces]
        peers = gather_objects((output.pieces, groups, output.columns_PO.dtype), self.mesh.peer_group)
        exchange = PeerExchange(
            self.mesh.peer_group,
            [sum(_widths(pieces)) for pieces, _, _ in peers],
            # Under autocast a tower with a matrix product has another output dtype than one that passes through.
            dtype=functools.reduce(torch.promote_types, (dtype for *_, dtype in peers)),
            precision=self.peer_precision,
            tag=self._tag,
        )
        all_pieces, all_groups = ([peer[i] for peer in peers] for i in (0, 1))
        return AgreedOutputs(list(output.pieces), all_pieces, all_groups, exchange)

    def _check_output(self, output: TowerOutput, num_samples: int) -> None:
        assert self._outputs is not None, "the peers have agreed"
        columns_PO, pieces = output
        agreed, dtype = self._outputs.own_pieces, self._outputs.exchange.dtype
        if torch.promote_types(columns_PO.dtype, dtype) != dtype or pieces != agreed:
            raise InputError(
                f"Tower {self.mesh.tower} returned columns {_widths(pieces)} of {columns_PO.dtype}, but "
                f"{_widths(agreed)} of {dtype} were agreed on with the other towers in the first batch; they must stay."
            )
        found = columns_PO.shape[0]
        assert found == num_samples, f"tower {self.mesh.tower} computed {found} rows for {num_samples} samples"

    def _check_batch(self, ids: KeyedJaggedTensor) -> None:
        if ids.variable_stride_per_key():
            raise InputError(
                "The batch size varies by feature (variable stride KeyedJaggedTensor); towers need one batch size "
                "for all features."
            )
        if self._is_weighted and ids.weights_or_none() is None:
            raise InputError("The bags are weighted, but the KeyedJaggedTensor has no weights.")
        if self.id_exchanges:
            expected = self.id_exchanges[0].input_features
            if ids.keys() != expected:
                raise InputError(
                    f"The batch has features {ids.keys()}, but earlier ones had {expected}; the keys and their order "
                    "must stay."
                )
            return
        known = set(ids.keys())
        missing = [f for features in self._features_by_tower for f in features if f not in known]
        if missing:
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(known)} present)."
                f"{did_you_mean(missing[0], known)}"
            )


def _with_dtypes(
    ids: KeyedJaggedTensor, values: torch.dtype, lengths: torch.dtype, weights: torch.dtype | None
) -> KeyedJaggedTensor:
    """Returns the ids in the dtypes that the ranks have agreed on in the first batch."""
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=ids.values().to(values),
        lengths=ids.lengths().to(lengths),
        weights=None if weights is None else ids.weights().to(weights),
        stride=ids.stride(),
    )


def _widths(pieces: Sequence[Piece]) -> list[int]:
    return [width for _, width in pieces]
