"""Building, sharding and optimizing: what a config says is what tables and dense parts do, on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import LazyAwaitable

from dmt.errors import InputError
from dmt.sptt import peer_exchange
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import PeerExchange, Pending
from dmt.testing import gather_plain_state, load_plain_state
from dmt.training import preflight
from dmt.training.build import (
    build_model,
    build_optimizer,
    count_model,
    fused_params,
    shard_model,
)
from dmt.training.checkpoints import Checkpointer, load_plain
from dmt.training.config import OptimizerConfig, TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.job import Job, open_job
from tests.ranks import run_ranks
from tests.training.small import ARCHS, new_run, plain, small, source, train_loop, unsharded

CPU = torch.device("cpu")
SPARSE = ["rowwise_adagrad", "adagrad", "sgd"]
DENSE = ["adam", "adamw", "adagrad", "sgd"]
State = dict[str, torch.Tensor]


def batches(config: TrainingConfig, rank: int, world_size: int) -> Iterator[ClickBatch]:
    size = config.train.batch_size
    return source(config).batches("train", rank=rank, world_size=world_size, batch_size=size)


# Pure arithmetic first.


def on_one_host(job: Job, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Checks the memory of a job whose ranks are on one host, all with the need of rank 0."""
    ranks = job.topology.world_size
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}[name])
    monkeypatch.setattr(preflight, "gather_objects", lambda value, group: [value] * ranks)
    mesh: Any = SimpleNamespace(rank=0, global_group=None)
    preflight.check_memory(job, build_model(job, device="meta"), mesh)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "model",
            {"c": 65_536, "tower_dim": 65_536},
            "The 2 ranks on host .* need at least .* PB of memory",
        ),
        ("model", {"dense_arch": [2**20, 2**20]}, "need at least 17.6 TB of memory.* dense layers"),
        ("train", {"batch_size": 2**24}, r"batches \(train\.batch_size\)\. Lower"),
    ],
    ids=["towers", "layers", "batch"],
)
def test_a_run_that_no_host_has_memory_for(section: str, values: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}[name])
    numbers = {"data": {"synthetic": {"num_rows": 2**30}}, "topology": {"num_towers": 2}}
    with pytest.raises(InputError, match=message):
        on_one_host(open_job(TrainingConfig.model_validate({**numbers, section: values})), monkeypatch, 2**20)


def test_the_ranks_of_a_host_share_its_memory_and_the_limit_of_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = open_job(small(train={"batch_size": 8192}))
    with pytest.raises(InputError, match=r"The 4 ranks on .* need at least 6\.70 MB of memory, but it has 4\.10 MB"):
        on_one_host(job, monkeypatch, 1000)  # enough for any of them
    on_one_host(job, monkeypatch, 4000)
    assert preflight.memory_limit(tmp_path) == 4000 * 4096
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.memory_limit(tmp_path) == 4000 * 4096
    (tmp_path / "memory.max").write_text("5000\n")
    assert preflight.memory_limit(tmp_path) == 5000


@pytest.mark.parametrize("arch", ["dlrm", "dcn", "dmt-dlrm", "dmt-dcn", "dmt-dlrm-products"])
def test_parameters_are_counted_as_they_are_built(arch: str) -> None:
    config = small(arch, model={"p": 1})
    job = unsharded(config)
    built = build_model(job, device="meta")
    assert count_model(job).parameters == sum(p.numel() for p in built.parameters())
    assert all(p.is_meta for p in built.parameters())


def test_an_optimizer_without_a_cpu_kernel_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"optimizer\.sparse='adam': FBGEMM has no CPU kernel.*\['rowwise_adagrad', 'adagrad', 'sgd'\]"
    ):
        fused_params(OptimizerConfig(sparse="adam"))
    assert [fused_params(OptimizerConfig(sparse=name))["learning_rate"] for name in SPARSE] == [0.05] * 3


# Then ranks.


def every_optimizer_on_rank(rank: int) -> list[str]:
    """Parameters that three steps leave as they were, or break, over all models, dataflows and optimizers."""
    mesh = TowerMesh(small(topology={"ranks_per_tower": 1}).topology.build())
    still = []
    # Every dense optimizer meets every sparse one, and so does every dataflow; every model has two of the pairs.
    for (sparse, dense), (arch, dataflow) in zip(itertools.product(SPARSE, DENSE), 2 * ARCHS, strict=True):
        config = small(
            arch,
            dataflow,
            topology={"ranks_per_tower": 1},
            optimizer={"sparse": sparse, "dense": dense, "warmup_steps": 2},
        )
        model = shard_model(open_job(config), mesh)
        optimizer = build_optimizer(config.optimizer, model)
        before = gather_plain_state(model)
        for batch in itertools.islice(batches(config, rank, 2), 3):
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        after = gather_plain_state(model)
        case = f"{arch} {dataflow} {sparse} {dense}: "
        still += [case + name for name, old in before.items() if torch.equal(old, after[name])]
        still += [case + name + " is not finite" for name, new in after.items() if not new.isfinite().all()]
        assert sum("embedding_bags" in name for name in before) == 6, case
    return still


