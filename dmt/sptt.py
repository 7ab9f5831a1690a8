"""The semantic-preserving tower transform (SPTT) as a TorchRec sharded module: what every tower dataflow shares.

DMT (arXiv 2403.00877) section 3.1, Figure 7. With the peer route the paper's steps become:

======  ==================================================================  ==========  =====================
step    what                                                                group       who does it
======  ==================================================================  ==========  =====================
a, c    ids of each feature to the peer whose tower owns it, in peer order  peer        `IdsToTowers`
a       from there to the rank that holds the table (or column shard)       tower       TorchRec's sharded EBC
b       lookup                                                              -           FBGEMM
d, e    partial embeddings to the tower's ranks, [sum of B, F_t, N]         tower       TorchRec's sharded EBC
-       tower module, [sum of B, F_t, N] -> [sum of B, O_t]                 tower       `ShardedTowerCollection`
f       outputs to peers, [sum of B, O_t] -> [B, sum of O_t]                peer        `OutputsToPeers`
======  ==================================================================  ==========  =====================

Only bytes move: the result is the unsharded module's, in its column order, on any placement. Gradients divide by T
crossing the peers and by L crossing the tower, so tables, tower modules and dense parts all see the mean over ranks of
their local losses' gradients: the mean over the job's samples when local batches are equal.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from dmt._torchrec import LazyResult, PipelinedModule, group_env, place_globally
from dmt.collectives import IdsToTowers, OutputsToPeers, gather_objects, same_on_all_ranks
from dmt.errors import InputError, nearest
from dmt.mesh import TowerMesh
from dmt.placement import SCHEMES

__all__ = ["SPTTContext", "SPTTModule", "shard_in_tower"]


@dataclass
class SPTTContext(Multistreamable):
    """What one batch carries from the id exchange to the output exchange: the peers' batch sizes."""

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=lambda: [EmbeddingShardingContext()])

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing here lives on a device."""

    @property
    def batch_sizes(self) -> list[int]:
        """B of every peer, in tower order."""
        return self.sharding_contexts[0].batch_size_per_rank


class SPTTModule(PipelinedModule, FusedOptimizerModule):
    """TorchRec's ``ShardedModule`` protocol over a `TowerMesh`; subclasses say what a tower computes.

    Args:
        mesh: the groups.
        features_by_tower: the features of each mesh tower, in the order they are sent.
        is_weighted: whether the ids carry weights.
        device: this rank's device.
        qcomm_codecs_registry: TorchRec's quantised communication.

    Raises:
        InputError: replicas are asked for (not supported yet), or ranks disagree on the towers.
    """

    def __init__(
        self,
        *,
        mesh: TowerMesh,
        features_by_tower: Sequence[Sequence[str]],
        is_weighted: bool,
        device: torch.device | None,
        qcomm_codecs_registry: dict[str, Any] | None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        if mesh.topology.num_replicas > 1:
            raise InputError(
                f"num_replicas={mesh.topology.num_replicas}: nothing keeps replicas equal yet (ReplicaSync is not "
                "built), so they would drift apart. Use num_replicas=1."
            )
        self.mesh = mesh
        self._features_by_tower = [list(features) for features in features_by_tower]
        self._is_weighted = is_weighted
        self._target_device = device or torch.device("cpu")
        self._outputs_to_peers: OutputsToPeers | None = None
        differing = same_on_all_ranks(self._features_by_tower, mesh.global_group)
        if differing:
            raise InputError(
                f"Ranks {differing} have other towers than rank 0. Every rank must load the same tower plan and tables."
            )

    @abc.abstractmethod
    def tower_output(self, ids: KeyedJaggedTensor) -> Tensor:
        """Looks up and computes this tower's output [sum of B, O_t] for the ids of all peers."""

    @abc.abstractmethod
    def output_sizes(self, output: Tensor) -> list[int]:
        """O_t of each mesh tower, known once this rank's own ``output`` is."""

    @abc.abstractmethod
    def finish(self, columns: Tensor) -> Any:
        """Turns [B, sum of O_t], in mesh tower order, into the module's result."""

    def create_context(self) -> SPTTContext:
        """A fresh context for one batch."""
        return SPTTContext()

    def input_dist(
        self,
        ctx: SPTTContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the id exchange of one batch.

        Args:
            ctx: the batch's context.
            features: the batch's ids; keys in any order, further keys are ignored.
            weighted_features: given instead of ``features`` when the bags are weighted.

        Raises:
            InputError: a feature is missing, weights are missing, or the batch size varies by feature.
        """
        ids = weighted_features if weighted_features is not None else features
        if ids is None:
            raise InputError("No sparse features were given; pass a KeyedJaggedTensor.")
        self._check_batch(ids)
        if self.id_exchange is None:
            device = ids.device() if self._target_device.type == "meta" else self._target_device
            self.set_id_exchange(IdsToTowers(self.mesh.peer_group, self._features_by_tower, ids.keys(), device))
            self._input_features = ids.keys()
        exchange = self.id_exchange
        assert exchange is not None, "the id exchange was just installed"
        with torch.no_grad():
            return KJTListSplitsAwaitable([exchange(ids)], ctx)

    def compute(self, ctx: SPTTContext, dist_input: KJTList) -> Tensor:
        """This tower's output [sum of B, O_t]."""
        return self.tower_output(dist_input[0])

    def output_dist(self, ctx: SPTTContext, output: Tensor) -> LazyAwaitable[Any]:
        """Starts the return of the outputs to the peers whose samples they belong to."""
        if self._outputs_to_peers is None:
            codecs = (self.qcomm_codecs_registry or {}).get("POOLED_EMBEDDINGS_ALL_TO_ALL")
            self._outputs_to_peers = OutputsToPeers(
                self.mesh.peer_group, self.output_sizes(output), output.device, codecs
            )
        assert output.shape[0] == sum(ctx.batch_sizes), (
            f"tower {self.mesh.tower} computed {output.shape[0]} rows for peers with {ctx.batch_sizes}"
        )
        return LazyResult(self._outputs_to_peers(output, ctx.batch_sizes), self.finish)

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
                f"{nearest(missing[0], known)}"
            )


