"""The semantic-preserving tower transform (SPTT) as a TorchRec sharded module: what every tower dataflow shares.

DMT (arXiv 2403.00877) section 3.1, Figure 7. With the peer route, the default, the paper's steps become as below; see
`dmt.sptt.input_dist` for the other one and docs/sptt.md for a worked example.

======  ==================================================================  ==========  =====================
step    what                                                                group       who does it
======  ==================================================================  ==========  =====================
a, c    ids of each feature to the peer whose tower owns it, in peer order  peer        `PeerInputDist`
a       from there to the rank that holds the table (or column shard)       tower       TorchRec's sharded EBC
b       lookup                                                              -           FBGEMM
d, e    partial embeddings to the tower's ranks, [sum of B, F_t, N]         tower       TorchRec's sharded EBC
-       tower module, [sum of B, F_t, N] -> [sum of B, O_t]                 tower       `ShardedTowerCollection`
f       outputs to peers, [sum of B, O_t] -> [B, sum of O_t]                peer        `PeerExchange`
======  ==================================================================  ==========  =====================

Only bytes move: the result is the unsharded module's, in its column order, on any placement. Gradients divide by T
crossing the peers and by L crossing the tower, so tables, tower modules and dense parts all see the mean over ranks of
their local losses' gradients: the mean over the job's samples when local batches are equal.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from dmt._torchrec import PipelinedModule, fused_settings, place_globally
from dmt.collectives import broadcast_tensor, gather_objects
from dmt.errors import InputError, did_you_mean
from dmt.plan.tables import feature_names
from dmt.sharding.data_parallel import DataParallelTables
from dmt.sharding.group_ebc import GroupShardedEBC, RowWiseOutputs
from dmt.sharding.optimizers import TableOptimizer, moment_scale_of
from dmt.sptt.input_dist import GlobalIdRoute, PeerInputDist
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.output_dist import PeerExchange
from dmt.sptt.parts import ResultInParts, in_micro_batch_order, micro_batch_sizes
from dmt.sptt.results import CachedAwaitable, split_rows
from dmt.sptt.sharder import Exchange

__all__ = ["Piece", "SPTTContext", "SPTTModule", "model_parallel_tables", "shard_in_tower"]


Piece = tuple[Any, int]
"""A part of a tower's output: its name, and how many columns it has."""


@dataclass
class SPTTContext(Multistreamable):
    """What one batch carries from the id exchange to the output exchange."""

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=lambda: [EmbeddingShardingContext()])
    """TorchRec's own; the id exchange writes the batch sizes of the ranks it crosses into it."""
    peers: slice = field(default_factory=lambda: slice(None))
    """Where the peers, in tower order, stand among those ranks."""
    pieces: list[Piece] = field(default_factory=list)
    """Of this tower's output."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing here lives on a device."""

    @property
    def batch_sizes(self) -> list[int]:
        """B of every peer, in tower order."""
        return self.sharding_contexts[0].batch_size_per_rank[self.peers]


