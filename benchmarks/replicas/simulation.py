"""Algorithm 1 of the 2D sparse parallelism paper (section 3.2) in one process, for a model with flat tables.

With a sync in every step, all replicas are equal at the start of each step, so one copy of the tables is enough, and
only the rows of a batch are visited: fast enough for whole epochs. Tests hold it against `dmt.testing.PlainTraining`.

Legend: M replicas, B samples of the global batch, F features, N embedding dim, V rows of all tables together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.towers.clicks import Clicks
from benchmarks.towers.trials import build_trial_model, row_order, this_process_alone
from dmt.errors import InputError
from dmt.testing.plain import rate_share
from dmt.training.build import ClickTask
from dmt.training.config import TrainingConfig
from dmt.training.loop import ClickMetrics, MetricValues

__all__ = ["ReplicaTables", "Simulation", "simulate"]


class ReplicaTables(nn.Module):
    """The tables of M replicas, synchronised after every step, under moment-scaled row-wise AdaGrad.

    Takes the place of a flat model's ``sparse_arch``; every feature has one id a sample. Replica m is given the m-th
    of M equal parts of the batch. Its gradient g_m is of the mean loss over that part, and in each row that it touches

        v_m = v + mean over columns of g_m^2,    w_m = w - lr g_m / (sqrt(v_m / c) + eps).

    Then w and v of every row become the means over m (lines 5, 6, 9 and 10). The paper adds the squared norm of g_m
    instead of the mean over columns, which is FBGEMM's: v is smaller by N here, the step larger by sqrt(N).

    Args:
        tables: initial weights [rows, N] float32 by table, in the order of the features; copied.
        features: their names.
        num_replicas: M; 1 is training without replicas.
        moment_scale: c.
        eps: of the optimizer.

    Raises:
        InputError: M is below 1, or c not above 0.

    Example:
        >>> tables = ReplicaTables({"t": torch.zeros(3, 2)}, ["a"], num_replicas=2, moment_scale=2.0, eps=0.0)
        >>> ids = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([0, 1]), torch.ones(2, dtype=torch.long))
        >>> tables(ids)["a"].sum(dim=1).mean().backward()
        >>> tables.step(lr=1.0)
        >>> tables.weight
        tensor([[-0.7071, -0.7071],
                [-0.7071, -0.7071],
                [ 0.0000,  0.0000]])
        >>> tables.moment
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        features: list[str],
        *,
        num_replicas: int,
        moment_scale: float,
        eps: float,
    ) -> None:
        super().__init__()
        if num_replicas < 1 or moment_scale <= 0:
            raise InputError(
                f"ReplicaTables: num_replicas={num_replicas} must be positive, and so must moment_scale={moment_scale}."
            )
        self._features = features
        self._starts = torch.tensor([0, *(len(table) for table in tables.values())]).cumsum(0)[:-1]
        self._num_replicas, self._moment_scale, self._eps = num_replicas, moment_scale, eps
        self.weight = torch.cat([table.detach() for table in tables.values()])
        """w, [V, N]."""
        self.moment = torch.zeros(len(self.weight))
        """v, [V]."""
        self.plain_moment = torch.zeros(len(self.weight))
        """Value that `moment` would have with the gradient of the whole batch, at the same weights; [V]."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Ids of B samples -> [B, N] by feature."""
        self._ids = sparse_features.values().view(len(self._features), -1).T + self._starts
        self._embeddings = self.weight[self._ids].requires_grad_(torch.is_grad_enabled())
        return dict(zip(self._features, self._embeddings.unbind(dim=1), strict=True))

    def step(self, lr: float) -> None:
        """One update of every replica and the sync, after a backward pass of the mean loss over the global batch.

        Raises:
            InputError: the batch does not divide into M equal parts.
        """
        num_replicas, num_rows, batch = self._num_replicas, len(self.weight), len(self._ids)
        if batch % num_replicas:
            raise InputError(f"ReplicaTables: {num_replicas} replicas do not divide a batch of {batch} samples.")
        assert self._embeddings.grad is not None, "step comes after a backward pass"
        # One row for each pair of replica and touched table row. The mean over a replica's part is M times the share
        # that the part has in the mean over the batch.
        replica = torch.arange(batch) // (batch // num_replicas)
        touched, place = (self._ids + (replica * num_rows).unsqueeze(1)).unique(return_inverse=True)
        rows = touched % num_rows
        gradient = torch.zeros(len(touched), self.weight.shape[1])
        gradient.index_add_(0, place.flatten(), self._embeddings.grad.flatten(0, 1), alpha=num_replicas)
        added = gradient.square().mean(dim=1)
        rate = lr / (((self.moment[rows] + added) / self._moment_scale).sqrt() + self._eps)
        self._add_plain_moment(rows, gradient)
        self.weight.index_add_(0, rows, gradient * rate.unsqueeze(1), alpha=-1 / num_replicas)
        self.moment.index_add_(0, rows, added, alpha=1 / num_replicas)

    def moment_growth(self, lookups: Tensor) -> tuple[float, float]:
        """Growth of v relative to training without replicas: 1 where replicas agree, about M where gradients are noise.

        Args:
            lookups: of each row in training, [V].

        Returns:
            Sum of `moment` over that of `plain_moment`; and the median of the rows' own ratios, over lookups.
        """
        ratios = (self.moment / self.plain_moment)[lookups > 0]
        order = ratios.argsort()
        passed = lookups[lookups > 0][order].cumsum(0)
        middle = ratios[order][torch.searchsorted(passed, passed[-1] / 2)]
        return float(self.moment.sum() / self.plain_moment.sum()), float(middle)

    def _add_plain_moment(self, rows: Tensor, gradient: Tensor) -> None:
        distinct, place = rows.unique(return_inverse=True)
        whole = torch.zeros(len(distinct), gradient.shape[1])
        whole.index_add_(0, place, gradient, alpha=1 / self._num_replicas)
        self.plain_moment[distinct] += whole.square().mean(dim=1)


