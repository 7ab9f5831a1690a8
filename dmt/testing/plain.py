"""Training of the plain module: the optimizers of a config, written down plainly, and Algorithm 1 with replicas.

With R replicas (2D sparse parallelism, Zhang et al. 2025) there are R plain modules, each on the batches of its
replica's ranks. Dense parts, tower modules and data-parallel tables have their gradients averaged; the other tables train
alone, with moments divided by c (Algorithm 1, line 6), and their weights and states are averaged every N steps (lines 9
and 10). With one replica nothing is averaged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmt.sharding.optimizers import moment_scale_of
from dmt.testing.state import TableKinds
from dmt.training.config import OptimizerConfig, TrainingConfig
from dmt.training.job import fused_params

__all__ = ["PlainTraining", "is_table", "is_tower_module"]

_DENSE = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_TOWER_MODULE = re.compile(r"\.towers\.(\d+)\.interaction\.")


def is_table(name: str) -> bool:
    """Whether a parameter is a table."""
    return ".embedding_bags." in name


def is_tower_module(name: str) -> bool:
    """Whether a parameter belongs to a tower module."""
    return _TOWER_MODULE.search(name) is not None


class PlainTraining:
    """Trains the plain modules of all replicas, or of the only one.

    Args:
        config: the run.
        tasks: a `ClickTask` for each replica, with equal weights.
        kinds: how tables are spread.
    """

    def __init__(self, config: TrainingConfig, tasks: Sequence[nn.Module], kinds: TableKinds) -> None:
        self._own = config.replicas
        self._names = [name for name, _ in tasks[0].named_parameters()]
        self._averaged = [n for n in self._names if is_table(n) and _table(n) not in kinds.data_parallel]
        scale = moment_scale_of(self._own.moment_scale, fused_params(config.optimizer), len(tasks))
        half = config.sharding.table_precision == "fp16"
        scales = dict.fromkeys(self._averaged, scale)
        self._replicas = [_Replica(config.optimizer, task, kinds.column_cuts, scales, half) for task in tasks]
        self._snapshots: dict[tuple[str, int], list[Tensor]] = {}

    def share_gradients(self) -> None:
        """Gives all replicas the mean gradients of what every step keeps equal."""
        for name in self._names:
            gradients = [replica.parameters[name].grad for replica in self._replicas]
            if name not in self._averaged:
                _set_to_mean([gradient for gradient in gradients if gradient is not None])

    def step(self, step: int) -> None:
        """One training step with the gradients that the tasks have; averages tables where it is time to."""
        self.share_gradients()
        for replica in self._replicas:
            replica.step(step)
        if (step + 1) % self._own.sync_every == 0:
            self.average()

    def average(self) -> None:
        """Averages weights; and states, or what they were one averaging ago while what they gained since stays."""
        if len(self._replicas) == 1:
            return
        for name in self._averaged:
            _set_to_mean([replica.parameters[name].data for replica in self._replicas])
            for replica in self._replicas:
                replica.round_table(name)
            for shard in range(len(self._replicas[0].states[name])):
                self._average_states(name, shard)

    def _average_states(self, name: str, shard: int) -> None:
        states = [replica.states[name][shard] for replica in self._replicas]
        if self._own.optimizer_state == "now":
            _set_to_mean(states)
            return
        if (before := self._snapshots.get((name, shard))) is not None:
            mean = torch.stack(before).mean(dim=0)
            for state, old in zip(states, before, strict=True):
                state += mean - old
        self._snapshots[name, shard] = [state.clone() for state in states]


class _Replica:
    """The optimizers of a config for one plain module: tables as FBGEMM's fused ones, dense parts by PyTorch's."""

    def __init__(
        self,
        config: OptimizerConfig,
        task: nn.Module,
        cuts: Mapping[str, Sequence[int]],
        scales: Mapping[str, float],
        half: bool,
    ) -> None:
        self._config = config
        self._half = half
        self._scales = scales
        self.parameters = dict(task.named_parameters())
        self._tables = {name: p for name, p in self.parameters.items() if is_table(name)}
        self._cuts = {name: list(cuts.get(_table(name), [p.shape[1]])) for name, p in self._tables.items()}
        self.states = {
            name: [self._first_state(shard) for shard in p.detach().split(self._cuts[name], 1)]
            for name, p in self._tables.items()
        }
        tower_rate = config.dense_lr if config.tower_lr is None else config.tower_lr
        self._dense: list[tuple[Any, float]] = []
        for of_towers, rate in ((True, tower_rate), (False, config.dense_lr)):
            parameters = [
                p for name, p in self.parameters.items() if not is_table(name) and is_tower_module(name) is of_towers
            ]
            if parameters:
                self._dense.append((_DENSE[config.dense](parameters, lr=rate), rate))

    def step(self, step: int) -> None:
        """Updates everything from the gradients that are there."""
        config, share = self._config, _share_of_rate(self._config, step)
        for optimizer, rate in self._dense:
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.step()
        with torch.no_grad():
            for name, table in self._tables.items():
                assert table.grad is not None, f"{name} got no gradient"
                shards = zip(table.split(self._cuts[name], 1), table.grad.split(self._cuts[name], 1), strict=True)
                for i, (weight, grad) in enumerate(shards):
                    weight -= config.sparse_lr * share * self._direction(name, i, grad)
                self.round_table(name)

    @torch.no_grad()
    def round_table(self, name: str) -> None:
        """To what an FP16 table can hold, if it is one."""
        if self._half:
            self._tables[name].copy_(self._tables[name].half())

    def _first_state(self, weight: Tensor) -> Tensor:
        return torch.zeros(len(weight), 1) if self._config.sparse == "rowwise_adagrad" else torch.zeros_like(weight)

    def _direction(self, name: str, shard: int, grad: Tensor) -> Tensor:
        if self._config.sparse == "sgd":
            return grad
        square = grad.square()
        if self._config.sparse == "rowwise_adagrad":
            square = square.mean(dim=1, keepdim=True)
        moment = self.states[name][shard]
        moment += square
        return grad / ((moment / self._scales.get(name, 1.0)).sqrt() + self._config.sparse_eps)


def _set_to_mean(tensors: Sequence[Tensor]) -> None:
    if tensors:
        mean = torch.stack([*tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)


def _share_of_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rates rise from 1/W of their value to all of it in W equal steps."""
    warmup = config.warmup_steps
    return 1.0 if step >= warmup else 1 / warmup + (1 - 1 / warmup) * step / warmup


def _table(name: str) -> str:
    return name.split(".")[-2]
