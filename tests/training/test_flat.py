"""The flat dataflow in TorchRec's schemes: trains as the plain module does, loads any checkpoint, refuses the rest."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state, load_plain_state
from dmt.testing.plain import PlainTraining
from dmt.testing.state import table_layout
from dmt.training.build import build_optimizer, flat_tables, fused_params, shard_model
from dmt.training.checkpoints import Checkpointer, restore
from dmt.training.commands.plans import run_plan
from dmt.training.config import TrainingConfig
from dmt.training.flat import FlatSharder, table_shardings
from dmt.training.job import Job, open_job
from dmt.training.preflight import resolve
from dmt.training.train import train_job
from tests.parity import FUSED, Batches, FlatModel, make_tables
from tests.ranks import run_ranks
from tests.training.small import plain, small, source

# Hosts, ranks of a host, the scheme asked for, and those that TorchRec has for the six tables. `make test` has each
# scheme once, and each kind of place: hosts of one rank, one host, as many hosts as ranks of a host, and more.
DAILY = [
    (2, 2, "data_parallel", {"data_parallel"}),
    (2, 2, "planner", set()),
    (4, 1, "table_row_wise", {"table_row_wise"}),
    (3, 2, "grid", {"grid_shard"}),
    (1, 3, "row_wise", {"row_wise"}),
]
PLACES = [(2, 2), (4, 1), (3, 2), (1, 3)]
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
    training = PlainTraining(
        [oracle],
        fused_params=fused_params(config.optimizer),
        make_optimizer=lambda dense: torch.optim.SGD(dense.values(), lr=config.optimizer.dense_lr),
        layout=table_layout(model),
    )
    load_plain_state(model, start)
    optimizer = build_optimizer(config.optimizer, model)
    streams = [source(config).batches("train", rank=r, world_size=world, batch_size=16) for r in range(world)]
    for batches in itertools.islice(zip(*streams, strict=True), STEPS):
        optimizer.zero_grad()
        model(batches[mesh.rank])[0].backward()
        optimizer.step()
        if mesh.rank == 0:
            oracle.zero_grad()
            torch.stack([oracle(batch)[0] for batch in batches]).mean().backward()
            training.step()
    after, wanted = gather_plain_state(model), oracle.state_dict()
    assert Checkpointer(folder, mesh).save(model, optimizer, step=STEPS, progress={})
    # Where columns are cut in another way, one moment of a row becomes several, or the reverse.
    cuts_columns = "grid" in (config.sharding.scheme, into.sharding.scheme)
    loaded = [load(folder, layout, mesh) for layout in ([into, config] if cuts_columns else [into])]
    for again, _ in loaded:
        assert distance(after, gather_plain_state(again)) == 0
    batch = next(itertools.islice(streams[mesh.rank], 1))
    for own, of_own in ((model, optimizer), loaded[-1]):
        of_own.zero_grad()
        own(batch)[0].backward()
        of_own.step()
    schemes = {own.sharding_type for module in model.plan.plan.values() for own in module.values()}
    stepped, reloaded = gather_plain_state(model), gather_plain_state(loaded[-1][0])
    assert distance(after, stepped) > 1e-3
    return schemes, [distance(after, wanted), distance(start, wanted), distance(stepped, reloaded)]


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


def check_schemes(hosts: int, ranks: int, expected: dict[str, set[str]], folder: Path) -> None:
    found = run_ranks(train_on_rank, hosts * ranks, hosts, ranks, list(expected), str(folder))[0]
    for scheme, (schemes, (trained, moved, reloaded)) in found.items():
        assert schemes == (expected[scheme] or schemes), scheme
        assert moved > 0.05
        assert trained < 2e-5, scheme
        assert reloaded < 2e-5, scheme


@pytest.mark.ranks
@pytest.mark.parametrize(("hosts", "ranks"), PLACES)
def test_every_scheme_trains_as_the_plain_module_and_loads_into_another(hosts: int, ranks: int, tmp_path: Path) -> None:
    """To rounding: sums of bags and of gradients are added in another order, which AdaGrad's first steps enlarge."""
    check_schemes(hosts, ranks, {scheme: names for h, r, scheme, names in DAILY if (h, r) == (hosts, ranks)}, tmp_path)


