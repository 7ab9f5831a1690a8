"""A flat TorchRec model, unchanged, in the tower dataflow: the same numbers, another route for the embeddings.

Four ranks simulate two hosts of two. Each host becomes one tower; the model's code does not change. Run it with

    torchrun --standalone --nproc-per-node 4 examples/flat_model_over_towers.py

Rank 0 prints whether the sharded model equals the plain one bit for bit, and the bytes that cross between the hosts.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt import SPTTEmbeddingBagCollectionSharder, TowerMesh, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.collectives import gather_objects
from dmt.testing import load_plain_state
from dmt.traffic import TrafficMeter

FEATURES, ROWS, DIM, BATCH = ["ad", "user", "shop", "city"], 100, 16, 64


class ClickModel(nn.Module):
    """Your own model: any module with an ``EmbeddingBagCollection`` inside."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f])
            for f in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables)
        self.over_arch = nn.Sequential(nn.Linear(len(FEATURES) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Ids of B samples -> logits [B, 1]. Embeddings are read by name: their order depends on the sharding."""
        embeddings = self.embeddings(ids)
        return self.over_arch(torch.cat([embeddings[f] for f in FEATURES], dim=1))


gpus = torch.cuda.device_count() >= 4  # one per rank
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
topology = TowerTopology(num_towers=2, ranks_per_tower=2)
mesh = TowerMesh(topology)
torch.manual_seed(0)
plain = ClickModel().to(device)
towers = TowerPlan.from_lists([["ad", "shop"], ["user", "city"]])
sharders = [SPTTEmbeddingBagCollectionSharder(mesh, towers, unique=True)]  # sends each distinct id once
plan = TowerShardingPlanner(topology, device_type=device.type).plan(plain, sharders)
model = DistributedModelParallel(ClickModel(), device=device, plan=plan, sharders=sharders)

# Load weights only now: building DistributedModelParallel initializes the tables again.
load_plain_state(model, plain.state_dict())

draw = torch.Generator().manual_seed(mesh.rank)
values = torch.randint(0, ROWS, (len(FEATURES) * BATCH,), generator=draw)
batch = KeyedJaggedTensor(keys=FEATURES, values=values, lengths=torch.ones_like(values)).to(device)
equal = gather_objects(torch.equal(model(batch), plain(batch)), mesh.global_group)
with TrafficMeter(host_of=lambda rank: rank // 2) as meter:
    loss = model(batch).mean()
    loss.backward()
traffic = meter.total(mesh.global_group)
other = towers.towers[1 - mesh.tower].features  # their tables are on the other host
distinct = sum(gather_objects(sum(len(batch[f].values().unique()) for f in other), mesh.global_group))
if mesh.rank == 0:
    print(f"output equal to the plain model's, bit for bit, on {sum(equal)} of {len(equal)} ranks")
    print(f"bytes across hosts in a step: {traffic}")
    print(f"forward by hand: {distinct} distinct ids x {DIM} columns x 4 bytes = {distinct * DIM * 4}")
dist.barrier()
dist.destroy_process_group()