@pytest.mark.ranks
def test_every_optimizer_moves_every_table_and_dense_part() -> None:
    assert run_ranks(every_optimizer_on_rank, 2) == [[], []]


def parity_on_rank(rank: int, steps: int) -> dict[str, tuple[State, State]]:
    """For each model and dataflow, on rank 0, the weights after training on 2 x 2 ranks, and of the plain model."""
    found = {}
    for arch, dataflow in ARCHS:
        config = small(
            arch,
            dataflow,
            synthetic={"num_multi_hot": 2},
            optimizer={"sparse": "sgd", "sparse_lr": 2.0, "dense": "sgd", "dense_lr": 0.2},
            train={"max_steps": steps},
        )
        mesh = TowerMesh(config.topology.build())
        model = shard_model(open_job(config), mesh)
        torch.manual_seed(5)
        oracle = plain(config)
        load_plain_state(model, oracle.state_dict())
        train_loop(new_run(config, mesh, model=model))
        ours = gather_plain_state(model)
        if rank:
            continue
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in oracle.named_parameters():
            groups["embedding_bags" in name].append(parameter)
        optimizer = torch.optim.SGD([{"params": groups[True], "lr": 2.0}, {"params": groups[False], "lr": 0.2}])
        union = source(config).batches("train", rank=0, world_size=1, batch_size=4 * config.train.batch_size, lanes=4)
        for batch in itertools.islice(union, steps):
            optimizer.zero_grad()
            oracle(batch)[0].backward()
            optimizer.step()
        found[f"{arch} {dataflow}"] = (ours, {n: p.detach() for n, p in oracle.state_dict().items()})
    return found


@pytest.mark.ranks
def test_training_on_ranks_is_training_on_the_union_of_their_batches() -> None:
    by_case = run_ranks(parity_on_rank, 4, 4)[0]
    assert len(by_case) == len(ARCHS)
    for case, (ours, oracle) in by_case.items():
        assert ours.keys() == oracle.keys()
        for name, value in oracle.items():
            # Same sums in another order: a few units in the last place of numbers up to 1, over four steps. A wrong
            # gradient division, learning rate or batch differs by 1e-3 and more.
            torch.testing.assert_close(
                ours[name], value, rtol=0, atol=2e-6, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )


def learning_rates(rank: int, arch: str, warmup_steps: int, steps: int) -> Any:
    """The learning rates of each part at each step: what SGD did, over the gradient of the plain model."""
    sgd = {"sparse": "sgd", "sparse_lr": 0.5, "dense": "sgd", "dense_lr": 0.25, "warmup_steps": warmup_steps}
    config = small(arch, topology={"ranks_per_tower": 1}, optimizer=sgd)
    model = shard_model(open_job(config), TowerMesh(config.topology.build()))
    # The pipeline the trainer uses: it decides when zero_grad and step are called.
    pipeline = TrainPipelineSparseDist(model, build_optimizer(config.optimizer, model), CPU, execute_all_batches=True)
    mine = itertools.islice(batches(config, rank, 2), steps)
    union = source(config).batches("train", rank=0, world_size=1, batch_size=2 * config.train.batch_size, lanes=2)
    oracle = plain(config)
    rates = []
    for _ in range(steps):
        before = gather_plain_state(model)
        oracle.load_state_dict(before)
        oracle.zero_grad()
        oracle(next(union))[0].backward()
        pipeline.progress(mine)
        after = gather_plain_state(model)
        products: dict[str, list[float]] = {}
        for name, parameter in oracle.named_parameters():
            assert parameter.grad is not None, name
            part = next((part for part in ("embedding_bags", "interaction") if part in name), "dense")
            product = products.setdefault(part, [0.0, 0.0])
            product[0] += float((parameter.grad.double() * (before[name] - after[name])).sum())
            product[1] += float(parameter.grad.double().pow(2).sum())
        rates.append({part: moved / gradient for part, (moved, gradient) in products.items()})
    return rates


