"""Building, sharding and optimizing: what a config says is what tables and dense parts do, on ranks."""

from __future__ import annotations

import inspect
import itertools
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.errors import InputError
from dmt.plan.towers import TowerPlan
from dmt.sptt import peer_exchange
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import PeerExchange, Pending
from dmt.testing import gather_plain_state, load_plain_state, table_layout
from dmt.training.build import ClickTask, build_model, count_model, shard_model
from dmt.training.config import TrainingConfig
from dmt.training.job import Job, open_job, open_unsharded
from dmt.training.preflight import Place, check_memory, memory_limit, this_place
from tests.ranks import run_ranks
from tests.training.small import new_run, plain, small, source, train_loop, train_on_union

State = dict[str, torch.Tensor]


# Pure arithmetic first.


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_batch_of_one_sample_has_one_logit(shape: tuple[int, ...]) -> None:
    one = torch.ones(1)
    batch = SimpleNamespace(dense_features=one, sparse_features=None, labels=one, weights=one)
    with patch.object(nn.Identity, "forward", lambda self, dense, ids: dense.reshape(shape)):
        loss, (logits, *_) = ClickTask(nn.Identity())(batch)
    assert (loss.shape, logits.shape) == ((), (1,))


def on_one_host(job: Job, monkeypatch: pytest.MonkeyPatch, pages: int, *more: Place) -> None:
    """Checks the memory of a job whose ranks are on one host, but for as many as there are ``more`` places."""
    ranks = job.topology.world_size - len(more)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}[name])
    places = [*[this_place(job.device_type)] * ranks, *more]
    check_memory(job, build_model(job, device="meta"), places)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"c": 65_536, "tower_dim": 65_536}, "host .* of memory, but its 2 ranks would take at least .* PB"),
        ("model", {"dense_arch": [2**20, 2**20]}, "would take at least 17.6 TB.* dense layers"),
        ("train", {"batch_size": 2**24}, r"16777216\).* There is enough for train\.batch_size=\d{5}\. Lower"),
    ],
    ids=["towers", "layers", "batch"],
)
def test_a_run_that_no_host_has_memory_for(section: str, values: Any, message: str, monkeypatch: Any) -> None:
    numbers = {"data": {"synthetic": {"num_rows": 2**30}}, "topology": {"num_towers": 2}}
    with pytest.raises(InputError, match=message):
        on_one_host(open_job(TrainingConfig.model_validate({**numbers, section: values})), monkeypatch, 2**20)


def test_the_ranks_of_a_host_share_its_memory_and_the_limit_of_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = open_job(small(train={"batch_size": 8192}))
    with pytest.raises(InputError, match=r"has 4\.10 MB of memory, but its 4 ranks would take at least 13\.0 MB"):
        on_one_host(job, monkeypatch, 1000)  # enough for any of them
    # Of two places without room the batch size of the smaller one is advised.
    more = 2 * [Place("host b", 3_000_000, "boot")]
    with pytest.raises(InputError, match=r"host b .* its 2 ranks .* There is enough for train\.batch_size=3778\."):
        on_one_host(job, monkeypatch, 1400, *more)
    on_one_host(open_job(small(train={"batch_size": 3778})), monkeypatch, 1400, *more)
    # Machines may have equal names.
    on_one_host(job, monkeypatch, 2000, *2 * [Place(f"host {socket.gethostname()}", 2000 * 4096, "another boot")])
    on_one_host(job, monkeypatch, 4000)
    assert memory_limit(tmp_path) == 4000 * 4096
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == 4000 * 4096
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory_limit(tmp_path) == 5000


