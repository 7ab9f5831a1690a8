"""`ReplicaSync`: keeps the replicas of a model's tables equal (2D sparse parallelism, Zhang et al. 2025).

Each replica trains its tables on its own samples with FBGEMM's fused optimizer, so there are no gradients to average;
weights and optimizer states are averaged over the replica group instead (section 3, Algorithm 1, lines 9 and 10).
Data parallelism averages the gradients of dense parts, tower modules and data-parallel tables over all replicas, so
these parts are equal after every step and are not averaged here.

Legend: M replicas (R elsewhere); w, v weights and optimizer states of this rank's shards; s a snapshot of v.

==================  ========================================  =====================================================
at every sync       ``optimizer_state="now"``                 ``optimizer_state="delayed"`` (PyTorch's blog)
==================  ========================================  =====================================================
weights             w = mean(w)                               w = mean(w)
states              v = mean(v)                               v = mean(s) + (v - s), s of the last sync; then s = v
collectives         complete within the sync                  mean(s) is computed while the next interval trains
==================  ========================================  =====================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmt.collectives import broadcast_tensor, check_agreement, gather_objects, start_together
from dmt.errors import InputError, ReplicaMismatchError, check_instance
from dmt.formatting import shorten
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.group_sharded import Embeddings, embedding_values
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.state import checksum, table_tensors

__all__ = ["ReplicaSync", "RunningMean", "drifted", "moment_scales"]

# Training passes per step. Nobody accumulates gradients over more: after that many, a call of step() is missing.
_MOST_PASSES_PER_STEP = 256
# Tensors are averaged in collectives of about this size; gloo copies the input of each into one buffer.
_BUCKET_BYTES = 64 * 2**20


class ReplicaSync:
    """Averages tables and their optimizer states over the replicas of a `TowerMesh`.

    Construct it after loading weights, or call `restart` after loading: both copy the weights and states of replica 0
    to every replica. Call `step` on every rank after every training step. Unless M is a power of two, the mean of equal
    values may differ from them by one unit in the last place; the replicas stay equal. FP16 tables are sent and
    averaged in FP32, and the mean is rounded to FP16.

    Args:
        model: contains modules made by the tower sharders, at any depth; usually a ``DistributedModelParallel``.
        mesh: the process groups of this job.
        interval: N, training steps from one sync to the next; above 1 this is local SGD (section 5).
        optimizer_state: ``"now"``, or ``"delayed"`` by one sync; see the table in `dmt.replicas.sync`.

    Raises:
        InputError: an argument is out of range or not the same on all ranks, the tower sharders made no module of the
            model, or the shards of the replicas have different shapes.

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
    ) -> None:
        check_instance("mesh", mesh, TowerMesh)
        arguments = {"interval": interval, "optimizer_state": optimizer_state}
        check_agreement("ReplicaSync", arguments, mesh.global_group)
        if not isinstance(interval, int) or interval < 1:
            raise InputError(f"ReplicaSync: interval={interval!r} must be a whole number of steps, at least 1.")
        if optimizer_state not in ("now", "delayed"):
            raise InputError(f"ReplicaSync: optimizer_state={optimizer_state!r} must be 'now' or 'delayed'.")
        self._mesh = mesh
        self.interval = interval
        self.delays_states = optimizer_state == "delayed"
        """True for ``"delayed"``: a call of `sync` then changes the states even right after a step that averaged."""
        modules = {path: module for path, module in model.named_modules() if isinstance(module, SPTTModule)}
        if not modules:
            raise InputError(
                "ReplicaSync: the model has no tables that a tower sharder of dmt has sharded. Pass the "
                "DistributedModelParallel made with TowerCollectionSharder or SPTTEmbeddingBagCollectionSharder."
            )
        self._modules = list(modules.values())
        prefixed = {f"{path}." if len(modules) > 1 else "": module for path, module in modules.items()}
        self._tensors = [part for prefix, module in prefixed.items() for part in table_tensors(module, prefix)]
        shapes = {part.name: tuple(part.tensor.shape) for part in self._tensors}
        check_agreement("ReplicaSync", {"shape": shapes}, mesh.replica_group)
        # Algorithm 1, lines 9 and 10. Data-parallel tables already get the mean gradient in every step.
        replicated = [part for part in self._tensors if part.is_replicated and mesh.topology.num_replicas > 1]
        weights = [part.tensor for part in replicated if part.part == "weight"]
        states = [part.tensor for part in replicated if part.part != "weight"]
        self._weights = RunningMean(weights, mesh.replica_group, delayed=False)
        self._states = RunningMean(states, mesh.replica_group, delayed=self.delays_states)
        # A single replica cannot drift; there `HotRows` may use the same hook.
        for module in self._modules if mesh.topology.num_replicas > 1 else ():
            module.before_lookup = self._note_pass
            module.after_lookup = functools.partial(_note_updates, module)
            module.after_states_loaded = self._states.forget  # else a delayed mean would mix old states into them
        self.restart()

    def restart(self, *, steps: int = 0) -> None:
        """Copies the weights and states of replica 0 to every replica, and drops collectives in flight.

        Call it after loading weights or states into the model. ``steps`` is the number of training steps before they
        were saved, so that syncs stay at multiples of the interval. Collective over the replicas.
        """
        self._states.forget()
        for module in self._modules:
            module.flush()
        for part in self._tensors:
            broadcast_tensor(part.tensor, self._mesh.replica_group)
        self._steps, self._passes = steps, 0
        self._set_drifted(False)

    def step(self) -> None:
        """Counts a step, and averages every ``interval`` steps; call it after every step. Collective over replicas."""
        self._steps += 1
        self._passes = 0
        if self._steps % self.interval == 0:
            self._average()
            # The mean of delayed states is adopted only at the next sync.
            self._set_drifted(self.delays_states and self._mesh.topology.num_replicas > 1)

    def sync(self) -> None:
        """Averages weights and states now: all replicas are equal afterwards. Collective over the replicas.

        Call it before saving, or at the end of training; it does not count as a step.
        """
        self._average()
        self._states.finish()
        self._set_drifted(False)

    def check(self) -> None:
        """Checks that all replicas have the same bits, as they must after `sync`.

        Compares a checksum of each shard and of its states; data-parallel tables are checked too. Collective over the
        job; reads every table once.

        Raises:
            ReplicaMismatchError: a tensor differs between replicas; raised on every rank, naming tensors and ranks.
        """
        mine = {part.name: checksum(part.tensor) for part in self._tensors}
        everyone = gather_objects(mine, self._mesh.replica_group)
        ranks = dist.get_process_group_ranks(self._mesh.replica_group)
        own_problems = [
            f"{name} of rank {rank} differs from that of rank {ranks[0]}"
            for rank, theirs in zip(ranks, everyone, strict=True)
            for name, value in theirs.items()
            if value != everyone[0][name]
        ]
        # All ranks raise, else ranks without a mismatch would wait for the others.
        problems = sorted({text for texts in gather_objects(own_problems, self._mesh.global_group) for text in texts})
        if problems:
            raise ReplicaMismatchError(
                f"Replicas differ, but must be equal after sync(): {shorten(problems)}. If check() came right after "
                "sync(), do not save this state; go back to the last checkpoint."
            )

    def _note_pass(self, _: Any, is_training_pass: bool) -> None:
        self._passes += is_training_pass
        if self._passes > _MOST_PASSES_PER_STEP * len(self._modules):
            raise InputError(
                f"ReplicaSync.step() was not called in {_MOST_PASSES_PER_STEP} training passes: the replicas drift "
                "apart. Call it after every training step, on every rank."
            )

    def _set_drifted(self, has_drifted: bool) -> None:
        for module in self._modules:
            module.replicas_drifted = has_drifted

    def _average(self) -> None:
        """Averages weights and states; with a delay, adopts the mean of states that the last sync began to compute."""
        for module in self._modules:
            module.flush()
        self._states.finish()
        # Both rounds start before the first wait: they share the links.
        self._weights.start()
        self._states.start()
        self._weights.finish()
        if not self.delays_states:
            self._states.finish()


