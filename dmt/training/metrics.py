"""AUC and normalized entropy over all ranks, by torchmetrics and TorchRec's metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dmt.collectives import gather_objects
from dmt.errors import InputError

__all__ = ["ClickMetrics", "MetricValues"]


@dataclass(frozen=True, kw_only=True)
class MetricValues:
    """Metrics of one evaluation, over the rows of all ranks."""

    auc: float
    """Area under the ROC curve; 0.5 is chance. NaN when the labels are all equal."""
    ne: float
    """Normalized entropy (He et al., 2014): cross entropy over that of always predicting the mean; below 1 is better
    than the mean. NaN when the labels are all equal."""
    loss: float
    """Mean binary cross entropy in nats."""
    num_rows: int
    """Rows evaluated."""
    label_rate: float
    """Share of positive labels."""


class ClickMetrics:
    """Accumulates one evaluation on a rank; `compute` joins the ranks.

    AUC is exact, so every prediction is gathered: 8 bytes a row of host memory on every rank.

    Args:
        group: the ranks that evaluate together.
    """

    _ETA = 1e-12  # keeps logarithms finite; TorchRec's own default

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds a batch: logits, labels and weights of [B]; rows of weight 0 are padding and are left out."""
        real = weights > 0
        self._logits.append(logits[real].float().cpu())
        self._labels.append(labels[real].float().cpu())

    def compute(self) -> MetricValues:
        """Joins all ranks of the group; collective, and right for ranks that saw no row."""
        mine = (torch.cat(self._logits or [torch.empty(0)]), torch.cat(self._labels or [torch.empty(0)]))
        parts = gather_objects(mine, self._group)
        logits, labels = (torch.cat([part[i] for part in parts]).double() for i in (0, 1))
        # torchmetrics takes longer to load than the rest of this file: a rank that only trains does without.
        from torchmetrics.functional.classification import binary_auroc
        from torchrec.metrics.ne import compute_cross_entropy, compute_ne

        if not len(labels):
            raise InputError("There is no row to evaluate; check data.eval_path, split_column or eval_fraction.")
        if not bool(logits.isfinite().all()):
            raise InputError(
                "The model predicts NaN: training has diverged. Lower optimizer.sparse_lr or optimizer.dense_lr, "
                "lengthen optimizer.warmup_steps, or look for huge values in the dense columns."
            )
        predictions, ones = torch.sigmoid(logits), torch.ones_like(labels)
        bits = compute_cross_entropy(labels, predictions.clone(), ones, self._ETA).sum()
        positive = labels.sum()
        both_labels = 0 < int(positive) < len(labels)
        ne = compute_ne(bits, ones.sum(), positive, len(labels) - positive, self._ETA)
        return MetricValues(
            auc=float(binary_auroc(predictions, labels.long())) if both_labels else math.nan,
            ne=float(ne) if both_labels else math.nan,
            loss=float(binary_cross_entropy_with_logits(logits, labels)),
            num_rows=len(labels),
            label_rate=float(positive) / len(labels),
        )
