"""From a TorchRec script to towers: the same model over towers, then learned towers with tower modules.

Four ranks simulate two hosts of two. Rank 0 prints what a training step of each model sends between the hosts (ids,
embeddings and gradients):

    torchrun --standalone --nproc-per-node 4 examples/from_torchrec.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.models import DCNTowerModule, compression_ratio
from dmt.partitioner import FeatureAffinity, TowerPartitioner
from dmt.testing import gather_plain_state, load_plain_state
from dmt.traffic import TrafficMeter
from dmt.training.data.batch import ClickBatch

FEATURES, ROWS, DIM, BATCH, STEPS = ["user", "shop", "ad", "city"], 80, 32, 128, 10
DEVICE = torch.device("cpu")

# The script as it is: tables, a model, batches, optimizers, a training loop, DistributedModelParallel.


def tables(features: list[str] | tuple[str, ...]) -> list[EmbeddingBagConfig]:
    """Returns a table for each feature."""
    sizes = {"num_embeddings": ROWS, "embedding_dim": DIM}
    return [EmbeddingBagConfig(name=f"t_{feature}", feature_names=[feature], **sizes) for feature in features]


class ClickModel(nn.Module):
    """Stands in for your own model."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables(FEATURES))
        self.over_arch = nn.Sequential(nn.Linear(len(FEATURES) * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Ids of B samples -> logits [B]. Embeddings are read by name: their order depends on the sharding."""
        embeddings = self.embeddings(ids).to_dict()
        return self.over_arch(torch.cat([embeddings[feature] for feature in FEATURES], dim=1)).squeeze(1)


def draw(step: int, rank: int) -> ClickBatch:
    """Returns a rank's batch; clicks are likelier if user and ad, or shop and city, are of one kind."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, ROWS, (len(FEATURES), BATCH), generator=generator)
    user, shop, ad, city = ids % 4
    clicked = torch.rand(BATCH, generator=generator) < 0.1 + 0.4 * (user == ad) + 0.4 * (shop == city)
    features = KeyedJaggedTensor(FEATURES, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int64))
    return ClickBatch(torch.zeros(BATCH, 0), features, clicked.float(), torch.ones(BATCH))


def with_table_optimizer(model: nn.Module) -> nn.Module:
    """Adds row-wise AdaGrad, which runs in the backward pass, to the tables of a model, and returns the model."""
    weights = [weight for name, weight in model.named_parameters() if ".embedding_bags." in name]
    apply_optimizer_in_backward(RowWiseAdagrad, weights, {"lr": 0.1})
    return model


def train(model: nn.Module) -> int:
    """Trains a model, and returns the bytes per sample that crossed hosts in the last step."""
    adam = torch.optim.Adam([weight for _, weight in in_backward_optimizer_filter(model.named_parameters())], lr=2e-3)
    for step in range(STEPS):
        batch = draw(step, dist.get_rank())
        with TrafficMeter(host_of=lambda rank: rank // 2) as meter:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.sparse_features), batch.labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
    return round(meter.total(dist.group.WORLD).across / (4 * BATCH))


def say(text: str) -> None:
    """Prints a text on rank 0."""
    if dist.get_rank() == 0:
        print(text)


dist.init_process_group("gloo")
torch.manual_seed(0)
flat = DistributedModelParallel(with_table_optimizer(ClickModel()), device=DEVICE)
say(f"TorchRec: {train(flat)} bytes per sample cross hosts")

# Steps 1 and 2, the same model over towers, with the trained weights: only the sharder and its plan are new.

mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))


def over_towers(model: nn.Module, sharder: Any) -> nn.Module:
    """Returns the model sharded by a tower sharder."""
    plan = TowerShardingPlanner(mesh.topology).plan(with_table_optimizer(model), [sharder])
    return DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=[sharder])


ids, trained = draw(0, mesh.rank).sparse_features, gather_plain_state(flat)
towers = TowerPlan.balanced(tables(FEATURES), mesh.topology)
for unique in (False, True):
    same = over_towers(ClickModel(), SPTTEmbeddingBagCollectionSharder(mesh, towers, unique=unique))
    load_plain_state(same, trained)
    assert torch.equal(same(ids), flat(ids)), "the outputs differ"
    say(f"the same model over towers{', each distinct id once' * unique}: {train(same)}")

# Step 3, towers of features that interact, learned from clicks.

towers = TowerPartitioner(num_towers=2).fit(FeatureAffinity.collect_interactions(draw(s, 0) for s in range(60)))

# Step 4, another model: a tower sends 16 numbers per sample instead of its 64.


class TowerModel(nn.Module):
    """Applies an over arch to the outputs of towers."""

    def __init__(self, plan: TowerPlan) -> None:
        super().__init__()
        self.towers = EmbeddingTowerCollection(
            [
                EmbeddingTower(
                    EmbeddingBagCollection(tables=tables(tower.features)),
                    DCNTowerModule(tower.features, embedding_dim=DIM, tower_dim=16),
                )
                for tower in plan.towers
            ]
        )
        self.over_arch = nn.Sequential(nn.Linear(16 * plan.num_towers, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Ids of B samples -> logits [B]."""
        return self.over_arch(self.towers(ids)).squeeze(1)


in_towers = TowerModel(towers)
ratio = compression_ratio(in_towers)
sent = train(over_towers(in_towers, TowerCollectionSharder(mesh)))
say(f"towers {towers.to_lists()} with tower modules, compression ratio {ratio:g}: {sent}")
dist.barrier()
dist.destroy_process_group()