class SPTTModule(PipelinedModule, FusedOptimizerModule):
    """TorchRec's ``ShardedModule`` protocol over a `TowerMesh`; subclasses say what a tower computes.

    A tower's output consists of pieces side by side (the outputs of its logical towers, or the embeddings of its
    features); subclasses put them in order by their names, wherever they were computed. Subclasses put the names of
    all towers' tables that are not data-parallel into ``sharded_tables``.

    Args:
        mesh: the groups.
        tables_by_tower: the table configs of each mesh tower.
        is_weighted: whether the ids carry weights.
        exchange: how ids and outputs travel.
        device: this rank's device.
        qcomm_codecs_registry: TorchRec's quantised communication, inside the tower.

    Raises:
        InputError: the device cannot do a number format.
    """

    def __init__(
        self,
        *,
        mesh: TowerMesh,
        tables_by_tower: Sequence[Sequence[Any]],
        is_weighted: bool,
        exchange: Exchange,
        device: torch.device | None,
        qcomm_codecs_registry: dict[str, Any] | None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self.mesh = mesh
        self._exchange = exchange
        # A feature that several tables of a tower look up is sent there once.
        self._features_by_tower = [list(dict.fromkeys(feature_names(tables))) for tables in tables_by_tower]
        self._is_weighted = is_weighted
        self._target_device = device or torch.device("cpu")
        self._input_features: list[str] = []
        self._outputs_to_peers: PeerExchange | None = None
        self._output_dtype = torch.float32
        self._own_pieces: list[Piece] = []
        self._all_pieces: list[Piece] = []
        self._collections: list[GroupShardedEBC] = []
        self._global_route: GlobalIdRoute | None = None
        self._replicas_ready: Callable[[bool], None] | None = None
        self._num_micro_batches = 1
        self._tag = mesh.new_tag()
        self.sharded_tables: list[str] = []
        exchange.precision.check_device(self._target_device)

    def build_input_dist(self, embeddings: Iterable[GroupShardedEBC]) -> None:
        """Says how ids get to the sharded collections of this rank's tower; subclasses call it when they have them.

        Raises:
            InputError: the global route cannot serve a table.
        """
        # A plain list: they are registered by the subclass, under its own names.
        self._collections = list(embeddings)
        if self._exchange.id_route == "global":
            self._global_route = GlobalIdRoute(self.mesh, self._collections)

    def set_micro_batches(self, number: int) -> None:
        """Called by `dmt.MicroBatches` once checked: outputs are exchanged in so many parts, all under way at once."""
        self._num_micro_batches = number

    def check_micro_batches(self, number: int) -> None:
        """Refuses what cannot be.

        Raises:
            InputError: ids travel by the global route, which brings them to the ranks in another order.
        """
        if number > 1 and self._global_route is not None:
            raise InputError("Micro-batches need id_route='peer'; this model was sharded with id_route='global'.")

    @property
    def collections(self) -> Sequence[GroupShardedEBC]:
        """The sharded collections of this rank's tower."""
        return self._collections

    def set_replica_hook(self, ready: Callable[[bool], None]) -> None:
        """Sets the function that `dmt.ReplicaSync` runs before tables are read; it is told if a training pass reads them."""
        self._replicas_ready = ready

    def wait_for_replicas(self, *, is_training_pass: bool = False) -> None:
        """Waits until this rank's tables may be read."""
        if self._replicas_ready is not None:
            self._replicas_ready(is_training_pass)

    def _check_replicas(self) -> None:
        if self._replicas_ready is None and self.mesh.topology.num_replicas > 1:
            raise InputError(
                f"num_replicas={self.mesh.topology.num_replicas}, but nothing keeps the replicas equal: they would "
                "drift apart. Make dmt.ReplicaSync(model, mesh) after loading weights, and call its step() after every "
                "training step."
            )

    @abc.abstractmethod
    def tower_output(self, embeddings: Sequence[KeyedTensor], num_samples: int) -> tuple[Tensor, list[Piece]]:
        """This tower's output [samples, O_t] for some samples, and its pieces from left to right.

        Args:
            embeddings: of each sharded collection given to `build_input_dist` [samples, columns].
            num_samples: how many samples.
        """

    @abc.abstractmethod
    def result(self, columns: Tensor, pieces: Sequence[Piece]) -> Any:
        """Turns [B, sum of O_t] with the pieces of all towers, as they arrived, into what the unsharded one returns."""

    def create_context(self) -> SPTTContext:
        """A fresh context for one batch."""
        return SPTTContext() if self._global_route is None else SPTTContext(peers=self._global_route.peers)

    def input_dist(
        self,
        ctx: SPTTContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the id exchange of one batch.

        Args:
            ctx: the batch's context.
            features: the batch's ids; keys in any order, further keys are ignored. Weights are ignored unless the
                bags are weighted.
            weighted_features: the ids when the bags are weighted, in the way of ``EmbeddingTowerCollection``.

        Raises:
            InputError: a feature is missing, weights are missing, or the batch size varies by feature.
        """
        wanted, other = (weighted_features, features) if self._is_weighted else (features, weighted_features)
        ids = other if wanted is None else wanted
        if ids is None:
            raise InputError("No sparse features were given; pass a KeyedJaggedTensor.")
        self._check_batch(ids)
        if not self._is_weighted and ids.weights_or_none() is not None:
            # TorchRec's sharded lookups would apply them; the plain module does not.
            ids = KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride())
        if self.id_exchange is None:
            device = ids.device() if self._target_device.type == "meta" else self._target_device
            self.set_id_exchange(
                PeerInputDist(self.mesh.peer_group, self._features_by_tower, ids.keys(), device)
                if self._global_route is None
                else self._global_route.exchange(ids.keys(), device)
            )
            self._input_features = ids.keys()
        exchange = self.id_exchange
        assert exchange is not None, "the id exchange was just installed"
        with torch.no_grad():
            return KJTListSplitsAwaitable([exchange(ids)], ctx)

    def compute(self, ctx: SPTTContext, dist_input: KJTList) -> Iterator[Tensor]:
        """This tower's output [sum of B, O_t], micro-batch by micro-batch, each computed when it is asked for.

        So the exchange of the first is under way while the tower computes the next.
        """
        self._check_replicas()
        self.wait_for_replicas(is_training_pass=self.training and torch.is_grad_enabled())
        ids = dist_input[0]
        if self._num_micro_batches > 1:
            ids = in_micro_batch_order(ids, ctx.batch_sizes, self._num_micro_batches)
        if self._global_route is None:
            embeddings = [embedding(ids) for embedding in self._collections]
        else:
            embeddings = self._global_route.look_up(ids, ctx.sharding_contexts[0].batch_size_per_rank)
        rows = [sum(sizes) for sizes in self._batch_sizes(ctx)]
        by_collection = [split_rows(lazy.wait(), rows) for lazy in embeddings]
        for number, count in enumerate(rows):
            output, ctx.pieces = self.tower_output([parts[number] for parts in by_collection], count)
            yield output

    def output_dist(self, ctx: SPTTContext, output: Iterable[Tensor]) -> LazyAwaitable[Any]:
        """Starts the return of the outputs to the peers whose samples they belong to.

        Raises:
            InputError: a tower's output has another width or a wider dtype than in the first batch.
        """
        sizes = self._batch_sizes(ctx)
        started = [self._start_exchange(ctx, part, of_peers) for part, of_peers in zip(output, sizes, strict=True)]
        return CachedAwaitable(started[0], self._finish) if len(started) == 1 else ResultInParts(started, self._finish)

    def _batch_sizes(self, ctx: SPTTContext) -> list[list[int]]:
        """Samples of every peer in each micro-batch."""
        by_peer = [micro_batch_sizes(size, self._num_micro_batches) for size in ctx.batch_sizes]
        return [list(sizes) for sizes in zip(*by_peer, strict=True)]

    def _start_exchange(self, ctx: SPTTContext, output: Tensor, batch_sizes: list[int]) -> Awaitable[Tensor]:
        if self._outputs_to_peers is None:
            self._outputs_to_peers = self._connect(ctx.pieces, output)
        is_wider = torch.promote_types(output.dtype, self._output_dtype) != self._output_dtype
        if is_wider or ctx.pieces != self._own_pieces:
            raise InputError(
                f"Tower {self.mesh.tower} put out columns {_widths(ctx.pieces)} of {output.dtype}, but "
                f"{_widths(self._own_pieces)} of {self._output_dtype} were agreed on with the other towers in the "
                "first batch; they must stay."
            )
        assert output.shape[0] == sum(batch_sizes), (
            f"tower {self.mesh.tower} computed {output.shape[0]} rows for peers with {batch_sizes}"
        )
        return self._outputs_to_peers(output.to(self._output_dtype), batch_sizes)

    def _connect(self, pieces: list[Piece], output: Tensor) -> PeerExchange:
        """Asks the peers once what their pieces are, and of which dtype: a tower module may put out anything."""
        peers = gather_objects((pieces, output.dtype), self.mesh.peer_group)
        self._own_pieces = list(pieces)
        self._all_pieces = [piece for of_tower, _ in peers for piece in of_tower]
        # Under autocast a tower with a matrix product puts out another dtype than one that passes through.
        self._output_dtype = functools.reduce(torch.promote_types, (dtype for _, dtype in peers))
        return PeerExchange(
            self.mesh.peer_group,
            [sum(_widths(of_tower)) for of_tower, _ in peers],
            dtype=self._output_dtype,
            device=output.device,
            precision=self._exchange.precision,
            tag=self._tag,
        )

    def _finish(self, columns: Tensor) -> Any:
        return self.result(columns, self._all_pieces)

    def _check_batch(self, ids: KeyedJaggedTensor) -> None:
        if ids.variable_stride_per_key():
            raise InputError(
                "The batch size varies by feature (variable stride KeyedJaggedTensor); towers need one batch size "
                "for all features."
            )
        if self._is_weighted and ids.weights_or_none() is None:
            raise InputError("The bags are weighted, but the KeyedJaggedTensor has no weights.")
        if self.id_exchange is not None:
            if ids.keys() != self._input_features:
                raise InputError(
                    f"The batch has features {ids.keys()}, but earlier ones had {self._input_features}; the keys and "
                    "their order must stay."
                )
            return
        known = set(ids.keys())
        missing = [f for features in self._features_by_tower for f in features if f not in known]
        if missing:
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(known)} present)."
                f"{did_you_mean(missing[0], known)}"
            )


def _widths(pieces: Sequence[Piece]) -> list[int]:
    return [width for _, width in pieces]


def model_parallel_tables(sharding: Mapping[str, ParameterSharding]) -> list[str]:
    """Names of the tables that each rank of a tower holds a part of, or nothing."""
    return [name for name, of_table in sharding.items() if of_table.sharding_type != "data_parallel"]


def shard_in_tower(
    embedding: nn.Module,
    sharding: Mapping[str, ParameterSharding],
    mesh: TowerMesh,
    *,
    optimizer: TableOptimizer,
    device: torch.device | None,
    qcomm_codecs_registry: dict[str, Any] | None,
) -> GroupShardedEBC:
    """Shards an ``EmbeddingBagCollection`` over the ranks of this rank's tower (SPTT steps a, b, d).

    Args:
        embedding: the collection.
        sharding: for each table its scheme, with ranks and placements local to the tower (0..L-1); see
            `dmt.sptt.checks.check_agreement`.
        mesh: the groups.
        optimizer: of the tables.
        device: this rank's device.
        qcomm_codecs_registry: TorchRec's quantised communication.
    """
    ranks = mesh.tower_ranks()
    tables = embedding.embedding_bag_configs()  # type: ignore[operator]
    devices = gather_objects(str(device or "cpu"), mesh.tower_group)
    bags: Any = embedding.embedding_bags
    settings = {t.name: fused_settings(bags[t.name].weight, optimizer.fused_params) for t in tables}
    placed = {table.name: place_globally(sharding[table.name], ranks, devices) for table in tables}
    return GroupShardedEBC(
        embedding,
        placed,
        group=mesh.tower_group,
        # Data-parallel tables of all replicas must stay equal, like the tower's dense module.
        make_data_parallel=functools.partial(DataParallelTables, group=mesh.tower_module_group),
        start_equal=functools.partial(broadcast_tensor, group=mesh.tower_module_group),
        make_row_wise_output=functools.partial(RowWiseOutputs, rank=mesh.local),
        moment_scales={
            name: moment_scale_of(optimizer.moment_scale, settings[name], mesh.topology.num_replicas)
            for name in model_parallel_tables(placed)
        },
        options={
            "fused_params": optimizer.fused_params,
            "device": device,
            "qcomm_codecs_registry": qcomm_codecs_registry,
        },
    )