def test_the_memory_of_a_gpu_is_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for size, is_enough in ((3_200_000, False), (3_300_000, True)):
        found = SimpleNamespace(total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        with nullcontext() if is_enough else pytest.raises(InputError, match=r"host .*, cuda:3 has 3\.20 MB"):
            on_one_host(open_job(small(train={"batch_size": 2048})), monkeypatch, 1)


@pytest.mark.parametrize("arch", ["dlrm", "dcn", "dmt-dlrm", "dmt-dcn", "dmt-dlrm-products"])
def test_parameters_are_counted_as_they_are_built(arch: str) -> None:
    job = open_unsharded(small(arch, model={"p": 1}))
    built = build_model(job, device="meta")
    assert count_model(job).parameters == sum(p.numel() for p in built.parameters())
    assert all(p.is_meta for p in built.parameters())
    kernels = [tuple(p.shape) for name, p in built.named_parameters() if "V_kernels" in name]
    assert kernels == {"dcn": [(2, 56)], "dmt-dcn": [(2, 24), (2, 24), (2, 12)]}.get(arch, [])  # one layer of rank 2


# Then ranks.


# Plans that cut tables into column shards: every table in both towers, which have unlike dimensions; and whole tables
# among shards, of which the flat model joins those of a table. C6 has bags.
FEATURES = [f"C{i}" for i in range(1, 7)]
ALL_CUT = TowerPlan.from_lists(
    [[f"{f}[4:16]" for f in FEATURES[::-1]], [f"{f}[0:4]" for f in FEATURES]],
    column_splits={f: (4, 12) for f in FEATURES},
)
SOME_CUT = TowerPlan.from_lists(
    [["C6[4:12]", "C1[12:16]", "C3", "C2"], ["C6[0:4]", "C4", "C1[0:12]", "C6[12:16]", "C5"]],
    column_splits={"C1": (12, 4), "C6": (4, 8, 4)},
)
OUTSIDE = TowerPlan.from_lists([["C1", "C5"], ["C4", "C3"]], outside=("C6", "C2"))
# Model, dataflow, optimizer of the tables with its learning rate, and plan. Both rates warm up.
TRAINED: list[tuple[str, str, str, float, TowerPlan | None]] = [
    ("dlrm", "flat", "sgd", 2.0, None),
    ("dcn", "sptt", "sgd", 2.0, None),
    ("dmt-dlrm", "sptt", "sgd", 2.0, ALL_CUT),
    ("dmt-dcn", "sptt", "rowwise_adagrad", 0.1, None),
    ("dlrm", "sptt", "adagrad", 0.1, SOME_CUT),
    ("dmt-dlrm", "sptt", "adagrad", 0.1, OUTSIDE),
]
STEPS = 4


def parity_on_rank(rank: int, folder: str) -> list[tuple[bool, State, State]]:
    """On rank 0, of each case: whether ids go ahead, and the weights of training on 2 x 2 ranks and in one process."""
    found = []
    for number, (arch, dataflow, sparse, rate, plan) in enumerate(TRAINED):
        config = small(
            arch,
            dataflow,
            model={"embedding_dim": 16 if plan else 8},
            synthetic={"num_multi_hot": 2},
            optimizer={"sparse": sparse, "sparse_lr": rate, "dense": "sgd", "dense_lr": 0.2, "warmup_steps": 3},
            towers={"plan": f"{folder}/{number}.json"} if plan else {},
            train={"max_steps": STEPS},
        )
        mesh = TowerMesh(config.topology.build())
        model = shard_model(open_job(config), mesh)
        torch.manual_seed(5)
        oracle = plain(config)
        load_plain_state(model, oracle.state_dict())
        train_loop(new_run(config, mesh, model=model))
        ours = gather_plain_state(model)
        sparse_arch: Any = model.module.model.sparse_arch
        # A train pipeline puts an object of its own in the place of the method, where it can.
        is_ahead = not inspect.ismethod(getattr(sparse_arch, "shards", sparse_arch).forward)
        if rank == 0:
            found.append((is_ahead, ours, train_on_union(config, oracle, STEPS, table_layout(model))))
    return found


@pytest.mark.ranks
def test_training_on_ranks_is_training_on_the_union_of_their_batches(tmp_path: Path) -> None:
    for number, (*_, plan) in enumerate(TRAINED):
        if plan is not None:
            plan.save(tmp_path / f"{number}.json")
    for case, (is_ahead, ours, oracle) in zip(TRAINED, run_ranks(parity_on_rank, 4, str(tmp_path))[0], strict=True):
        assert is_ahead, f"{case}: the pipeline does not exchange the ids of the next batch"
        assert ours.keys() == oracle.keys()
        for name, value in oracle.items():
            # Same sums in another order: a few units in the last place of numbers up to 1, over five steps; AdaGrad
            # divides by roots of sums that can be small, and eps bounds what that makes of them. A wrong gradient
            # division, learning rate or batch differs by 1e-3 and more.
            torch.testing.assert_close(
                ours[name], value, rtol=0, atol=2e-6, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )


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


@pytest.mark.ranks
def test_tables_start_apart_dense_parts_equal_and_both_by_the_seed() -> None:
    starts = run_ranks(start_on_rank, 4)
    for case, (start, _, others) in starts[0].items():
        tables = {name: value.flatten() for name, value in start.items() if "embedding_bags" in name}
        assert len(tables) == 6
        for (one, first), (two, second) in itertools.combinations(tables.items(), 2):
            # The correlation of independent draws of 88 numbers; its standard deviation is 0.11.
            apart = abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1]))
            assert apart < 0.5, f"{case}: {one} and {two} start alike"
        for rank in range(1, 4):
            dense, mine = starts[0][case][1], starts[rank][case][1]
            # Ranks of another tower hold another tower module, of another name; ranks 0 and 1 are one tower.
            shared = dense.keys() & mine.keys()
            assert len(shared) >= 8, case
            assert rank != 1 or shared == dense.keys()
            for name in shared:
                assert torch.equal(dense[name], mine[name]), f"{case}: {name} of rank {rank} is not that of rank 0"
        for name, value in start.items() if others else ():
            assert torch.equal(value, others[0][name]), f"{name} differs from one start to the next"
            assert not torch.equal(value, others[1][name]), f"{name} is the same with another seed"


