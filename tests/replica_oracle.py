"""Algorithm 1 of the 2D sparse parallelism paper (section 3.2), written out in pure PyTorch in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.parity import EPS, LR, loss_of


class ReplicaOracle:
    """M replicas of the tables, each trained on its own batches and averaged at every N-th step; one dense part.

    Moments are as FBGEMM's: the mean over a (column) shard's columns of the squared gradient. Tables that every replica
    sees the whole batch's gradient of (data-parallel) are neither scaled nor averaged.

    Args:
        model: the plain model.
        num_replicas: M.
        c: the moment scale.
        interval: N.
        delayed: whether moments are averaged one sync late.
        column_cuts: widths of the shards of column-wise tables.
        data_parallel: names of the data-parallel tables.
        rate: learning rate of the tables in each step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_replicas: int,
        c: float,
        interval: int = 1,
        delayed: bool = False,
        column_cuts: Mapping[str, list[int]] | None = None,
        data_parallel: Sequence[str] = (),
    ) -> None:
        self.replicas = [copy.deepcopy(model) for _ in range(num_replicas)]
        self.c, self.interval, self.delayed = c, interval, delayed
        self.cuts, self.data_parallel = column_cuts or {}, set(data_parallel)
        dense = [p for n, p in self.replicas[0].named_parameters() if "embedding_bags" not in n]
        self.dense = torch.optim.Adam(dense, lr=LR)
        self.w: dict[str, list[Tensor]] = {}  # [rows, columns] of each replica
        self.v: dict[str, list[list[Tensor]]] = {}  # [rows, 1] of each shard of each replica
        self.s: dict[str, list[list[Tensor]]] = {}  # snapshots of v
        for name, parameter in self.tables(0).items():
            shards = len(self.cuts.get(name, [0]))
            self.w[name] = [self.tables(m)[name].data for m in range(num_replicas)]
            self.v[name] = [[torch.zeros(len(parameter), 1) for _ in range(shards)] for _ in range(num_replicas)]
        self.k = 0

    def tables(self, m: int) -> dict[str, nn.Parameter]:
        named = self.replicas[m].named_parameters()
        return {name.split(".")[-2]: p for name, p in named if "embedding_bags" in name}

    def step(self, batches: Sequence[Sequence[tuple]], rate: float = LR) -> None:
        """One iteration k; batches[m] are those of the ranks of replica m."""
        for model, of_group in zip(self.replicas, batches, strict=True):
            model.zero_grad()
            torch.stack([loss_of(model(ids)[1], labels) for ids, labels in of_group]).mean().backward()
        self._dense_step()
        groups = range(len(self.replicas))
        for name in self.w:
            grads = [self.tables(m)[name].grad for m in groups]
            c = self.c
            if name in self.data_parallel:
                grads, c = [torch.stack(grads).mean(0) for _ in groups], 1.0
            for m in groups:
                cuts = self.cuts.get(name, [grads[m].shape[1]])
                for i, (w, g) in enumerate(zip(self.w[name][m].split(cuts, 1), grads[m].split(cuts, 1), strict=True)):
                    self.v[name][m][i] = self.v[name][m][i] + g.pow(2).mean(dim=1, keepdim=True)  # line 5
                    w -= rate / ((self.v[name][m][i] / c).sqrt() + EPS) * g  # line 6
        self.k += 1
        if self.k % self.interval == 0:
            self.sync(self.delayed)

    def sync(self, delayed: bool) -> None:
        for name in self.w.keys() - self.data_parallel:
            mean = torch.stack(self.w[name]).mean(0)
            for w in self.w[name]:
                w.copy_(mean)  # line 9
            v, groups = self.v[name], range(len(self.replicas))
            for i in range(len(v[0])):
                if name in self.s:
                    mean = torch.stack([self.s[name][m][i] for m in groups]).mean(0)
                    for m in groups:
                        v[m][i] = mean + (v[m][i] - self.s[name][m][i])
                if not delayed:
                    mean = torch.stack([v[m][i] for m in groups]).mean(0)
                    for m in groups:
                        v[m][i] = mean  # line 10
            self.s.pop(name, None)
            if delayed:
                self.s[name] = [list(of_replica) for of_replica in v]

    def _dense_step(self) -> None:
        everyone = [dict(model.named_parameters()) for model in self.replicas]
        dense = [name for name in everyone[0] if "embedding_bags" not in name]
        for name in dense:
            everyone[0][name].grad = torch.stack([named[name].grad for named in everyone]).mean(0)
        self.dense.step()
        for name in dense:
            for named in everyone[1:]:
                named[name].data.copy_(everyone[0][name].data)
