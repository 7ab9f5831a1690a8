"""A model with bags in towers and sequences of ids, planned together, trains as the plain module does."""

from __future__ import annotations

import copy

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import (
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.testing import load_plain_state
from tests.dmt.test_planner import Sharder, collection
from tests.ranks import run_ranks

BAGS, WORDS, ROWS, SAMPLES, RATE = ["ad", "user", "shop", "city"], ["title", "query"], 30, 6, 0.5
TOPOLOGY = TowerTopology(num_towers=2, ranks_per_tower=2)


class Clicks(nn.Module):
    """Words are looked up one by one, and pass through a nonlinearity before they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f]) for f in BAGS
            ]
        )
        self.words = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f]) for f in WORDS
            ]
        )
        self.over = nn.Linear(8 * (len(BAGS) + len(WORDS)), 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        bags, words = self.bags(ids), self.words(ids)
        sums = []
        for name in WORDS:
            rows = torch.repeat_interleave(torch.arange(SAMPLES), words[name].lengths())
            sums.append(torch.zeros(SAMPLES, 8).index_add(0, rows, torch.sin(3 * words[name].values())))
        return self.over(torch.cat([*(bags[name] for name in BAGS), *sums], dim=1))


def draw(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(BAGS + WORDS) * SAMPLES,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=BAGS + WORDS, values=values, lengths=lengths)


def loss_of(model: nn.Module, ids: KeyedJaggedTensor) -> Tensor:
    return (model(ids).squeeze(1) - torch.linspace(-1, 1, SAMPLES)).square().mean()


def train_on_rank(rank: int) -> tuple[dict[str, str], Tensor, Tensor, Tensor]:
    """Returns the schemes of the words' tables, and logits: ours, of the plain module, and of the untrained one."""
    torch.manual_seed(0)
    plain = Clicks()
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    towers = TowerPlan.from_lists([["ad", "shop"], ["user", "city"]])
    sharders = [
        SPTTEmbeddingBagCollectionSharder(TowerMesh(TOPOLOGY), towers, fused_params=fused),
        EmbeddingCollectionSharder(fused_params=fused),
    ]
    plan = TowerShardingPlanner(TOPOLOGY).plan(plain, sharders)
    model = DistributedModelParallel(copy.deepcopy(plain), device=torch.device("cpu"), plan=plan, sharders=sharders)
    load_plain_state(model, plain.state_dict())
    untrained = plain(draw(0, 99)).detach()
    dense = torch.optim.SGD([p for _, p in in_backward_optimizer_filter(model.named_parameters())], lr=RATE)
    whole = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(4):
        dense.zero_grad()
        loss_of(model, draw(rank, step)).backward()
        dense.step()
        whole.zero_grad()
        torch.stack([loss_of(plain, draw(r, step)) for r in range(TOPOLOGY.world_size)]).mean().backward()
        whole.step()
    schemes = {name: sharding.sharding_type for name, sharding in plan.plan["words"].items()}
    return schemes, model(draw(0, 99)).detach(), plain(draw(0, 99)).detach(), untrained


@pytest.mark.ranks
def test_bags_in_towers_and_sequences_train_as_the_plain_module() -> None:
    for schemes, ours, plain, untrained in run_ranks(train_on_rank, TOPOLOGY.world_size):
        assert schemes.keys() == {"t_title", "t_query"}
        assert "data_parallel" not in schemes.values()
        assert (plain - untrained).abs().max() > 0.1, "training changed nothing"
        # Sums in another order.
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-6)


def test_tables_that_no_sharder_is_for_are_refused() -> None:
    model = nn.ModuleDict({"bags": collection("a", "b"), "words": EmbeddingCollection(tables=[], device="meta")})
    planner = TowerShardingPlanner(TOPOLOGY)
    message = (
        r"no sharder is for 'words' \(EmbeddingCollection\), so every rank .* Add TorchRec's EmbeddingCollectionSh"
    )
    with pytest.raises(InputError, match=message):
        planner.plan(model, [Sharder()])


def test_sequences_with_replicas_are_refused() -> None:
    words = [EmbeddingConfig(name="t_w", num_embeddings=9, embedding_dim=8, feature_names=["w"])]
    model = nn.ModuleDict({"bags": collection("a", "b"), "words": EmbeddingCollection(tables=words, device="meta")})
    planner = TowerShardingPlanner(TowerTopology(num_replicas=2, num_towers=2, ranks_per_tower=1))
    with pytest.raises(InputError, match=r"'words' is for a sharder of TorchRec's, which knows no replicas"):
        planner.plan(model, [Sharder(), EmbeddingCollectionSharder()])


def test_torchrecs_sharder_alone_is_refused() -> None:
    with pytest.raises(InputError, match="none of the sharders is dmt's"):
        TowerShardingPlanner(TOPOLOGY).plan(nn.Sequential(collection("a")), [EmbeddingBagCollectionSharder()])
