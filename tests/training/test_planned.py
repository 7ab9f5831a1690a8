"""Bytes that the sharding plan expects of a step against those that `TrafficMeter` counts in one, on gloo ranks."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dmt.plan.distinct import DistinctRows
from dmt.plan.towers import TowerPlan
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import build_optimizer, expected_traffic, shard_model
from dmt.training.config import TrainingConfig
from dmt.training.distinct import InputGroup, distinct_inputs_of, first_ids
from dmt.training.job import open_job
from dmt.training.loop import Trainer
from dmt.training.records import traffic_warning
from tests.ranks import run_ranks
from tests.seeds import collected
from tests.training.small import small, source

# C1 whole, C6 in both towers.
CUT = TowerPlan.from_lists([["C1", "C2", "C6[0:4]"], ["C3", "C4", "C5", "C6[4:8]"]], column_splits={"C6": (4, 4)})

# arch, then the sections of the config
CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "planner's choice": ("dmt-dlrm", {}),
    "table_wise": ("dmt-dlrm", {"sharding": {"scheme": "table_wise"}}),
    "row_wise": ("dmt-dlrm", {"sharding": {"scheme": "row_wise"}}),
    "column_wise": ("dmt-dlrm", {"sharding": {"scheme": "column_wise"}}),
    "data_parallel": ("dmt-dlrm", {"sharding": {"scheme": "data_parallel"}}),
    "a mix": (
        "dmt-dcn",
        {"sharding": {"tables": {"t_C1": "row_wise", "t_C[23]": "data_parallel", "t_C4": "table_wise"}}},
    ),
    "flat model": ("dlrm", {"sharding": {"scheme": "table_wise"}}),
    "cut table": ("dcn", {"sharding": {"scheme": "table_wise"}, "towers": {"plan": "cut"}}),
    "global route": ("dmt-dlrm", {"sharding": {"scheme": "column_wise", "id_route": "global"}}),
    "global route, row_wise": ("dmt-dlrm", {"sharding": {"scheme": "row_wise", "id_route": "global"}}),
    "16 bits": (
        "dmt-dlrm",
        {"sharding": {"scheme": "table_wise", "forward_precision": "fp16", "backward_precision": "bf16"}},
    ),
    "8 bits": ("dlrm", {"sharding": {"scheme": "table_wise", "forward_precision": "int8"}}),
    "one tower": (
        "dmt-dlrm",
        {"sharding": {"scheme": "table_wise"}, "topology": {"num_towers": 1, "ranks_per_tower": 4}},
    ),
    "one rank per tower": ("dmt-dlrm", {"topology": {"num_towers": 4, "ranks_per_tower": 1}}),
    "two towers on a host": (
        "dmt-dlrm",
        {
            "topology": {"num_towers": 4, "ranks_per_tower": 1, "ranks_per_host": 2},
            "train": {"dense_reduce": "hierarchical"},
        },
    ),
    "a tower on two hosts": (
        "dmt-dcn",
        {
            "sharding": {"tables": {"t_C[125]": "table_wise", "t_C3": "data_parallel", "t_C[46]": "row_wise"}},
            "topology": {"num_towers": 1, "ranks_per_tower": 4, "ranks_per_host": 2},
        },
    ),
    "TorchRec's tables": ("dlrm", {"sharding": {"dataflow": "flat", "scheme": "table_wise"}}),
    "TorchRec's columns, 16 bits": (
        "dcn",
        {"sharding": {"dataflow": "flat", "forward_precision": "fp16", "backward_precision": "bf16"}},
    ),
    "TorchRec's rows": ("dlrm", {"sharding": {"dataflow": "flat", "scheme": "row_wise"}}),
    "TorchRec's copies": ("dlrm", {"sharding": {"dataflow": "flat", "scheme": "data_parallel"}}),
    "TorchRec's rows of a host": (
        "dlrm",
        {"sharding": {"dataflow": "flat", "scheme": "table_row_wise", "forward_precision": "fp16"}},
    ),
    "TorchRec's grid": ("dlrm", {"sharding": {"dataflow": "flat", "scheme": "grid"}}),
    "two towers on four hosts": (
        "dlrm",
        {"sharding": {"scheme": "column_wise"}, "topology": {"ranks_per_host": 1}},
    ),
}
MIX = {"t_C1": "row_wise", "t_C[25]": "data_parallel", "t_C4": "column_wise", "t_C[36]": "table_wise"}
# Two replicas. Gradients of data-parallel tables and tower modules cross hosts only between hosts, those of dense parts
# do in both placements.
for _placement, _name, _arch, _sizes, _tables in (
    ("inter_host", "2 x 2 x 2", "dmt-dlrm", (2, 2), MIX),
    ("intra_host", "flat model on 2 x 2 x 2", "dlrm", (2, 2), MIX),
    ("inter_host", "2 x 2 x 1", "dmt-dcn", (2, 1), {}),
    ("intra_host", "2 x 1 x 2", "dmt-dlrm", (1, 2), MIX),
):
    _mesh = {"num_replicas": 2, "replica_placement": _placement}
    _topology = {"num_towers": _sizes[0], "ranks_per_tower": _sizes[1], **_mesh}
    CASES[f"{_name}, {_placement}"] = (_arch, {"sharding": {"tables": _tables}, "topology": _topology})

# Flat schemes whose ids go to hosts by row.
BY_ROWS = ("row_wise", "table_row_wise", "grid")

# Those whose parts all are in other cases.
SLOW = (
    "planner's choice",
    "table_wise",
    "row_wise",
    "column_wise",
    "data_parallel",
    "flat model",
    "16 bits",
    "one tower",
    "one rank per tower",
    "TorchRec's tables",
    "global route, row_wise",
    "two towers on four hosts",
    "2 x 2 x 2, inter_host",
    "flat model on 2 x 2 x 2, intra_host",
    "2 x 2 x 1, inter_host",
)


def config_of(name: str, folder: str) -> TrainingConfig:
    arch, sections = CASES[name]
    sections = {key: dict(section) for key, section in sections.items()}
    if "towers" in sections:
        sections["towers"] = {"plan": f"{folder}/towers.json"}
    sections["sharding"] = {"dataflow": "sptt"} | sections.get("sharding", {})
    # Rows that the tower's ranks share evenly, ids that use them evenly, and one id a sample, as planned. In its third
    # pass, DDP tells all ranks once how it has laid out gradients; the fourth one is measured.
    synthetic = {"rows_per_table": 12, "zipf_exponent": 0.0, "num_rows": 3072}
    train = {"batch_size": 128, "max_steps": 3} | sections.pop("train", {})
    return small(arch, synthetic=synthetic, train=train, **sections)


class Silent:
    """Stands in for `RunRecord`."""

    def draw(self, step: int, values: dict[str, float]) -> None: ...

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Nothing is kept."""


