"""Measures a run: AUC, normalized entropy and loss over all ranks, times of steps and lookups, bytes of a step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.optim.keyed import KeyedOptimizer

from dmt._torchrec import lookups_of
from dmt.collectives import gather_objects, sum_over_ranks
from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.state import TowerState
from dmt.traffic import Traffic, TrafficMeter
from dmt.training.data.batch import ClickBatch

__all__ = ["ClickMetrics", "MetricValues", "StepTimer", "measure_lookups", "measure_traffic", "settled_time"]

_BINS = 2**20
# Steps left out of the speed: the first ones allocate, compile, and exchange sizes that then stay the same.
_WARM_UP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class MetricValues:
    """Metrics of one evaluation, over the rows of all ranks."""

    auc: float
    """Area under the ROC curve; 0.5 is chance. NaN when the labels are all equal."""
    ne: float
    """Normalized entropy (He et al., 2014): cross entropy divided by that of always predicting the mean label; below 1
    is better than the mean. NaN when the labels are all equal."""
    loss: float
    """Mean binary cross entropy in nats."""
    num_rows: int
    """Rows evaluated."""
    label_rate: float
    """Share of positive labels."""


class ClickMetrics:
    """Accumulates one evaluation on a rank; `compute` combines the ranks with one all-reduce of 16 MiB.

    AUC is computed from counts of labels in 2^20 bins of the logits x, of equal width in x / (1 + |x|) and narrowest at
    x = 0 (2e-6); rows of one bin count as ties. On a million rows it was within 1e-6 of the exact area, unless almost
    all logits lay within a few bins. ``group`` has the ranks that evaluate together; None: this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        # Counts by label and bin; then the sums of losses, labels, rows, and rows whose logit is not finite.
        self._sums = torch.zeros(2 * _BINS + 4, dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds a batch: logits, labels (0 or 1) and weights, float [B] each; padding, of weight 0, does not count."""
        logits, labels, weights = logits.double(), labels.double(), weights.double()
        self._sums = self._sums.to(logits.device)
        finite = logits.isfinite()
        logits = logits.where(finite, 0.0)
        bins = ((logits / (1 + logits.abs()) + 1) * (_BINS / 2)).long().clamp(max=_BINS - 1)
        losses = binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")
        # Masks and counts stay on the device: reading one here would force a sync in every batch.
        self._sums.index_add_(0, bins + _BINS * labels.long(), weights)
        totals = torch.stack([losses, (labels * weights).sum(), weights.sum(), (weights * ~finite).sum()])
        self._sums[2 * _BINS :] += totals

    def compute(self) -> MetricValues:
        """Returns the metrics over the rows of all ranks of the group; a rank may have seen no row. Collective.

        Raises `InputError` if no rank has a row, or a logit is not finite.
        """
        sums = self._sums.cpu()
        if self._group is not None:
            sums = sum_over_ranks(sums, self._group)
        negatives, positives = sums[:_BINS], sums[_BINS : 2 * _BINS]
        loss, positive, rows, not_finite = sums[2 * _BINS :].tolist()
        if not rows:
            raise InputError("There is no row to evaluate. Check data.eval_path, split_column, eval_fraction, source.")
        if not_finite:
            raise InputError(
                "The model predicts NaN or infinity: training has diverged. Lower optimizer.sparse_lr or "
                "optimizer.dense_lr, lengthen optimizer.warmup_steps, or look for huge values in the dense columns."
            )
        rate, auc, ne = positive / rows, math.nan, math.nan
        if 0 < positive < rows:
            below = negatives.cumsum(0) - negatives / 2
            auc = float((positives * below).sum()) / (positive * (rows - positive))
            ne = loss / rows / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return MetricValues(auc=auc, ne=ne, loss=loss / rows, num_rows=int(rows), label_rate=rate)


class StepTimer:
    """Measures the time of training steps, without the first five steps and without the work between steps."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        """Number of steps measured, and the seconds that they took together."""
        self._left_out, self._since = _WARM_UP_STEPS, 0.0

    def restart(self) -> None:
        """Leaves out the time since the last step, such as the time of an evaluation, a checkpoint or a record."""
        self._since = time.perf_counter()

    def step(self, *, awaits_gpu: bool = False) -> None:
        """Counts a step that has just ended; ``awaits_gpu``: first waits until the GPU has finished its work."""
        now = settled_time() if awaits_gpu else time.perf_counter()
        if self._left_out:
            self._left_out -= 1
        else:
            self.steps, self.seconds = self.steps + 1, self.seconds + now - self._since
        self._since = now


def settled_time() -> float:
    """Waits until the current GPU, if one is in use, has finished its work; returns `time.perf_counter`."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_lookups(
    model: nn.Module, optimizer: KeyedOptimizer, batches: Iterable[ClickBatch], mesh: TowerMesh
) -> list[float]:
    """Runs a forward and backward pass of each batch, and returns the seconds of lookups on each rank; collective.

    It times the forward calls of TorchRec's lookups and of hot rows' lookups, without exchanges; the seconds of a rank
    are the median over all batches but the first. The backward passes update the tables: call it after the last save.
    """
    seconds: list[float] = []

    def begin(*_: Any) -> None:
        seconds[-1] -= settled_time()

    def end(*_: Any) -> None:
        seconds[-1] += settled_time()

    with ExitStack() as hooks:
        for module in model.modules():
            collections, copies = [module], list[nn.Module]()
            if isinstance(module, TowerState):
                collections, copies = module.collections, [] if module.hot is None else [module.hot.lookup]
            for lookup in (*chain.from_iterable(map(lookups_of, collections)), *copies):
                hooks.callback(lookup.register_forward_pre_hook(begin).remove)
                hooks.callback(lookup.register_forward_hook(end).remove)
        for batch in batches:
            seconds.append(0.0)
            optimizer.zero_grad()
            model(batch)[0].backward()
    return gather_objects(statistics.median(seconds[1:] or seconds), mesh.global_group)


def measure_traffic(work: Callable[[], Any], mesh: TowerMesh) -> Traffic:
    """Calls ``work`` on every rank, and counts the bytes that it sends between and inside hosts. Collective."""
    with TrafficMeter(host_of=mesh.topology.host) as meter:
        work()
    return meter.total(mesh.global_group)
