"""``dmt what-if``: predictions of a job's step and of its alternatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from dmt.errors import InputError
from dmt.models import DLRM, ModelOptions
from dmt.models.complexity import MetaTables, count_on_meta, criteo_1tb_tables
from dmt.plan.tables import TableSpec
from dmt.simulator.cluster import load_cluster, save_cluster
from dmt.simulator.steps import StepWork
from dmt.simulator.work import Inputs, count_operators, step_bytes, step_work
from dmt.training.build import build_model
from dmt.training.commands import main
from dmt.training.commands.plan import placement_rates
from dmt.training.commands.what_if import (
    alternatives,
    changed_config,
    count,
    first_batches,
    inputs_of,
    predict_step,
    workload_of,
)
from dmt.training.config import TrainingConfig, load_config, to_toml
from dmt.training.factory import without_tables
from dmt.training.job import Job, make_job, open_job
from examples import deepfm as deepfm_example
from tests.training.small import small
from tests.training.test_factory import deepfm, unsharded

A100 = load_cluster("a100")
SMALL = replace(A100, ranks_per_host=2)


def work_of(job: Job, inputs: Sequence[Inputs] = ()) -> StepWork:
    return step_work(workload_of(job, inputs), count(job))


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


def test_rows_cross_with_the_first_micro_batch_that_has_them() -> None:
    """Ids 0 1 0 1 in one feature, 0 1 2 3 in all others."""
    job = open_job(small("dlrm", dataflow="sptt", sharding={"unique": True}, train={"micro_batches": 2}))
    features = [name for tower in job.towers.to_lists() for name in tower]
    ids = torch.tensor([[0, 1, 0, 1]] + [[0, 1, 2, 3]] * (len(features) - 1))
    batch = KeyedJaggedTensor(features, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))
    config = changed(job.config, "train", batch_size=4)
    job = replace(job, config=config)
    found = inputs_of(job, [batch])
    num = len(features)
    assert [group.parts for group in found] == [(1.0, 0.0)] + [(0.5, 0.5)] * (num - 1)
    shares = (2 * num / (4 * num - 2), (2 * num - 2) / (4 * num - 2))
    assert work_of(job, found).parts == pytest.approx(shares)
    other = KeyedJaggedTensor(features, ids[1].repeat(len(features)), lengths=batch.lengths())
    assert work_of(job, inputs_of(job, [other])).parts == ()


def changed(config: Any, section: str, **values: Any) -> Any:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def test_a_row_that_samples_share_is_sent_and_computed_once() -> None:
    """Half of the inputs repeat: half the rows cross, and the tower modules compute half."""
    job = open_job(small("dmt-dlrm", sharding={"unique": True}))
    towers = enumerate(job.towers.to_lists())
    halves = [Inputs(i, tuple(own), 8.0, (8.0,) * len(own), (1.0,)) for i, own in towers]
    plain, shared = (work_of(job, inputs) for inputs in ([], halves))
    for name in ("lookup_bytes", "embedding_bytes", "output_bytes", "peer_samples"):
        assert getattr(shared, name) == pytest.approx(getattr(plain, name) / 2), name
    uplinks = [work.loads["peer_outputs"].uplink for work in (plain, shared)]
    assert uplinks[1] == pytest.approx(uplinks[0] / 2)
    # 16 samples of two towers of 12 columns from 8 rows each; six features' ids are told apart.
    assert shared.added_bytes == (4 * (8 + 16) * 24,) * 2
    assert (plain.compared_ids, shared.compared_ids) == (0, 16 * 6)
    assert [work.samples for work in (plain, shared)] == [16, 16]


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


def job_for(config: TrainingConfig, tables: Sequence[TableSpec]) -> Job:
    return make_job(config, tables, 13)


def test_alternatives_are_sorted_and_their_overrides_make_them() -> None:
    config = load_config("demo", ["topology.num_towers=4", "topology.ranks_per_tower=2", "train.batch_size=4096"])
    tables = criteo_1tb_tables(64)
    found = alternatives(job_for(config, tables), SMALL)
    seconds = [round(one.prediction.timeline.seconds, 7) for one in found]
    assert seconds == sorted(seconds)
    assert {round(one.ratio) for one in found} == {1, 2, 4, 16}
    assert len(found) == len({(one.name, one.exchange) for one in found}) == 2 * 5
    for one in found[:: len(found) // 4]:
        again = load_config("demo", [*one.overrides, "train.batch_size=4096"])
        alone = predict_step(make_job(again, tables, 13), SMALL)
        assert alone.timeline.seconds == pytest.approx(one.prediction.timeline.seconds)
        assert alone.uplink_bytes == pytest.approx(one.prediction.uplink_bytes)


def test_towers_span_hosts_where_there_are_more_hosts_than_features() -> None:
    values = ["topology.num_towers=12", "topology.ranks_per_tower=2", "model.embedding_dim=16", "model.arch=dlrm"]
    config = load_config("demo", values)
    tables = [TableSpec(name=f"t{i}", num_embeddings=10, embedding_dim=16, feature_names=(f"f{i}",)) for i in range(5)]
    sizes = {
        (one.settings["topology.num_towers"], one.settings["topology.ranks_per_tower"])
        for one in alternatives(job_for(config, tables), SMALL)
        if not one.is_flat
    }
    assert sizes == {(4, 6)}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["what-if", *arguments], env={"COLUMNS": "140"}, catch_exceptions=False)


def test_the_command_predicts_the_config_and_its_alternatives() -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8"]
    found = run("demo", *shape, "--cluster", "h100")
    assert found.exit_code == 0, found.output
    words = " ".join(found.output.split())
    assert "2 hosts x 8 ranks, 512 samples a rank, on h100: 2,688 Gbit/s from a host to others (336 a rank)" in words
    # All are bound by the program: one row for all.
    assert [name in words for name in ("this config", "every way to train", "flat (TorchRec)")] == [True, True, False]
    words = " ".join(run("demo", *shape, "train.batch_size=16384", "--cluster", "v100").output.split())
    for name in ("this config", "flat (TorchRec)", "SPTT, same model", "towers, ratio 16", "The fastest: model.arch="):
        assert name in words
    record = json.loads(run("demo", *shape, "--cluster", "h100", "--json").output)
    assert record["own"]["seconds"] == pytest.approx(sum(record["own"]["exposed"].values()))
    assert record["cluster"]["name"] == "h100"
    # The ids of the demo repeat too little to be sent once, but that is predicted.
    assert len(record["alternatives"]) == 2 * (1 + 2 * 4)


def test_a_list_of_tables_is_enough(tmp_path: Path) -> None:
    tables = [{"name": f"t{i}", "num_embeddings": 9, "embedding_dim": 8, "feature_names": [f"f{i}"]} for i in range(8)]
    (tmp_path / "t.json").write_text(json.dumps(tables))
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8", f"data.tables={tmp_path / 't.json'}"]
    found = run("demo", *shape, "data.synthetic.num_dense=5", "--cluster", "h100")
    assert found.exit_code == 0, found.output
    assert "5 dense columns are assumed beside the tables" in " ".join(found.output.split())


def test_a_cluster_of_gpus_is_asked_about_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8", "train.device=cuda"]
    found = run("demo", *shape, "--cluster", "h100", "--json")
    assert found.exit_code == 0, found.output


def test_tables_are_placed_by_the_rates_of_a_cluster(tmp_path: Path) -> None:
    save_cluster(replace(SMALL, lookup_bytes_per_s=5e9), tmp_path / "c.toml")
    rates = [f"{key}={rate:.6g}" for key, rate in placement_rates(load_cluster(tmp_path / "c.toml")).items()]
    assert rates[0] == "sharding.memory_gb_per_s=5"
    planned = [
        json.loads(CliRunner().invoke(main, ["plan", "demo", *arguments, "--json"]).output)
        for arguments in (["--cluster", str(tmp_path / "c.toml")], rates, [])
    ]
    assert planned[0] == planned[1] != planned[2]
    refused = CliRunner().invoke(
        main, ["plan", "demo", "model.arch=dlrm", "sharding.dataflow=flat", "--cluster", "a100"]
    )
    assert "--cluster" in refused.output
    assert refused.exit_code == 2


def test_hosts_of_another_size_than_the_clusters_are_refused() -> None:
    found = run("demo", "--cluster", "a100")
    assert found.exit_code == 2
    assert "Hosts of the run have 2 ranks, those of cluster 'a100' have 8" in found.output
    assert "topology.ranks_per_host=8" in found.output
    assert "neither a file" in run("demo", "--cluster", "none.toml").output


@pytest.mark.parametrize(
    ("overrides", "hosts", "left_out"),
    [
        (["topology.num_towers=1"], 1, []),
        (["train.micro_batches=4", "sharding.scheme=row_wise", "train.dense_reduce=hierarchical"], 2, []),
        (["sharding.unique=true", "sharding.forward_precision=fp16"], 2, []),
        (
            ["sharding.unique=true", "hot_rows.extra_memory=0.01", "model.arch=dlrm"],
            2,
            ["sharding.unique=true", "hot_rows.extra_memory=0.01"],
        ),
        (["topology.num_replicas=2", "replicas.moment_scale=2"], 4, []),
        (["hot_rows.extra_memory=0.01", "model.arch=dlrm"], 2, ["hot_rows.extra_memory=0.01"]),
        (["optimizer.sparse=adam"], 2, ["the state of optimizer.sparse='adam'"]),
    ],
)
def test_alternatives_to_any_config_are_found(overrides: list[str], hosts: int, left_out: list[str]) -> None:
    """They are the same ways to train whatever the config, of which only tables and ranks are kept."""
    values = ["topology.num_towers=2", "topology.ranks_per_tower=8", "sharding.dataflow=sptt", *overrides]
    found = run("demo", *values, "--cluster", "a100", "--json")
    assert found.exit_code == 0, found.output
    record = json.loads(found.output)
    assert record["not_counted"] == left_out
    # Flat, and SPTT and three ratios with unique inputs and without, if there are other hosts, in two formats.
    assert len(record["alternatives"]) == 2 * (1 + 4 * 2)
    for one in record["alternatives"]:
        made = load_config("demo", one["overrides"])
        assert made.topology.build().world_size == 8 * hosts


def test_of_equally_fast_ones_the_model_that_is_unchanged_comes_first() -> None:
    config = load_config("demo", ["topology.num_towers=2", "topology.ranks_per_tower=2"])
    found = alternatives(job_for(config, criteo_1tb_tables(64)), replace(SMALL, step_s=1.0))
    assert found[0].overrides[:2] == ["model.arch=dlrm", "sharding.dataflow=flat"]
    assert found[0].prediction.timeline.seconds == pytest.approx(1.0)


def test_the_busiest_ranks_and_hosts_are_those_that_hold_most() -> None:
    tables = [
        TableSpec(name=f"t{i}", num_embeddings=9, embedding_dim=8, feature_names=tuple(f"f{i}{j}" for j in range(n)))
        for i, n in enumerate((3, 1, 1, 1))
    ]
    job = make_job(small("dlrm", sharding={"dataflow": "flat", "scheme": "table_wise"}), tables, 3)
    # Ranks 0 and 1, on the first host, hold 24 and 8 of 48 columns: 4/3 of the mean. Two of three ranks are elsewhere.
    sent = 16 * 3 * 48 * 4 * 2 / 3
    assert step_bytes(workload_of(job), count(job))["peer_outputs"].uplink == pytest.approx(sent)
    assert work_of(job).loads["peer_outputs"].uplink == pytest.approx(sent / 2 * 4 / 3)


def test_a_cluster_of_one_host_says_nothing_of_several(tmp_path: Path) -> None:
    save_cluster(replace(A100, hosts=1), tmp_path / "one.toml")
    found = run("demo", "topology.num_towers=2", "topology.ranks_per_tower=8", "--cluster", str(tmp_path / "one.toml"))
    assert found.exit_code == 2
    assert "was measured on one host, which tells nothing of the links between the 2 hosts" in found.output


def test_a_model_of_ones_own_stays_what_it_is() -> None:
    config = deepfm()  # tables of several widths, which no shipped model has
    assert config.model.in_towers
    job = unsharded(config)
    found = alternatives(job, SMALL)
    ratio = sum(t.embedding_dim * len(t.feature_names) for t in job.tables) / sum(count(job).widths)
    ratios = {next(own for own in one.overrides if own.startswith("model.")): one.ratio for one in found}
    assert ratios == {"model.in_towers=false": 1.0, "model.in_towers=true": pytest.approx(ratio)}
    assert ratio > 1
    assert all(changed_config(config, one.settings, SMALL).model.factory == config.model.factory for one in found)


def towers_only(tables: Any, num_dense: int, options: Any, towers: Any, device: Any) -> torch.nn.Module:
    """A factory that has no flat model."""
    assert len(towers.towers) > 0
    return deepfm_example.deepfm(tables, num_dense, options, towers, device)


def test_a_model_that_is_in_towers_only_has_no_flat_rows(tmp_path: Path) -> None:
    shape = {"num_towers": 2, "ranks_per_tower": 2}
    config = deepfm(model={"factory": "tests.training.test_what_if:towers_only"}, topology=shape)
    job = unsharded(config)
    found = alternatives(job, SMALL)
    assert {one.overrides[0] for one in found} == {"model.in_towers=true"}
    (tmp_path / "run.toml").write_text(to_toml(config))
    save_cluster(SMALL, tmp_path / "c.toml")
    printed = run(str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "c.toml"))
    assert printed.exit_code == 0, printed.output
    assert "makes no model without towers; model.in_towers=false says why." in " ".join(printed.output.split())


class Concatenated(torch.nn.Module):
    """A model that reads its embeddings as one matrix."""

    def __init__(self, tables: Any, device: Any) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=tables, device=device)
        self.over = torch.nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        return self.over(self.tables(sparse_features).values())


def concatenated(tables: Any, device: Any) -> torch.nn.Module:
    return Concatenated(tables, device)


def test_a_model_may_read_all_columns_at_once() -> None:
    config = deepfm(model={"factory": "tests.training.test_what_if:concatenated", "in_towers": False, "options": {}})
    job = unsharded(config)
    columns = sum(table.embedding_dim * len(table.feature_names) for table in job.tables)
    assert [one.flops for one in count(job).rest.forward if one.flops] == [2.0 * columns]


def test_alternatives_keep_what_is_said_of_ids_and_tables() -> None:
    values = ["topology.num_towers=2", "topology.ranks_per_tower=2", "sharding.table_precision=fp16"]
    config = load_config("demo", [*values, "sharding.memory_gib=8", "sharding.pooling_factors.C1=7"])
    for dataflow in ("flat", "sptt"):
        own = changed_config(config, {"model.arch": "dlrm", "sharding.dataflow": dataflow}, SMALL).sharding
        assert (own.table_precision, own.memory_gib, own.pooling_factors) == ("fp16", 8, {"C1": 7})


def test_more_ids_take_longer_in_every_way_to_train() -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=2"]
    tables, cluster = criteo_1tb_tables(64), replace(SMALL, step_s=0.0)
    configs = [load_config("demo", [*shape, *more]) for more in ([], ["sharding.pooling_factors.C1=900"])]
    few, many = (
        {(a.name, a.exchange): a.prediction.timeline.seconds for a in alternatives(job_for(config, tables), cluster)}
        for config in configs
    )
    assert few.keys() == many.keys()
    assert all(few[way] < many[way] for way in few)


def test_towers_beside_a_flat_config_are_placed_by_the_rates_of_the_cluster() -> None:
    config = load_config("demo", ["model.arch=dlrm", "sharding.dataflow=flat"])
    own = changed_config(config, {"model.arch": "dlrm", "sharding.dataflow": "sptt"}, SMALL).sharding
    assert (own.memory_gb_per_s, own.intra_tower_gb_per_s, own.collective_latency_us) == (1300, 252, 30)
    towers = load_config("demo", ["sharding.dataflow=sptt", "sharding.memory_gb_per_s=7"])
    assert changed_config(towers, {"sharding.dataflow": "sptt"}, SMALL).sharding.memory_gb_per_s == 7


def test_operators_that_depend_on_the_samples_are_refused() -> None:
    class Looping(torch.nn.Module):
        def forward(self, dense: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[None, :1] * 2 for row in dense])

    with pytest.raises(
        InputError, match=r"runs 3 operators for 2 samples and 5 for 4.*without a loop over the samples"
    ):
        count_operators(Looping(), 3)


def test_what_a_prediction_does_not_know_is_named() -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8", "model.arch=dlrm", "--cluster", "h100"]
    found = " ".join(run("demo", *shape, "sharding.dataflow=flat", "sharding.scheme=row_wise").output.split())
    assert "This config is predicted as if it had not sharding.scheme='row_wise'." in found
    assert "as if it had not" not in run("demo", *shape, "sharding.dataflow=flat").output


def test_the_fastest_is_written_and_its_config_is_its_prediction(tmp_path: Path) -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8"]
    best = tmp_path / "best.toml"
    record = json.loads(run("demo", *shape, "--cluster", "h100", "--json", "--write", str(best)).output)
    again, first = json.loads(run(str(best), "--cluster", "h100", "--json").output), record["alternatives"][0]
    assert again["own"].pop("exposed") == pytest.approx(first["exposed"])
    assert {name: pytest.approx(first[name]) for name in again["own"]} == again["own"]


def test_the_rate_of_the_uplink_may_be_given(tmp_path: Path) -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8", "train.batch_size=16384"]
    save_cluster(replace(A100, hosts=1, step_s=0.0), tmp_path / "one.toml")
    cluster = ["--cluster", str(tmp_path / "one.toml")]
    found = [run("demo", *shape, *cluster, "--uplink-gbit-per-s", rate, "--json") for rate in ("1600", "100")]
    fast, slow = (json.loads(one.output)["own"] for one in found)
    assert fast["uplink_bytes"] == slow["uplink_bytes"]
    assert fast["seconds"] < slow["seconds"]
    printed = " ".join(run("demo", *shape, *cluster, "--uplink-gbit-per-s", "100").output.split())
    assert "100 Gbit/s from a host to others (12.5 a rank)" in printed
    refused = run("demo", *shape, *cluster, "--uplink-gbit-per-s", "0")
    assert refused.exit_code == 2
    assert "--uplink-gbit-per-s 0 must be a positive number" in refused.output


def test_towers_are_compared_with_the_flat_model_in_the_same_format() -> None:
    shape = ["topology.num_towers=2", "topology.ranks_per_tower=8", "train.batch_size=16384", "--cluster", "v100"]
    text = run("demo", *shape, "model.arch=dlrm", "sharding.dataflow=flat").output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    flat = [row for row in rows if row[0] == "flat (TorchRec)"]
    assert [row[1] for row in flat] == ["fp16", "fp32"]
    assert [row[5] for row in flat] == ["1.00", "1.00"]


def test_towers_with_unique_inputs_are_alternatives_where_the_data_repeat() -> None:
    config = small("dlrm", synthetic={"rows_per_table": 2, "num_rows": 500}, train={"batch_size": 32})
    job, slow = open_job(config), replace(SMALL, step_s=0.0, told_apart_s=0.0)
    slow = replace(slow, exchange=replace(slow.exchange, uplink_bytes_per_s=1e5))
    batches = first_batches(job)
    found = alternatives(job, slow, batches)
    shared = [one for one in found if one.settings.get("sharding.unique")]
    assert {one.ratio for one in shared} == {one.ratio for one in found}
    # Two rows for each of 32 samples' features cross instead of 32, and the step is the shorter for it.
    assert next(one for one in found if one.ratio == 1 and not one.is_flat).name == "SPTT, same model, unique inputs"
    for one in shared[:3]:
        alone = replace(open_job(changed_config(config, one.settings, slow)), source=job.source)
        known = predict_step(alone, slow, inputs=inputs_of(alone, first_batches(alone)))
        assert known.timeline.seconds == pytest.approx(one.prediction.timeline.seconds)
        assert known.uplink_bytes == pytest.approx(one.prediction.uplink_bytes)
        assert known.timeline.seconds < predict_step(alone, slow).timeline.seconds
    # Without data nobody knows what repeats.
    assert not [one for one in alternatives(job, slow) if one.settings.get("sharding.unique")]
