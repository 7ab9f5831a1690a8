"""`Agreement`: ranks meet to decide whether to save or stop, and to check the state; `Signals`: SIGTERM and Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import counted, shorten
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.state import checksum
from dmt.training.config import TrainConfig
from dmt.training.metrics import StepTimer

__all__ = ["SIGNALS", "Agreed", "Agreement", "Signals"]

logger = logging.getLogger(__name__)

SIGNALS: Mapping[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
"""The signals that stop a run, and their names in messages."""

# Ranks meet this often, so that all soon know of a signal: torchrun kills ranks 30 s after it sends one.
_MEET_EVERY_S = 2.0
# Schedulers signal both torchrun and its ranks, so the same signal may reach a rank twice within moments.
_SECOND_SIGNAL_S = 2.0
_NEVER = 2**52  # a step that no run reaches


class Signals:
    """Records SIGTERM and Ctrl-C in a ``with`` block of the main thread; a second one over 2 s later ends the process.

    Once `Agreement.meet` has set ``stops``, signals are ignored, even after the block, so that the last save completes.
    A signal that comes after the last meeting is raised again, with its usual effect, when the block ends.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that stops training; 0 until this rank gets one or learns of one in a meeting."""
        self.stops = False
        """Whether training has stopped on all ranks because of a signal."""
        self._came: float | None = None  # when the first signal reached this rank
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Python lets only the main thread set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        if self.stops:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.signal and error[0] is None:
            signal.raise_signal(self.signal)

    def _note(self, number: int, frame: object) -> None:
        if self._came is None:
            # Another rank's signal may be known already: torchrun's agents send theirs at different times.
            self.signal, self._came = self.signal or number, time.monotonic()
        elif not self.stops and time.monotonic() - self._came > _SECOND_SIGNAL_S:
            os._exit(128 + number)


@dataclass(frozen=True)
class Agreed:
    """The outcome of a meeting, the same on all ranks."""

    loss: float
    """Mean of the ranks' losses."""
    saves: bool
    """Whether to save now; the state has then been checked."""
    stops: bool
    """Whether to stop; the caller then saves."""


