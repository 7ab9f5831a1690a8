"""The flat dataflow in TorchRec's schemes: trains as the plain module does, loads any checkpoint, refuses the rest."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.errors import InputError
from dmt.sharding import planner
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state, load_plain_state
from dmt.testing.state import table_layout
from dmt.training import flat
from dmt.training.build import ClickTask, build_model, build_optimizer, fused_params, shard_model
from dmt.training.checkpoints.store import Checkpointer, restore
from dmt.training.commands.plans import run_plan
from dmt.training.config import TrainingConfig, load_config
from dmt.training.flat import FlatSequenceSharder, FlatSharder, plan_flat
from dmt.training.job import Job, open_job
from dmt.training.preflight import checked_model
from tests.parity import FUSED, FlatModel, draw_batch, make_tables
from tests.ranks import on_ranks, run_ranks
from tests.training.small import plain, small, source, train_on_union

# By hosts and ranks of a host: the scheme asked for, and those that TorchRec has for the six tables.
PLACES: dict[tuple[int, int], dict[str, set[str]]] = {
    (2, 2): {"data_parallel": {"data_parallel"}, "planner": set(), "column_wise": {"column_wise"}},
    (1, 3): {"row_wise": {"row_wise"}},
}
STEPS = 3


def config_of(hosts: int, ranks: int, scheme: str, **sections: Any) -> TrainingConfig:
    sharding = {"dataflow": "flat", "scheme": scheme} | sections.pop("sharding", {})
    synthetic = {"num_multi_hot": 2, "rows_per_table": 29} | sections.pop("synthetic", {})
    return small(
        "dlrm",
        "flat",
        model={"embedding_dim": 24},
        topology={"num_towers": hosts, "ranks_per_tower": ranks} | sections.pop("topology", {}),
        sharding=sharding,
        synthetic=synthetic,
        optimizer={"dense": "sgd", "dense_lr": 0.1},
        **sections,
    )


def train(config: TrainingConfig, into: TrainingConfig, mesh: TowerMesh, folder: Path) -> tuple[set[str], list[float]]:
    """Schemes; largest differences of weights: to the plain module, to the start, and of the loaded model after a step.

    What is trained is loaded into the layout of ``into``, as it was; one more step, which moments decide, goes alike.
    """
    job, world = open_job(config), mesh.topology.world_size
    model = shard_model(job, mesh)
    torch.manual_seed(5)
    oracle = plain(config)
    start = {name: value.detach().clone() for name, value in oracle.state_dict().items()}
    load_plain_state(model, start)
    optimizer = build_optimizer(config.optimizer, model)
    batches = source(config).batches("train", rank=mesh.rank, world_size=world, batch_size=16, lanes=world)
    for batch in itertools.islice(batches, STEPS):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    after, layout = gather_plain_state(model), table_layout(model)
    wanted = train_on_union(config, oracle, STEPS, layout) if mesh.rank == 0 else after
    assert Checkpointer(folder, mesh).save(model, optimizer, step=STEPS, progress={})
    loaded, loaded_optimizer = load(folder, into, mesh)
    assert distance(after, gather_plain_state(loaded)) == 0
    batch = next(batches)
    for stepping, its_optimizer in ((model, optimizer), (loaded, loaded_optimizer)):
        its_optimizer.zero_grad()
        stepping(batch)[0].backward()
        its_optimizer.step()
    schemes = schemes_of(model.plan)
    stepped, reloaded = gather_plain_state(model), gather_plain_state(loaded)
    assert distance(after, stepped) > 1e-3
    return set(schemes.values()), [distance(after, wanted), distance(start, wanted), distance(stepped, reloaded)]


def schemes_of(plan: ShardingPlan) -> dict[str, str]:
    """The scheme of every table of a plan."""
    modules: list[Any] = list(plan.plan.values())
    return {name: placed.sharding_type for module in modules for name, placed in module.items()}


def load(folder: Path, config: TrainingConfig, mesh: TowerMesh) -> tuple[DistributedModelParallel, Any]:
    model = shard_model(open_job(config), mesh)
    restore(folder, model, (optimizer := build_optimizer(config.optimizer, model)), mesh=mesh)
    return model, optimizer


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours if "embedding_bags" in name)


def train_on_rank(rank: int, hosts: int, ranks: int, schemes: list[str], folder: str) -> dict[str, Any]:
    configs = [config_of(hosts, ranks, scheme) for scheme in [*schemes, "table_wise"]]
    mesh = TowerMesh(configs[0].topology.build())
    # Each checkpoint into the layout of the next.
    return {
        scheme: train(config, into, mesh, Path(folder, scheme))
        for scheme, (config, into) in zip(schemes, itertools.pairwise(configs), strict=True)
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("hosts", "ranks"), PLACES)
def test_every_scheme_trains_as_the_plain_module_and_loads_into_another(hosts: int, ranks: int, tmp_path: Path) -> None:
    """To rounding: sums of bags and of gradients are added in another order, which AdaGrad's first steps enlarge."""
    expected = PLACES[hosts, ranks]
    found = run_ranks(train_on_rank, hosts * ranks, hosts, ranks, list(expected), str(tmp_path))[0]
    for scheme, (schemes, (trained, moved, reloaded)) in found.items():
        assert schemes == (expected[scheme] or schemes), scheme
        assert moved > 0.05
        assert max(trained, reloaded) < 2e-5, scheme