def shard_in_tower(
    embedding: nn.Module,
    sharding: Mapping[str, ParameterSharding],
    mesh: TowerMesh,
    *,
    fused_params: dict[str, Any] | None,
    device: torch.device | None,
    qcomm_codecs_registry: dict[str, Any] | None,
) -> ShardedEmbeddingBagCollection:
    """Shards an ``EmbeddingBagCollection`` over the ranks of this rank's tower (SPTT steps a, b, d).

    Args:
        embedding: the collection.
        sharding: for each table its scheme, with ranks and placements local to the tower (0..L-1).
        mesh: the groups.
        fused_params: of FBGEMM's fused optimizer.
        device: this rank's device.
        qcomm_codecs_registry: TorchRec's quantised communication.

    Raises:
        InputError: a table has no sharding, an unsupported scheme, a rank outside the tower, or shards that do not
            cover it.
    """
    ranks = mesh.tower_ranks()
    devices = gather_objects(str(device or "cpu"), mesh.tower_group)
    placed = {}
    for table in embedding.embedding_bag_configs():  # type: ignore[operator]
        _check_sharding(table, sharding.get(table.name), mesh)
        placed[table.name] = place_globally(sharding[table.name], ranks, devices)
    return ShardedEmbeddingBagCollection(
        embedding,
        placed,
        group_env(mesh.tower_group),
        fused_params=fused_params,
        device=device,
        qcomm_codecs_registry=qcomm_codecs_registry,
    )


def _check_sharding(table: Any, sharding: ParameterSharding | None, mesh: TowerMesh) -> None:
    where = f"Table {table.name!r} in tower {mesh.tower}"
    num_ranks = mesh.topology.ranks_per_tower
    if sharding is None:
        raise InputError(f"{where} is not in the sharding plan. Make the plan with TowerShardingPlanner.")
    if sharding.sharding_type not in SCHEMES:
        raise InputError(f"{where} is sharded {sharding.sharding_type!r}; inside a tower use one of {list(SCHEMES)}.")
    shards = list(getattr(sharding.sharding_spec, "shards", None) or [])
    outside = [rank for rank in sharding.ranks or [] if not 0 <= rank < num_ranks]
    outside += [s.placement.rank() for s in shards if not 0 <= s.placement.rank() < num_ranks]
    if outside:
        raise InputError(
            f"{where} has a shard on rank {outside[0]}; ranks of a plan are local to the tower, 0..{num_ranks - 1}."
        )
    if sharding.ranks != [shard.placement.rank() for shard in shards]:
        raise InputError(
            f"{where} lists ranks {sharding.ranks} but places its shards on "
            f"{[shard.placement.rank() for shard in shards]}; the two must agree."
        )
    columns = 0
    for shard in shards:
        if list(shard.shard_offsets) != [0, columns] or shard.shard_sizes[0] != table.num_embeddings:
            break
        columns += shard.shard_sizes[1]
    if columns != table.embedding_dim:
        cut = [(list(s.shard_offsets), list(s.shard_sizes)) for s in shards]
        raise InputError(
            f"{where} is {table.num_embeddings} x {table.embedding_dim}, but its shards (offsets, sizes) {cut} do not "
            "cover it from left to right."
        )
