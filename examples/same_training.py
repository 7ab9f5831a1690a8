"""Checks that your model trains over towers as it does unsharded, on CPU processes and with tables of few rows.

Copy this file, replace model, batches, loss, optimizers and sharders in its first part with your own, and run it:

    python examples/same_training.py

It prints how far each weight moved, and by how much the sharded weight then differs from the unsharded one.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import SPTTEmbeddingBagCollectionSharder, TowerMesh, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.testing import PlainTraining, gather_plain_state, load_plain_state, run_on_ranks, table_layout

TOPOLOGY = TowerTopology(num_towers=2, ranks_per_tower=2)
TOWERS = TowerPlan.from_lists([["user", "city"], ["ad", "shop"]])
ROWS = {"user": 10_000_000, "city": 3_000, "ad": 2_000_000, "shop": 50_000}
FEW, BATCH, STEPS = 100, 32, 4
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6}


class ClickModel(nn.Module):
    """Stands in for your own model; no table has more than ``most_rows`` rows."""

    def __init__(self, most_rows: int, device: str = "cpu") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", num_embeddings=min(rows, most_rows), embedding_dim=64, feature_names=[f])
            for f, rows in ROWS.items()
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.over_arch = nn.Linear(len(ROWS) * 64, 1, device=device)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Ids of B samples -> logits [B]."""
        embeddings = self.embeddings(ids).to_dict()
        return self.over_arch(torch.cat([embeddings[f] for f in ROWS], dim=1)).squeeze(1)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Returns the mean loss of a rank's batch. Its ids are below FEW; take other ids modulo FEW."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, FEW, (len(ROWS) * BATCH,), generator=generator)
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    logits = model(KeyedJaggedTensor(list(ROWS), ids, lengths=torch.ones_like(ids)))
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def dense_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of all parameters but tables."""
    return torch.optim.Adam(parameters, lr=1e-3)


def sharders_of(mesh: TowerMesh) -> list[Any]:
    """Returns the sharders of all collections; for sequences, add ``EmbeddingCollectionSharder(FUSED_PARAMS)``."""
    return [SPTTEmbeddingBagCollectionSharder(mesh, TOWERS, fused_params=FUSED_PARAMS, unique=True)]


# From here on, nothing depends on the model.


def compare(rank: int) -> dict[str, tuple[float, float]]:
    """Trains the sharded model and, on each rank, the unsharded one; returns how far each weight moved and differs."""
    sharders = sharders_of(TowerMesh(TOPOLOGY))
    full = ClickModel(most_rows=2**62, device="meta")  # small tables are sharded as these would be
    placements = TowerShardingPlanner(TOPOLOGY).explain(full, sharders).placements
    torch.manual_seed(0)
    plain = ClickModel(FEW)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    plan = TowerShardingPlanner(TOPOLOGY, pinned=placements).plan(plain, sharders)
    sharded = DistributedModelParallel(ClickModel(FEW), device=torch.device("cpu"), plan=plan, sharders=sharders)
    load_plain_state(sharded, before)
    optimizer = dense_optimizer([weight for _, weight in in_backward_optimizer_filter(sharded.named_parameters())])
    training = PlainTraining(
        [plain],
        fused_params=FUSED_PARAMS,
        make_optimizer=lambda weights: dense_optimizer(list(weights.values())),
        layout=table_layout(sharded),  # row-wise AdaGrad has a moment for each row of a column shard
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(sharded, step, rank).backward()
        optimizer.step()
        plain.zero_grad()
        torch.stack([loss_of(plain, step, rank) for rank in range(TOPOLOGY.world_size)]).mean().backward()
        training.step()
    expected, found = plain.state_dict(), gather_plain_state(sharded)
    return {
        name: (distance(expected[name], start), distance(expected[name], found[name])) for name, start in before.items()
    }


def distance(weight: Tensor, other: Tensor) -> float:
    """Returns the largest difference; weights may be buffers of any type."""
    return float((weight.double() - other.double()).abs().max())


if __name__ == "__main__":
    for name, (moved, differs) in run_on_ranks(compare, TOPOLOGY.world_size, timeout_s=300)[0].items():
        print(f"{name}: moved {moved:.1e}, differs by {differs:.1e}")
        assert differs <= 1e-4 * moved, name
