"""Replicas against Algorithm 1 written out: weights and moments of every replica, on every placement and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dmt import InputError, ReplicaSync, TowerMesh, TowerTopology
from dmt.errors import ReplicaMismatchError
from dmt.sptt.state import TableTensor, checksum, table_tensors
from dmt.testing import PlainTraining, load_plain_state, table_layout
from dmt.testing.plain import table_name
from dmt.testing.state import LocalPart, join_parts
from tests.parity import EPS, LR, loss_of, make_tables, plain_training, share, train_plainly
from tests.ranks import run_ranks
from tests.seeds import some_slow
from tests.sptt_case import TOLERANCE, Case, build, shard

STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Replicated:
    replicas: int
    case: Case
    placement: Literal["inter_host", "intra_host"] = "inter_host"
    c: Any = "num_replicas"
    interval: int = 1
    delayed: bool = False
    warmup: bool = False

    @property
    def world(self) -> int:
        return self.replicas * self.case.world

    @property
    def topology(self) -> TowerTopology:
        return TowerTopology(
            num_replicas=self.replicas,
            num_towers=self.case.towers,
            ranks_per_tower=self.case.ranks,
            replica_placement=self.placement,
        )


MIXED = Case(towers=2, ranks=2, scheme="mixed")
TWO_TWO_TWO = [
    Replicated(replicas=2, case=MIXED, placement="inter_host"),
    Replicated(replicas=2, case=MIXED, placement="intra_host", c=1),
    Replicated(replicas=2, case=Case(towers=2, ranks=2, kind="flat", scheme="mixed"), placement="intra_host", c=1.5),
    Replicated(replicas=2, case=MIXED, interval=3, c=0.5, warmup=True),
    Replicated(replicas=2, case=MIXED, interval=2, delayed=True, placement="intra_host"),
    Replicated(replicas=2, case=MIXED, interval=3, c=1, placement="intra_host"),
]
OTHERS = [
    Replicated(replicas=4, case=Case(towers=2, ranks=1), c=3),
    Replicated(replicas=4, case=Case(towers=1, ranks=2, plan=((0, 1, 2, 3),), scheme="row_wise"), interval=2),
    Replicated(replicas=8, case=Case(towers=1, ranks=1, plan=((0, 1, 2, 3),)), c=8, placement="intra_host"),
    Replicated(replicas=3, case=Case(towers=2, ranks=1, max_bag=3, pooling="MEAN"), delayed=True),
    Replicated(replicas=2, case=Case(towers=2, ranks=1, sizes=(4, 4, 7, 7), plan=((0, 1, 2), (3,))), interval=2),
]
# Daily, each value of each field is in one of the others.
SLOW = [
    TWO_TWO_TWO[0],
    TWO_TWO_TWO[1],
    TWO_TWO_TWO[5],
    OTHERS[0],
    OTHERS[1],
]


def label(case: Replicated) -> str:
    mesh = f"{case.replicas}x{case.case.towers}x{case.case.ranks}"
    flags = ["delayed"] if case.delayed else []
    return "-".join([mesh, case.placement, f"c={case.c}", f"N={case.interval}", *flags, case.case.kind])


def dense_optimizer(model: DistributedModelParallel) -> KeyedOptimizerWrapper:
    named = in_backward_optimizer_filter((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return KeyedOptimizerWrapper(dict(named), lambda params: torch.optim.Adam(params, lr=LR))


def sharded(case: Replicated, mesh: TowerMesh) -> tuple[DistributedModelParallel, Any]:
    """The model on the mesh with the weights of the plain one, which is returned too."""
    torch.manual_seed(0)
    plain = build(case.case)
    start = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    original = build(case.case)
    torch.manual_seed(100 + mesh.rank)
    model = shard(case.case, original, mesh, moment_scale=case.c)
    load_plain_state(model, start)
    for one in own_tables(model):
        # Replicas of a table draw their own weights; they are to be given those of replica 0.
        one.tensor.add_(mesh.replica if one.is_replicated else 0)
    return model, plain


def own_tables(model: DistributedModelParallel) -> list[TableTensor]:
    module = next(m for m in model.modules() if hasattr(m, "replicas_drifted"))
    return table_tensors(module)


def difference(one: TableTensor, oracle: PlainTraining, mesh: TowerMesh, places: dict[str, Any]) -> float:
    """Between a rank's shard, or its moments, and the oracle's of the same replica."""
    table, what = one.name.split(".")
    plain = next(t for name, t in oracle.tables[mesh.replica].items() if table_name(name) == table)
    size = plain.weight.shape
    (row, column), (rows, columns) = places.get(table, ((0, 0), size))
    if what == "weight":
        expected = plain.weight.detach()[row : row + rows, column : column + columns]
    else:
        number = [sum(plain.widths[:i]) for i in range(len(plain.widths))].index(column)
        expected = plain.states[number][0][row : row + rows, 0]
    assert one.tensor.shape == expected.shape
    return float((one.tensor - expected).abs().max())


def algorithm_1_on_rank(rank: int, case: Replicated) -> dict[str, float]:
    mesh = TowerMesh(case.topology)
    model, plain = sharded(case, mesh)
    sync = ReplicaSync(
        model,
        mesh,
        interval=case.interval,
        optimizer_state="delayed" if case.delayed else "now",
    )
    data_parallel = {name for name, pin in case.case.pins().items() if pin.scheme == "data_parallel"}
    assert {one.name.split(".")[0] for one in own_tables(model) if not one.is_replicated} <= data_parallel
    assert table_layout(model).data_parallel == data_parallel
    oracle = plain_training(
        plain,
        replicas=case.replicas,
        moment_scale=case.c,
        interval=case.interval,
        optimizer_state="delayed" if case.delayed else "now",
        layout=table_layout(model),
    )
    dense = dense_optimizer(model)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.25)] if case.warmup else []
    fused = WarmupOptimizer(model.fused_optimizer, stages, lr=LR)
    tables = make_tables(list(case.case.dims), pooling=case.case.pooling)
    batches = Case(**{**vars(case.case), "sizes": case.case.sizes or (5,) * case.world}).batches()
    worst: dict[str, float] = {}
    weights = [one for one in own_tables(model) if one.is_weight]
    places = {one.table: (one.shard.offsets, one.shard.sizes) for one in weights if one.shard}
    sharding_ranks = case.topology.sharding_groups()
    before = {one.name: one.tensor.clone() for one in own_tables(model)}
    for step in range(STEPS):
        ids, labels = batches.draw(rank, step, tables)
        dense.zero_grad()
        fused.zero_grad()
        logits = model(ids)[1]
        with torch.no_grad():
            expected = oracle.modules[mesh.replica](ids)[1]
        worst["logits"] = max(worst.get("logits", 0.0), float((logits - expected).detach().abs().max()))
        loss_of(logits, labels).backward()
        dense.step()
        fused.step()
        sync.step()
        oracle.learning_rate = LR * min(1.0, 0.25 + 0.75 * step / 4) if case.warmup else LR
        if rank == 0:
            train_plainly(oracle, *([batches.draw(r, step, tables) for r in of] for of in sharding_ranks))
        share(oracle)
        for one in own_tables(model):
            kind = "weight" if one.is_weight else "moment"
            worst[kind] = max(worst.get(kind, 0.0), difference(one, oracle, mesh, places))
    assert any(not torch.equal(before[one.name], one.tensor) for one in own_tables(model)) or not before
    sync.sync()
    oracle.sync()
    share(oracle)
    sync.check()
    for one in own_tables(model):
        worst["synced"] = max(worst.get("synced", 0.0), difference(one, oracle, mesh, places))
    return worst


@pytest.mark.ranks
@pytest.mark.parametrize("case", some_slow([*TWO_TWO_TWO, *OTHERS], SLOW), ids=label)
def test_every_replica_follows_algorithm_1(case: Replicated) -> None:
    for rank, worst in enumerate(run_ranks(algorithm_1_on_rank, case.world, case)):
        # The bound of training against the plain model; averaging adds less than one unit in the last place a sync.
        assert max(worst.values()) < TOLERANCE, (rank, worst)


def one_step(model: DistributedModelParallel, dense: Any, case: Replicated, rank: int, step: int) -> None:
    ids, labels = (
        Case(**{**vars(case.case), "sizes": (5,) * case.world})
        .batches()
        .draw(rank, step, make_tables(list(case.case.dims)))
    )
    dense.zero_grad()
    loss_of(model(ids)[1], labels).backward()
    dense.step()


def unreplicated_on_rank(rank: int, case: Replicated) -> None:
    mesh = TowerMesh(case.topology)
    states = []
    for replicated in (False, True):
        model, _ = sharded(case, mesh)
        dense = dense_optimizer(model)
        sync = ReplicaSync(model, mesh) if replicated else None
        for step in range(3):
            one_step(model, dense, case, rank, step)
            if sync is not None:
                sync.step()
        states.append({one.name: one.tensor.clone() for one in own_tables(model)})
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.ranks
def test_one_replica_trains_as_without_replicas_bit_for_bit() -> None:
    run_ranks(unreplicated_on_rank, 4, Replicated(replicas=1, case=MIXED, c=1))


def other_optimizers_on_rank(rank: int, optimizer: str, c: Any) -> None:
    """Identical batches in each replica: averaging changes nothing, so c is all that is left of the replicas."""
    case = Replicated(replicas=2, case=Case(towers=2, ranks=1, optimizer=optimizer), c=c)
    mesh = TowerMesh(case.topology)
    model, plain = sharded(case, mesh)
    sync = ReplicaSync(model, mesh)
    tables = make_tables([8] * 4)
    start = {one.name: one.tensor.clone() for one in own_tables(model) if one.is_weight}
    weights = {name.split(".")[-2]: p for name, p in plain.named_parameters() if "embedding_bags" in name}
    everyone = [Case(towers=2, ranks=1).batches().draw(r, 0, tables) for r in range(2)]
    ids, labels = everyone[rank % 2]
    loss_of(model(ids)[1], labels).backward()
    sync.step()
    sync.check()
    torch.stack([loss_of(plain(i)[1], y) for i, y in everyone]).mean().backward()
    for one in own_tables(model):
        if not one.is_weight:
            continue
        grad = weights[one.name.split(".")[0]].grad
        step = grad / ((grad.pow(2) / c).sqrt() + EPS) if optimizer == "adagrad" else grad
        moved = one.tensor - start[one.name]
        # AdaGrad's first step divides a gradient by its own size: see TRAINED_FP32 in tests/sptt_case.py.
        assert (moved + LR * step).abs().max() < 5e-5, one.name
        assert moved.abs().max() > 0


@pytest.mark.ranks
@pytest.mark.parametrize(("optimizer", "c"), [("adagrad", 2), ("adagrad", 1), ("sgd", 1)])
def test_other_table_optimizers(optimizer: str, c: int) -> None:
    run_ranks(other_optimizers_on_rank, 4, optimizer, c)


def damage_on_rank(rank: int) -> None:
    case = Replicated(replicas=2, case=MIXED)
    mesh = TowerMesh(case.topology)
    model, _ = sharded(case, mesh)
    sync = ReplicaSync(model, mesh, interval=2)
    dense = dense_optimizer(model)
    sync.check()
    one_step(model, dense, case, rank, 0)
    sync.step()
    with pytest.raises(ReplicaMismatchError, match=r"t\d\.\w+ of rank \d differs from that of rank \d"):
        sync.check()  # between syncs they do differ
    one_step(model, dense, case, rank, 1)
    sync.step()
    sync.check()
    victim = next((one for one in own_tables(model) if one.name == "t1.momentum1"), None)
    if rank >= 4 and victim is not None:
        victim.tensor[:2] = victim.tensor[:2].flip(0) + torch.tensor([0.0, 1e-30])
        victim.tensor[0] += 1
    with pytest.raises(ReplicaMismatchError, match=r"t1\.momentum1 of rank [4567] differs from that of rank [0123]"):
        sync.check()


@pytest.mark.ranks
def test_a_replica_that_differs_is_found_on_every_rank() -> None:
    run_ranks(damage_on_rank, 8)


def wrong_use_on_rank(rank: int) -> None:
    case = Replicated(replicas=2, case=Case(towers=2, ranks=1))
    mesh = TowerMesh(case.topology)
    for c in (0, -1, 3, float("nan"), True, "replicas"):
        with pytest.raises(InputError, match=r"moment_scale=.* must be above 0 and at most num_replicas=2"):
            shard(case.case, build(case.case), mesh, moment_scale=c)
    sgd = Case(towers=2, ranks=1, optimizer="sgd")
    with pytest.raises(InputError, match=r"moment_scale=2 scales the moments of rowwise_adagrad and adagrad, but"):
        shard(sgd, build(sgd), mesh, moment_scale=2)
    with pytest.raises(InputError, match=r"moment_scale is .* on rank 0, but .* on rank 3"):
        shard(case.case, build(case.case), mesh, moment_scale=2 if rank == 3 else 1)
    model = shard(case.case, build(case.case), mesh)
    ids, _ = Case(towers=2, ranks=1, sizes=(5,) * 4).batches().draw(rank, 0, make_tables([8] * 4))
    with pytest.raises(InputError, match=r"num_replicas=2, but nothing keeps the replicas equal.*ReplicaSync\(model"):
        model(ids)
    for wrong in (
        {"interval": 0},
        {"interval": 1.5},
        {"optimizer_state": "late"},
    ):
        name = next(iter(wrong))
        with pytest.raises(InputError, match=f"ReplicaSync: {name}="):
            ReplicaSync(model, mesh, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="found no tables in the model that a tower sharder"):
        ReplicaSync(build(case.case), mesh)


def passes_without_step_on_rank(rank: int, kind: str, most: int) -> None:
    case = Replicated(replicas=2, case=Case(towers=2, ranks=1))
    mesh = TowerMesh(case.topology)
    model = shard(case.case, build(case.case), mesh)
    ids, _ = Case(towers=2, ranks=1, sizes=(5,) * 4).batches().draw(rank, 0, make_tables([8] * 4))
    ReplicaSync(model, mesh)
    model.train(kind != "eval")
    for _ in range(most + 1):
        if kind == "state_dict":
            model.state_dict()
        else:
            model(ids)
    model.train()
    for _ in range(most):  # none of those before was a training pass
        model(ids)
    with pytest.raises(InputError, match=rf"step\(\) was not called in {most} training passes"):
        model(ids)


def few_passes_without_step_on_rank(rank: int) -> None:
    with patch("dmt.replicas.sync._MOST_PASSES_PER_STEP", 8):
        for kind in ("eval", "state_dict"):
            passes_without_step_on_rank(rank, kind, 8)


@pytest.mark.ranks
def test_a_forgotten_step_is_noticed_in_training_passes_only() -> None:
    """Evaluation without ``no_grad`` and ``state_dict()`` read tables too, and need no step."""
    run_ranks(few_passes_without_step_on_rank, 4)


@pytest.mark.ranks
def test_wrong_use_is_refused() -> None:
    run_ranks(wrong_use_on_rank, 4)


def test_a_checksum_sees_every_bit_and_place() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(3 * 2**20 // 7, generator=generator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        base = value.to(dtype)
        seen = {checksum(base)}
        for place in (0, 1, len(base) // 2, len(base) - 1):
            changed = base.clone()
            changed[place] = torch.nextafter(changed[place].float(), torch.tensor(9e9)) * 1.01
            seen.add(checksum(changed))
        swapped = base.clone()
        swapped[[3, 2**19 // 2]] = swapped[[2**19 // 2, 3]]
        assert len(seen | {checksum(swapped)}) == 6, dtype
    # Places whose chunk and number in it are exchanged.
    long = torch.zeros(2**21)
    long[1], long[2**20] = 1.0, 2.0
    other = torch.zeros(2**21)
    other[1], other[2**20] = 2.0, 1.0
    assert checksum(long) != checksum(other)


def under_way_on_rank(rank: int) -> None:
    """Weights and states that are loaded while an averaging is under way stay as they were loaded."""
    case = Replicated(replicas=2, case=Case(towers=2, ranks=1))
    mesh = TowerMesh(case.topology)
    model, _ = sharded(case, mesh)
    sync = ReplicaSync(model, mesh, optimizer_state="delayed")
    dense = dense_optimizer(model)
    for step in range(2):
        one_step(model, dense, case, rank, step)
        sync.step()
    assert sync.is_running
    loaded = {one.name: torch.full_like(one.tensor, 7.0) for one in own_tables(model)}
    model.state_dict()  # as loading begins: whoever writes tables waits for what is under way first
    for one in own_tables(model):
        one.tensor.copy_(loaded[one.name])
    sync.restart()
    assert not sync.is_running
    for one in own_tables(model):
        assert torch.equal(one.tensor, loaded[one.name]), one.name
    one_step(model, dense, case, rank, 2)
    sync.step()
    sync.sync()
    sync.check()


@pytest.mark.ranks
def test_what_is_loaded_is_not_mixed_with_what_was_under_way() -> None:
    run_ranks(under_way_on_rank, 4)


def own_rates_on_rank(rank: int) -> None:
    """A learning rate on a table's parameter goes before the sharder's, also when it is scaled."""
    case = Case(towers=2, ranks=1, kind="flat")
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1, num_replicas=2))
    moved = {}
    for c in (1, 2):
        torch.manual_seed(0)
        model = build(case)
        for name, parameter in model.sparse_arch.named_parameters():
            if "t0" in name:
                apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.01, "eps": 1e-12})
        sharded_model = shard(case, model, mesh, moment_scale=c)
        sync = ReplicaSync(sharded_model, mesh)
        before = {one.name: one.tensor.clone() for one in own_tables(sharded_model)}
        ids, labels = Case(towers=2, ranks=1, sizes=(5,) * 4).batches().draw(rank % 2, 0, make_tables([8] * 4))
        loss_of(sharded_model(ids)[1], labels).backward()
        sync.step()
        moved[c] = {one.name: float((one.tensor - before[one.name]).norm()) for one in own_tables(sharded_model)}
    for name, step in moved[1].items():
        if name.endswith("weight"):
            # The first step of AdaGrad is lr sqrt(c) times the sign; eps is far below the gradients here.
            assert abs(moved[2][name] / step - 2**0.5) < 0.02, (name, moved)
    if "t0.weight" in moved[1]:
        assert moved[1]["t0.weight"] < 0.5 * moved[1]["t2.weight"], "the table's own rate is a fifth"


@pytest.mark.ranks
def test_a_table_s_own_learning_rate_is_scaled_too() -> None:
    run_ranks(own_rates_on_rank, 4)


def lost_table_on_rank(rank: int) -> None:
    case = Replicated(replicas=2, case=Case(towers=2, ranks=1))
    mesh = TowerMesh(case.topology)
    model, _ = sharded(case, mesh)
    sync = ReplicaSync(model, mesh)
    sync.check()
    sync._tensors = [one for one in sync._tensors if not one.name.startswith("t2.")]
    with pytest.raises(ReplicaMismatchError, match=r"no rank holds a shard of table 't2' in replica [01]"):
        sync.check()


@pytest.mark.ranks
def test_a_table_that_no_rank_holds_is_found() -> None:
    run_ranks(lost_table_on_rank, 4)


def test_gathering_without_the_number_of_replicas_says_what_to_give() -> None:
    parts = [LocalPart("t.weight", torch.ones(4, 2), (slice(0, 4), slice(0, 2)), (4, 2), is_shard=True)] * 2
    assert torch.equal(join_parts(parts, num_replicas=2)["t.weight"], torch.ones(4, 2))
    with pytest.raises(ReplicaMismatchError, match=r"8 of its 8 .* held by 2 rank\(s\), not by num_replicas=1"):
        join_parts(parts)
