"""`PartWork`: the operators of a part of a model, and the seconds that they take on a cluster. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from dmt.simulator.cluster import Cluster

__all__ = ["Operator", "PartWork"]


class Operator(NamedTuple):
    """One operator of a model; it takes as long as its FLOPs or as the bytes it moves, whichever is longer."""

    flops: float
    """FLOPs for one sample."""
    sample_bytes: float
    """Bytes that it reads and writes for one sample."""
    pass_bytes: float
    """Bytes that it reads and writes whatever the batch: weights, or their gradients."""


class PartWork(NamedTuple):
    """Operators of a part of a model."""

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    weight_bytes: int = 0
    """Bytes of its weights."""

    @property
    def flops(self) -> float:
        """FLOPs of a training step for one sample."""
        return sum(operator.flops for operator in (*self.forward, *self.backward))

    def seconds(self, samples: float, cluster: Cluster) -> tuple[float, float]:
        """Returns the seconds forward and backward for some samples in one pass.

        Example:
            >>> from dataclasses import replace
            >>> from dmt.simulator.cluster import load_cluster
            >>> cluster = replace(load_cluster("a100"), matmul_flops=10.0, memory_bytes_per_s=2.0)
            >>> part = PartWork(forward=(Operator(30.0, 1.0, 0.0), Operator(0.0, 2.0, 1.0)))
            >>> part.seconds(2.0, cluster)
            (8.5, 0.0)
        """
        forward, backward = (_seconds(operators, samples, cluster) for operators in (self.forward, self.backward))
        return forward, backward


def _seconds(operators: tuple[Operator, ...], samples: float, cluster: Cluster) -> float:
    flops, memory = cluster.matmul_flops, cluster.memory_bytes_per_s
    busy = sum(max(o.flops * samples / flops, (o.sample_bytes * samples + o.pass_bytes) / memory) for o in operators)
    return busy + len(operators) * cluster.operator_s
