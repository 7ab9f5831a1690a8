"""The studies of quality: statistics by hand, sizes and bytes, equal training, runs that go on, records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from benchmarks.steps.build import own_towers
from benchmarks.steps.contenders import named
from benchmarks.steps.setting import Setting
from benchmarks.study.__main__ import main
from benchmarks.study.data import Clicks, read_clicks, without_test_rows, write_planted
from benchmarks.study.entities import bytes_once
from benchmarks.study.report import comparisons, costs
from benchmarks.study.runs import OUTSIDE_SHARE, Progress, Run, Trials
from benchmarks.study.statistics import compare_arms, holm
from benchmarks.study.studies import STUDIES, runs_of, with_tuned_rates
from benchmarks.study.tables import OneTable, ReplicaAdagrad, join_tables
from benchmarks.study.train import (
    SETTINGS,
    Arm,
    build_model_of_seed,
    bytes_across,
    bytes_outside,
    job_of,
    tower_sizes,
    train_and_test,
)
from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from dmt.testing.plain import PlainTraining
from dmt.training.build import count_model

# Statistics.

ARM = {0: 0.7712, 1: 0.7733, 2: 0.7721, 3: 0.7705, 4: 0.7740, 5: 0.7729}
BASELINE = {0: 0.7701, 1: 0.7719, 2: 0.7724, 3: 0.7698, 4: 0.7715, 5: 0.7711}


def test_medians_differences_and_effect() -> None:
    found = compare_arms(ARM, BASELINE)
    assert found.median == pytest.approx((0.7721 + 0.7729) / 2)
    # Seed by seed: 11, 14, -3, 7, 25, 18 (1e-4); the difference of the medians would be 12.
    assert found.median_difference == pytest.approx(12.5e-4)
    assert (found.num_seeds, found.num_better) == (6, 5)
    spread = np.sqrt((np.var(list(ARM.values()), ddof=1) + np.var(list(BASELINE.values()), ddof=1)) / 2)
    assert found.effect == pytest.approx(12.5e-4 / spread)
    assert compare_arms(ARM, dict(sorted(BASELINE.items(), reverse=True))) == found, "seeds are paired by number"
    # Of 924 ways to divide the twelve values, 122 are at least as uneven, as are 4 of 64 choices of signs.
    assert (found.mann_whitney_p, found.wilcoxon_p) == pytest.approx((122 / 924, 4 / 64))
    assert compare_arms(ARM, ARM).wilcoxon_p == 1.0


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .03 .9 are multiplied by 4 3 2 1, and none may fall below the one before.
    assert holm([0.03, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert (holm([0.6, 0.7]), holm([])) == ([1.0, 1.0], [])


# Data, sizes, training.


def clicks_of(num_features: int = 16, rows: int = 2048) -> Clicks:
    generator = torch.Generator().manual_seed(0)
    names = [f"c_{i}" for i in range(num_features)]
    tables = [
        TableSpec(name=f"t_{n}", num_embeddings=9 + i, embedding_dim=16, feature_names=(n,))
        for i, n in enumerate(names)
    ]
    ids = torch.stack([torch.randint(0, 9 + i, (rows,), generator=generator) for i in range(num_features)], dim=1)
    part = (torch.randn(rows, 3, generator=generator), ids, ((ids[:, 0] + ids[:, 4]) % 2 == 0).float())
    return Clicks(tables=tuple(tables), train=part, test=part)


def test_generated_data_are_read_as_the_others(tmp_path: Path) -> None:
    write_planted(tmp_path / "drawn.parquet")
    clicks = read_clicks(tmp_path / "drawn.parquet")
    assert len(clicks.features) == 16
    assert 60_000 < len(clicks.train[2]) < 70_000
    assert 0.2 < clicks.train[2].mean() < 0.55
    held = without_test_rows(clicks, parts=10)
    assert len(held.test[2]) == len(clicks.train[2]) // 10
    assert len(held.test[2]) + len(held.train[2]) == len(clicks.train[2])
    assert len(read_clicks(tmp_path / "drawn.parquet", max_rows=100).train[2]) == 100
    with pytest.raises(InputError, match=r"absent\.parquet does not exist"):
        read_clicks(tmp_path / "absent.parquet")


@pytest.mark.parametrize("model", ["dlrm", "dlrm-products", "dlrm-each", "dcn"])
@pytest.mark.parametrize("num_towers", [2, 4, 8])
def test_sizes_give_the_ratio_and_the_bytes_that_go_with_it(model: str, num_towers: int) -> None:
    clicks = clicks_of()
    plan = TowerPlan.strided(clicks.features, num_towers)
    for ratio in (2, 16):
        arm = Arm(model=model, towers="strided", num_towers=num_towers, ratio=ratio)
        assert count_model(job_of("hotel", arm, clicks, plan)).compression_ratio == ratio
        flat, found = (bytes_across(arm, clicks, towers, num_towers) for towers in (None, plan))
        assert found["embeddings"] == pytest.approx(flat["embeddings"] / ratio)
        # 16 features of 16 numbers and their gradients, but for the samples of the tower's own host.
        assert flat["embeddings"] == pytest.approx(2 * 4 * 16 * 16 * (1 - 1 / num_towers))
    assert tower_sizes(Arm(model="dlrm", towers="strided", ratio=2, dim=32), 17) == (32, 0, 2)


def test_small_tables_are_outside_towers_at_their_width(tmp_path: Path) -> None:
    assert len(own_towers(named("dmt-cr4+all+outside"), Setting()).outside) / 26 == OUTSIDE_SHARE
    clicks, arm = clicks_of(), Arm(model="dlrm-each", towers="outside", ratio=16)
    plan, _ = Trials(folder=tmp_path, work=tmp_path).plan_of(Run(data="hotel", seed=0, arm=arm), clicks)
    assert plan is not None
    assert plan.to_lists() == [["c_10", "c_14"], ["c_11", "c_15"], ["c_12"], ["c_13"]]
    assert plan.outside == tuple(f"c_{i}" for i in range(10))
    learned = replace(arm, model="dlrm-products", towers="interactions, outside")
    inside, _ = Trials(folder=tmp_path, work=tmp_path).plan_of(Run(data="hotel", seed=0, arm=learned), clicks)
    assert inside is not None
    assert (inside.strategy, inside.outside) == ("together", plan.outside)
    job = job_of("hotel", arm, clicks, plan)
    assert [table.embedding_dim for table in job.tables] == [1] * 10 + [16] * 6
    assert count_model(job).compression_ratio == 16
    assert bytes_across(arm, clicks, plan, 4) == pytest.approx({"ids": 16 * 6 * 0.75, "embeddings": 8 * 6 * 0.75})
    # Three quarters of the 135 numbers and their sum pass each of four links, in a step of 512 samples.
    assert bytes_outside("hotel", arm, clicks, plan) == pytest.approx(4 * 2 * 0.75 * 135 * 4 / 512)
    rows = {"c_5": 767, "c_7": 320, "c_9": 319}
    tables = (replace(t, num_embeddings=rows.get(t.feature_names[0], t.num_embeddings)) for t in clicks.tables)
    facts = STUDIES["outside"].facts(replace(clicks, tables=tuple(tables)))
    assert facts["towers"] == [{"c_5": 767, "c_14": 23}, {"c_7": 320, "c_15": 24}, {"c_9": 319}, {"c_13": 22}]


@pytest.mark.parametrize("model", ["dlrm", "dcn"])
def test_one_table_computes_what_many_do(model: str) -> None:
    clicks = clicks_of(num_features=5)
    plan = TowerPlan.strided(clicks.features, 2)
    arms = [(Arm(model=model), None), (Arm(model=model, towers="strided", num_towers=2, ratio=2), plan)]
    if model == "dlrm":
        small_outside = Arm(model="dlrm-each", towers="outside", num_towers=2, ratio=4)
        arms.append((small_outside, plan.moved_outside(["c_1", "c_2"])))
    for arm, towers in arms:
        plain = build_model_of_seed(job_of("hotel", arm, clicks, towers), seed=3)
        joined = build_model_of_seed(job_of("hotel", arm, clicks, towers), seed=3)
        tables = join_tables(joined, clicks.features)
        outside = () if towers is None else towers.outside
        dense, ids, labels = (column[:64] for column in clicks.train)
        batch = clicks.batch(clicks.train, torch.arange(64))
        outputs = [plain(batch.dense_features, batch.sparse_features), joined(dense, ids)]
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
        for output in outputs:
            nn.functional.binary_cross_entropy_with_logits(output.squeeze(-1), labels).backward()
        bags = {n.rpartition(".")[2]: m for n, m in plain.named_modules() if isinstance(m, nn.EmbeddingBag)}
        for attribute, table in tables.items():
            held = [name for name in clicks.features if (name in outside) == (attribute == "outside_arch")]
            expected = torch.cat([bags[f"t_{name}"].weight.grad for name in held])
            torch.testing.assert_close(table.embedding_bags.grad, expected, atol=1e-7, rtol=1e-5)
            with torch.no_grad():
                table.embedding_bags += 1
            setattr(joined, attribute, table.restored())
        moved = dict(joined.named_parameters())
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(moved[name], weight + 1.0 * ("embedding_bags" in name))


# Runs and records.


def test_runs_go_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    runs = [Run(data="hotel", seed=seed, arm=Arm(model="dcn")) for seed in range(3)]
    trained = []

    def train_one(run: Run) -> dict[str, float]:
        trained.append(run.seed)
        return {"ne": run.seed / 10}

    for some in (runs[:2], runs):
        progress = Progress(tmp_path / "runs.jsonl", "a")
        progress.train(some, train_one)
    assert trained == [0, 1, 2]
    assert {run.seed: record["ne"] for run, record in progress.records.items()} == {0: 0.0, 1: 0.1, 2: 0.2}
    with pytest.raises(InputError, match="holds runs with settings other than"):
        Progress(tmp_path / "runs.jsonl", "b")


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_has_its_flat_model_before_it(name: str) -> None:
    study = STUDIES[name]
    runs = runs_of(study, "census", [1, 2])
    assert len(set(runs)) == len(runs)
    for arm, baseline in study.on("census").comparisons:
        assert {arm, baseline} <= {run.arm for run in runs}
    for place, run in enumerate(runs):
        if run.arm.towers in ("coherent", "diverse"):
            assert replace(run, arm=run.arm.flat) in runs[:place]


def test_costs_and_comparisons_are_paired_by_seed() -> None:
    study, seeds = STUDIES["interactions"], range(100, 107)
    gains = {"flat": 0.03, "strided": 0.0, "coherent": -0.01, "together": 0.02}
    size = {"ne": 0.8, "mflops_per_sample": 0.1, "compression_ratio": 4.0, "bytes": {"ids": 1.0, "embeddings": 384.0}}
    records = {
        run: size | {"auc": 0.7 + 0.001 * run.seed + gains[run.arm.towers]} for run in runs_of(study, "hotel", seeds)
    }
    rows = {(row["arm"], row["baseline"]): row for row in comparisons(study, "hotel", records, seeds)}
    assert rows["dcn, together", "dcn, strided"]["median_difference"] == pytest.approx(0.02)
    assert rows["dcn, together", "dcn, flat"]["num_better"] == 0
    assert rows["dcn, coherent", "dcn, strided"]["wilcoxon_p_holm"] == pytest.approx(4 * 2 / 2**7)
    for seed in (100, 101):
        del records[Run(data="hotel", seed=seed, arm=Arm(model="dcn", towers="strided"))]
    rows = {(row["arm"], row["baseline"]): row for row in comparisons(study, "hotel", records, seeds)}
    few = rows["dcn, together", "dcn, strided"]
    assert (few["num_seeds"], few["wilcoxon_p"], few["wilcoxon_p_holm"]) == (5, None, None)
    assert rows["dcn, together", "dcn, flat"]["wilcoxon_p_holm"] == pytest.approx(2 * 2 / 2**7)
    found = {row["towers"]: row for row in costs(study, "hotel", records, seeds, clicks_of())}
    assert found["together"]["auc_less_flat"] == pytest.approx(-0.01)
    assert (found["together"]["bytes"], found["together"]["flat_bytes"]) == (384.0, 1536.0)
    assert found["strided"]["num_seeds"] == 5


def test_a_larger_batch_is_larger_in_rows_and_shorter_in_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clicks, rates = clicks_of(), {"sparse": 2.0, "dense": 2.0}
    _, record = train_and_test("hotel", Arm(model="dlrm", batch=4, **rates), clicks, 0, plan=None)
    monkeypatch.setitem(SETTINGS, "hotel", replace(SETTINGS["hotel"], batch_size=512 * 4, warmup_steps=25))
    assert train_and_test("hotel", Arm(model="dlrm", **rates), clicks, 0, plan=None)[1] == record
    monkeypatch.setitem(SETTINGS, "hotel", replace(SETTINGS["hotel"], warmup_steps=100))
    assert train_and_test("hotel", Arm(model="dlrm", **rates), clicks, 0, plan=None)[1] != record
    assert all(arm.flat == arm for arm in STUDIES["batches"].arms), "compared in NE, not with a flat model"


def test_a_study_from_end_to_end(tmp_path: Path) -> None:
    folders = ["--data", str(tmp_path), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(main, ["interactions", *folders, "--set", "planted", "--quick"])
    assert ran.exit_code == 0, ran.output
    record = json.loads((tmp_path / "work" / "quick" / "interactions.json").read_text())
    assert [run["towers"] for run in record["runs"]] == ["flat", "together", "coherent", "strided"] * 2
    assert all(0.45 < run["auc"] < 0.9 for run in record["runs"])
    page = (tmp_path / "work" / "quick" / "interactions.md").read_text()
    assert page.count("| planted | 4 | 4 | 16 | dcn, together |") == 3


def test_bytes_of_distinct_inputs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [2, 1, 1, 1, 3], [2, 1, 1, 1, 4]])
    clicks = clicks_of(num_features=5, rows=4)
    clicks = replace(clicks, train=(clicks.train[0], ids, clicks.train[2]))
    monkeypatch.setitem(SETTINGS, "hotel", replace(SETTINGS["hotel"], batch_size=4))
    plan = TowerPlan.from_lists([["c_0", "c_1"], ["c_2", "c_3", "c_4"]])
    arm = Arm(model="dcn", towers="strided", num_towers=2, ratio=2)
    width = tower_sizes(arm, 5)[0]
    # Two distinct inputs of the first tower and four of the second, half of which another host computes.
    by_hand = (2 * (2 * 16 + 2 * width * 4) + 4 * (3 * 16 + 2 * width * 4)) / 4 / 2
    assert bytes_once("hotel", arm, clicks, plan, torch.arange(4)) == pytest.approx(by_hand)


# Replicas.

ROWS, DIM, FEATURES, BATCH, EPS = (3, 7), 4, ["a", "b"], 8, 0.01


def ids_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(rows, (BATCH,), generator=generator) for rows in ROWS], dim=1)


def loss_of(embeddings: list[Tensor], step: int, part: slice = slice(None)) -> Tensor:
    """A mean over samples whose gradient depends on the tables and on the sample."""
    target = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(100 + step))[part]
    return (torch.tanh(embeddings[0]) * embeddings[1] - target).square().sum(dim=1).mean()


def tables_of() -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(7)
    bags = {
        f"t_{name}": nn.EmbeddingBag(rows, DIM, mode="sum", _weight=torch.randn(rows, DIM, generator=generator))
        for name, rows in zip(FEATURES, ROWS, strict=True)
    }
    return nn.ModuleDict({"embedding_bags": nn.ModuleDict(bags)})


def written_out(num_replicas: int, scale: float, *, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with M copies of every table."""
    modules = [tables_of() for _ in range(num_replicas)]
    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": lr, "eps": EPS}
    training = PlainTraining(modules, fused_params=fused, moment_scale=scale)
    size = BATCH // num_replicas
    for step in range(steps):
        for m, module in enumerate(modules):
            module.zero_grad()
            part = slice(m * size, (m + 1) * size)
            tables = module["embedding_bags"].values()
            loss_of([table(ids_of(step)[part, f : f + 1]) for f, table in enumerate(tables)], step, part).backward()
        training.step()
    tables = training.tables[0].values()
    return torch.cat([t.weight.detach() for t in tables]), torch.cat([t.states[0].squeeze(1) for t in tables])