class Agreement:
    """Decides after which steps the ranks meet; a meeting decides whether to save or stop, and checks the state.

    The ranks meet every ``log_every`` steps, when a save is due, and about every two seconds by the clock of rank 0.
    With replicas, saves and stops wait for a step after which replicas are averaged anyway, so neither changes weights.

    A state is sound if the logits and dense gradients of all steps were finite and copies of one parameter (dense
    layers, tower modules, data-parallel tables, hot rows) have the same bits on all ranks. This is checked where the
    loss is recorded and before each save. NaN in a table that only one rank holds is noticed when a sample reads the
    row, and at the latest when the table is saved (`dmt.training.checkpoints.Checkpointer`).

    Args:
        config: the section ``train``.
        model: the sharded model.
        mesh: the mesh of the run.
        timer: times the steps; the mean time of a step determines the next meeting.
        replicas: the sync of the replicas; None without replicas.
        signals: the signals of this rank.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        mesh: TowerMesh,
        *,
        timer: StepTimer,
        replicas: ReplicaSync | None,
        signals: Signals,
    ) -> None:
        self._config, self._mesh, self._timer, self._signals = config, mesh, timer, signals
        self._interval = 1 if replicas is None else replicas.interval
        self._save_every = self._rounded(config.save_every)
        # Steps of the next meeting at the latest, of the agreed stop and of the last check; -1 where there is none.
        self._next, self._stop_at, self._checked = 1, -1, -1
        self._trained = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
        self._copies = {
            name: value.detach() for name, value in model.state_dict().items() if not isinstance(value, ShardedTensor)
        }
        self._towers = [part for part in model.modules() if isinstance(part, SPTTModule)]
        # The first steps at which logits, and a gradient of the dense part, were not finite.
        self._since = torch.full((2,), _NEVER)

    @torch.no_grad()
    def note(self, step: int, logits: Tensor) -> None:
        """Records whether a step's logits [B] and dense gradients are finite; on the device, without a sync."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).sum() if gradients else logits.new_zeros(())
        finite = torch.stack([logits.sum(), norm]).isfinite()
        since = self._since.to(finite.device)
        self._since = since.where(finite, since.clamp(max=step))

    def is_due(self, step: int) -> bool:
        """Returns whether the ranks meet after a step."""
        is_regular = step % self._config.log_every == 0 or step % self._save_every == 0
        return is_regular or step >= self._next or step == self._stop_at

    def meet(self, step: int, loss: Tensor) -> Agreed:
        """Meets the other ranks after a step, with this rank's scalar ``loss``; returns what all agree on. Collective.

        Raises:
            InputError: training has diverged; the same on every rank.
            ReplicaMismatchError: copies of a parameter differ between ranks.
        """
        steps = int(_MEET_EVERY_S * self._timer.steps / self._timer.seconds) if self._timer.steps else 1
        everyone = gather_objects((float(loss), self._signals.signal, max(1, steps)), self._mesh.global_group)
        losses, signals, steps_to_next = zip(*everyone, strict=True)
        self._next = step + steps_to_next[0]
        if any(signals) and self._stop_at < 0:
            self._signals.signal, self._stop_at = next(filter(None, signals)), self._rounded(step)
            self._announce_stop(step)
        saves, stops = step % self._save_every == 0, step == self._stop_at
        if saves or stops or step % self._config.log_every == 0:
            self.check(step)
        self._signals.stops = stops
        return Agreed(sum(losses) / len(losses), saves, stops)

    def check(self, step: int) -> None:
        """Checks that the state after a step is sound, unless already checked; collective. Raises as `meet` does."""
        if self._checked == step:
            return
        reports = run_on_all_or_raise(self._report, self._mesh.global_group)
        _check_finite([steps for steps, _ in reports])
        _compare_copies(step, [checksums for _, checksums in reports])
        self._checked = step

    def _report(self) -> tuple[list[int], dict[str, int]]:
        """Returns the first steps at which logits and a gradient were not finite, and checksums of copies by name."""
        copies = dict(self._copies)
        for module in self._towers:
            module.write_back()
            copies |= {} if module.hot is None else module.hot.tensors
        return self._since.tolist(), {name: checksum(copy) for name, copy in copies.items()}

    def _announce_stop(self, step: int) -> None:
        if self._stop_at > step and self._mesh.rank == 0:
            logger.warning(
                f"{SIGNALS[self._signals.signal]}: training stops after step {self._stop_at}, when replicas are next "
                f"averaged (replicas.sync_every), in {counted(self._stop_at - step, 'step')}. A second signal ends "
                "training at once; the last checkpoint remains."
            )

    def _rounded(self, step: int) -> int:
        """Returns the first step, from ``step`` on, at whose end replicas are averaged."""
        return -(-step // self._interval) * self._interval


def _compare_copies(step: int, by_rank: Sequence[dict[str, int]]) -> None:
    """Raises `ReplicaMismatchError` if copies of one name differ; a rank need not have every name."""
    first: dict[str, tuple[int, int]] = {}
    differences = []
    for rank, checksums in enumerate(by_rank):
        for name, value in checksums.items():
            holder, expected = first.setdefault(name, (rank, value))
            if value != expected:
                differences.append(f"{name} of rank {rank} differs from that of rank {holder}")
    if differences:
        raise ReplicaMismatchError(
            f"Copies that must be equal differ, as seen at step {step}: {shorten(differences)}. This state is not "
            "saved. Check the memory and network of these ranks; run again, and training resumes from the last "
            "checkpoint."
        )


def _check_finite(by_rank: Sequence[list[int]]) -> None:
    """Raises `InputError` if the loss or a gradient of a rank was not finite at any step."""
    first = min(step for steps in by_rank for step in steps)
    # The loss comes first: a bad one makes all gradients bad, on all ranks.
    for place, what in enumerate(("the loss", "a gradient")):
        ranks = [f"rank {rank}" for rank, steps in enumerate(by_rank) if steps[place] == first]
        if ranks and first != _NEVER:
            raise InputError(
                f"Training has diverged: NaN or infinity at step {first} in {what} of {shorten(ranks, ', ')}. "
                "This state is not saved. Lower optimizer.sparse_lr or optimizer.dense_lr, lengthen "
                "optimizer.warmup_steps, or look for huge values in the dense columns; run again, and training "
                "resumes from the last checkpoint."
            )