def measure_on_rank(rank: int, folder: str, names: list[str]) -> dict[str, dict[str, int]]:
    """The bytes of one step of every case, on all ranks."""
    found = {}
    for name in names:
        config = config_of(name, folder)
        mesh = TowerMesh(config.topology.build())
        data = source(config)
        model = shard_model(open_job(config), mesh)
        silent: Any = Silent()
        trainer = Trainer(
            config=config.train,
            data=data,
            mesh=mesh,
            model=model,
            optimizer=build_optimizer(config.optimizer, model),
            record=silent,
            replicas=ReplicaSync(model, mesh) if mesh.topology.num_replicas > 1 else None,
        )
        trainer.train()
        found[name] = asdict(trainer.measure_traffic())
    return found


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, dict[str, dict[str, int]]]:
    cases = [name for name in CASES if name in collected(request, "name")]
    folder = tmp_path_factory.mktemp("planned")
    CUT.save(folder / "towers.json")
    found: dict[str, dict[str, int]] = {}
    for ranks in (4, 8):
        names = [name for name in cases if config_of(name, str(folder)).topology.build().world_size == ranks]
        found |= run_ranks(measure_on_rank, ranks, str(folder), names)[0] if names else {}
    return str(folder), found


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_a_step_sends_what_was_planned(name: str, measured: tuple[str, dict[str, dict[str, int]]]) -> None:
    folder, traffic = measured
    config = config_of(name, folder)
    topology = config.topology.build()
    planned = asdict(expected_traffic(open_job(config)))
    found = traffic[name]
    assert any(found.values())
    for kind in ("forward", "backward", "dense"):
        assert found[kind] == planned[kind], kind
    # Sizes come on top: at most 8 numbers of 8 bytes from every rank to each other one of its replica.
    ranks = topology.world_size // topology.num_replicas
    sizes = 8 * 8 * topology.world_size * (ranks - 1)
    # Which ranks the ids of a row-wise table go to is chance: 512 samples, each id to the own rank with 1/2. The sum
    # over 6 tables has a standard deviation of 8 * sqrt(6 * 512 / 4), 222 bytes; five of them. (With replicas it is one
    # table and twice the samples.)
    chance = 1110 if "row_wise" in str(CASES[name]) else 0
    crossing = 2 * 1110 if config.dataflow == "flat" and config.sharding.scheme in BY_ROWS else 0
    assert -crossing <= found["ids"] - planned["ids"] <= sizes + crossing
    chance = max(chance, crossing)
    assert -chance <= found["inside"] - planned["inside"] <= sizes + chance
    per_sample = [
        {kind: number / (128 * topology.world_size) for kind, number in of.items()} for of in (planned, found)
    ]
    assert traffic_warning(*per_sample) == ""


