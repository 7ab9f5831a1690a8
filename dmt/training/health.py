"""`SoundnessCheck`: finite numbers in training, and equal copies of what several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt._torchrec import norms
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.state import checksum

__all__ = ["Report", "SoundnessCheck", "judge"]

_NEVER = 2**52  # a step, in float64
_LOSS = "the loss"
Report = tuple[dict[str, float], dict[str, int]]
"""What of a rank was not finite, with the first step at which it was not; and the checksums of its copies, by name."""


class SoundnessCheck:
    """Notices in training that numbers are no longer finite, or that copies of one parameter differ between ranks.

    `note` looks at the logits and the gradients of what PyTorch's optimizers train, in every step, on the device and
    without a wait. From time to time, ranks exchange a `report` and `judge` those of all. Copies are dense layers,
    tower modules, data-parallel tables and hot rows. A number of a table that only one rank holds is noticed when a
    sample reads it, and at the latest when it is saved (`dmt.training.checkpoints.Checkpointer`).

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = {
            name: p for name, p in in_backward_optimizer_filter(model.named_parameters()) if p.requires_grad
        }
        self._copies = {
            name: value.detach() for name, value in model.state_dict().items() if not isinstance(value, ShardedTensor)
        }
        self._towers = [part for part in model.modules() if isinstance(part, SPTTModule)]
        # The first step at which the loss, and the gradient of each parameter, was not finite.
        self._since = torch.full((1 + len(self._trained),), _NEVER)

    @torch.no_grad()
    def note(self, step: int, logits: Tensor) -> None:
        """Notes whether the logits [B] of a step and its gradients are finite; not collective."""
        zero = logits.new_zeros(1)
        gradients = norms([zero if p.grad is None else p.grad for p in self._trained.values()])
        finite = torch.stack([logits.sum(), *gradients]).isfinite()
        self._since = self._since.to(finite.device).where(finite, self._since.clamp(max=step))

    def report(self) -> Report:
        """Returns what was not finite, and the checksums of the copies."""
        names = [_LOSS, *(f"the gradient of {name}" for name in self._trained)]
        not_finite = {name: step for name, step in zip(names, self._since.tolist(), strict=True) if step != _NEVER}
        copies = dict(self._copies)
        for module in self._towers:
            module.write_back()
            copies |= {} if module.hot is None else module.hot.tensors
        return not_finite, {name: checksum(copy) for name, copy in copies.items()}


def judge(step: int, reports: Sequence[Report]) -> None:
    """Raises the same error on every rank if the report of some rank, in rank order, is not sound.

    Raises:
        InputError: training has diverged.
        ReplicaMismatchError: copies of a parameter differ; ranks may hold other ones, which are no fault.
    """
    if any(not_finite for not_finite, _ in reports):
        raise _diverged([not_finite for not_finite, _ in reports])
    first: dict[str, tuple[int, int]] = {}
    apart = []
    for rank, (_, checksums) in enumerate(reports):
        for name, value in checksums.items():
            holder, expected = first.setdefault(name, (rank, value))
            if value != expected:
                apart.append(f"{name} of rank {rank} differs from that of rank {holder}")
    if apart:
        raise ReplicaMismatchError(
            f"Copies that must be equal are not, seen at step {step}: {shorten(apart)}. Nothing of this state is "
            "saved. Look for a fault of the memory or the network of these ranks; run again, and training goes on "
            "from the last checkpoint."
        )


def _diverged(by_rank: Sequence[dict[str, float]]) -> InputError:
    first = min(step for not_finite in by_rank for step in not_finite.values())
    at_first = [[name for name, step in not_finite.items() if step == first] for not_finite in by_rank]
    seen = list(dict.fromkeys(name for names in at_first for name in names))
    # A bad loss makes all gradients bad, on all ranks.
    blamed = [_LOSS] if _LOSS in seen else seen
    ranks = [str(rank) for rank, names in enumerate(at_first) if set(blamed) & set(names)]
    return InputError(
        f"Training has diverged: NaN or infinity at step {int(first)} in {shorten(blamed, ', ')} of rank "
        f"{shorten(ranks, ', ')}. Nothing of this state is saved. Lower optimizer.sparse_lr or optimizer.dense_lr, "
        "lengthen optimizer.warmup_steps, or look for huge values in the dense columns; run again, and training goes "
        "on from the last checkpoint."
    )
