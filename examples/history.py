"""A DLRM of two towers with a click history, trained in your own loop; in one tower, the target item attends to it.

Each tower sends 16 numbers per sample, however long the history is. Rank 0 prints its loss, and the bytes of a step's
outputs, gradients and ids between two hosts of two ranks, for histories of up to 10 and up to 50 items:

    torchrun --standalone --nproc-per-node 4 examples/history.py
"""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import TowerCollectionSharder, TowerMesh, TowerShardingPlanner, TowerTopology
from dmt.models import DINTowerModule, DLRMTowerModule
from dmt.models.dense import DotInteraction, mlp
from dmt.sharding.costs import StepWorkload
from dmt.traffic import TrafficMeter

ROWS, DIM, D, BATCH, STEPS, GROUPS = 200, 16, 8, 128, 25, 2


class HistoryDLRM(nn.Module):
    """DLRM with the user's bags in one tower, and the item and its history, which share a table, in the other."""

    def __init__(self) -> None:
        super().__init__()
        user, sizes = ["user", "city"], {"num_embeddings": ROWS, "embedding_dim": DIM}
        bags = [EmbeddingBagConfig(name=f"t_{f}", feature_names=[f], **sizes) for f in user]
        items = EmbeddingConfig(name="t_item", feature_names=["item", "history"], **sizes)
        user_module = DLRMTowerModule(user, embedding_dim=DIM, tower_dim=D, c=0, p=2)
        item_module = DINTowerModule("item", "history", embedding_dim=DIM, tower_dim=2 * D)
        first = EmbeddingTower(EmbeddingBagCollection(tables=bags), user_module)
        second = EmbeddingTower(EmbeddingCollection(tables=[items]), item_module)
        self.towers = EmbeddingTowerCollection([first, second])
        self.bottom, self.interaction = mlp(4, (16, D)), DotInteraction(num_vectors=4, dim=D)
        self.over_arch = mlp(self.interaction.out_features, (32, 1), last_is_linear=True)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Dense features [B, 4] and ids of B samples -> logits [B]."""
        vectors = self.towers(ids).view(-1, 4, D)
        return self.over_arch(self.interaction(self.bottom(dense), vectors)).squeeze(1)


def draw(length: int, generator: torch.Generator) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Returns dense features, ids and labels; the label is 1 if the history is not empty and is of the item's group."""
    lengths = torch.randint(0, length + 1, (BATCH,), generator=generator)
    item, user, city = torch.randint(0, ROWS, (3, BATCH), generator=generator)
    liked = torch.randint(0, GROUPS, (BATCH,), generator=generator)  # the group of the whole history
    history = GROUPS * torch.randint(0, ROWS // GROUPS, (int(lengths.sum()),), generator=generator)
    history += liked.repeat_interleave(lengths)
    ones = torch.ones(3 * BATCH, dtype=torch.int64)
    keys = ["item", "user", "city", "history"]
    ids = KeyedJaggedTensor(keys, torch.cat([item, user, city, history]), lengths=torch.cat([ones, lengths]))
    return torch.randn(BATCH, 4, generator=generator), ids, ((item % GROUPS == liked) & (lengths > 0)).float()


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3}
sharders, workload = [TowerCollectionSharder(mesh, fused_params=fused)], StepWorkload(pooling_factors={"history": 10})
model: nn.Module = HistoryDLRM()
plan = TowerShardingPlanner(mesh.topology, workload=workload).plan(model, sharders)
model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
adam = torch.optim.Adam([p for _, p in in_backward_optimizer_filter(model.named_parameters())], lr=5e-3)
generator, losses = torch.Generator().manual_seed(mesh.rank), []
for step in range(STEPS + 1):
    with TrafficMeter(host_of=lambda rank: rank // 2) as meter:
        dense, ids, labels = draw(10 if step < STEPS else 50, generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
    losses.append(loss.item())
    if step >= STEPS - 1 and (traffic := meter.total(mesh.global_group)) and mesh.rank == 0:
        print(f"bytes across hosts: outputs {traffic.forward}, gradients {traffic.backward}, ids {traffic.ids}")
if mesh.rank == 0:
    print(f"loss {sum(losses[:10]) / 10:.4f} in steps 1-10, {sum(losses[-11:-1]) / 10:.4f} in the last 10 of length 10")
dist.barrier()
dist.destroy_process_group()