def mean_on_rank(rank: int) -> None:
    mesh = TowerMesh(config_of(2, 2, "auto").topology.build())
    tables = make_tables([8, 8, 8], pooling="MEAN")
    torch.manual_seed(0)
    plain, model = FlatModel(tables, weighted=False), FlatModel(tables, weighted=False)
    sharder = FlatSharder(mesh, fused_params=FUSED)
    schemes = {"t0": table_row_wise(host_index=1), "t1": row_wise(), "t2": table_wise(rank=2)}
    path, collection = next((n, m) for n, m in model.named_modules() if isinstance(m, EmbeddingBagCollection))
    plan = construct_module_sharding_plan(collection, schemes, sharder, 2, 4, device_type="cpu")
    for own in plan.values():
        own.compute_kernel = "fused"
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )
    load_plain_state(sharded, plain.state_dict())
    # Batches of unequal sizes.
    everyone = [Batches(sizes=(5, 2, 1, 7), max_bag=4).draw(r, 0, tables) for r in range(4)]
    ours, theirs = (found[0].values() for found in (sharded(everyone[rank][0]), plain(everyone[rank][0])))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.sum().backward()
    torch.stack([plain(ids)[0].values().sum() for ids, _ in everyone]).mean().backward()
    after = gather_plain_state(sharded)
    for name, weight in plain.named_parameters():
        if "embedding_bags" in name:  # the first step of row-wise AdaGrad
            step = weight.grad / (weight.grad.square().mean(dim=1, keepdim=True).sqrt() + FUSED["eps"])
            torch.testing.assert_close(after[name], weight - FUSED["learning_rate"] * step, rtol=0, atol=1e-5)


@pytest.mark.ranks
def test_means_over_bags_of_unequal_batches_are_those_of_the_plain_module() -> None:
    run_ranks(mean_on_rank, 4)


@pytest.mark.parametrize(
    ("ranks", "scheme", "sections", "why"),
    [
        # With 3 rows, a rank of 4 would have none; with 4, one of 3. Gradients of FP16 tables would be FP16.
        (2, "row_wise", {"synthetic": {"rows_per_table": 3}}, r"cut for 4 ranks, its 3 rows would leave one without"),
        (3, "grid", {"synthetic": {"rows_per_table": 4}}, r"cut for 3 ranks, its 4 rows would leave one without"),
        (2, "data_parallel", {"sharding": {"table_precision": "fp16"}}, r"its weights are FP16, and gradients of"),
    ],
)
def test_tables_that_cannot_have_the_scheme_stay_whole_and_the_plan_says_so(
    ranks: int, scheme: str, sections: dict[str, Any], why: str
) -> None:
    plan, [note] = flat_tables(open_job(config_of(2, ranks, scheme, **sections)))
    schemes = {name: placed.sharding_type for name, placed in table_shardings(plan).items()}
    assert set(schemes.values()) == {"table_wise"}
    asked = "grid_shard" if scheme == "grid" else scheme
    assert re.search(rf"^6 tables are table_wise instead of {asked}: 't_C\d' \({why}.*\) and 3 more\.$", note)


@pytest.mark.ranks
def test_a_run_says_which_tables_stay_whole(tmp_path: Path) -> None:
    train = {"max_steps": 1, "output_dir": str(tmp_path)}
    config = config_of(3, 1, "row_wise", synthetic={"rows_per_table": 4}, train=train)
    run_ranks(said_on_rank, 3, config.model_dump(mode="json"))


def said_on_rank(rank: int, values: dict[str, Any]) -> None:
    config, said = TrainingConfig.model_validate(values), io.StringIO()
    with contextlib.redirect_stdout(said):
        result = train_job(resolve(config, 3), TowerMesh(config.topology.build()))
    assert ("# 6 tables are table_wise instead of row_wise" in said.getvalue()) is (rank == 0)
    assert result["sharding"]["notes"]


@pytest.mark.parametrize("scheme", ["table_row_wise", "grid", "planner"])
def test_schemes_of_torchrec_are_for_one_flat_copy(scheme: str) -> None:
    with pytest.raises(ValueError, match=rf"sharding\.scheme='{scheme}' is TorchRec's.*but this run has the tower"):
        small("dlrm", "sptt", sharding={"dataflow": "sptt", "scheme": scheme})
    with pytest.raises(ValueError, match=rf"sharding\.scheme='{scheme}' is TorchRec's.*but this run has 2 replicas"):
        config_of(2, 2, scheme, topology={"num_replicas": 2})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_torchrec_cannot_place_is_told_before_training(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "device_type", device)
    assert flat_tables(open_job(config_of(2, 2, "planner", sharding={"memory_gib": 1.0})))[0].plan
    config = config_of(2, 2, "planner", sharding={"memory_gib": 1e-6})
    with pytest.raises(
        InputError, match=r"TorchRec's planner cannot place the .* tables .* with 1\.07 kB of memory per rank"
    ):
        flat_tables(open_job(config))
    config = config_of(2, 2, "planner", sharding={"pooling_factors": {"C9": 2.0}})
    with pytest.raises(InputError, match=r"pooling_factors names the feature 'C9'"):
        flat_tables(open_job(config))


def test_dmt_plan_refuses_what_torchrec_plans() -> None:
    with pytest.raises(InputError, match=r"has the flat dataflow \(model.arch='dlrm'\)"):
        run_plan("demo", ["model.arch=dlrm"])
