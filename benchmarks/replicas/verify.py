"""Is the simulation what the trainer computes? Against M of its sharded models, with FBGEMM's fused kernel."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.replicas.runs import Progress
from benchmarks.replicas.simulation import Simulation
from benchmarks.towers.clicks import Clicks
from benchmarks.towers.trials import STUDY_SETS, build_trial_model, row_order, this_process_alone
from dmt.sptt.mesh import TowerMesh
from dmt.testing import load_plain_state
from dmt.training.build import build_optimizer, shard_model
from dmt.training.config import OptimizerConfig, TopologyConfig, TrainingConfig
from dmt.training.job import make_job

__all__ = ["FusedReplicas", "compare", "verify"]

_CASES = ((1, 1.0), (2, 1.0), (2, 0.5), (4, 4.0), (8, 3.0), (8, 8.0))
_WARM_UP, _STEPS = 20, 30


class FusedReplicas:
    """M models of the trainer, each sharded over this process alone, synchronised by hand after every step.

    Moment scaling is the identity of `dmt`: a fused learning rate of lr sqrt(c) with eps sqrt(c).

    Args:
        config: the run.
        clicks: the data.
        seed: of the weights.
        num_replicas: M.
        moment_scale: c.
    """

    def __init__(
        self, config: TrainingConfig, clicks: Clicks, *, seed: int, num_replicas: int, moment_scale: float
    ) -> None:
        self._clicks = clicks
        optimizer = config.optimizer.model_dump()
        for name in ("sparse_lr", "sparse_eps"):
            optimizer[name] *= math.sqrt(moment_scale)
        alone = TopologyConfig(num_towers=1, ranks_per_tower=1)
        config = config.model_copy(update={"optimizer": OptimizerConfig(**optimizer), "topology": alone})
        plain = build_trial_model(config, clicks, seed).state_dict()
        this_process_alone()
        mesh = TowerMesh(alone.build())
        self._models, self._optimizers = [], []
        for _ in range(num_replicas):
            model = shard_model(make_job(config, clicks.tables, clicks.train[0].shape[1]), mesh)
            load_plain_state(model, {f"model.{name}": value for name, value in plain.items()})
            self._models.append(model)
            self._optimizers.append(build_optimizer(config.optimizer, model))

    def step(self, rows: Tensor) -> float:
        """Trains on one global batch of the given rows; returns its mean loss before."""
        losses = []
        for model, optimizer, part in zip(self._models, self._optimizers, rows.chunk(len(self._models)), strict=True):
            optimizer.zero_grad()
            loss, _ = model(self._clicks.batch(self._clicks.train, part))
            loss.backward()
            losses.append(loss.item())
        _average([[p.grad for p in _dense(model) if p.grad is not None] for model in self._models])
        for optimizer in self._optimizers:
            optimizer.step()
        _average([self.tables(replica) for replica in range(len(self._models))])
        _average([self.moments(replica) for replica in range(len(self._models))])
        return sum(losses) / len(losses)

    def tables(self, replica: int = 0) -> list[Tensor]:
        """The tables' weights, [rows, N] each, in the order of the features."""
        return self._in_order(self._models[replica].state_dict())

    def moments(self, replica: int = 0) -> list[Tensor]:
        """The fused optimizer's state of each table, [rows]."""
        state: dict[str, dict[str, Any]] = self._models[replica].fused_optimizer.state_dict()["state"]
        return self._in_order({table: next(iter(of_table.values())) for table, of_table in state.items()})

    def _in_order(self, values: Mapping[str, Any]) -> list[Tensor]:
        prefix = "model.sparse_arch.embedding_bags."
        return [values[f"{prefix}{table.name}.weight"].local_shards()[0].tensor for table in self._clicks.tables]


def compare(
    config: TrainingConfig, clicks: Clicks, *, num_replicas: int, moment_scale: float, steps: int
) -> dict[str, float]:
    """Trains both for some steps on the same batches.

    Returns:
        Largest difference in the loss of a step, in the weights and in the moments; and the largest distance that a
        weight went and the largest moment, to hold them against.
    """
    setting: dict[str, Any] = {"seed": 0, "num_replicas": num_replicas, "moment_scale": moment_scale}
    ours, theirs = Simulation(config, clicks, **setting), FusedReplicas(config, clicks, **setting)
    start = ours.tables.weight.clone()
    loss = 0.0
    for _, rows in zip(range(steps), row_order(len(clicks.train[2]), config.train, 0), strict=False):
        loss = max(loss, abs(ours.step(rows) - theirs.step(rows)))
    weight, moment = torch.cat(theirs.tables()), torch.cat(theirs.moments())
    return {
        "loss": loss,
        "weight": float((ours.tables.weight - weight).abs().max()),
        "weight_moved": float((weight - start).abs().max()),
        "moment": float((ours.tables.moment - moment).abs().max()),
        "moment_largest": float(moment.max()),
    }


def verify(progress: Progress) -> list[dict[str, Any]]:
    """Compares both on every data set, for several M and c; one row each, see `compare`."""
    torch.set_num_threads(1)
    # TorchRec's planner warns of what it is not given, for every model.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    found = []
    for dataset in progress.datasets():
        config, clicks = progress.config(dataset, STUDY_SETS[dataset].sparse_lr), progress.clicks(dataset)
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"warmup_steps": _WARM_UP})})
        for num_replicas, scale in _CASES:
            row = {"dataset": dataset, "num_replicas": num_replicas, "moment_scale": scale}
            found.append(row | compare(config, clicks, num_replicas=num_replicas, moment_scale=scale, steps=_STEPS))
    return found


def _dense(model: DistributedModelParallel) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if "sparse_arch" not in name)


def _average(of_replicas: list[list[Tensor]]) -> None:
    with torch.no_grad():
        for tensors in zip(*of_replicas, strict=True):
            mean = torch.stack(tensors).mean(dim=0)
            for tensor in tensors:
                tensor.copy_(mean)
