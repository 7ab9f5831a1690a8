"""Gradients clipped by the norm over all towers: as in the unsharded module, the same on every rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt import InputError, ReplicaSync, TowerCollectionSharder, TowerMesh, TowerShardingPlanner, TowerTopology
from dmt.hot_rows.copies import HotCopies
from dmt.hot_rows.runtime import HotRows
from dmt.sptt import towers
from dmt.sptt.towers import ShardedTowerCollection, clip_grad_norm
from dmt.testing import load_plain_state
from tests.parity import loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import Case, build, shard

NUM_TOWERS, ROWS, BATCH = 3, 10, 4
FEATURES = [f"f{i}" for i in range(NUM_TOWERS)]


class Project(nn.Module):
    """A tower module of another size, and with other gradients, in every tower."""

    def __init__(self, feature: str, outputs: int) -> None:
        super().__init__()
        self.feature, self.project = feature, nn.Linear(8, outputs)

    def forward(self, embeddings: Any) -> torch.Tensor:
        return self.project(embeddings[self.feature]) * (1 + 10 * self.project.out_features)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        towers = []
        for i, name in enumerate(FEATURES):
            table = EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=8, feature_names=[name])
            towers.append(EmbeddingTower(EmbeddingBagCollection(tables=[table]), Project(name, i + 1)))
        self.sparse_arch = EmbeddingTowerCollection(towers)
        self.over_arch = nn.Linear(sum(range(1, NUM_TOWERS + 1)), 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over_arch(self.sparse_arch(ids)).square().mean()


def batch(rank: int) -> KeyedJaggedTensor:
    ids = torch.randint(0, ROWS, (NUM_TOWERS * BATCH,), generator=torch.Generator().manual_seed(rank))
    return KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones_like(ids))


def plain() -> Model:
    torch.manual_seed(0)
    return Model()


def clipped(rank: int, sizes: dict[str, Any], max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = TowerMesh(TowerTopology(**sizes))
    # Three towers on one, two or three hosts.
    placement = [min(i, mesh.topology.num_towers - 1) for i in range(NUM_TOWERS)]
    sharders = [TowerCollectionSharder(mesh, placement=placement)]
    plan = TowerShardingPlanner(mesh.topology).plan(plain(), sharders)
    model = DistributedModelParallel(plain(), device=torch.device("cpu"), plan=plan, sharders=sharders)
    load_plain_state(model, plain().state_dict())
    ReplicaSync(model, mesh)
    model(batch(rank)).backward()
    norm = clip_grad_norm(model, max_norm)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if "embedding" not in name}
    return float(norm), grads


def expected(world_size: int, max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    model = plain()
    torch.stack([model(batch(rank)) for rank in range(world_size)]).mean().backward()
    trained = {name: p for name, p in model.named_parameters() if "embedding" not in name}
    norm = clip_grad_norm_(trained.values(), max_norm)
    return float(norm), {name: p.grad for name, p in trained.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_towers": 3, "ranks_per_tower": 1},
        {"num_towers": 2, "ranks_per_tower": 2},
        {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2},
    ],
    ids=["3x1", "2x2", "replicas"],
)
def test_gradients_are_clipped_as_in_one_process(sizes: dict[str, Any], max_norm: float) -> None:
    world_size = TowerTopology(**sizes).world_size
    norm, grads = expected(world_size, max_norm)
    assert (norm > max_norm) == (max_norm == 0.5)
    found = run_ranks(clipped, world_size, sizes, max_norm)
    assert len({of_rank for of_rank, _ in found}) == 1  # to the bit, or copies would drift apart
    seen = set()
    for of_rank, own in found:
        # Gradients are means over ranks, added in another order: some units in the last place.
        assert of_rank == pytest.approx(norm, rel=1e-5)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, grads[name], rtol=1e-5, atol=1e-6)
            seen.add(name)
    assert seen == set(grads)


def test_a_norm_that_is_not_above_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"max_norm=0\.0 must be above 0"):
        clip_grad_norm(nn.Linear(1, 1), 0.0)


def test_towers_on_several_meshes_are_refused() -> None:
    parts = nn.ModuleList()
    for _ in range(2):
        part = ShardedTowerCollection.__new__(ShardedTowerCollection)
        nn.Module.__init__(part)
        part.mesh = object()  # type: ignore[assignment]
        parts.append(part)
    with pytest.raises(InputError, match="towers on several meshes"):
        clip_grad_norm(parts, 1.0)


def test_a_rank_without_dense_gradients_adds_up_on_its_device() -> None:
    assert towers._square([], torch.device("meta")).device.type == "meta"


def copies_stay_on_rank(rank: int) -> bool:
    """Clipping reads no table, so it does not bring tables up to date with the copies of their hot rows."""
    case = Case(towers=2, ranks=1, kind="flat")
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    model = shard(case, build(case), mesh)
    hot = HotRows(model, mesh, refresh_every=None)
    hot.replicate({"t0": [1, 2]})
    ids, labels = case.batches().draw(rank, 0, make_tables(list(case.dims)))
    loss_of(model(ids)[1], labels).backward()
    with patch.object(HotCopies, "write_back", side_effect=AssertionError("tables were read")):
        return bool(clip_grad_norm(model, 1e-3) > 0)


@pytest.mark.ranks
def test_clipping_brings_no_table_up_to_date() -> None:
    assert all(run_ranks(copies_stay_on_rank, 2))
