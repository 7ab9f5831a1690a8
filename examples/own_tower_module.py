"""Your own tower module and over arch, trained in two towers of two ranks with TorchRec's train pipeline.

Each tower outputs 8 numbers per sample instead of 48. Rank 0 prints that ratio and the falling loss of its batches:

    torchrun --standalone --nproc-per-node 4 examples/own_tower_module.py
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import TowerCollectionSharder, TowerMesh, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.models import compression_ratio
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig, SyntheticConfig

ROWS, DIM, TOWER_DIM, BATCH, STEPS = 100, 16, 8, 128, 40


class GatedTower(nn.Module):
    """Tower module: gates the embeddings, then projects them: [B, F_t * DIM] -> [B, TOWER_DIM]."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features, self.in_features, self.out_features = features, len(features) * DIM, TOWER_DIM
        self.gate = nn.Linear(self.in_features, self.in_features)
        self.project = nn.Linear(self.in_features, TOWER_DIM)

    def forward(self, embeddings: KeyedTensor) -> Tensor:
        """Embeddings [B, DIM] by name -> [B, TOWER_DIM]. Read them by name: their order is that of the tables."""
        vector_of = embeddings.to_dict()  # once: slices of it are slow in the backward pass
        x = torch.cat([vector_of[name] for name in self.features], dim=1)
        return self.project(x * torch.sigmoid(self.gate(x)))


class Model(nn.Module):
    """Applies an over arch to tower outputs and dense features; returns the loss, as train pipelines expect."""

    def __init__(self, plan: TowerPlan) -> None:
        super().__init__()
        sizes, towers = {"num_embeddings": ROWS, "embedding_dim": DIM}, []
        for t in plan.towers:
            tables = [EmbeddingBagConfig(name=f"t_{f}", feature_names=[f], **sizes) for f in t.features]
            towers.append(EmbeddingTower(EmbeddingBagCollection(tables=tables), GatedTower(t.features)))
        self.towers = EmbeddingTowerCollection(towers)
        self.over_arch = nn.Sequential(nn.Linear(13 + plan.num_towers * TOWER_DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """Returns the mean loss of the batch twice: with its graph, and detached."""
        columns = torch.cat([batch.dense_features, self.towers(batch.sparse_features)], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.over_arch(columns).squeeze(1), batch.labels)
        return loss, loss.detach()


gpus = torch.cuda.device_count() >= 4  # one per rank
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
torch.manual_seed(dist.get_rank())
mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
data = ClickData(DataConfig(synthetic=SyntheticConfig(num_features=6, num_groups=2, rows_per_table=ROWS)))
model = Model(TowerPlan.strided(data.columns.feature_names, num_towers=2))
compression = compression_ratio(model)
fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
sharders = [TowerCollectionSharder(mesh, fused_params=fused)]
plan = TowerShardingPlanner(mesh.topology, device_type=device.type).plan(model, sharders)
sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=2e-3))
pipeline = TrainPipelineSparseDist(sharded, CombinedOptimizer([sharded.fused_optimizer, adam]), device)
batches = islice(data.batches("train", rank=mesh.rank, world_size=4, batch_size=BATCH), STEPS)  # none stays in flight
losses = [float(pipeline.progress(batches)) for _ in range(STEPS)]
if mesh.rank == 0:
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"compression ratio {compression:.1f}; loss {first:.4f} in steps 1-10, {last:.4f} in the last 10")
dist.barrier()
dist.destroy_process_group()