# model, steps of warm-up -> share of the full rates at each step
WARM_UPS: dict[tuple[str, int], list[float]] = {
    # from 1/4 in 4 equal steps to 1
    ("dmt-dlrm", 4): [4 / 16, 7 / 16, 10 / 16, 13 / 16, 1, 1, 1],
    ("dlrm", 2): [1 / 2, 3 / 4, 1, 1],
    ("dmt-dcn", 1): [1, 1],
    ("dmt-dcn", 0): [1, 1],
}


def rates_on_rank(rank: int) -> list[list[dict[str, float]]]:
    return [learning_rates(rank, *case, len(shares)) for case, shares in WARM_UPS.items()]


@pytest.mark.ranks
def test_both_learning_rates_are_as_set_and_warm_up() -> None:
    for found in run_ranks(rates_on_rank, 2):
        for ((arch, _), shares), rates in zip(WARM_UPS.items(), found, strict=True):
            full = {"embedding_bags": 0.5, "dense": 0.25} | ({"interaction": 0.25} if arch.startswith("dmt") else {})
            for share, of_step in zip(shares, rates, strict=True):
                # Weights of about 1 have a float32 spacing of 1e-7, and full steps here are about 1e-3 of them.
                expected = {part: rate * share for part, rate in full.items()}
                assert of_step == pytest.approx(expected, rel=2e-3 / min(1, share)), arch


def start_on_rank(rank: int) -> dict[str, tuple[State, State, list[State]]]:
    """For each model: the whole start, this rank's dense parts, and starts of the same and another seed."""
    found = {}
    for arch, dataflow in [("dlrm", "flat"), ("dlrm", "sptt"), ("dmt-dlrm", "sptt")]:
        starts = []
        for seed in (0, 0, 1) if arch == "dmt-dlrm" else (0,):
            config = small(arch, dataflow, train={"seed": seed})
            model = shard_model(open_job(config), TowerMesh(config.topology.build()))
            starts.append(gather_plain_state(model))
        dense = {name: v.clone() for name, v in model.state_dict().items() if not isinstance(v, ShardedTensor)}
        found[f"{arch} {dataflow}"] = (starts[0], dense, starts[1:])
    return found


@pytest.fixture(scope="module")
def starts() -> list[Any]:
    return run_ranks(start_on_rank, 4)


@pytest.mark.ranks
def test_tables_start_apart_and_dense_parts_equal(starts: list[Any]) -> None:
    for case, (start, _, _) in starts[0].items():
        tables = {name: value for name, value in start.items() if "embedding_bags" in name}
        assert len(tables) == 6
        for (one, first), (two, second) in itertools.combinations(tables.items(), 2):
            # The correlation of independent draws of 88 numbers; its standard deviation is 0.11.
            together = torch.stack([first.flatten(), second.flatten()])
            assert abs(float(torch.corrcoef(together)[0, 1])) < 0.5, f"{case}: {one} and {two} start alike"
        for rank in range(1, 4):
            dense, mine = starts[0][case][1], starts[rank][case][1]
            # Ranks of another tower hold another tower module, of another name.
            shared = dense.keys() & mine.keys()
            assert len(shared) >= 8, case
            assert rank != 1 or shared == dense.keys(), "ranks 0 and 1 are one tower"
            for name in shared:
                assert torch.equal(dense[name], mine[name]), f"{case}: {name} of rank {rank} is not that of rank 0"


@pytest.mark.ranks
def test_the_seed_decides_the_start(starts: list[Any]) -> None:
    start, _, (same, other) = starts[0]["dmt-dlrm sptt"]
    for name, value in start.items():
        assert torch.equal(value, same[name]), f"{name} differs from one start to the next"
        assert not torch.equal(value, other[name]), f"{name} is the same with another seed"


def few_tables(rank: int, folder: str, arch: str, dataflow: str) -> tuple[int, State, bool]:
    """Trains and saves two tables on four ranks; returns this rank's tables, the weights, and whether they moved."""
    config = small(
        arch,
        dataflow,
        synthetic={"num_features": 2, "num_groups": 1},
        sharding={"dataflow": dataflow, "scheme": "table_wise"},
        optimizer={"warmup_steps": 2},
        train={"max_steps": 3},
    )
    mesh = TowerMesh(config.topology.build())
    model = shard_model(open_job(config), mesh)
    optimizer = build_optimizer(config.optimizer, model)
    before = gather_plain_state(model)
    train_loop(new_run(config, mesh, model=model, optimizer=optimizer))
    after = gather_plain_state(model)
    assert Checkpointer(Path(folder) / arch, mesh).save(model, optimizer, step=3, progress={})
    held = sum(len(v.local_shards()) for v in model.state_dict().values() if isinstance(v, ShardedTensor))
    return held, after, all(not torch.equal(before[name], after[name]) for name in before)