# The dense arch computes while the peer exchange is under way, forward and backward.


def events_on_rank(rank: int, arch: str) -> list[str]:
    """When the exchange is begun and waited for and when the dense arch runs in a step, and the same of gradients."""
    events: list[str] = []
    exchange = PeerExchange.__call__

    def begin(self: PeerExchange, outputs: torch.Tensor, *args: Any) -> Any:
        events.append("exchange begun")
        # A hook of a tensor runs when its gradient is there.
        outputs.register_hook(lambda _: events.append("gradients arrived"))
        return exchange(self, outputs, *args)

    def pending(wait: Any, *arguments: Any) -> Pending:
        def end() -> Any:
            result = wait(*arguments)
            if isinstance(result, torch.Tensor):  # columns, not ids
                events.append("exchange waited for")
                result.register_hook(lambda _: events.append("gradients to be sent"))
            return result

        return Pending(end)

    def dense(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        events.append("dense arch")
        output.register_hook(lambda _: events.append("dense arch, backward"))

    config = small(arch, "sptt", topology={"ranks_per_tower": 1})
    model = shard_model(open_job(config), TowerMesh(config.topology.build()))
    model.module.model.dense_arch.register_forward_hook(dense)
    with patch.object(PeerExchange, "__call__", begin), patch.object(peer_exchange, "Pending", pending):
        model(next(source(config).batches("train", rank=rank, world_size=2, batch_size=16)))[0].backward()
    return events


@pytest.mark.ranks
@pytest.mark.parametrize("arch", ["dlrm", "dcn", "dmt-dlrm", "dmt-dcn"])
def test_the_dense_arch_runs_between_beginning_and_end_of_the_exchange(arch: str) -> None:
    forward = ["exchange begun", "dense arch", "exchange waited for"]
    backward = ["gradients to be sent", "dense arch, backward", "gradients arrived"]
    assert run_ranks(events_on_rank, 2, arch) == [[*forward, *backward]] * 2
