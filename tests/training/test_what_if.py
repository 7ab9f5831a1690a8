"""``dmt what-if``: predictions of a job's step and of its alternatives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from dmt.errors import InputError
from dmt.models import DLRM, ModelOptions
from dmt.models.complexity import MetaTables, count_on_meta, criteo_1tb_tables
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from dmt.simulator.cluster import load_cluster, save_cluster
from dmt.simulator.work import count_operators
from dmt.training import step_prediction
from dmt.training.build import build_model
from dmt.training.commands import what_if
from dmt.training.config import load_config, to_toml
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare
from dmt.training.factory import without_tables
from dmt.training.job import make_job, open_job
from dmt.training.step_prediction import alternatives, changed_config, predict_step, predicted_result, work_of
from tests.training.small import dmt, small
from tests.training.test_factory import deepfm, job_of

A100 = load_cluster("a100")
SMALL = replace(A100, ranks_per_host=2)


def test_the_parts_of_a_model_are_all_of_it() -> None:
    job = open_job(small("dmt-dlrm"))
    model = without_tables(build_model(job, device="meta"))
    parts = count_operators(model, job.num_dense)
    # Forward: each tower maps its three features from 8 to 4 columns; 3 -> 6 -> 4 in the bottom MLP; seven vectors of
    # 4 interact, and 21 products and 4 columns go through 4 and 1.
    forward = [3 * 8 * 4, 3 * 8 * 4, 3 * 6 + 6 * 4, 7 * 7 * 4 + 25 * 4 + 4]
    found = [*parts.towers, parts.dense_arch, parts.rest]
    assert [sum(one.flops for one in part.forward) for part in found] == [2 * n for n in forward]
    counted = 1e6 * count_on_meta(model, job.num_dense).mflops_per_sample
    assert sum(part.flops for part in found) == pytest.approx(counted)
    own = [p.nbytes for name, p in model.named_parameters() if ".embedding." not in name]
    assert sum(part.weight_bytes for part in found) == sum(own)
    assert count_operators(without_tables(build_model(open_job(small("dlrm")), device="meta")), 3).towers == ()


def test_operators_move_their_tensors_for_each_sample_and_their_weights_in_each_pass() -> None:
    model = DLRM(
        tables=criteo_1tb_tables(8),
        dense_in_features=3,
        make_sparse_arch=MetaTables,
        options=ModelOptions(dense_arch_layer_sizes=(6,), over_arch_layer_sizes=(4, 1), device="meta"),
    )
    forward = count_operators(model, 3).dense_arch.forward
    # 3 -> 6 -> 8, each with a ReLU, which reads and writes; 4 bytes a number.
    assert [one.sample_bytes for one in forward] == [4 * (3 + 6), 8 * 6, 4 * (6 + 8), 8 * 8]
    assert [one.pass_bytes for one in forward] == [4 * (3 * 6 + 6), 0, 4 * (6 * 8 + 8), 0]


def test_replicas_cost_their_average_and_less_of_it_if_they_wait() -> None:
    topology = {"num_replicas": 2, "num_towers": 2, "ranks_per_tower": 2}
    loads = []
    for steps in (1, 10):
        whole = {"scheme": "table_wise"}
        job = open_job(small("dmt-dlrm", topology=topology, replicas={"sync_every": steps}, sharding=whole))
        loads.append(work_of(job).loads["replicas"].uplink)
    # Six tables of 11 rows x 8 and a moment each; a ring of two sends all of them each way, from four hosts.
    assert loads[0] == pytest.approx(2 * 6 * 11 * 9 * 4 / 4)
    assert loads[1] == pytest.approx(loads[0] / 10)


def test_the_busiest_ranks_and_hosts_are_those_that_hold_most() -> None:
    tables = [
        TableSpec(name=f"t{i}", num_embeddings=9, embedding_dim=8, feature_names=tuple(f"f{i}{j}" for j in range(n)))
        for i, n in enumerate((3, 1, 1, 1))
    ]
    job = make_job(small("dlrm", sharding={"dataflow": "flat", "scheme": "table_wise"}), tables, 3)
    # Ranks 0 and 1, on the first host, hold 24 and 8 of 48 columns: 4/3 of the mean. Two of three ranks are elsewhere.
    sent = 16 * 3 * 48 * 4 * 2 / 3
    work = work_of(job)
    assert work.sent["peer_outputs"].uplink == pytest.approx(sent)
    assert work.loads["peer_outputs"].uplink == pytest.approx(sent / 2 * 4 / 3)
    assert work.embedding_bytes == work.output_bytes == 4 * 16 * 48
    # The ids and lengths of their 4 features, 8 bytes each, from 3 other ranks each.
    assert work.loads["peer_ids"].uplink == pytest.approx(16 * 3 * 4 * 2 * 8 * 2 / 3)
    # Rank 0: weights, and embeddings with their gradients of 64 samples.
    assert work.rank_bytes == (9 * (8 + 1) * 4 + 64 * 24 * 4 * 2, 64 * 24 * 4 * 2)
    assert predict_step(job, A100).lookup_seconds == pytest.approx(64 * 24 * 4 / A100.lookup_bytes_per_s)


def test_towers_get_distinct_inputs_at_most_as_many_as_rows() -> None:
    features = {"t0": (5, ["f0"]), "t1": (100, ["f1"]), "t2": (3, ["f2"]), "t3": (4, ["f3", "f4"])}
    tables = [
        TableSpec(name=name, num_embeddings=rows, embedding_dim=8, feature_names=tuple(names))
        for name, (rows, names) in features.items()
    ]
    sharding = {"dataflow": "sptt", "scheme": "table_wise", "unique": True, "pooling_factors": {"f2": 2.0}}
    towers = TowerPlan.from_lists([["f0"], ["f1", "f2", "f3", "f4"]])
    work = work_of(make_job(small("dlrm", sharding=sharding), tables, 3, towers=towers))
    # Of 16 samples: 5 rows to the first tower; 16, 16 bags of two ids, 4 and 4 to the second. Each rank has one peer.
    assert work.sent["peer_ids"].uplink == 2 * 8 * (5 * 2 + 16 * 2 + 16 * 3 + 4 * 2 + 4 * 2)
    assert work.loads["peer_ids"].uplink == 2 * 8 * (16 * 2 + 16 * 3 + 4 * 2 + 4 * 2)
    for name in ("peer_outputs", "peer_gradients"):
        assert work.sent[name].uplink == 2 * 4 * 8 * (5 + 16 + 16 + 4 + 4)
        assert work.loads[name].uplink == 2 * 4 * 8 * (16 + 16 + 4 + 4)
    # In the second tower every feature is filled up to 16 rows of each of four ranks; half stays on its rank.
    assert work.sent["tower_outputs"].inside == 4 * 8 * 4 * (5 + 4 * 16) / 2
    assert (work.embedding_bytes, work.output_bytes) == (4 * 8 * 2 * 4 * 16, 4 * 8 * 5 * 16)
    # Only backward: a number of 4 bytes becomes one of 2 before the exchange, and one of 4 after it.
    sharding["backward_precision"] = "bf16"
    config = small("dlrm", sharding=sharding, train={"dense_reduce": "hierarchical"})
    halved = work_of(make_job(config, tables, 3, towers=towers))
    assert (work.is_hierarchical, halved.is_hierarchical) == (False, True)
    assert (work.converted_bytes, halved.converted_bytes) == ((0, 0), (0, 2 * 6 * 8 * (5 + 16 + 16 + 4 + 4)))


def test_a_model_may_read_all_columns_at_once() -> None:
    assert work_of(job_of("made:flat")).model.rest.forward


def test_operators_that_depend_on_the_samples_are_refused() -> None:
    class Looping(torch.nn.Module):
        def forward(self, dense: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[None, :1] * 2 for row in dense])

    with pytest.raises(InputError, match="runs 129 operators for 128 samples and 257 for 256"):
        count_operators(Looping(), 3)


# The alternatives.


def test_alternatives_are_sorted_and_their_overrides_make_them() -> None:
    values = ["topology.num_towers=4", "topology.ranks_per_tower=2", "train.batch_size=4096", "model.arch=dmt-dcn"]
    tables = criteo_1tb_tables(64)
    ways, left_out = alternatives(make_job(load_config("demo", values), tables, 13), SMALL)
    seconds = [round(way.seconds, 7) for way in ways]
    assert (seconds, left_out) == (sorted(seconds), [])
    # R of 1, of 2 on two hosts each, and of 2 on every host; of 4 on one host each, where towers would send nothing.
    ratios = {
        copies: sorted(round(w.compression_ratio) for w in ways if w.num_replicas == copies) for copies in (1, 2, 4)
    }
    assert ratios == {1: [1, 1, 1, 1, 2, 4, 16], 2: sorted([1, 1, 1, 2, 4, 16] * 2), 4: [1]}
    for way in (way for way in ways if way.num_replicas == 1 or way.compression_ratio == 2):
        again = load_config("demo", [*way.overrides, "train.batch_size=4096"])
        alone = predict_step(make_job(again, tables, 13), SMALL)
        assert (alone.seconds, way.samples_per_s) == pytest.approx((way.seconds, 8 * 4096 / way.seconds))
        assert alone.uplink_bytes == pytest.approx(way.uplink_bytes)


def test_towers_span_hosts_where_there_are_more_hosts_than_tables() -> None:
    values = ["topology.num_towers=4", "topology.ranks_per_tower=2", "model.embedding_dim=16", "model.arch=dlrm"]
    config = load_config("demo", values)
    sizes = {"num_embeddings": 10, "embedding_dim": 16}
    tables = [TableSpec(name=f"t{i}", feature_names=(f"f{i}", f"g{i}"), **sizes) for i in range(3)]
    for way in alternatives(make_job(config, tables, 13), SMALL)[0]:
        if way.num_replicas == 1:
            is_flat = way.name.startswith("flat")
            assert ("topology.num_towers=2" in way.overrides) is not is_flat
            assert ("topology.ranks_per_tower=4" in way.overrides) is not is_flat


def test_alternatives_keep_all_that_is_not_about_the_towers_of_the_config() -> None:
    sharding = ["table_precision=fp16", "cluster=a100", "forward_precision=bf16", "unique=true"]
    values = ["topology.num_towers=2", "train.micro_batches=2", "sharding.pooling_factors.C1=7"]
    config = load_config("demo", [*values, *(f"sharding.{setting}" for setting in sharding)])
    for dataflow, micro_batches in (("flat", 1), ("sptt", 2)):
        found = changed_config(config, {"model": {"arch": "dlrm"}, "sharding": {"dataflow": dataflow}})
        kept = found.sharding.table_precision, found.sharding.cluster, found.sharding.forward_precision
        assert (*kept, found.sharding.pooling_factors) == ("fp16", "a100", "bf16", {"C1": 7})
        assert (found.sharding.unique, found.train.micro_batches) == (False, micro_batches)


def test_numbers_of_replicas_that_memory_has_no_room_for_are_left_out() -> None:
    values = ["topology.num_towers=4", "topology.ranks_per_tower=2", "train.batch_size=64", "sharding.memory_gib=16"]
    ways, left_out = alternatives(make_job(load_config("demo", values), criteo_1tb_tables(64), 13), SMALL)
    # Of 46.3 GB of tables 8 ranks have 5.8 GB each, with 2 replicas 11.6 GB, with 4 of them 23.1 GB.
    assert {way.num_replicas for way in ways} == {1, 2}
    assert "flat (one tower), 2 replicas (inter_host)" in {way.name for way in ways}
    assert "flat (one tower), 4 replicas (inter_host)" in left_out
    assert all(way.rank_bytes <= 16 * 2**30 for way in ways)
    values[-1] = "sharding.memory_gib=1"
    job = make_job(load_config("demo", values[:-1]), criteo_1tb_tables(64), 13)
    with pytest.raises(InputError, match=r"memory_per_rank=1\.07 GB have.*more memory \(sharding\.memory_gib\)"):
        alternatives(replace(job, config=load_config("demo", values)), SMALL)


# The command.

SHAPE = ("topology.num_towers=2", "topology.ranks_per_tower=8")  # on hosts of the clusters that the library brings
PAIRS = ("topology.num_towers=2", "topology.ranks_per_tower=2", "data.synthetic.num_features=8")  # soon predicted


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """A cluster with two ranks on a host, of which rings of two are measured."""
    shares = replace(A100.all_reduce, uplink_by_ranks={2: 1.0})
    save_cluster(replace(SMALL, all_reduce=shares, lookup_bytes_per_s=5e9), tmp_path / "pairs.toml")
    return str(tmp_path / "pairs.toml")


def run(*arguments: str, code: int = 0) -> Result:
    return dmt("what-if", *arguments, code=code, columns=140)


def record_of(*arguments: str) -> dict[str, Any]:
    """What is printed to stdout: libraries may log to stderr, which ``output`` has too."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def test_tables_are_placed_by_the_rates_of_a_cluster_of_gpus_where_there_are_none(
    pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in (step_prediction, what_if):
        monkeypatch.setattr(module, "predict_step", lambda job, *more: seen.append(job) or predict_step(job, *more))
    result = run("demo", *PAIRS, "train.device=cuda", "sharding.cluster=h100", "--cluster", pairs)
    assert "Groups of more than 2 ranks were not measured; they get the rate of 2 ranks." in result.output
    assert {job.sharding.hardware.memory_gb_per_s for job in seen if job.sharding is not None} == {5.0}