@on_ranks(4)
def test_means_over_bags_of_unequal_batches_are_those_of_the_plain_module(rank: int) -> None:
    mesh = TowerMesh(config_of(2, 2, "auto").topology.build())
    tables = make_tables([8, 8, 8], pooling="MEAN")
    torch.manual_seed(0)
    plain, model = FlatModel(tables, weighted=False), FlatModel(tables, weighted=False)
    sharder = FlatSharder(mesh, fused_params=FUSED)
    schemes = {"t0": row_wise(), "t1": row_wise(), "t2": table_wise(rank=2)}
    path, collection = next((n, m) for n, m in model.named_modules() if isinstance(m, EmbeddingBagCollection))
    plan = construct_module_sharding_plan(collection, schemes, sharder, 2, 4, device_type="cpu")
    for own in plan.values():
        own.compute_kernel = "fused"
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )
    load_plain_state(sharded, plain.state_dict())
    # Batches of unequal sizes.
    everyone = [draw_batch(r, 0, tables, size, max_bag=4) for r, size in enumerate((5, 2, 1, 7))]
    ours, theirs = (found[0].values() for found in (sharded(everyone[rank][0]), plain(everyone[rank][0])))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.sum().backward()
    torch.stack([plain(ids)[0].values().sum() for ids, _ in everyone]).mean().backward()
    after = gather_plain_state(sharded)
    for name, weight in plain.named_parameters():
        if "embedding_bags" in name:  # the first step of row-wise AdaGrad
            step = weight.grad / (weight.grad.square().mean(dim=1, keepdim=True).sqrt() + FUSED["eps"])
            torch.testing.assert_close(after[name], weight - FUSED["learning_rate"] * step, rtol=0, atol=1e-5)
    # In FP16 the means stay FP16, although lengths are divided by in FP32.
    halves = EmbeddingBagCollection(tables=[replace(table, data_type=DataType.FP16) for table in tables])
    sharder = FlatSharder(mesh, fused_params=FUSED | {"output_dtype": SparseType.FP16})
    means = sharder.shard(halves, plan, None, torch.device("cpu"))(everyone[rank][0]).wait().values()
    # Weights are drawn below 1. Ranks without the table-wise table would take its FP16 for FP32.
    assert (means.dtype, bool((means.abs() <= 1).all())) == (torch.float16, True)
    # So would they that of sequences.
    item = EmbeddingConfig(name="t2", num_embeddings=9, embedding_dim=8, feature_names=["f2"], data_type=DataType.FP16)
    items = EmbeddingCollection(tables=[item])
    of_sequences = FlatSequenceSharder(mesh, fused_params=FUSED | {"output_dtype": SparseType.FP16})
    one_rank = construct_module_sharding_plan(items, {"t2": table_wise(rank=2)}, of_sequences, 2, 4, device_type="cpu")
    one_rank["t2"].compute_kernel = "fused"
    ids = KeyedJaggedTensor(["f2"], torch.arange(rank, rank + 3), lengths=torch.tensor([1, 2]))
    sequences = of_sequences.shard(items, one_rank, None, torch.device("cpu"))(ids).wait()["f2"].values()
    assert (sequences.dtype, bool((sequences.abs() <= 1).all())) == (torch.float16, True)


