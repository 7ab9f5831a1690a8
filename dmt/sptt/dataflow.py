"""Semantic-preserving tower transform (SPTT), step by step: the dataflow that every tower sharder's module shares.

DMT (arXiv 2403.00877) section 3.1, Figure 7. These are the paper's steps with the peer route, the default;
`dmt.sptt.id_routes` also has the global route, and docs/towers.md says what crosses hosts.

======  ===========================================================  =====  ==================  =======================
step    what                                                         group  method              file
======  ===========================================================  =====  ==================  =======================
a, c    ids to the peer whose tower owns the feature, in peer order  peer   `exchange_ids`      ``id_routes.py``
a       on to the rank of the tower that holds the table or shard    tower  `exchange_ids`      ``tower_lookup.py``
b       lookup                                                       -      `look_up`           FBGEMM's kernels
d, e    partial embeddings to the tower's ranks: [P, N]              tower  `look_up`           ``tower_lookup.py``
-       tower module: [P, N] -> [P, O]                               -      `run_towers`        ``towers.py``
f       outputs to the peers: [P, O] -> [B, S]                       peer   `exchange_outputs`  ``peer_exchange.py``
-       columns in the unsharded module's order                      -      `result`            ``flat``, ``towers``
======  ===========================================================  =====  ==================  =======================

The peer group is the virtual process group of section 3.1.3: its ranks are in peer order, so step c needs no code here.
Embeddings arrive in the layout of step e's view, [peers, features], and are read by key.

Shape suffixes: B samples of this rank; P rows of all T peers, in tower order (the sum of their B where every sample is
a row); N columns of the embeddings of this tower's features side by side; O columns of this tower's output; S sum of O
over the towers. Ids come in a ``KeyedJaggedTensor`` with a batch size of B or P: ``ids_B``, ``ids_P``.

A `RowEncoder` (``rows.py``) wraps the dataflow: it sends rows instead of samples, as many as each feature needs, in one
part or several, and turns the rows that come back into columns of samples. Without an encoder every sample is a row.

The result is that of the unsharded module, in its column order; only averaged bags, row-wise tables and tower modules
may round differently. Gradients are divided by T across the peers and by L across the tower, so tables, tower modules
and dense parts all get the mean over ranks of the gradients of local losses: with equal local batches, the mean over
the samples of the job, and for tables over those of their replica.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from dmt.collectives import profiler_range
from dmt.errors import InputError
from dmt.sptt.group_sharded import Embeddings
from dmt.sptt.id_routes import AgreedIds, GlobalIdRoute, PeerIdRoute
from dmt.sptt.peer_exchange import AgreedOutputs, Pending, Piece, Rows, TowerOutput
from dmt.sptt.rows import RowCode, RowEncoder, exchange_rows, rows_of_parts
from dmt.sptt.sharder import TowerSharder
from dmt.sptt.state import TowerState

__all__ = ["SPTTContext", "SPTTModule"]


@dataclass
class SPTTContext(Multistreamable):
    """State of one batch from the id exchange to the output exchange."""

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=lambda: [EmbeddingShardingContext()])
    """TorchRec's context; the id exchange writes into it the batch size of each rank of its group."""
    request: Awaitable[Awaitable[KJTList]] | None = None
    """The id exchange in flight; None before it starts and after the lookup."""
    ids_B: KeyedJaggedTensor | None = None
    """Ids of the batch before any encoding, so that they can be sent again."""
    encoder: RowEncoder | None = None
    """The module's encoder when the ids were sent."""
    code: RowCode | None = None
    """The rows that were sent instead of samples; None where every sample is a row."""
    parts: list[Rows] = field(default_factory=list)
    """Numbers of rows of each part of the batch; empty until the ids have arrived."""
    in_tower: list[tuple[Any, Any]] = field(default_factory=list)
    """TorchRec context and ids of each sharded collection of the tower; empty until the ids have arrived."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps memory that a train pipeline allocated on another stream until ``stream`` has used it."""
        in_tower = [part for pair in self.in_tower for part in pair]
        for part in (*in_tower, self.ids_B, self.code):
            if part is not None:
                part.record_stream(stream)


