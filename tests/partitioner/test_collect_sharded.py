"""`FeatureAffinity.collect` over gloo ranks: equal to one process on the union of the data, and nobody left waiting.

Tolerance of the matrix: column-wise and table-wise lookups are bitwise the plain model's, row-wise ones sum in another
order; cosines then differ by float32 rounding, 6e-8 of numbers up to 1. Sums over ranks are float64.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.streamable import Pipelineable

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.partitioner import FeatureAffinity
from dmt.testing import load_plain_state
from tests.partitioner.planted import FlatModel, batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
NAMES = ["a", "b", "c", "d", "e"]
DIM = 8
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}


def tables(**more: Any) -> list[EmbeddingBagConfig]:
    """One table per feature except for ``b`` and ``c``, which share one; rows differ."""
    groups = [["a"], ["b", "c"], ["d"], ["e"]]
    widths = more.pop("widths", [DIM] * 4)
    return [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=20 + i, embedding_dim=widths[i], feature_names=names, **more)
        for i, names in enumerate(groups)
    ]


def plain(**more: Any) -> FlatModel:
    torch.manual_seed(3)
    weighted = more.pop("is_weighted", False)
    return FlatModel(EmbeddingBagCollection(tables=tables(**more), is_weighted=weighted))


def batches_of(rank: int, count: int = 3, *, weighted: bool = False) -> list[SimpleNamespace]:
    """Bags of 0 to 3 ids, batches of unequal size, features in another order than the tables."""
    generator = torch.Generator().manual_seed(rank)
    made = [batch(NAMES[::-1], 4 + rank + i, generator=generator, least=0, most=3) for i in range(count)]
    for one in made if weighted else []:
        ids = one.sparse_features
        weights = torch.rand(len(ids.values()), generator=generator)
        one.sparse_features = KeyedJaggedTensor(ids.keys(), ids.values(), weights=weights, lengths=ids.lengths())
    return made


def shard(model: nn.Module, kind: str, **sharder_arguments: Any) -> DistributedModelParallel:
    ebc = model.sparse_arch["ebc_0"]
    makers = {
        "table_wise": [table_wise(rank=rank) for rank in (3, 0, 2, 1)],
        "column_wise": [column_wise(ranks=[0, 1]), column_wise(ranks=[3, 2]), table_wise(rank=1), table_wise(rank=0)],
        "row_wise": [row_wise()] * 4,
        "data_parallel": [data_parallel(), table_wise(rank=1), data_parallel(), table_wise(rank=0)],
        "mixed": [row_wise(), column_wise(ranks=[2, 1]), data_parallel(), table_wise(rank=3)],
    }[kind]
    sharder = EmbeddingBagCollectionSharder(fused_params=FUSED)
    plan = construct_module_sharding_plan(
        ebc,
        {f"t{i}": make for i, make in enumerate(makers)},
        sharder=sharder,
        local_size=4,
        world_size=4,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"sparse_arch.ebc_0": plan}), sharders=[sharder]
    )


def shard_sptt(model: nn.Module) -> DistributedModelParallel:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    # Towers in another order than the tables.
    sharders = [SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["e", "b", "c"], ["d", "a"]]))]
    plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sharded_copy(kind: str, source: FlatModel, **more: Any) -> DistributedModelParallel:
    model = shard_sptt(plain(**more)) if kind == "sptt" else shard(plain(**more), kind)
    load_plain_state(model, source.state_dict())
    return model


CASES: dict[str, dict[str, Any]] = {
    "table_wise": {},
    "column_wise": {},
    "row_wise": {},
    "data_parallel": {},
    "mixed": {},
    "sptt": {},
    "weighted": {"kind": "column_wise", "is_weighted": True},
    "mean": {"kind": "row_wise", "pooling": PoolingType.MEAN},
    "widths": {"kind": "sptt", "widths": [DIM, DIM, 2 * DIM, DIM]},
}


def case_on_rank(rank: int, name: str) -> tuple[FeatureAffinity, bool]:
    arguments = dict(CASES[name])
    kind = arguments.pop("kind", name)
    source = plain(**arguments)
    with torch.no_grad():
        for weight in source.parameters():
            weight.add_(0.1)  # not what any initialisation gives
    model = sharded_copy(kind, source, **arguments)
    before = _state(model)
    model.train()
    model.module.dropout.eval()
    modes = [part.training for part in model.modules()]
    weighted = bool(arguments.get("is_weighted"))
    found = FeatureAffinity.collect(model, iter(batches_of(rank, weighted=weighted)), process_group=world())
    untouched = (
        modes == [part.training for part in model.modules()]
        and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        and all(torch.equal(value, before[key]) for key, value in _state(model).items())
    )
    return found, untouched


def _state(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Local weights and the state of the fused optimizers."""
    state = {f"optimizer {key}": value for key, value in _flat(model.fused_optimizer.state_dict()).items()}
    return state | {key: _local(value) for key, value in model.state_dict().items()}


