"""Sends ids to the ranks that look them up (SPTT steps a and c), by `PeerIdRoute` or `GlobalIdRoute`.

The peer route, the default, sends the ids of a feature across the slow links once, and from there inside the tower to
the ranks that hold its table. The global route, that of DMT (arXiv 2403.00877, section 3.1.1), sends them straight to
these ranks, once for each column shard of the table. From the lookup (step b) on, both routes are the same, so their
results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError, did_you_mean
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import Pending
from dmt.sptt.tower_lookup import GroupShardedEBC

__all__ = ["AgreedIds", "GlobalIdRoute", "IdExchange", "PeerIdRoute"]


class AgreedIds:
    """Checks that all batches of the group have the same dtypes, and all batches of a rank the same keys, in order."""

    def __init__(self, features: Sequence[str], *, is_weighted: bool, group: dist.ProcessGroup) -> None:
        self._features, self._is_weighted, self._group = list(features), is_weighted, group
        self._keys: list[str] = []
        self._dtypes: dict[str, torch.dtype | None] = {}

    def checked(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids, without weights unless the bags are weighted; collective for the first batch.

        Raises `InputError` if a feature is missing, weights are missing or require a gradient, ids are neither int32
        nor int64, the batch size varies by feature, dtypes differ between the first batches of two ranks, or keys or
        dtypes differ from those of the rank's first batch. For the first batch all ranks raise, later only the rank
        whose batch is refused.
        """
        if self._keys:
            self._check(ids)
        else:
            # The first batch decides, since a plan knows neither the order of the keys nor the dtypes.
            run_on_all_or_raise(lambda: self._check(ids), self._group)
            dtypes = self._dtypes_of(ids)
            # A rank would misread the bytes of another dtype as other ids.
            named = {f"dtype of {name}": dtype for name, dtype in dtypes.items()}
            check_agreement("The first batch", named, self._group)
            # A copy: a caller may reorder the list of the keys in place.
            self._keys, self._dtypes = list(ids.keys()), dtypes
        # TorchRec's sharded lookups would apply weights where the unsharded module does not.
        if self._is_weighted or ids.weights_or_none() is None:
            return ids
        return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths())

    def _check(self, ids: KeyedJaggedTensor) -> None:
        keys, dtype = list(ids.keys()), ids.values().dtype
        weights = ids.weights_or_none() if self._is_weighted else None
        if missing := [] if self._keys else sorted(set(self._features).difference(keys)):
            raise InputError(
                f"The batch lacks feature {missing[0]!r} (missing features: {len(missing)})."
                f"{did_you_mean(missing[0], keys)} Pass ids of all features of the model."
            )
        refusals = {
            "has several batch sizes by feature; pass one, and unique=True to sharders.": ids.variable_stride_per_key(),
            f"has ids of {dtype}; ids must be torch.int32 or torch.int64.": dtype not in (torch.int32, torch.int64),
            "lacks weights, but bags are weighted; pass weights.": self._is_weighted and weights is None,
            # The unsharded module would pass their gradient on.
            "has weights that require a gradient, which does not cross ranks; pass weights.detach().": (
                weights is not None and weights.requires_grad
            ),
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InputError(f"The batch {message}")
        if self._keys not in ([], keys):
            at = next((i for i, key in enumerate(keys) if self._keys[i : i + 1] != [key]), len(keys))
            raise InputError(
                f"The batch has {len(keys)} keys, with {keys[at : at + 1]} at position {at}; the first batch had "
                f"{len(self._keys)} keys, with {self._keys[at : at + 1]} there. Give all batches the same keys in the "
                "same order."
            )
        for name, dtype in self._dtypes_of(ids).items():
            if dtype != (first := self._dtypes.get(name, dtype)):
                raise InputError(
                    f"The batch has {name} of {dtype}, but the first batch had {first}. Give all batches {name} of one "
                    "dtype."
                )

    def _dtypes_of(self, ids: KeyedJaggedTensor) -> dict[str, torch.dtype | None]:
        weights = ids.weights_or_none() if self._is_weighted else None
        parts = {"ids": ids.values(), "lengths": ids.lengths(), "weights": weights}
        return {name: None if part is None else part.dtype for name, part in parts.items()}


class IdExchange(nn.Module):
    """Sends each feature's ids to the ranks of a group that want it (SPTT steps a and c; no gradient).

    ========= ==========================================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids of the features that it wants, in the order in which it wants them, for
              the samples of all ranks of the group, in peer order. Ids from the peer group arrive in this
              order (DMT section 3.1.3, "virtual process group"); those from the sharding group are
              sorted by (local index, tower): the peer permute of step c, on ids, before the lookup
    ========= ==========================================================================================

    Ids cross in the dtype of the batch: int32 takes half the bytes of int64. Lengths always cross, even where every bag
    has one id: TorchRec rebuilds the ids from them (``KeyedJaggedTensor.dist_init``).

    Args:
        group: the ranks.
        wanted: features that each rank of the group wants; a feature may be listed several times (column shards).
        input_features: keys of the batch, in the order of its ids; may hold more features than are used.
        stagger: T for the sharding group, whose rank (tower, local) is tower * ranks_per_tower + local; else 1.
        device: device of the ids.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wanted: Sequence[Sequence[str]],
        input_features: Sequence[str],
        *,
        stagger: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._group, self._stagger = group, stagger
        self._sizes = [len(of_rank) for of_rank in wanted]
        position = {feature: i for i, feature in enumerate(input_features)}
        # A feature with column shards on several ranks goes to each of them (section 3.1.3).
        self._order = [position[feature] for of_rank in wanted for feature in of_rank]
        # Kept on the device: a copy in each batch would make the host wait for the GPU.
        order = torch.tensor(self._order, dtype=torch.int32, device=device)
        self.register_buffer("_order_tensor", order, persistent=False)

    def in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids of the features that each rank wants, rank after rank."""
        return ids.permute(self._order, self._order_tensor)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of ids from `in_order`; the first ``wait()`` waits for sizes, the second for the ids.

        With a `RowEncoder` a feature has a key for each part of the batch, and batch sizes differ between keys.
        """
        num_keys = len(ids.keys()) // sum(self._sizes)  # keys of each feature, one for each part
        # Not kept as self._dist: TorchRec's train pipeline looks for that name and would delay the exchange of sizes.
        return KJTAllToAll(self._group, [size * num_keys for size in self._sizes], stagger=self._stagger)(ids)


class PeerIdRoute:
    """The peer id route: `IdExchange` among peers, then TorchRec's id exchange inside the tower.

    ``collections`` are this rank's, one per logical tower; ``wanted`` lists the features of each mesh tower, each once.
    ``note_rows`` records how many rows each peer has sent, and returns the ids with one batch size for all features.
    """

    stagger = 1
    peers = slice(None)
    """Selects this rank's peers, in tower order, from the ranks of the id exchange's group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        collections: Sequence[Any],
        note_rows: Callable[[Any, KeyedJaggedTensor], KeyedJaggedTensor],
        wanted: Sequence[Sequence[str]],
    ) -> None:
        self._group, self._collections, self._note_rows, self._wanted = group, collections, note_rows, wanted

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdExchange:
        """Makes the id exchange for batches with the keys ``input_features``."""
        return IdExchange(self._group, self._wanted, input_features, stagger=self.stagger, device=device)

    def forward_ids(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Forwards the ids of a started exchange inside the tower (SPTT step a) once they have arrived.

        Two hops need four waits (sizes and ids of each), but a train pipeline waits only twice: for the ids of hop 1
        and the sizes of hop 2, and then for the ids of hop 2. So this method itself waits for the sizes of hop 1.
        """
        first = KJTListSplitsAwaitable([started], ctx).wait()

        def start() -> Awaitable[KeyedJaggedTensor]:
            ids_P = first.wait()[0]
            in_tower = self._note_rows(ctx, ids_P)
            # The end of step a: the table's scheme says which ranks of the tower need the ids (Neo, section 4).
            contexts = [collection.create_context() for collection in self._collections]
            by_collection = list(zip(self._collections, contexts, strict=True))
            # The sizes of all collections are sent before the first wait.
            sizes = [collection.input_dist(context, in_tower) for collection, context in by_collection]
            pending = [of_collection.wait() for of_collection in sizes]

            def end() -> KeyedJaggedTensor:
                ctx.in_tower = [(context, ids.wait()) for context, ids in zip(contexts, pending, strict=True)]
                return ids_P

            return Pending(end)

        return KJTListSplitsAwaitable([Pending(start)], ctx)

    def look_up(self, ctx: Any) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Returns per collection a lazy ``KeyedTensor`` [P, columns] or dict of sequences of P rows, peers in tower order.
        """
        collections = zip(self._collections, ctx.in_tower, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]


class GlobalIdRoute(PeerIdRoute):
    """The global id route. Its constructor is collective: ranks tell each other which features their lookups read."""

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], note_rows: Any) -> None:
        lookups = [[tables for _, tables in collection.tables_by_lookup] for collection in collections]
        features = [[[f for table in tables for f in table.feature_names] for tables in own] for own in lookups]
        # A rank wants a feature once for each column shard that it holds; these copies make this route more expensive.
        wanted = [name for of_collection in features for of_lookup in of_collection for name in of_lookup]
        super().__init__(mesh.sharding_group, collections, note_rows, gather_objects(wanted, mesh.sharding_group))
        self.stagger, self._num_ranks = mesh.topology.num_towers, mesh.topology.ranks_per_tower
        self.peers = slice(mesh.local, None, self._num_ranks)
        self._counts = [[len(of_lookup) for of_lookup in of_collection] for of_collection in features]
        """Number of features of each lookup of each collection."""

    def forward_ids(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Splits the ids of a started exchange by lookup once they have arrived; they need no second hop."""
        sizes = KJTListSplitsAwaitable([started], ctx)

        def start() -> Awaitable[KeyedJaggedTensor]:
            pending = sizes.wait()

            def end() -> KeyedJaggedTensor:
                ids = pending.wait()[0]
                ctx.in_tower = self._by_collection(self._note_rows(ctx, ids), ctx)
                return ids

            return Pending(end)

        return KJTListSplitsAwaitable([Pending(start)], ctx)

    def _by_collection(self, ids: KeyedJaggedTensor, ctx: Any) -> list[tuple[Any, KJTList]]:
        batch_sizes, num_ranks = ctx.sharding_contexts[0].batch_size_per_rank, self._num_ranks
        assert ids.stride() == sum(batch_sizes), f"{ids.stride()} samples arrived from batches of {batch_sizes}"
        # In peer order, the samples of all peers of a rank of the tower are one block.
        served = [sum(batch_sizes[local::num_ranks]) for local in range(num_ranks)]
        # Each lookup reads its own features; on the peer route, TorchRec makes this split inside the tower.
        parts = iter(ids.split([count for of_collection in self._counts for count in of_collection]))
        in_tower = []
        for collection, of_collection in zip(self._collections, self._counts, strict=True):
            context = collection.create_context()
            context.sharding_contexts = [EmbeddingShardingContext(batch_size_per_rank=[*served]) for _ in of_collection]
            in_tower.append((context, KJTList([next(parts) for _ in of_collection])))
        return in_tower