class SPTTModule(TowerState):
    """Implements TorchRec's ``ShardedModule`` protocol over a `TowerMesh`; subclasses define what a tower computes.

    TorchRec calls `input_dist` (a train pipeline calls it one batch ahead), then `compute` and `output_dist`. A tower's
    output consists of named pieces side by side: the outputs of its logical towers, or the embeddings of its features.
    Subclasses use the names to bring the pieces of all towers into the unsharded module's order.

    ``input_groups`` lists the groups of features of each mesh tower; features of a group have the same number of rows.
    ``outside`` names the features of tables outside towers.
    """

    def __init__(
        self,
        sharder: TowerSharder[Any],
        *,
        input_groups: Sequence[Sequence[Sequence[str]]],
        is_weighted: bool,
        device: torch.device | None,
        outside: Sequence[str] = (),
    ) -> None:
        super().__init__(sharder.module_type, sharder.mesh)
        self.id_route, self.peer_precision = sharder.id_route, sharder.peer_precision
        self._is_weighted = is_weighted
        self.device = device or torch.device("cpu")
        # A feature that several tables of a tower look up is sent there once.
        self._features_by_tower = [list(dict.fromkeys(f for group in groups for f in group)) for groups in input_groups]
        # Where groups have features in common, all features of the tower are one group.
        self.groups: list[list[Sequence[str]]] = [
            list(groups) if sum(map(len, groups)) == len(features) else [features]
            for groups, features in zip(input_groups, self._features_by_tower, strict=True)
        ]
        self._route: PeerIdRoute  # set once the sharded collections exist
        expected, group = [*self.features, *outside], self.mesh.sharding_group
        self._agreed_ids = AgreedIds(expected, is_weighted=is_weighted, group=group)
        self._outputs: AgreedOutputs | None = None
        # On the CPU the tag tells messages of two modules apart; all-to-alls on GPUs need one order on all ranks.
        self._tag = next(self.mesh.tags)

    @property
    def features(self) -> list[str]:
        """Features of all towers, in the order in which their ids are sent."""
        return [feature for features in self._features_by_tower for feature in features]

    def build_route(self) -> None:
        """Makes the id route to this rank's sharded collections; a subclass calls it once it has them. Collective."""
        if self.id_route == "global":
            self._route = GlobalIdRoute(self.mesh, self.collections, self._note_rows)
        else:
            self._route = PeerIdRoute(self.mesh.peer_group, self.collections, self._note_rows, self._features_by_tower)

    @abc.abstractmethod
    def tower_output(self, embeddings_PN: Sequence[Embeddings], rows: Rows) -> TowerOutput:
        """Computes this tower's output [P, O] from the `Embeddings` of P rows of each sharded collection."""

    @abc.abstractmethod
    def result(self, columns_BS: Tensor, pieces: Sequence[Piece]) -> Any:
        """Turns the columns [B, S] of all towers, with pieces in tower order, into the unsharded module's result."""

    def create_context(self) -> SPTTContext:
        """Makes a context for one batch."""
        return SPTTContext()

    def input_dist(
        self,
        ctx: SPTTContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the id exchange of one batch (steps a, c), and returns it in flight. Collective.

        Keys may be in any order. Extra keys are ignored, and so are weights unless the bags are weighted. The ids of
        weighted bags may be either argument: an ``EmbeddingTowerCollection`` takes them as the second.

        Raises `InputError` if no ids are given, or `AgreedIds.checked` refuses them.
        """
        # An EmbeddingBagCollection has one argument for both kinds of bags, so this takes either argument.
        wanted, other = (weighted_features, features) if self._is_weighted else (features, weighted_features)
        ids_B = other if wanted is None else wanted
        if ids_B is None:
            raise InputError("The sharded module was called without sparse features; pass a KeyedJaggedTensor.")
        return self.exchange_ids(ctx, self._agreed_ids.checked(ids_B))

    def compute(self, ctx: SPTTContext, dist_input: KJTList) -> TowerOutput:
        """Computes this tower's output for the samples of all peers (steps b, d, e and the tower module)."""
        # Only micro-batches cut a batch into parts, and they do not call this method.
        return self.run_towers(self.look_up(ctx), ctx.parts[0])

    def output_dist(self, ctx: SPTTContext, output: TowerOutput) -> LazyAwaitable[Any]:
        """Starts to send each row to the peer of its samples (step f); returns the result in flight. Collective.

        Raises `InputError` if a tower's output differs in width from the first batch's, or has a wider dtype.
        """
        # Do not wait here: the dense part of the model computes meanwhile.
        (columns_BS,) = self.columns(ctx, [self.exchange_outputs(ctx, output)])
        return Pending(lambda: self.finish(columns_BS.wait()))

    @profiler_range("exchange_ids")
    @torch.no_grad()
    def exchange_ids(self, ctx: SPTTContext, ids_B: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Steps a, c: starts to send ids to the peers whose towers own them (global: the ranks that look them up)."""
        if not self.id_exchanges:
            # Made here: only a batch shows the order of its keys and, for a module built on meta, the device.
            self.set_id_exchange(self._route.exchange(ids_B.keys(), ids_B.device()))
        exchange = self.id_exchanges[0]
        ctx.ids_B, ctx.encoder = ids_B, self.encoder
        # Tower after tower, so that the ids for a peer are one block (step a).
        sent_B = exchange.in_order(ids_B)
        ctx.code = None if self.encoder is None else self.encoder.encode(sent_B)
        started = exchange(sent_B if ctx.code is None else ctx.code.ids)
        # A train pipeline waits for the sizes and for the ids of this batch while the previous batch computes.
        ctx.request = self._route.forward_ids(started, ctx)
        return ctx.request

    def _note_rows(self, ctx: SPTTContext, ids_P: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Records how many rows each peer has sent; returns the ids with one batch size for all features."""
        batch_sizes = ctx.sharding_contexts[0].batch_size_per_rank[self._route.peers]
        if ctx.code is not None:
            ids_P, ctx.parts = rows_of_parts(ctx.code, ids_P, self.groups, self.mesh.tower)
        else:
            # Every sample is a row, so the features of a tower are one group, and in step f every tower returns one row
            # for each sample of this rank.
            own_batch_size = batch_sizes[self.mesh.tower]
            ctx.parts = [Rows([[size] for size in batch_sizes], [[own_batch_size]] * len(batch_sizes))]
        return ids_P

    @profiler_range("look_up")
    def look_up(self, ctx: SPTTContext) -> list[Embeddings]:
        """Steps b, d and e: looks up the ids that have arrived, and sends embeddings to the tower's ranks: [P, N]."""
        if not ctx.in_tower and ctx.request is not None:
            # A train pipeline that is detached and attached again exchanges the ids of its next batch twice with this
            # context, but waits for the first exchange only. The stream of the second could now reuse its buffers
            # before this stream of a GPU has read them.
            ctx.request.wait().wait()
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
        if ctx.encoder is not self.encoder:
            # The encoder was changed after the ids were sent: send them again, and forget the first exchange.
            assert ctx.ids_B is not None, "the batch was exchanged before"
            fresh = self.create_context()
            self.exchange_ids(fresh, ctx.ids_B).wait().wait()
            ctx.__dict__.update(fresh.__dict__)
        ctx.request = None  # else the result of a batch would keep its ids in memory
        if self.before_lookup is not None:
            self.before_lookup(ctx.ids_B, self.training and torch.is_grad_enabled())
        # All lookups start before the first wait: their exchanges share the links inside the tower.
        embeddings_PN = [lazy.wait() for lazy in self._route.look_up(ctx)]
        if self.after_lookup is not None:
            self.after_lookup(embeddings_PN)
        return embeddings_PN

    @profiler_range("run_towers")
    def run_towers(self, embeddings_PN: Sequence[Embeddings], rows: Rows) -> TowerOutput:
        """Runs the tower module: the embeddings of this tower's features [P, N] -> [P, O]."""
        return self.tower_output(embeddings_PN, rows)

    def exchange_outputs(self, ctx: SPTTContext, output: TowerOutput, part: int = 0) -> Awaitable[Any]:
        """Step f: starts to send each peer its rows of the output [P, O] of ``part``; `columns` takes what arrives."""
        rows = ctx.parts[part]
        if self._outputs is None:
            # Peers cannot know how wide a tower module's output is before it has run.
            self._outputs = AgreedOutputs.gather(
                output, self.mesh.peer_group, precision=self.peer_precision, tag=self._tag
            )
        agreed = self._outputs
        outputs_PO = agreed.checked(output, rows.num_rows)
        if ctx.code is None:
            # Rows lie peer by peer, as their ids came: no shuffle before they are sent (Figure 7, step f).
            return agreed.exchange(outputs_PO, [of_peer[0] for of_peer in rows.arrived])
        return exchange_rows(outputs_PO, rows, agreed)

    def columns(self, ctx: SPTTContext, exchanges: Sequence[Awaitable[Any]]) -> Sequence[Awaitable[Tensor]]:
        """Returns for each part of the batch an awaitable of its columns [samples, S], given its exchange (step f)."""
        if ctx.code is None:
            return exchanges
        assert self._outputs is not None, "columns come after an exchange"
        return ctx.code.decode(exchanges, self._outputs, [len(of_tower) for of_tower in self.groups])

    def finish(self, columns_BS: Tensor) -> Any:
        """Turns the columns [B, S] that step f delivered into the unsharded module's result."""
        assert self._outputs is not None, "columns come after an exchange"
        return self.result(columns_BS, [piece for pieces in self._outputs.pieces for piece in pieces])