def _local(value: Any) -> torch.Tensor:
    shards = value.local_shards() if hasattr(value, "local_shards") else None
    return (
        value.detach().clone() if shards is None else torch.cat([s.tensor.flatten() for s in shards] or [torch.ones(0)])
    )


def _flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, dict):
        return {k: v for key, inner in state.items() for k, v in _flat(inner, f"{path}.{key}").items()}
    return {path: _local(state)} if isinstance(state, torch.Tensor) or hasattr(state, "local_shards") else {}


def cases_on_rank(rank: int) -> dict[str, tuple[FeatureAffinity, bool]]:
    return {name: case_on_rank(rank, name) for name in CASES}


@pytest.fixture(scope="module")
def of_cases() -> list[dict[str, tuple[FeatureAffinity, bool]]]:
    return run_ranks(cases_on_rank, 4)


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_one_process_on_all_the_data(of_cases: list[dict[str, Any]], name: str) -> None:
    arguments = {key: value for key, value in CASES[name].items() if key != "kind"}
    model = plain(**arguments)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    weighted = bool(arguments.get("is_weighted"))
    wanted = FeatureAffinity.collect(model, [one for rank in range(4) for one in batches_of(rank, weighted=weighted)])
    for result in of_cases:
        found, untouched = result[name]
        assert untouched, "the model is not as it was"
        assert found.features == wanted.features == tuple(NAMES)
        assert found.num_samples == wanted.num_samples == 78
        np.testing.assert_allclose(found.matrix, wanted.matrix, rtol=0, atol=1e-6)
        assert found.tables == wanted.tables
        assert [table.name for table in found.tables] == ["t0", "t1", "t2", "t3"]
        np.testing.assert_allclose(found.pooling_factors, wanted.pooling_factors, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(found.matrix, of_cases[0][name][0].matrix)


class Forgetful(FlatModel):
    """Fails before the lookup on the first sample of which it dislikes the dense feature."""

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        if bool((dense_features < 0).any()):
            raise RuntimeError("no negative numbers")
        return super().forward(dense_features, sparse_features)


def message_of(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def broken(rank: int) -> dict[str, str]:
    """What each rank raises where only one of them is at fault."""
    messages = {}
    model = shard(plain(), "table_wise")
    load_plain_state(model, plain().state_dict())

    def collect(batches: Any, model: nn.Module = model, **more: Any) -> FeatureAffinity:
        return FeatureAffinity.collect(model, batches, **({"process_group": world()} | more))

    mine = batches_of(rank)
    # Features are absent from rank 1's second batch.
    lacking = [mine[0], batch(NAMES[:3] if rank == 1 else NAMES[::-1], 4, generator=torch.Generator().manual_seed(1))]
    messages["lacking"] = message_of(lambda: collect(lacking))
    # The first batch decides on the order of keys.
    turned = [mine[0], batch(NAMES if rank == 2 else NAMES[::-1], 4, generator=torch.Generator().manual_seed(1))]
    messages["turned"] = message_of(lambda: collect(turned))
    messages["iterator"] = message_of(
        lambda: collect(one if rank != 3 or i < 1 else 1 / 0 for i, one in enumerate(mine))
    )
    messages["not a batch"] = message_of(lambda: collect([mine[0], "x" if rank == 0 else mine[1], mine[2]]))
    messages["nobody"] = message_of(lambda: collect([] if rank == 2 else mine))
    messages["path"] = message_of(lambda: collect(mine, module_path="dropout" if rank == 1 else None))

    def twice(model: nn.Module, one: Any) -> None:
        for _ in range(2 if rank == 1 and one is mine[1] else 1):
            model(one.dense_features, one.sparse_features)

    messages["twice"] = message_of(lambda: collect(mine, forward=twice))

    def fussy(model: nn.Module, one: Any) -> None:
        if rank == 2:
            raise RuntimeError("no such column")
        model(one.dense_features, one.sparse_features)

    messages["forward"] = message_of(lambda: collect(mine, forward=fussy))
    weighted = batches_of(rank, weighted=rank == 1)
    messages["weights"] = message_of(lambda: collect(weighted))
    # The last rank's last batch is bad: the others have asked for the next one already.
    with torch.no_grad():
        for key, value in model.state_dict().items():
            for s in value.local_shards() if key.endswith("t1.weight") else []:
                s.tensor[5] = float("nan")
    some = [one if rank != 3 or i < 2 else _with_id(one, 5) for i, one in enumerate(_without_id(mine, 5))]
    messages["nan"] = message_of(lambda: collect(some))
    messages["no group"] = message_of(lambda: collect(mine, process_group=None))
    other = dist.new_group([0, 1])
    messages["not in the group"] = message_of(lambda: collect(mine, process_group=other) if rank > 1 else None)
    messages["nothing wrong"] = message_of(lambda: collect(_without_id(mine, 5)))
    return messages


class _Batch(Pipelineable):
    """A batch as TorchRec's pipelines take it."""

    def __init__(self, one: SimpleNamespace) -> None:
        self.dense_features, self.sparse_features = one.dense_features, one.sparse_features

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class _Task(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, one: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(one.dense_features, one.sparse_features)
        return out.mean(), out


def of_a_pipeline() -> tuple[str, int | None]:
    """What is said while the model is attached to a train pipeline, and the samples collected once it is not."""
    task = shard_two(_Task(plain()), "model.sparse_arch.ebc_0")
    load_plain_state(task, _Task(plain()).state_dict())
    mine = [_Batch(one) for one in batches_of(0)]

    def collect() -> FeatureAffinity:
        return FeatureAffinity.collect(task, mine, forward=lambda model, one: model(one), process_group=world())

    optimizer = torch.optim.SGD([torch.zeros(1)])
    pipeline = TrainPipelineSparseDist(task, optimizer, torch.device("cpu"), execute_all_batches=True)
    task.eval()
    with torch.no_grad():
        pipeline.progress(iter(mine[:2]))
    message = message_of(collect)
    pipeline.detach()
    return message, collect().num_samples


def _without_id(batches: list[SimpleNamespace], number: int) -> list[SimpleNamespace]:
    return [_map_ids(one, lambda ids: torch.where(ids == number, number + 1, ids)) for one in batches]


def _with_id(one: SimpleNamespace, number: int) -> SimpleNamespace:
    return _map_ids(one, lambda ids: torch.full_like(ids, number))


def _map_ids(one: SimpleNamespace, change: Any) -> SimpleNamespace:
    ids = one.sparse_features
    changed = KeyedJaggedTensor(ids.keys(), change(ids.values()), lengths=ids.lengths())
    return SimpleNamespace(dense_features=one.dense_features, sparse_features=changed)


# Who is at fault, and what that rank says; the others say that this rank failed.
FAULTS = {
    "lacking": (
        1,
        r"batch 1 lacks feature 'd' of EmbeddingBagCollection 'sparse_arch\.ebc_0' \(2 missing, 3 present\)",
    ),
    "turned": (2, "batch 1 gives .*'sparse_arch.ebc_0' its features in another order than earlier ones"),
    "iterator": (3, "ZeroDivisionError: division by zero"),
    "not a batch": (0, "a batch is a str without dense_features"),
    "path": (1, "no EmbeddingBagCollection at module_path='dropout'"),
    "twice": (1, r"'sparse_arch\.ebc_0' ran twice in one forward"),
    "forward": (2, "RuntimeError: no such column"),
    "nan": (3, "feature '[bc]' is not finite in batch 2"),
}
# What every rank says of itself.
REFUSALS = {
    "nobody": "batches gave no sample; give every rank",
    "weights": r"at the lookup of 'sparse_arch.ebc_0' in batch 0, ranks \[1\] differ from the first",
    "no group": "'sparse_arch.ebc_0' is a ShardedEmbeddingBagCollection, whose tables are spread .* process_group=",
}


@pytest.fixture(scope="module")
def of_faults() -> list[dict[str, str]]:
    return run_ranks(broken, 4)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank_is_raised_on_all(of_faults: list[dict[str, str]], name: str) -> None:
    culprit, words = FAULTS[name]
    for rank, messages in enumerate(of_faults):
        assert re.search(words, messages[name]), messages[name]
        if rank != culprit:
            assert messages[name].startswith(f"InputError: Rank {culprit} failed: ")
        assert "Rank" not in of_faults[culprit][name]


@pytest.mark.parametrize("name", REFUSALS)
def test_what_all_ranks_refuse(of_faults: list[dict[str, str]], name: str) -> None:
    for messages in of_faults:
        assert re.search(f"^InputError: .*{REFUSALS[name]}", messages[name]), messages[name]


def test_a_group_without_this_rank_is_refused_and_a_detached_model_is_fine(of_faults: list[dict[str, str]]) -> None:
    assert ["is no group of this rank" in messages["not in the group"] for messages in of_faults] == [False] * 2 + [
        True
    ] * 2
    assert {messages["nothing wrong"] for messages in of_faults} == {"nothing"}


class FirstOf(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, embeddings: Any) -> torch.Tensor:
        return embeddings[self.name]


class TwoParts(nn.Module):
    """Towers beside a flat collection."""

    def __init__(self) -> None:
        super().__init__()
        ebcs = [EmbeddingBagCollection(tables=part) for part in (tables()[:2], tables()[2:])]
        self.towers = EmbeddingTowerCollection(
            [EmbeddingTower(ebcs[0], FirstOf("a")), EmbeddingTower(ebcs[1], FirstOf("d"))]
        )
        self.flat = EmbeddingBagCollection(tables=tables())

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        return self.towers(sparse_features).sum() + self.flat(sparse_features).values().sum()


def others_on_rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Ranks with 1, 2 and 3 batches: two ranks, two batches of the second are left out.
    model = shard_two(plain())
    load_plain_state(model, plain().state_dict())
    uneven = FeatureAffinity.collect(model, iter(batches_of(rank, 1 + 2 * rank)), process_group=world())
    found["uneven"] = uneven
    # Replicated models, each rank with its own batches; in DDP, where its features are those of the plain model.
    wrapped = DistributedDataParallel(WithLayer(plain()), process_group=world())
    found["replicated"] = FeatureAffinity.collect(
        wrapped, batches_of(rank, 2), process_group=world(), module_path="flat.sparse_arch"
    )
    found["alone"] = FeatureAffinity.collect(wrapped, batches_of(rank, 2))
    # A batch without rows on one rank.
    empty = batch(NAMES[::-1], 0 if rank == 0 else 3, generator=torch.Generator().manual_seed(4))
    found["empty"] = FeatureAffinity.collect(model, [empty], process_group=world()).num_samples
    # Only batches without rows on one rank: a plain collection cannot run those, so it never learns its features.
    for name, bare in (("no rows on 0", 0), ("no rows on 1", 1)):
        mine = [batch(NAMES[::-1], 0, generator=torch.Generator())] * 2 if rank == bare else batches_of(rank, 2)
        found[name] = FeatureAffinity.collect(plain(), mine, process_group=world())
    nobody = [batch(NAMES[::-1], 0, generator=torch.Generator())]
    found["no rows"] = message_of(lambda: FeatureAffinity.collect(plain(), nobody, process_group=world()))
    # A bare sharded collection, not in a DistributedModelParallel.
    found["bare"] = FeatureAffinity.collect(
        model.module.sparse_arch["ebc_0"],
        batches_of(rank, 1),
        forward=lambda model, one: model(one.sparse_features),
        process_group=world(),
    ).features
    # Replicas of unlike models.
    unlike = FlatModel(EmbeddingBagCollection(tables=tables()[: 4 - rank]))
    found["unlike"] = message_of(lambda: FeatureAffinity.collect(unlike, batches_of(rank), process_group=world()))

    found["pipeline"] = of_a_pipeline()

    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    both = TwoParts()
    sharders: list[Any] = [TowerCollectionSharder(mesh), EmbeddingBagCollectionSharder(fused_params=FUSED)]
    plan = TowerShardingPlanner(mesh.topology).plan(both, sharders)
    both_parallel = DistributedModelParallel(both, device=torch.device("cpu"), plan=plan, sharders=sharders)
    found["towers"] = message_of(
        lambda: FeatureAffinity.collect(both_parallel, batches_of(rank), process_group=world())
    )
    # The flat collection beside them can be asked for.
    found["beside"] = FeatureAffinity.collect(
        both_parallel, batches_of(rank, 1), process_group=world(), module_path="flat"
    ).features
    return found


class WithLayer(nn.Module):
    def __init__(self, flat: nn.Module) -> None:
        super().__init__()
        self.flat = flat
        self.norm = nn.BatchNorm1d(1)  # buffers, which DDP exchanges in forward

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        return self.flat(self.norm(dense_features), sparse_features)


def shard_two(model: nn.Module, path: str = "sparse_arch.ebc_0") -> DistributedModelParallel:
    sharder = EmbeddingBagCollectionSharder(fused_params=FUSED)
    ways = {f"t{i}": row_wise() if i % 2 else table_wise(rank=0) for i in range(4)}
    plan = construct_module_sharding_plan(
        model.get_submodule(path), ways, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world()),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
    )


@pytest.fixture(scope="module")
def of_others() -> list[dict[str, Any]]:
    return run_ranks(others_on_rank, 2)


def test_all_stop_when_the_first_rank_runs_out(of_others: list[dict[str, Any]]) -> None:
    wanted = FeatureAffinity.collect(plain(), [batches_of(0)[0], batches_of(1)[0]])
    for found in of_others:
        assert found["uneven"].num_samples == wanted.num_samples == 9
        np.testing.assert_allclose(found["uneven"].matrix, wanted.matrix, rtol=0, atol=1e-6)


def test_replicated_models_add_up_with_a_group_and_do_not_without(of_others: list[dict[str, Any]]) -> None:
    wanted = FeatureAffinity.collect(plain(), batches_of(0, 2) + batches_of(1, 2))
    for rank, found in enumerate(of_others):
        np.testing.assert_allclose(found["replicated"].matrix, wanted.matrix, rtol=0, atol=1e-12)
        assert found["replicated"].num_samples == wanted.num_samples
        own = FeatureAffinity.collect(plain(), batches_of(rank, 2))
        np.testing.assert_allclose(found["alone"].matrix, own.matrix, rtol=0, atol=1e-12)


def test_other_shapes_of_models_and_batches(of_others: list[dict[str, Any]]) -> None:
    for found in of_others:
        assert found["empty"] == 3
        assert found["bare"] == found["beside"] == tuple(NAMES)
        assert "ranks [1] looked up other features than the first rank, see 'e'" in found["unlike"]


@pytest.mark.parametrize("bare", [0, 1])
def test_a_rank_whose_batches_have_no_rows_adds_nothing(of_others: list[dict[str, Any]], bare: int) -> None:
    wanted = FeatureAffinity.collect(plain(), batches_of(1 - bare, 2))
    for results in of_others:
        found = results[f"no rows on {bare}"]
        np.testing.assert_allclose(found.matrix, wanted.matrix, rtol=0, atol=1e-12)
        assert (found.features, found.num_samples) == (wanted.features, wanted.num_samples)
        assert (found.tables, found.pooling_factors) == (wanted.tables, wanted.pooling_factors)
        assert results["no rows"].startswith("InputError: FeatureAffinity.collect: batches gave no sample; give")


def test_sharded_towers_are_refused_by_name(of_others: list[dict[str, Any]]) -> None:
    expected = r"^InputError: .*'towers' is a ShardedTowerCollection\..* Collect on a flat model, or load"
    for found in of_others:
        assert re.search(expected, found["towers"]), found["towers"]


def test_a_model_in_a_train_pipeline_is_refused_until_it_is_detached(of_others: list[dict[str, Any]]) -> None:
    for found in of_others:
        message, num_samples = found["pipeline"]
        assert re.search(r"^InputError: .*attached to a train pipeline.* Call the pipeline's detach\(\)", message)
        assert num_samples == 2 * (4 + 5 + 6)
