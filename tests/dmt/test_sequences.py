"""Sequences beside towers train as in the plain module; sequences in towers: their rows, ids, state and plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor

from dmt import (
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.models import DINTowerModule, DLRMTowerModule
from dmt.models.complexity import compression_ratio, count_complexity, count_on_meta
from dmt.simulator.work import count_operators
from dmt.sptt.group_sharded import join_rows, split_rows
from dmt.testing import PlainTraining, load_plain_state
from dmt.testing.plain import table_name
from dmt.training.factory import without_tables
from tests.dmt.test_planner import Sharder, collection
from tests.ranks import run_ranks

BAGS, WORDS, ROWS, SAMPLES, RATE = ["ad", "user", "shop", "city"], ["title", "query"], 30, 6, 0.5
TOPOLOGY = TowerTopology(num_towers=2, ranks_per_tower=2)


class Clicks(nn.Module):
    """Words are looked up one by one, and pass through a nonlinearity before they are summed."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": 8}
        bags = [EmbeddingBagConfig(name=f"t_{f}", feature_names=[f], **sizes) for f in BAGS]
        words = [EmbeddingConfig(name=f"t_{f}", feature_names=[f], **sizes) for f in WORDS]
        self.bags, self.words = EmbeddingBagCollection(tables=bags), EmbeddingCollection(tables=words)
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


def test_plain_training_trains_tables_of_sequences_beside_towers_by_fused_params() -> None:
    training = PlainTraining([Clicks()], fused_params={})
    assert set(map(table_name, training.tables[0])) == {f"t_{name}" for name in BAGS + WORDS}
    training.step()  # embeddings that the model does not read give their table no gradient


def test_modules_that_no_sharder_is_for_are_refused() -> None:
    words = [EmbeddingConfig(name="t_w", num_embeddings=9, embedding_dim=8, feature_names=["w"])]
    model = nn.ModuleDict({"bags": collection("a", "b"), "words": EmbeddingCollection(tables=words, device="meta")})
    # The sharder takes the collection inside, and nothing would train the weights of places.
    bags = EmbeddingBagCollection(collection("a").embedding_bag_configs(), is_weighted=True)
    around = nn.Sequential(FeatureProcessedEmbeddingBagCollection(bags, {"a": PositionWeightedModule(3)}))
    of_towers, replicas = Sharder(), TowerTopology(num_replicas=2, num_towers=2, ranks_per_tower=1)
    of_towers.module_type = EmbeddingTowerCollection
    for module, sharders, topology, message in (
        (model, [Sharder()], TOPOLOGY, r"handles 'words' \(EmbeddingCollection\), .* EmbeddingCollectionSharder"),
        (model, [of_towers], TOPOLOGY, r"no sharder handles 'bags' .* OutsideCollectionSharder\(mesh\)"),
        (
            model,
            [Sharder(), Sharder()],
            TOPOLOGY,
            "two sharders handle EmbeddingBagCollection, and .* would use the last",
        ),
        (around, [Sharder()], TOPOLOGY, r"no sharder handles '0' \(FeatureProcessedEmbeddingBagCollection\), which"),
        (model, [Sharder(), EmbeddingCollectionSharder()], replicas, "'words' has a sharder .* not support replicas"),
        (nn.Sequential(collection("a")), [EmbeddingBagCollectionSharder()], TOPOLOGY, "none of the sharders is dmt's"),
    ):
        with pytest.raises(InputError, match=message):
            TowerShardingPlanner(topology).plan(module, sharders)


def test_rows_of_sequences_are_split_and_joined() -> None:
    lengths = torch.tensor([2, 0, 1, 3])
    whole = {"a": JaggedTensor(torch.arange(12.0).view(6, 2), lengths=lengths, weights=torch.arange(6))}
    first, none, rest = split_rows(whole, [1, 0, 3])
    assert [block["a"].lengths().tolist() for block in (first, none, rest)] == [[2], [], [0, 1, 3]]
    assert rest["a"].values().tolist() == [[4, 5], [6, 7], [8, 9], [10, 11]]
    joined = join_rows([rest, none, first])["a"]
    assert joined.lengths().tolist() == [0, 1, 3, 2]
    assert joined.weights().tolist() == [2, 3, 4, 5, 0, 1]


class History(nn.Module):
    """Attention to a history in one tower, a bag in the other."""

    def __init__(self) -> None:
        super().__init__()
        items = [EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["item", "history"])]
        attention = DINTowerModule("item", "history", embedding_dim=8, tower_dim=4, hidden=5)
        pooled = DLRMTowerModule(["user"], embedding_dim=8, tower_dim=4)
        bags = EmbeddingBagConfig(name="t_user", num_embeddings=ROWS, embedding_dim=8, feature_names=["user"])
        first = EmbeddingTower(EmbeddingCollection(tables=items), attention)
        second = EmbeddingTower(EmbeddingBagCollection(tables=[bags]), pooled)
        self.towers = EmbeddingTowerCollection([first, second])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.towers(ids)


def test_attention_is_counted_by_the_length_of_its_history() -> None:
    lengths = torch.cat([torch.ones(8, dtype=torch.int64), torch.tensor([0, 7, 3, 2, 1, 9, 8, 0])])
    ids = KeyedJaggedTensor(
        ["item", "user", "history"],
        torch.zeros(46, dtype=torch.int64),
        lengths=torch.cat([lengths[:8], lengths[:8], lengths[8:]]),
    )
    counted = count_complexity(History(), torch.zeros(8, 3), ids)
    # 30 / 8 items, and their products with the target, of 8 numbers through 5 and 1, and the target; target, sum
    # and their products, and the sum of these, through 4; a bag of 8 through 4.
    attention, compress = 3.75 * (16 * 5 + 5) + 8 * 5, 24 * 4 + 4
    assert counted.mflops_per_sample == pytest.approx(6e-6 * (attention + compress + 8 * 4))
    assert counted.compression_ratio == (1 + 3.75 + 1) * 8 / (4 + 4)
    planned = without_tables(History(), {"history": 3.75})
    assert count_on_meta(planned.to("meta"), 3) == counted
    forward = [sum(one.flops for one in part.forward) for part in count_operators(planned, 3).towers]
    assert forward == [2 * (attention + compress), 2 * 8 * 4]


def test_the_ratio_of_a_lone_tower_and_of_a_module_without_sizes() -> None:
    tower: Any = History().towers.towers[1]
    assert compression_ratio(nn.Sequential(tower)) == 8 / 4
    with pytest.raises(InputError, match=r"Tower module Identity lacks in_features or out_features \(.*\). Set both"):
        compression_ratio(EmbeddingTower(tower.embedding, nn.Identity()))