def test_a_model_of_ones_own_is_predicted_in_towers_as_it_is_and_flat_over_towers_too(tmp_path: Path) -> None:
    save_cluster(SMALL, tmp_path / "c.toml")
    config = deepfm(topology={"num_towers": 2, "ranks_per_tower": 2}, model={"in_towers": False})
    (tmp_path / "run.toml").write_text(to_toml(config))
    ways = record_of(str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "c.toml"))["alternatives"]
    names = sorted(way["name"] for way in ways if way["num_replicas"] == 1)
    assert names == ["SPTT, same model", "SPTT, same model, unique", "flat (TorchRec)", "flat (one tower)"]
    assert load_config(tmp_path / "run.toml", ways[0]["overrides"]).model == config.model
    config = deepfm(topology={"num_towers": 2, "ranks_per_tower": 2})
    (tmp_path / "run.toml").write_text(to_toml(config))
    record = record_of(str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "c.toml"))
    assert (record["own"]["compression_ratio"] > 1, record["alternatives"]) == (True, [])
    assert "nan" not in run(str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "c.toml")).output


def test_a_model_of_tables_of_several_widths_is_predicted_as_it_is(pairs: str, tmp_path: Path) -> None:
    TowerPlan.from_lists([[f"C{i}" for i in range(2, 9)], ["C1"]]).save(tmp_path / "towers.json")
    values = ["model.arch=dmt-dcn", "model.embedding_dims={'?1'=16}", f"towers.plan={tmp_path / 'towers.json'}"]
    record = record_of("demo", *PAIRS, *values, "--cluster", pairs)
    assert (record["own"]["compression_ratio"] > 1, record["alternatives"]) == (True, [])


