"""`RunningMean`: the mean of tensors over a group, begun at one moment and taken over at the same or a later one.

Legend: x a tensor of this rank, M ranks in the group, s its snapshot at the beginning, b the last mean agreed on.

========== ============================= ====================================================
precision  sent                          agreed on
========== ============================= ====================================================
``fp32``   s                             mean(s)
``bf16``   s - b, rounded to bfloat16    b + mean(s - b): the rounding is of the change only
========== ============================= ====================================================

At the end x becomes the mean agreed on; a *delayed* one keeps what x gained meanwhile: mean + (x - s). Every rank
computes it from the same numbers, so what was agreed on has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmt.collectives import start_mean
from dmt.number_formats import SyncPrecision

__all__ = ["RunningMean"]

# Size of a collective that carries several tensors; gloo copies its input into one buffer.
_BUCKET_BYTES = 64 * 2**20


@dataclass
class _Averaged:
    """One tensor and the buffers of its mean."""

    live: Tensor
    base: Tensor | None
    """b, with a reduced precision."""
    snapshot: Tensor | None = None
    """s, while a delayed mean is in flight."""
    sent: Tensor | None = None


class RunningMean:
    """The mean of tensors over a group; see the module.

    With ``fp32`` and no delay, float32 tensors are averaged in place; otherwise a copy of each is made for the
    time between `start` and `finish`, two with a delay, and ``bf16`` keeps another for good.

    Args:
        tensors: floating-point tensors, of the same shapes in the same order on every rank of the group, and equal
            there to begin with.
        group: the ranks.
        delayed: True if the tensors change between `start` and `finish`.
        precision: number format that is sent.
    """

    def __init__(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup, *, delayed: bool, precision: SyncPrecision
    ) -> None:
        self._group = group
        self._delayed = delayed
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        live = [tensor.detach() for tensor in tensors]
        bases = [None] * len(live) if precision == "fp32" else [tensor.to(torch.float32, copy=True) for tensor in live]
        self._averaged = [_Averaged(live=tensor, base=base) for tensor, base in zip(live, bases, strict=True)]
        self._works: list[Any] = []

    @property
    def is_running(self) -> bool:
        """True between `start` and `finish`."""
        return bool(self._works)

    @property
    def bytes_sent(self) -> int:
        """Bytes of one round that this rank hands to the collective, before the factor 2 (M - 1) / M of a ring."""
        return sum(one.live.numel() * self._dtype.itemsize for one in self._averaged)

    def forget(self) -> None:
        """Waits for the round in flight and drops its result."""
        for work in self._works:
            work.wait()
        for one in self._averaged:
            one.snapshot = one.sent = None
        self._works = []

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present tensors, equal on all ranks, as the last agreed values."""
        for one in self._averaged:
            if one.base is not None:
                one.base.copy_(one.live)

    @torch.no_grad()
    def start(self) -> None:
        """Begins a round with the tensors as they are now; every rank of the group calls it."""
        assert not self.is_running, "the last round was not finished"
        for one in self._averaged:
            one.snapshot = one.live.clone() if self._delayed else None
            value = one.live if one.base is None else one.live.float() - one.base
            one.sent = value.to(self._dtype, copy=self._delayed)
        self._works = [start_mean(bucket, self._group) for bucket in self._buckets()]

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the round in flight and adopts its mean; does nothing without one."""
        for work in self._works:
            work.wait()
        for one in self._averaged if self._works else ():
            assert one.sent is not None, "it was set when the round began"
            agreed = one.sent if one.base is None else one.base + one.sent.float()
            if one.base is not None:
                one.base.copy_(agreed)
            if one.snapshot is not None:
                agreed = agreed + (one.live - one.snapshot)
            if agreed is not one.live:
                one.live.copy_(agreed)
            one.snapshot = one.sent = None
        self._works = []

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        size = 0
        for one in self._averaged:
            assert one.sent is not None, "it was set when the round began"
            if bucket and size + one.sent.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(one.sent)
            size += one.sent.nbytes
        if bucket:
            yield bucket
