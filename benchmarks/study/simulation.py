"""Algorithm 1 of the 2D sparse parallelism paper (section 3.2) in one process, for the tables of a flat model.

With a sync in every step, all replicas are equal at the start of each step, so one copy of the tables is enough. Steps
visit only the rows of their batch: fast enough for whole epochs. Tests compare with `dmt.testing.PlainTraining`.

Legend: M replicas, B samples of the global batch, F features, N embedding dim, V rows of all tables together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dmt.errors import InputError

__all__ = ["ReplicaTables"]


class ReplicaTables(nn.Module):
    """The tables of M replicas, synchronized after every step, under moment-scaled row-wise AdaGrad.

    It replaces a flat model's ``sparse_arch``; every feature has one id per sample. Replica m gets the m-th of M equal
    parts of the batch. Its gradient g_m is that of the mean loss over its part, and in each row that it touches

        v_m = v + mean over columns of g_m^2,    w_m = w - lr g_m / (sqrt(v_m / c) + eps).

    Then w and v of every row become the means over m (lines 5, 6, 9 and 10). The paper adds the squared norm of g_m;
    here, as in FBGEMM, it is the mean over columns, so v is smaller by a factor N, and the step larger by sqrt(N).

    Args:
        tables: initial weights [rows, N] float32 by table, in the order of the features; copied.
        features: names of the features.
        num_replicas: M; 1 trains without replicas.
        moment_scale: c.
        eps: epsilon of the optimizer.

    Raises:
        InputError: M is below 1, or c not above 0.

    Example:
        >>> tables = ReplicaTables({"t": torch.zeros(3, 2)}, ["a"], num_replicas=2, moment_scale=2.0, eps=0.0)
        >>> tables(torch.tensor([[0], [1]]))["a"].sum(dim=1).mean().backward()
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
                f"ReplicaTables: num_replicas={num_replicas} must be at least 1, moment_scale={moment_scale} above 0."
            )
        self._features = features
        self._starts = torch.tensor([0, *(len(table) for table in tables.values())]).cumsum(0)[:-1]
        self._num_replicas, self._moment_scale, self._eps = num_replicas, moment_scale, eps
        self.weight = torch.cat([table.detach() for table in tables.values()])
        """The weights w, float32 [V, N]."""
        self.moment = torch.zeros(len(self.weight))
        """The moments v, float32 [V]."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Ids [B, F] int64 -> embeddings [B, N] float32 by feature."""
        self._ids = ids + self._starts
        self._embeddings = self.weight[self._ids].requires_grad_(torch.is_grad_enabled())
        return dict(zip(self._features, self._embeddings.unbind(dim=1), strict=True))

    def step(self, lr: float) -> None:
        """Updates every replica and averages them, after a backward pass of the mean loss over the global batch.

        Raises:
            InputError: the batch does not divide into M equal parts.
        """
        num_replicas, num_rows, batch = self._num_replicas, len(self.weight), len(self._ids)
        if batch % num_replicas:
            raise InputError(f"ReplicaTables: {num_replicas} replicas must divide the batch of {batch} samples.")
        assert self._embeddings.grad is not None, "step comes after a backward pass"
        # One row for each pair of replica and touched table row. The mean over a replica's part is M times that part's
        # contribution to the mean over the batch.
        replica = torch.arange(batch) // (batch // num_replicas)
        touched, place = (self._ids + (replica * num_rows).unsqueeze(1)).unique(return_inverse=True)
        rows = touched % num_rows
        gradient = torch.zeros(len(touched), self.weight.shape[1])
        gradient.index_add_(0, place.flatten(), self._embeddings.grad.flatten(0, 1), alpha=num_replicas)
        added = gradient.square().mean(dim=1)
        rate = lr / (((self.moment[rows] + added) / self._moment_scale).sqrt() + self._eps)
        self.weight.index_add_(0, rows, gradient * rate.unsqueeze(1), alpha=-1 / num_replicas)
        self.moment.index_add_(0, rows, added, alpha=1 / num_replicas)
