"""The tables of a study's model as one table, and the optimizer of M replicas of it.

Legend: B samples, F features, M replicas, N embedding dim, O_t numbers per sample that tower t returns, V rows of all
tables together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError

__all__ = ["OneTable", "ReplicaAdagrad", "join_tables"]


class OneTable(nn.Module):
    """Replaces a model's collection of tables by one table, so that a single lookup serves all their features.

    Every sample has one id for each feature. Weights, tower modules and updates are those of the replaced tables; the
    input is ids [B, F] of all features, including those that other tables look up.
    """

    def __init__(self, collection: Any, features: list[str]) -> None:
        super().__init__()
        self._before = [collection]  # in a list: not a submodule
        weights = self._tables()
        self._features = [name for name in features if name in weights]
        sizes = torch.tensor([len(weights[name]) for name in self._features])
        self.register_buffer("offsets", torch.cumsum(sizes, 0) - sizes, persistent=False)
        places = torch.tensor([features.index(name) for name in self._features])
        self.register_buffer("places", places, persistent=False)
        self.embedding_bags = nn.Parameter(torch.cat([weights[name].detach() for name in self._features]))
        self.towers = nn.ModuleList(tower.interaction for tower in getattr(collection, "towers", ()))

    def forward(self, ids: Tensor) -> Any:
        """Ids [B, F] int64 -> [B, N] by feature, or [B, sum O_t] of the towers."""
        self.rows = ids[:, self.places] + self.offsets
        self.vectors = nn.functional.embedding(self.rows, self.embedding_bags)
        if self.vectors.requires_grad:
            self.vectors.retain_grad()
        by_name = dict(zip(self._features, self.vectors.unbind(1), strict=True))
        return torch.cat([tower(by_name) for tower in self.towers], dim=1) if len(self.towers) else by_name

    def restored(self) -> Any:
        """Returns the replaced collection, with the current weights."""
        weights = self._tables()
        parts = self.embedding_bags.detach().split([len(weights[name]) for name in self._features])
        with torch.no_grad():
            for name, part in zip(self._features, parts, strict=True):
                weights[name].copy_(part)
        return self._before[0]

    def _tables(self) -> dict[str, Tensor]:
        modules = self._before[0].named_modules()
        bags = ((name.rpartition(".")[2], module) for name, module in modules if isinstance(module, nn.EmbeddingBag))
        return {name.removeprefix("t_"): module.weight for name, module in bags}


def join_tables(model: Any, features: list[str]) -> dict[str, OneTable]:
    """Replaces a model's sparse_arch and outside_arch, in place, by one table each; returns the tables by attribute."""
    collections = {name: getattr(model, name, None) for name in ("sparse_arch", "outside_arch")}
    joined = {name: OneTable(held, features) for name, held in collections.items() if held is not None}
    for name, table in joined.items():
        setattr(model, name, table)
    return joined


class ReplicaAdagrad(torch.optim.Optimizer):
    """Row-wise AdaGrad of M replicas with moment scaling: Algorithm 1 of the 2D sparse parallelism paper (section 3.2).

    All replicas are averaged after every step and thus equal at the start of the next one, so one copy of the tables is
    enough. Replica m gets the m-th of M equal parts of the batch. Its gradient g_m is that of the mean loss over its
    part, and in each row that it touches

        v_m = v + mean over columns of g_m^2,    w_m = w - lr g_m / (sqrt(v_m / c) + eps).

    Then w and v of every row become the means over m (lines 5, 6, 9 and 10). The paper adds the squared norm of g_m;
    here, as in FBGEMM, it is the mean over columns, so v is smaller by a factor N, and the step larger by sqrt(N).
    Tests compare with `dmt.testing.PlainTraining`.

    Args:
        table: the table, whose features have one id per sample.
        lr: learning rate.
        num_replicas: M; 1 trains without replicas.
        moment_scale: c.
        eps: epsilon.
    """

    def __init__(self, table: OneTable, lr: float, *, num_replicas: int, moment_scale: float, eps: float) -> None:
        super().__init__([table.embedding_bags], {"lr": lr})
        self._table, self._eps = table, eps
        self._num_replicas, self._moment_scale = num_replicas, moment_scale
        self.moment = torch.zeros(len(table.embedding_bags))
        """The moments v, float32 [V]."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates every replica and averages them, after a backward pass of the mean loss over the global batch.

        Raises:
            InputError: the batch does not divide into M equal parts.
        """
        weight, ids, vectors = self._table.embedding_bags, self._table.rows, self._table.vectors
        num_replicas, num_rows, batch = self._num_replicas, len(weight), len(ids)
        if batch % num_replicas:
            raise InputError(f"ReplicaAdagrad: {num_replicas} replicas must divide the batch of {batch} samples.")
        assert vectors.grad is not None, "step comes after a backward pass"
        # One row for each pair of replica and touched table row. The mean over a replica's part is M times that part's
        # contribution to the mean over the batch.
        replica = torch.arange(batch) // (batch // num_replicas)
        touched, place = (ids + (replica * num_rows).unsqueeze(1)).unique(return_inverse=True)
        rows = touched % num_rows
        gradient = torch.zeros(len(touched), weight.shape[1])
        gradient.index_add_(0, place.flatten(), vectors.grad.flatten(0, 1), alpha=num_replicas)
        added = gradient.square().mean(dim=1)
        rate = self.param_groups[0]["lr"] / (((self.moment[rows] + added) / self._moment_scale).sqrt() + self._eps)
        weight.index_add_(0, rows, gradient * rate.unsqueeze(1), alpha=-1 / num_replicas)
        self.moment.index_add_(0, rows, added, alpha=1 / num_replicas)