def test_more_ids_than_planned_are_told_and_pooling_factors_mend_it() -> None:
    bags: dict[str, Any] = {"synthetic": {"num_multi_hot": 6}, "sharding": {"scheme": "table_wise"}}
    plain = small("dmt-dlrm", **bags)
    bags["sharding"] = {"scheme": "table_wise", "pooling_factors": {f"C{i}": 1.5 for i in range(1, 7)}}
    told = small("dmt-dlrm", **bags)

    def planned(config: TrainingConfig) -> dict[str, int]:
        return asdict(expected_traffic(open_job(config)))

    without, with_factors = planned(plain), planned(told)
    # Half of 64 samples, 6 features: a length each, and 1 or 1.5 ids.
    assert (without["ids"], with_factors["ids"]) == (32 * 6 * 16, 32 * 6 * 20)
    warning = traffic_warning(without, with_factors)
    assert "ids 3,072, measured 3,840" in warning
    assert "sharding.pooling_factors" in warning
    assert "forward" not in warning
    assert traffic_warning(with_factors, with_factors) == ""


@pytest.mark.parametrize(
    "name", [name for name, (_, s) in CASES.items() if {"id_route", "dataflow"}.isdisjoint(s.get("sharding", {}))]
)
def test_where_no_input_repeats_as_much_is_planned_as_without_looking(name: str, tmp_path: Path) -> None:
    CUT.save(tmp_path / "towers.json")
    job = open_job(config_of(name, str(tmp_path)))
    assert job.towers is not None
    every = [
        InputGroup(tower=tower, features=tuple(own), distinct=DistinctRows(128.0, (128.0,) * len(own)), share=1.0)
        for tower, own in enumerate(job.towers.to_lists())
    ]
    assert expected_traffic(job, every) == expected_traffic(job)


@pytest.mark.parametrize("arch", ["dmt-dlrm", "dlrm"])
def test_distinct_inputs_are_planned_once(arch: str, tmp_path: Path) -> None:
    # Each request of 8 rows has a user of 2 requests: B = 64 rows have 8 requests and 4 users.
    lines = [
        f"{i % 2},{i},{i // 16},{i // 16 % 4},{i // 8},{i // 8 % 4},{'x|y' if i // 16 % 2 else ''}" for i in range(256)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["label,d_1,u_a,u_b,q_a,q_b,u_c", *lines]) + "\n")
    data = {"kind": "columns", "train_path": str(tmp_path), "eval_path": str(tmp_path), "dense": ["d_1"]}
    data |= {"categorical": ["u_*", "q_*"], "multi_hot": ["u_c"], "shuffle_rows": 0, "num_embeddings": 100_000}
    TowerPlan.from_lists([["u_a", "u_b", "u_c"], ["q_a", "q_b"]]).save(tmp_path / "towers.json")
    sections = {"towers": {"plan": str(tmp_path / "towers.json")}, "train": {"batch_size": 64}, "data": data}
    job = open_job(small(arch, "sptt", sharding={"dataflow": "sptt", "scheme": "table_wise"}, **sections))
    groups = distinct_inputs_of(job)
    assert {group.features: (group.share * 64, group.distinct.ids) for group in groups} == (
        {("u_a", "u_b", "u_c"): (4.0, (4.0, 4.0, 4.0)), ("q_a", "q_b"): (8.0, (8.0, 8.0))}
        if arch == "dmt-dlrm"
        else {
            ("u_a",): (4.0, (4.0,)), ("u_b",): (4.0, (4.0,)), ("u_c",): (2.0, (2.0,)),
            ("q_a",): (8.0, (8.0,)), ("q_b",): (4.0, (4.0,)),
        }
    )  # fmt: skip
    # Data for one rank's batch only: it stands for a host's.
    by_host = {"dataflow": "sptt", "scheme": "table_wise", "unique": "host"}
    of_hosts = open_job(small(arch, "sptt", sharding=by_host, **sections))
    few = distinct_inputs_of(of_hosts, batches=first_ids(job.data, world_size=1, batch_size=64))
    assert [group.distinct for group in few] == [group.in_host for group in few] == [g.distinct for g in groups]
    whole, once = expected_traffic(job), expected_traffic(job, groups)
    # Half of what 4 ranks send goes to the other tower: a length for each feature and row, and the ids.
    numbers = (4 * 3 + 12, 8 * 2 + 16) if arch == "dmt-dlrm" else (8 + 8 + 2 + 2, 16 + 8)
    assert once.ids == 4 // 2 * 8 * sum(numbers)
    # Outputs of FP32: 4 or 8 numbers of each feature (tower_dim 4, or the embedding).
    rows = (4 * 3 + 8 * 2) * 4 if arch == "dmt-dlrm" else (4 + 4 + 2 + 8 + 4) * 8
    assert once.forward == once.backward == 4 // 2 * 4 * rows
    assert once.dense == whole.dense
    assert 0 < once.inside - once.dense < (whole.inside - whole.dense)