class Simulation:
    """A flat model with its optimizers, trained with M replicas.

    Args:
        config: the run; ``batch_size`` is that of all replicas together.
        clicks: the data.
        seed: of the weights and of the order of rows, the same for every M and c.
        num_replicas: M.
        moment_scale: c.
        start_factor: factor on the starting weights of the tables; what a factor next to 1 changes is noise.
    """

    def __init__(
        self,
        config: TrainingConfig,
        clicks: Clicks,
        *,
        seed: int,
        num_replicas: int,
        moment_scale: float,
        start_factor: float = 1.0,
    ) -> None:
        self._optimizer, self._clicks, self._steps = config.optimizer, clicks, 0
        model = build_trial_model(config, clicks, seed)
        plain: Any = model.sparse_arch
        self.tables = ReplicaTables(
            {name: bag.weight.detach() * start_factor for name, bag in plain.embedding_bags.items()},
            clicks.features,
            num_replicas=num_replicas,
            moment_scale=moment_scale,
            eps=config.optimizer.sparse_eps,
        )
        model.sparse_arch = self.tables
        self._task = ClickTask(model)
        self._dense = torch.optim.Adam(self._task.parameters(), lr=config.optimizer.dense_lr, fused=True)

    def step(self, rows: Tensor) -> float:
        """Trains on one global batch of the given rows; returns its mean loss before."""
        own = self._optimizer
        factor = rate_share(self._steps, own.warmup_steps, decay_start=own.decay_start, decay_steps=own.decay_steps)
        self._dense.param_groups[0]["lr"] = self._optimizer.dense_lr * factor
        loss, _ = self._task(self._clicks.batch(self._clicks.train, rows))
        self._task.zero_grad()
        loss.backward()
        self._dense.step()
        self.tables.step(self._optimizer.sparse_lr * factor)
        self._steps += 1
        return loss.item()

    def test(self, batch_size: int) -> MetricValues:
        """Metrics on the test rows."""
        metrics = ClickMetrics(this_process_alone())
        self._task.eval()
        with torch.no_grad():
            for rows in torch.arange(len(self._clicks.test[2])).split(batch_size):
                metrics.update(*self._task(self._clicks.batch(self._clicks.test, rows))[1])
        self._task.train()
        return metrics.compute()


def simulate(config: TrainingConfig, clicks: Clicks, *, seed: int, **setting: Any) -> dict[str, Any]:
    """Trains a `Simulation` over the epochs of the config and tests it.

    Returns:
        A record ready for JSON: metrics, growth of the moments, steps, seconds.
    """
    began = time.perf_counter()
    simulation = Simulation(config, clicks, seed=seed, **setting)
    steps = 0
    for rows in row_order(len(clicks.train[2]), config.train, seed):
        simulation.step(rows)
        steps += 1
    metrics = simulation.test(config.train.eval_batch_size)
    total, median = simulation.tables.moment_growth(_lookups(clicks))
    return {
        "ne": metrics.ne,
        "auc": metrics.auc,
        "moment_growth": total,
        "moment_growth_median": median,
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 2),
    }


def _lookups(clicks: Clicks) -> Tensor:
    counts = [
        torch.bincount(ids, minlength=table.num_embeddings)
        for ids, table in zip(clicks.train[1].T, clicks.tables, strict=True)
    ]
    return torch.cat(counts)
