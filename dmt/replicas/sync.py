"""`ReplicaSync`: keeps the replicas of a model's tables equal (2D sparse parallelism, Zhang et al. 2025).

Each replica trains its tables on its own samples with FBGEMM's fused optimizer, so there are no gradients to average;
weights and optimizer states are averaged over the replica group instead (section 3, Algorithm 1, lines 9 and 10).
Data parallelism averages the gradients of dense parts, tower modules and data-parallel tables over all replicas: they
are equal at every step and are not touched here.

Legend: M replicas; w, v the weights and optimizer states of this rank's shards; s a snapshot of v.

==================  ========================================  =====================================================
at every sync       ``optimizer_state="now"``                 ``optimizer_state="delayed"`` (the blog's)
==================  ========================================  =====================================================
weights             w = mean(w)                               w = mean(w)
states              v = mean(v)                               v = mean(s) + (v - s), s of the sync before; s = v
collectives         all done when it ends                     mean(s) is computed while the next interval trains
==================  ========================================  =====================================================
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from dmt.collectives import broadcast_tensor, gather_objects, ranks_that_differ
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.number_formats import SyncPrecision
from dmt.replicas.mean import RunningMean
from dmt.replicas.state import checksum, table_tensors, uncovered
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.mesh import TowerMesh

__all__ = ["ReplicaSync", "moment_scales"]

# Training passes without a step, more than gradients are accumulated over: beyond it, step() was forgotten.
_MOST_PASSES_PER_STEP = 256


class ReplicaSync:
    """Averages tables and their optimizer states over the replicas of a `TowerMesh`.

    Make it after loading weights (or call `restart` then): it gives every replica the weights and states of replica 0,
    which would otherwise start from their own. Call `step` after every training step of every rank. Averaging three or
    a like number of equal values may move them by one unit in the last place, once; the replicas stay equal.

    Args:
        model: holds modules made by the tower sharders, anywhere in it; usually a ``DistributedModelParallel``.
        mesh: the groups.
        interval: N, training steps from one sync to the next; above 1 it is a local SGD (section 5).
        optimizer_state: ``"now"``, or ``"delayed"`` by one sync, see the module.
        asynchronous: let the collectives run on after `step` returns, until tables are looked up or the model's
            ``state_dict`` is read next: while the next batch comes in. The result has the same bits. Call `wait` before
            you read optimizer states or a table's tensor yourself.
        precision: of what is sent: ``"fp32"``, or ``"bf16"`` for the change since the last sync (this keeps one more
            copy of weights and states).

    Raises:
        InputError: an argument is out of range, no module of the model was made by the tower sharders, or replicas
            hold other shards.

    Example::

        model = DistributedModelParallel(model, plan=plan, sharders=[TowerCollectionSharder(mesh)])
        sync = ReplicaSync(model, mesh, interval=4)
        for batch in batches:
            train_step(model, batch)
            sync.step()
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: TowerMesh,
        *,
        interval: int = 1,
        optimizer_state: Literal["now", "delayed"] = "now",
        asynchronous: bool = False,
        precision: SyncPrecision = "fp32",
    ) -> None:
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise InputError(f"ReplicaSync: interval={interval!r} must be a whole number of steps, at least 1.")
        if optimizer_state not in ("now", "delayed"):
            raise InputError(f"ReplicaSync: optimizer_state={optimizer_state!r} is unknown; use 'now' or 'delayed'.")
        if precision not in ("fp32", "bf16"):
            raise InputError(
                f"ReplicaSync: precision={precision!r} is unknown; use 'fp32' or 'bf16' (squared gradients are "
                "below what 'fp16' can hold)."
            )
        if not isinstance(asynchronous, bool):
            raise InputError(f"ReplicaSync: asynchronous={asynchronous!r} must be True or False.")
        self._mesh = mesh
        self.interval = interval
        self._delayed = optimizer_state == "delayed"
        self._asynchronous = asynchronous
        modules = _tower_modules(model)
        self._modules = list(modules.values())
        prefixed = {f"{path}." if len(modules) > 1 else "": module for path, module in modules.items()}
        self._tensors = [one for prefix, module in prefixed.items() for one in table_tensors(module, prefix)]
        self._tables = [prefix + table for prefix, module in prefixed.items() for table in module.sharded_tables]
        shapes = [(one.name, tuple(one.tensor.shape)) for one in self._tensors]
        if differing := ranks_that_differ(shapes, mesh.replica_group):
            raise InputError(
                f"Ranks {differing} hold other shards than rank {mesh.replica_ranks()[0]}, of which they are replicas. "
                "Give every rank the same sharding plan."
            )
        replicated = [one for one in self._tensors if one.is_replicated and mesh.topology.num_replicas > 1]
        weights = [one.tensor for one in replicated if one.is_weight]
        states = [one.tensor for one in replicated if not one.is_weight]
        self._weights = RunningMean(weights, mesh.replica_group, delayed=False, precision=precision)
        self._states = RunningMean(states, mesh.replica_group, delayed=self._delayed, precision=precision)
        self._steps = self._passes = 0
        for module in self._modules:
            module.set_replica_hook(self._before_tables_are_read)
        self.restart()

    @property
    def bytes_per_sync(self) -> float:
        """Bytes this rank sends in one sync, by a ring: 2 (M - 1) / M times weights and states (section 5)."""
        replicas = self._mesh.topology.num_replicas
        return 2 * (replicas - 1) / replicas * (self._weights.bytes_sent + self._states.bytes_sent)

    @property
    def is_running(self) -> bool:
        """True while collectives of an asynchronous or delayed sync are in flight."""
        return self._weights.is_running or self._states.is_running

    def restart(self, *, steps: int = 0) -> None:
        """Gives every replica the weights and states of replica 0, and drops collectives in flight.

        Call it after loading weights or states into the model. Collective over the replicas.

        Args:
            steps: training steps behind the state that was loaded; the next sync comes at a multiple of the interval.
        """
        self._weights.forget()
        self._states.forget()
        for one in self._tensors:
            broadcast_tensor(one.tensor, self._mesh.replica_group)
        self._weights.rebase()
        self._states.rebase()
        self._steps, self._passes = steps, 0

    def step(self) -> None:
        """To be called after every training step: syncs every ``interval`` of them. Collective over the replicas."""
        self._steps += 1
        self._passes = 0
        if self._steps % self.interval == 0:
            self._start()
            if not self._asynchronous:
                self.wait()

    def sync(self) -> None:
        """Averages weights and states at once: all replicas are equal afterwards. Collective over the replicas.

        Call it before saving, or at the end of training; it does not count as a step.
        """
        self._start()
        self._weights.finish()
        self._states.finish()

    def wait(self) -> None:
        """Waits for the collectives of an asynchronous sync; tables do so themselves before they are read."""
        self._weights.finish()
        if not self._delayed:
            self._states.finish()

    def check(self) -> None:
        """Checks what must hold after `sync`: replicas have the same bits, and shards cover every table.

        Compares a checksum of each shard and of its states; data-parallel tables are checked too. Collective over the
        job; reads every table once.

        Raises:
            ReplicaMismatchError: on every rank, naming tensors and ranks.
        """
        self.wait()
        mine = {one.name: checksum(one.tensor) for one in self._tensors}
        everyone = gather_objects(mine, self._mesh.replica_group)
        ranks = self._mesh.replica_ranks()
        problems = [
            f"{name} of rank {rank} differs from that of rank {ranks[0]}"
            for rank, theirs in zip(ranks, everyone, strict=True)
            for name, value in theirs.items()
            if value != everyone[0][name]
        ]
        shards = gather_objects([one.shard for one in self._tensors if one.shard], self._mesh.sharding_group)
        problems += [
            f"{problem} in replica {self._mesh.replica}"
            for problem in uncovered([s for some in shards for s in some], self._tables)
        ]
        # Everyone raises, or those that found nothing would wait for the others.
        found = sorted({text for texts in gather_objects(problems, self._mesh.global_group) for text in texts})
        if found:
            raise ReplicaMismatchError(
                f"Replicas are not what they must be: {shorten(found)}. Do not save this state, but go back to the "
                "last checkpoint."
            )

    def _before_tables_are_read(self, is_training_pass: bool) -> None:
        self.wait()
        self._passes += is_training_pass
        if self._passes > _MOST_PASSES_PER_STEP * len(self._modules):
            raise InputError(
                f"ReplicaSync.step() was not called in {_MOST_PASSES_PER_STEP} training passes: the replicas drift "
                "apart. Call it after every training step, on every rank."
            )

    def _start(self) -> None:
        self.wait()
        for module in self._modules:
            for collection in module.collections:
                collection.flush()
        # The delayed states of the sync before.
        self._states.finish()
        self._weights.start()
        self._states.start()


def moment_scales(model: nn.Module) -> dict[str, float]:
    """The factor c of this rank's tables whose moments are scaled, by table."""
    collections = [c for module in model.modules() if isinstance(module, SPTTModule) for c in module.collections]
    return {table: scale for collection in collections for table, scale in collection.moment_scales.items()}


def _tower_modules(model: nn.Module) -> dict[str, SPTTModule]:
    modules = {path: module for path, module in model.named_modules() if isinstance(module, SPTTModule)}
    if not modules:
        raise InputError(
            "ReplicaSync found no tables in the model that a tower sharder of dmt has sharded. Give it the "
            "DistributedModelParallel made with TowerCollectionSharder or SPTTEmbeddingBagCollectionSharder."
        )
    return modules
