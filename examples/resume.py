"""Your own training loop saves, is interrupted and resumes; then one plain process loads the checkpoint.

Two ranks simulate two hosts with one tower each. Run it with

    torchrun --standalone --nproc-per-node 2 examples/resume.py

Rank 0 prints the step at which each call begins, and whether the plain model equals the sharded one bit for bit.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import SPTTEmbeddingBagCollectionSharder, TowerMesh, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.collectives import gather_objects
from dmt.training.checkpoints import Checkpointer, load_plain, restore

FEATURES = ["ad", "user"]


class ClickModel(nn.Module):
    """Stands in for your own model."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", num_embeddings=100, embedding_dim=16, feature_names=[f]) for f in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables)
        self.over_arch = nn.Linear(len(FEATURES) * 16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Ids of B samples -> logits [B, 1]."""
        embeddings = self.embeddings(ids).to_dict()
        return self.over_arch(torch.cat([embeddings[f] for f in FEATURES], dim=1))


def batch_of(step: int) -> KeyedJaggedTensor:
    """Returns the ids of eight samples, the same in every call for a step."""
    ids = torch.randint(0, 100, (2 * 8,), generator=torch.Generator().manual_seed(step))
    return KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=torch.ones_like(ids))


dist.init_process_group("gloo")
mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
sharders = [SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["ad"], ["user"]]))]
model = ClickModel()
plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = CombinedOptimizer(
    [("tables", model.fused_optimizer), ("dense", KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=1e-3)))]
)

# All ranks need the same folder, on a file system that all hosts share.
folder = Path(gather_objects(tempfile.mkdtemp(), mesh.global_group)[0], "checkpoint")
checkpointer = Checkpointer(folder, mesh)


def train(steps: int) -> int:
    """Trains up to a step, from the newest intact checkpoint if there is one; returns the first step."""
    start = restore(folder, model, optimizer, mesh=mesh)
    done = 0 if start is None else start.step
    for step in range(done, steps):
        optimizer.zero_grad()
        model(batch_of(step)).mean().backward()
        optimizer.step()
        checkpointer.save(model, optimizer, step=step + 1, progress={"row": 16 * (step + 1)})
    return done


begun = [train(steps=2), train(steps=3)]  # the second call resumes, as after a crash
plain = ClickModel()  # one process, no sharding
load_plain(plain, folder)
equal = gather_objects(torch.equal(model(batch_of(9)), plain(batch_of(9))), mesh.global_group)
if mesh.rank == 0:
    print(f"began at steps {begun}; the plain model equals the sharded one on {sum(equal)} of {len(equal)} ranks")
dist.barrier()
dist.destroy_process_group()