@pytest.mark.parametrize(("num_replicas", "scale"), [(1, 1.0), (2, 1.0), (4, 3.0), (8, 8.0), (2, 0.5)])
def test_one_copy_is_m_copies_written_out(num_replicas: int, scale: float) -> None:
    weight, moment = written_out(num_replicas, scale, steps=5, lr=0.1)
    table = OneTable(tables_of(), FEATURES)
    optimizer = ReplicaAdagrad(table, 0.1, num_replicas=num_replicas, moment_scale=scale, eps=EPS)
    for step in range(5):
        embeddings = table(ids_of(step))
        loss_of([embeddings[name] for name in FEATURES], step).backward()
        optimizer.step()
    torch.testing.assert_close(table.embedding_bags.detach(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.moment, moment, rtol=1e-5, atol=1e-7)


def test_replicas_are_compared_with_one_at_the_rate_that_was_best_for_it() -> None:
    trained: dict[Run, dict[str, float]] = {}

    def train(runs: list[Run], title: str) -> None:
        trained.update((run, {"ne": abs(run.arm.sparse - 7.5)}) for run in runs)

    trials = SimpleNamespace(progress=SimpleNamespace(records=trained), train=train)
    found = with_tuned_rates(STUDIES["replicas"], "hotel", trials)
    assert {(run.arm.replicas, run.arm.tuning) for run in trained} == {(1, True)}
    assert {(arm.sparse, arm.dense, baseline) for arm, baseline in found.comparisons} == {
        (8.0, 1.0, Arm(model="dlrm", replicas=1, sparse=8.0))
    }
    assert len(found.arms) == 12
    _, plain = train_and_test("hotel", Arm(model="dlrm", replicas=1), clicks_of(), 0, plan=None)
    _, two = train_and_test("hotel", Arm(model="dlrm", replicas=2, moment_scale=2.0), clicks_of(), 0, plan=None)
    assert plain["ne"] != two["ne"] == pytest.approx(plain["ne"], rel=0.1)