# Each model and each scheme; then the other pairs.
SCHEMES = [
    ("dmt-dlrm", "rank", "table_wise"),
    ("dlrm", "auto", "row_wise"),
    ("dmt-dlrm", "rank", "data_parallel"),
    ("dlrm", "host", "table_wise"),
]
OTHERS = [
    ("dlrm", "rank", "table_wise"),
    ("dmt-dlrm", "auto", "row_wise"),
    ("dlrm", "rank", "data_parallel"),
    ("dmt-dlrm", "host", "row_wise"),
]


def requests_config(folder: str, arch: str, unique: str, scheme: str) -> TrainingConfig:
    data = {"kind": "columns", "train_path": f"{folder}/rows.csv", "eval_path": f"{folder}/rows.csv", "dense": ["d_1"]}
    data |= {"categorical": ["u_*", "q_*"], "multi_hot": ["u_c"], "num_embeddings": 5000, "group_by": "q_a"}
    sharding = {"dataflow": "sptt", "scheme": scheme, "unique": unique}
    train = {"batch_size": 128, "max_steps": 3}
    return small(arch, "sptt", data=data, towers={"plan": f"{folder}/towers.json"}, train=train, sharding=sharding)


def measure_requests(rank: int, folder: str, cases: list[tuple[str, str, str]]) -> list[dict[str, int]]:
    found = []
    for case in cases:
        config = requests_config(folder, *case)
        job, mesh = open_job(config), TowerMesh(config.topology.build())
        model = shard_model(job, mesh)
        record: Any = Silent()
        optimizer = build_optimizer(config.optimizer, model)
        trainer = Trainer(
            config=config.train,
            data=job.data,
            mesh=mesh,
            model=model,
            optimizer=optimizer,
            record=record,
            replicas=None,
        )
        trainer.train()
        found.append(asdict(trainer.measure_traffic()))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases", [pytest.param(SCHEMES, id="cover"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_a_step_sends_the_distinct_inputs_that_were_planned(cases: list[tuple[str, str, str]], tmp_path: Path) -> None:
    draw, lines = random.Random(0), ["label,d_1,u_a,u_b,q_a,q_b,u_c"]
    for request in range(400):
        user, place = draw.randrange(100), draw.randrange(4)
        bag = "|".join("abc"[: user % 4])
        for _ in range(draw.randrange(1, 9)):
            lines.append(f"{draw.randrange(2)},{draw.random()},u{user},{user % 7},q{request},{place},{bag}")
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    TowerPlan.from_lists([["u_a", "u_b", "u_c"], ["q_a", "q_b"]]).save(tmp_path / "towers.json")
    for case, found in zip(cases, run_ranks(measure_requests, 4, str(tmp_path), cases)[0], strict=True):
        job = open_job(requests_config(str(tmp_path), *case))
        groups = distinct_inputs_of(job)
        assert all(group.share < 0.5 for group in groups)
        planned, every = asdict(expected_traffic(job, groups)), asdict(expected_traffic(job))
        # Planned from the mean of all ranks' rows, of which each sends only those to other towers. With so few rows, a
        # hash shares them out among the ranks of a host less evenly than planned.
        error = 0.1 if case[1] == "host" else 0.03
        for kind in ("forward", "backward"):
            assert found[kind] == pytest.approx(planned[kind], rel=error), (case, kind)
        assert found["dense"] == planned["dense"], case
        assert planned["forward"] < 0.5 * every["forward"]
        # Numbers of rows come on top: a few for each feature and pair of ranks.
        for kind in ("ids", "inside"):
            assert found[kind] == pytest.approx(planned[kind], rel=error, abs=16 * 8 * 4 * 3), (case, kind)


def test_a_warning_needs_a_tenth() -> None:
    planned = {"ids": 100.0, "inside": 0.0}
    assert traffic_warning(planned, {"ids": 109.0, "inside": 0.0}) == ""
    assert traffic_warning(planned, {"ids": 89.0, "inside": 0.0}).count("measured") == 1
    assert "inside 0, measured 5" in traffic_warning(planned, {"ids": 100.0, "inside": 5.0})


def test_a_warning_needs_a_byte() -> None:
    assert traffic_warning({"ids": 0.0}, {"ids": 0.9}) == ""
    assert "ids 0, measured 2" in traffic_warning({"ids": 0.0}, {"ids": 1.5})
