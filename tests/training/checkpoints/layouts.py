"""One model in many layouts: how it is sharded, trained and written out whole, to compare before and after loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import ReplicaSync, TowerMesh, TowerTopology
from dmt.collectives import gather_objects
from dmt.testing import gather_plain_state, table_layout
from dmt.testing.state import LocalPart, join_parts
from dmt.training.build import ScheduledOptimizer, build_optimizer
from dmt.training.config import OptimizerConfig
from tests.parity import LR, Batches, loss_of, make_tables
from tests.sptt_case import Case, build, shard

DIMS = (8, 8, 12, 16, 8, 8)
TOWERS = ((0, 4), (1,), (2, 5), (3,))
NUM_SAMPLES = 40
STEPS = 2
OPTIMIZER = OptimizerConfig(dense="adamw", sparse_lr=LR, dense_lr=0.02, warmup_steps=5)


_MESHES: dict[TowerTopology, TowerMesh] = {}


def layout(scheme: str, towers: int, ranks: int, placement: tuple[int, ...] | None = None, **options: Any) -> Case:
    """A mesh, and how the tables of the model are spread over it."""
    spread = {"towers": towers, "ranks": ranks, "scheme": scheme, "placement": placement, "moment_scale": 1, **options}
    return Case(dims=DIMS, plan=TOWERS, **spread)


@dataclass(kw_only=True)
class Job:
    """A model in a layout with everything that trains it."""

    mesh: TowerMesh
    model: DistributedModelParallel
    optimizer: ScheduledOptimizer
    layout: Case

    @classmethod
    def of(cls, layout: Case, seed: int) -> Job:
        torch.manual_seed(seed + dist.get_rank())
        # Groups take long to make.
        if any(mesh.global_group is not dist.group.WORLD for mesh in _MESHES.values()):
            _MESHES.clear()  # made for an earlier call of this process
        mesh = _MESHES[layout.topology] = _MESHES.get(layout.topology) or TowerMesh(layout.topology)
        model = shard(layout, build(layout), mesh)
        return cls(mesh=mesh, model=model, optimizer=build_optimizer(OPTIMIZER, model), layout=layout)

    def train(self, steps: range) -> None:
        """Steps on the samples of these numbers; the same for every number of ranks, each with its share."""
        sync = ReplicaSync(self.model, self.mesh) if self.layout.replicas > 1 else None
        for step in steps:
            ids, labels = self._batch(step, self.mesh.rank, self.layout.world)
            self.optimizer.zero_grad()
            loss_of(self.model(ids)[1], labels).backward()
            self.optimizer.step()
            if sync is not None:
                sync.step()

    def pass_without_step(self, step: int) -> None:
        """Trains on one batch without averaging replicas afterwards."""
        ids, labels = self._batch(step, self.mesh.rank, self.layout.world)
        loss_of(self.model(ids)[1], labels).backward()

    def logits(self) -> Tensor:
        """Of the same samples on every rank."""
        if self.layout.replicas > 1:
            ReplicaSync(self.model, self.mesh)
        self.model.eval()
        with torch.no_grad():
            result = self.model(self._batch(99, 0, 8)[0])[1].clone()
        self.model.train()
        return result

    def _batch(self, step: int, rank: int, world: int) -> tuple[Any, Tensor]:
        size = NUM_SAMPLES // 8
        drawn = Batches(sizes=(size,) * 8)
        tables = make_tables(list(DIMS))
        parts = [drawn.draw(r, step, tables) for r in range(rank * 8 // world, (rank + 1) * 8 // world)]
        if len(parts) == 1:
            return parts[0]
        keys = parts[0][0].keys()
        ids = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([kjt[key].values() for key in keys for kjt, _ in parts]),
            lengths=torch.cat([kjt[key].lengths() for key in keys for kjt, _ in parts]),
        )
        return ids, torch.cat([labels for _, labels in parts])

    def snapshot(self) -> dict[str, Any]:
        """Everything, whole, on every rank."""
        return {
            "weights": self.weights(),
            "moments": self.moments(),
            "dense": self.dense_state(),
            "cuts": self.cuts(),
            "logits": self.logits(),
        }

    def cuts(self) -> dict[str, list[int]]:
        """Widths of the column shards of each table."""
        cuts = {table: widths for table, widths in table_layout(self.model).items() if widths}
        return {f"t{i}": [dim] for i, dim in enumerate(DIMS)} | cuts

    def weights(self) -> dict[str, Tensor]:
        """Parameters and tables."""
        return gather_plain_state(self.model)

    def moments(self) -> dict[str, Tensor]:
        """Row-wise AdaGrad's moments as [rows, columns]: what is kept for a row of a shard, in each of its columns."""
        cuts = self.cuts()
        parts = []
        for weight, states in self.optimizer.state.items():
            for name, value in states.items():
                table, _, kind = name.partition(".")
                if kind != "momentum1":
                    continue
                dim = DIMS[int(table[1:])]
                if not isinstance(value, ShardedTensor):
                    whole = (slice(0, len(value)), slice(0, dim))
                    parts.append(LocalPart(table, value.unsqueeze(1).repeat(1, dim), whole, (len(value), dim)))
                    continue
                rows = weight.metadata().size[0]
                for part in value.local_shards():
                    number, row = divmod(part.metadata.shard_offsets[0], rows)
                    width, column = cuts[table][number], sum(cuts[table][:number])
                    shard = part.tensor.unsqueeze(1).repeat(1, width)
                    where = (slice(row, row + len(shard)), slice(column, column + width))
                    parts.append(LocalPart(table, shard, where, (rows, dim)))
        everyone = gather_objects(parts, self.mesh.global_group)
        return join_parts(part for of_rank in everyone for part in of_rank)

    def dense_state(self) -> dict[str, Tensor]:
        """State of tower modules, dense parts and schedules, from whichever rank has it."""
        mine = {
            f"{key}.{name}": value.clone()
            for key, states in self.optimizer.state_dict()["state"].items()
            for name, value in states.items()
            if "momentum1" not in name
        }
        everyone = gather_objects(mine, self.mesh.global_group)
        return {name: value for part in everyone for name, value in part.items()}


def moments_in(cuts: dict[str, list[int]], moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tables cut another way keep of moments [rows, columns]: each shard the mean over its columns."""
    return {
        name: torch.cat(
            [
                part.double().mean(dim=1, keepdim=True).float().expand_as(part)
                for part in moments[name].split(cuts[name], 1)
            ],
            dim=1,
        )
        for name in moments
    }


def largest_difference(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert ours.keys() == wanted.keys(), ours.keys() ^ wanted.keys()
    return max((ours[name].double() - wanted[name].double()).abs().max().item() for name in wanted)