def planned(config: TrainingConfig) -> ShardingPlan:
    job = open_job(config)
    return plan_flat(job, ClickTask(build_model(job, device="meta")), fused_params(config.optimizer))


@pytest.mark.parametrize(
    ("scheme", "sections"),
    [
        # With 3 rows, a rank of 4 would have none. Gradients of FP16 tables would be FP16.
        ("row_wise", {"synthetic": {"rows_per_table": 3}}),
        ("data_parallel", {"sharding": {"table_precision": "fp16"}}),
    ],
)
def test_tables_that_cannot_have_the_scheme_stay_whole(scheme: str, sections: dict[str, Any], caplog: Any) -> None:
    schemes = schemes_of(planned(config_of(2, 2, scheme, **sections)))
    assert (len(schemes), set(schemes.values())) == (6, {"table_wise"})
    assert caplog.records == []  # none of TorchRec's warnings


def test_a_table_in_one_column_shard_is_called_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec chooses among equal costs by the order of a set of names, which differs by process."""

    def by_columns(*args: Any, constraints: dict[str, Any], **given: Any) -> ShardingPlan:
        columns = {name: replace(one, sharding_types=["column_wise"]) for name, one in constraints.items()}
        return planner.plan_by_torchrec(*args, constraints=columns, **given)

    monkeypatch.setattr(flat, "plan_by_torchrec", by_columns)
    assert set(schemes_of(planned(config_of(2, 2, "auto"))).values()) == {"table_wise"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_torchrec_cannot_place_is_told_before_training(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "device_type", device)
    assert planned(config_of(2, 2, "planner", sharding={"memory_gib": 1.0})).plan
    config = config_of(2, 2, "planner", sharding={"memory_gib": 1e-6})
    with pytest.raises(InputError, match=r"TorchRec's planner cannot place the tables .* with 1\.07 kB of free memory"):
        planned(config)
    config = config_of(2, 2, "planner", sharding={"pooling_factors": {"C9": 2.0}})
    with pytest.raises(InputError, match=r"pooling_factors names the feature 'C9'"):
        planned(config)


def test_torchrecs_planner_soon_stops_at_the_plan_of_all_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, greedy, feedback = list[Any](), planner.GreedyProposer, planner.GreedyProposer.feedback
    monkeypatch.setattr(greedy, "feedback", lambda *args, **given: trials.append(given) or feedback(*args, **given))
    config = config_of(2, 2, "planner", synthetic={"num_features": 60})
    plan, tried = planned(config), len(trials)
    monkeypatch.setattr(planner, "GreedyProposer", lambda use_depth, threshold: greedy(use_depth))
    assert str(planned(config)) == str(plan)
    assert tried < 300 < len(trials) - tried


def test_dmt_plan_shows_a_flat_model_on_the_ranks_of_a_replica(tmp_path: Path) -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=4", "topology.num_replicas=2"]
    overrides = ["model.arch=dlrm", "sharding.scheme=table_wise", *shape, "train.batch_size=100"]
    found = run_plan("demo", [*overrides, "replicas.sync_every=5", "train.device=cuda"])
    placed = [table["placement"] for table in found.record["tables"]]
    assert {(placement["scheme"], len(placement["ranks"])) for placement in placed} == {("table_wise", 1)}
    counts = [sum(placement["ranks"] == (rank,) for placement in placed) for rank in range(8)]
    # Embeddings and gradients of the 800 samples of a replica; half of an exchange of two, every five steps.
    table, looked_up = 1000 * (32 + 1) * 4, 800 * 32 * 4 * 2
    ranks = found.record["ranks"]
    assert [rank["memory"] for rank in ranks] == [count * table for count in counts]
    assert [rank["activations"] for rank in ranks] == [count * looked_up for count in counts]
    assert [rank["averaged_bytes"] for rank in ranks] == [count * table / 5 for count in counts]
    job = open_job(load_config("demo", overrides))
    with pytest.raises(InputError, match=r"num_replicas=2 needs the tower dataflow, but this run is flat"):
        checked_model(job)
    (tmp_path / "t.json").write_text(
        '[{"name": "t", "num_embeddings": 9, "embedding_dim": 8, "feature_names": ["f", "g"]}]'
    )
    (alone,) = run_plan("demo", [*overrides, f"data.tables={tmp_path / 't.json'}"]).record["tables"]
    assert (alone["name"], alone["memory"]) == ("t", 9 * 9 * 4)