@pytest.mark.parametrize(
    ("overrides", "hosts", "left_out"),
    [
        (["topology.num_towers=1", "model.p=1"], 1, []),
        (
            ["train.micro_batches=4", "sharding.scheme=row_wise", "optimizer.sparse=adam"],
            2,
            ["extra time for optimizer.sparse='adam'"],
        ),
        (["sharding.unique=true", "sharding.forward_precision=fp16"], 2, ["sharding.unique=true"]),
        (["topology.num_replicas=2", "replicas.moment_scale=2", "sharding.tables.t_C1=row_wise"], 4, []),
        (["hot_rows.extra_memory=0.01", "sharding.unique=true", "model.arch=dlrm"], 2, ["hot_rows.extra_memory=0.01"]),
        (["model.arch=dlrm", "sharding.dataflow=flat", "sharding.scheme=row_wise"], 2, ["sharding.scheme='row_wise'"]),
        (["model.arch=dlrm", "sharding.dataflow=flat", "train.dense_reduce=hierarchical"], 2, []),
    ],
)
def test_alternatives_to_any_config_are_found(
    overrides: list[str], hosts: int, left_out: list[str], pairs: str
) -> None:
    given = [*PAIRS, "sharding.dataflow=sptt", "train.epochs=3", *overrides]
    record = record_of("demo", *given, "--cluster", pairs)
    assert record["not_counted"] == left_out
    assert len([way for way in record["alternatives"] if way["num_replicas"] == 1]) == (5 if hosts == 1 else 7)
    for way in record["alternatives"]:
        config = load_config("demo", [*given, *way["overrides"]])
        assert (config.topology.build().world_size, config.train.epochs) == (2 * hosts, 3)
        # What the run has beyond its model is not part of the prediction.
        assert (config.sharding.unique, config.hot_rows.extra_memory) == ("unique" in way["name"], 0)
        assert (config.sharding.scheme, config.sharding.tables) == ("auto", {})
        assert config.replicas.moment_scale == "num_replicas"
        kind, _, ratio = way["name"].partition(", ratio ")
        assert ratio.partition(",")[0] in ("", f"{way['compression_ratio']:.0f}")
        assert (config.train.dense_reduce == "ring") == (hosts == 1 or kind.startswith("flat"))


