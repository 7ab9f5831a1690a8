"""`SoundnessCheck`: finite numbers in training, and equal copies of what several ranks hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt._torchrec import norms
from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.state import checksum
from dmt.training.checkpoints.state import chunks, collect_state, is_finite

__all__ = ["SoundnessCheck"]

_NEVER = 2**52  # a step, in float64
_LOSS = "the loss"
_READ_AT_A_CHECK = 2**24  # numbers of the weights, in some 10 ms


class SoundnessCheck:
    """Notices in training that numbers are no longer finite, or that copies of one parameter differ between ranks.

    `note` looks at the loss and at the gradients of what PyTorch's optimizers train, in every step, on the device and
    without a wait. `report` returns four numbers, which ranks exchange with what they exchange anyway; `judge` reads
    those of all ranks. Copies are dense layers, tower modules, data-parallel tables and hot rows. A number of a table
    that only one rank holds is checked for being finite: when a sample reads it, when `report` reads it (16 Mi numbers
    of each rank at a time, in turns), and at the latest when it is saved (`dmt.training.checkpoints.Checkpointer`).

    Args:
        model: the sharded model.
        group: all ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._trained = {
            name: p for name, p in in_backward_optimizer_filter(model.named_parameters()) if p.requires_grad
        }
        self._copies = {
            name: value.detach() for name, value in model.state_dict().items() if not isinstance(value, ShardedTensor)
        }
        everyone = gather_objects(sorted(self._copies), group)
        self._on_all = set.intersection(*map(set, everyone))
        # Ranks with the same further copies: those of a tower, in all replicas.
        kinds = [tuple(name for name in names if name not in self._on_all) for names in everyone]
        self._peers = [kinds.index(kind) for kind in kinds]
        self._towers = [part for part in model.modules() if isinstance(part, SPTTModule)]
        state = collect_state(model.state_dict(), None)
        # A buffer may hold infinity: a mask, a running minimum.
        buffers = {f"model.{name}" for name, value in model.named_buffers() if type(value) is Tensor}
        self._parts = list(chunks({name: shards for name, shards in state.items() if name not in buffers}))
        self._turns = cycle(self._parts)
        # The first step at which the loss, and the gradient of each parameter, was not finite.
        self._since = torch.full((1 + len(self._trained),), _NEVER)
        self._range = torch.tensor([math.inf, -math.inf])

    @property
    def output_range(self) -> tuple[float, float]:
        """Least and greatest logit that `note` was given on this rank."""
        low, high = self._range.tolist()
        return low, high

    @torch.no_grad()
    def note(self, step: int, logits: Tensor) -> None:
        """Notes whether the logits [B] of a step and its gradients are finite; not collective."""
        zero = logits.new_zeros(1)
        gradients = norms([zero if p.grad is None else p.grad for p in self._trained.values()])
        finite = torch.stack([logits.sum(), *gradients]).isfinite()
        self._since = self._since.to(finite.device).where(finite, self._since.clamp(max=step))
        low, high = self._range.to(logits.device)
        self._range = torch.stack([torch.minimum(low, logits.min()), torch.maximum(high, logits.max())])

    def report(self) -> list[float]:
        """Returns the first bad step, whether weights are finite, and hashes of the copies on all and on some ranks."""
        for module in self._towers:
            module.write_back()
        sums = self._sums()
        # Hot rows, which come and go, have copies on all ranks.
        of_some = {name: value for name, value in sums.items() if name in self._copies and name not in self._on_all}
        of_all = {name: value for name, value in sums.items() if name not in of_some}
        hashes = [zlib.crc32(repr(sorted(part.items())).encode()) for part in (of_all, of_some)]
        return [float(self._since.min()), float(self._reads_finite()), *map(float, hashes)]

    def judge(self, step: int, reports: Sequence[Sequence[float]]) -> None:
        """Raises the same error on every rank if a report of some rank, in rank order, is not sound.

        Raises:
            InputError: training has diverged, or tables were changed in place.
            ReplicaMismatchError: copies of a parameter differ.
        """
        since = int(min(report[0] for report in reports))
        if since != _NEVER or not all(report[1] for report in reports):
            raise self._diverged(step, since)
        if any(
            report[2] != reports[0][2] or report[3] != reports[peer][3]
            for report, peer in zip(reports, self._peers, strict=True)
        ):
            self._compare_copies(step)

    def check(self, step: int) -> None:
        """Exchanges reports by themselves and judges them; collective over the group, errors as of `judge`."""
        self.judge(step, run_on_all_or_raise(self.report, self._group))

    def _sums(self) -> dict[str, int]:
        copies = dict(self._copies)
        for module in self._towers:
            copies |= {} if module.hot is None else module.hot.tensors
        return {name: checksum(copy) for name, copy in copies.items()}

    def _reads_finite(self) -> bool:
        numbers = 0
        for _, part in islice(self._turns, len(self._parts)):
            numbers += part.numel()
            if not is_finite(part) or numbers >= _READ_AT_A_CHECK:
                return is_finite(part)
        return True

    def _compare_copies(self, step: int) -> None:
        """Compares copies by name; ranks may hold other ones, which are no fault."""
        holders: dict[str, tuple[int, int]] = {}
        apart = []
        for rank, sums in enumerate(gather_objects(self._sums(), self._group)):
            for name, value in sums.items():
                first, expected = holders.setdefault(name, (rank, value))
                if value != expected:
                    apart.append(f"{name} of rank {rank} differs from that of rank {first}")
        if apart:
            raise ReplicaMismatchError(
                f"Copies that must be equal are not, seen at step {step}: {shorten(apart)}. Nothing of this state is "
                "saved. Look for a fault of the memory or the network of these ranks; run again, and training goes on "
                "from the last checkpoint."
            )

    def _diverged(self, step: int, since: int) -> InputError:
        names = [_LOSS, *(f"the gradient of {name}" for name in self._trained)]
        noted = [name for name, first in zip(names, self._since.tolist(), strict=True) if first == since != _NEVER]
        bad = sorted({name for name, part in self._parts if not is_finite(part)})
        everyone = gather_objects((noted, bad), self._group)
        # Where no step was seen, a weight was changed in place.
        ranks = [bad if since == _NEVER else noted for noted, bad in everyone]
        # A bad loss makes all gradients bad, on all ranks.
        seen = list(dict.fromkeys(name for of_rank in ranks for name in of_rank))
        first = [_LOSS] if _LOSS in seen else seen
        where = [str(rank) for rank, of_rank in enumerate(ranks) if set(first) & set(of_rank)]
        when = f"by step {step}" if since == _NEVER else f"at step {since}"
        return InputError(
            f"Training has diverged: NaN or infinity {when} in {shorten(first, ', ')} of rank {shorten(where, ', ')}. "
            "Nothing of this state is saved. Lower optimizer.sparse_lr or optimizer.dense_lr, lengthen "
            "optimizer.warmup_steps, or look for huge values in the dense columns; run again, and training goes on "
            "from the last checkpoint."
        )