FEW = [("dlrm", "flat"), ("dmt-dlrm", "sptt")]


def few_tables_on_rank(rank: int, folder: str) -> list[tuple[int, State, bool]]:
    return [few_tables(rank, folder, *case) for case in FEW]


@pytest.mark.ranks
def test_ranks_without_tables_train_and_save(tmp_path: Path) -> None:
    by_rank = run_ranks(few_tables_on_rank, 4, str(tmp_path))
    for (arch, dataflow), results in zip(FEW, zip(*by_rank, strict=True), strict=True):
        assert sorted(held for held, _, _ in results) == [0, 0, 1, 1], arch
        assert all(moved for _, _, moved in results), arch
        model = plain(small(arch, dataflow, synthetic={"num_features": 2, "num_groups": 1}))
        load_plain(model, tmp_path / arch)
        for name, value in model.state_dict().items():
            assert torch.equal(value, results[0][1][name]), name


# The dense arch computes while the peer exchange is under way, forward and backward, and no bit depends on it.

WATCHED = ["dlrm", "dcn", "dmt-dlrm", "dmt-dcn"]


def watch(model: torch.nn.Module, events: list[str]) -> None:
    """Logs when the exchange is begun and waited for and when the dense arch runs, and the same of their gradients."""
    exchange = PeerExchange.__call__

    def begin(self: PeerExchange, outputs: torch.Tensor, *args: Any) -> Any:
        events.append("exchange begun")
        # A hook of a tensor runs when its gradient is there.
        outputs.register_hook(lambda _: events.append("gradients arrived"))
        return exchange(self, outputs, *args)

    def pending(wait: Any, *arguments: Any) -> Pending:
        def end() -> torch.Tensor:
            events.append("exchange waited for")
            columns: torch.Tensor = wait(*arguments)
            columns.register_hook(lambda _: events.append("gradients to be sent"))
            return columns

        return Pending(end)

    def dense(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        events.append("dense arch")
        output.register_hook(lambda _: events.append("dense arch, backward"))

    PeerExchange.__call__, peer_exchange.Pending = begin, pending  # type: ignore[method-assign,assignment]
    model.module.model.dense_arch.register_forward_hook(dense)  # type: ignore[union-attr]


def train(rank: int, arch: str, *, at_once: bool, events: list[str] | None = None) -> dict[str, torch.Tensor]:
    """The weights after three steps; ``at_once``: the exchange is waited for before the dense arch runs."""
    config = small(arch, "sptt", topology={"ranks_per_tower": 1}, train={"seed": 3})
    job = open_job(config)
    data = job.data
    model = shard_model(job, TowerMesh(config.topology.build()))
    optimizer = build_optimizer(config.optimizer, model)
    if at_once:

        def wait(module: Any, inputs: Any, output: LazyAwaitable[Any]) -> Any:
            return output.wait()

        model.module.model.sparse_arch.register_forward_hook(wait)
    if events is not None:
        watch(model, events)
    for batch in itertools.islice(data.batches("train", rank=rank, world_size=2, batch_size=16), 3):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return gather_plain_state(model)


def on_rank(rank: int) -> dict[str, tuple[Any, Any, list[str]]]:
    found = {}
    begin = PeerExchange.__call__
    for arch in WATCHED:
        events: list[str] = []
        late = train(rank, arch, at_once=False, events=events)
        PeerExchange.__call__, peer_exchange.Pending = begin, Pending  # type: ignore[method-assign,misc]
        found[arch] = (late, train(rank, arch, at_once=True), events)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[Any, Any, list[str]]]]:
    return run_ranks(on_rank, 2)


@pytest.mark.ranks
def test_the_dense_arch_runs_between_beginning_and_end_of_the_exchange(found: list[Any]) -> None:
    forward = ["exchange begun", "dense arch", "exchange waited for"]
    backward = ["gradients to be sent", "dense arch, backward", "gradients arrived"]
    for rank, arch in itertools.product(range(2), WATCHED):
        assert found[rank][arch][2] == 3 * [*forward, *backward], f"rank {rank}, {arch}"


@pytest.mark.ranks
def test_when_the_exchange_is_waited_for_changes_no_bit(found: list[Any]) -> None:
    for arch in WATCHED:
        late, at_once, _ = found[0][arch]
        assert late.keys() == at_once.keys()
        for name, value in at_once.items():
            assert torch.equal(late[name], value), f"{arch}: {name}"