def test_distinct_inputs_are_those_that_prepare_has_counted(pairs: str, tmp_path: Path) -> None:
    # A quarter of the users is b; items are even; bags have two ids.
    lines = [f"{n % 2},0,{'ab'[n % 4 == 0]},{n % 8},x|y" for n in range(64)]
    (tmp_path / "clicks.csv").write_text("\n".join(["label,d,user,item,tags", *lines]))
    path, ids = str(tmp_path / "clicks.csv"), ("user", "item", "tags")
    columns: dict[str, Any] = {"dense": ("d",), "multi_hot": ("tags",)}
    prepare(DataConfig(kind="columns", train_path=path, eval_path=path, categorical=ids, **columns), tmp_path / "ready")
    flat = ["model.arch=dlrm", "sharding.dataflow=sptt", "sharding.unique=true", "train.batch_size=16"]
    values = [*PAIRS, *flat, f"data.prepared={tmp_path / 'ready'}"]
    sent = work_of(open_job(load_config("demo", values))).sent
    users, items = 2 - 0.75**16 - 0.25**16, 8 * (1 - (7 / 8) ** 16)
    assert sent["peer_outputs"].uplink == pytest.approx(2 * 4 * 32 * (users + items + 16))
    assert sent["peer_ids"].uplink == pytest.approx(2 * 8 * (2 * users + 2 * items + 3 * 16))
    towers = open_job(load_config("demo", [*values, "towers.plan=balanced"])).towers
    assert towers is not None
    assert towers.to_lists() == [["tags"], ["item", "user"]]
    record = record_of("demo", *values, "--cluster", pairs)
    known = {way["name"]: way["unique_rows"] for way in (record["own"], *record["alternatives"])}
    assert known["this config"] == known["SPTT, same model, unique"] == "counted by dmt prepare"
    assert known["SPTT, same model"] is None