class RunningMean:
    """Averages tensors over a group: `start` begins a round; `finish`, called at once or steps later, adopts its mean.

    A *delayed* round keeps what a tensor x has gained since its snapshot s: x becomes mean(s) + (x - s), where mean(s)
    is the same on all ranks, but x - s is not. Without a delay, FP32 tensors are averaged in place. Every rank of the
    group passes tensors of the same shapes in the same order.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, *, delayed: bool) -> None:
        self._group, self._delayed = group, delayed
        self._live = [tensor.detach() for tensor in tensors]
        self._snapshots: list[Tensor] = []
        self._means: list[Tensor] = []
        self._works: list[Any] = []

    def forget(self) -> None:
        """Waits for the delayed round in flight, if there is one, and drops its mean."""
        self._snapshots, self._means = [], []
        self.finish()

    @torch.no_grad()
    def start(self) -> None:
        """Starts a round with the current values of the tensors; every rank of the group calls it."""
        assert not self._works, "the last round was not finished"
        self._snapshots = [tensor.clone() if self._delayed else tensor for tensor in self._live]
        self._means = [tensor.to(torch.float32, copy=self._delayed) for tensor in self._live]
        self._works = [start_together(bucket, self._group, mean=True) for bucket in _buckets(self._means)]

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the round in flight and adopts its mean; does nothing if no round is in flight."""
        for work in self._works:
            work.wait()
        for live, snapshot, mean in zip(self._live, self._snapshots, self._means, strict=False):
            # What this replica has added since the snapshot is averaged only in the next round.
            live.copy_(mean + (live - snapshot) if self._delayed else mean)
        self._snapshots, self._means, self._works = [], [], []


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cuts the list of tensors wherever their sizes add up to another `_BUCKET_BYTES`."""
    starts = accumulate((tensor.nbytes for tensor in tensors), initial=0)
    placed = zip(starts, tensors, strict=False)
    return [[tensor for _, tensor in bucket] for _, bucket in groupby(placed, lambda pair: pair[0] // _BUCKET_BYTES)]


def moment_scales(model: nn.Module) -> dict[str, float]:
    """Returns, by table name, the c that divides moments (Algorithm 1), for tables on this rank whose c is not 1."""
    modules = [module for module in model.modules() if isinstance(module, SPTTModule)]
    return {t: scale for module in modules for part in module.collections for t, scale in part.moment_scales.items()}


def drifted(model: nn.Module) -> bool:
    """Returns whether replicas may differ: tables have trained since the last average, or delayed states lag behind."""
    return any(module.replicas_drifted for module in model.modules() if isinstance(module, SPTTModule))


def _note_updates(module: SPTTModule, embeddings: Sequence[Embeddings]) -> None:
    def note(_: Tensor) -> None:
        module.replicas_drifted = True

    for values in (values for of_collection in embeddings for values in embedding_values(of_collection)):
        if values.requires_grad:
            # Backward passes update tables in training and in evaluation mode.
            values.register_hook(note)