def test_a_run_that_names_its_cluster_has_the_prediction_in_its_result(tmp_path: Path) -> None:
    save_cluster(replace(A100, ranks_per_host=2), tmp_path / "c.toml")
    jobs = [open_job(load_config("demo", [f"sharding.cluster={name}"])) for name in (tmp_path / "c.toml", "a100")]
    found = predicted_result(jobs[0])
    assert found is not None
    assert found["samples_per_second"] == predict_step(jobs[0], load_cluster(tmp_path / "c.toml")).samples_per_s
    assert 0 < found["lookup_seconds"] < 4 * 512 / found["samples_per_second"]
    assert predicted_result(open_job(load_config("demo", []))) is None
    assert predicted_result(jobs[1]) is None  # its hosts have 8 ranks


def test_the_rate_of_the_uplink_may_be_given(tmp_path: Path) -> None:
    save_cluster(replace(SMALL, hosts=1, step_s=0.0), tmp_path / "one.toml")
    cluster = ["--cluster", str(tmp_path / "one.toml")]
    assert "was measured on one host, which says nothing about" in run("demo", *PAIRS, *cluster, code=2).stderr
    values = ["train.batch_size=16384", *cluster, "--uplink-gbit-per-s"]
    fast, slow = (record_of("demo", *PAIRS, *values, rate)["own"] for rate in ("1600", "100"))
    assert fast["seconds"] == pytest.approx(sum(fast["exposed"].values()))
    assert fast["uplink_bytes"] == slow["uplink_bytes"]
    assert fast["seconds"] < slow["seconds"]
    assert "(another AUC: docs/quality.md)" in run("demo", *PAIRS, *values, "1").output


def test_alternatives_that_take_equally_long_are_all_shown_and_none_is_called_the_fastest(tmp_path: Path) -> None:
    save_cluster(replace(SMALL, step_s=1.0), tmp_path / "c.toml")
    output = run("demo", *PAIRS, "--cluster", str(tmp_path / "c.toml")).output
    assert ("flat (TorchRec)" in output, "Fastest" in output) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cluster", "a100"], "Hosts of the run have 2 ranks, but the rates of cluster 'a100' are for hosts of 8"),
        (
            [*SHAPE, "topology.num_replicas=3", "topology.ranks_per_host=32", "--cluster", "a100"],
            "=32 must divide the 48 ranks",
        ),
        ([*SHAPE, "--cluster", "a100", "--uplink-gbit-per-s", "0"], "s=0 (--uplink-gbit-per-s) must be a finite"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments: list[str], reason: str) -> None:
    assert reason in run("demo", *arguments, code=2).stderr
