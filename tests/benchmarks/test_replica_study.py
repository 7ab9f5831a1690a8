"""The replica study: Algorithm 1 against M copies written out and the trainer's models, its runs, its statistics."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.replicas.findings import (
    gap_findings,
    noise_findings,
    summary_of_pairs,
    trend_findings,
    whole_seeds,
)
from benchmarks.replicas.runs import Progress, ReplicaRun, study_runs, tune_runs, tuned_rates
from benchmarks.replicas.simulation import ReplicaTables
from benchmarks.replicas.verify import compare
from benchmarks.towers.clicks import Clicks
from benchmarks.towers.trials import STUDY_SETS, trial_config
from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.testing.plain import PlainTraining, rate_share
from dmt.training.config import OptimizerConfig
from tests.ranks import run_ranks

ROWS, DIM, FEATURES, BATCH = (3, 7), 4, ["a", "b"], 8
EPS = 0.01


def ids_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(rows, (BATCH,), generator=generator) for rows in ROWS], dim=1)


def loss_of(embeddings: list[Tensor], target: Tensor) -> Tensor:
    """A mean over samples whose gradient depends on the tables and on the sample."""
    return (torch.tanh(embeddings[0]) * embeddings[1] - target).square().sum(dim=1).mean()


def target_of(step: int) -> Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(100 + step))


def as_batch(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.T.reshape(-1), torch.ones(ids.numel(), dtype=torch.long))


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"t_{name}": torch.randn(rows, DIM, generator=generator) for name, rows in zip(FEATURES, ROWS, strict=True)}


def written_out(num_replicas: int, scale: float, *, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with M copies of every table."""
    modules = [
        nn.ModuleDict({"embedding_bags": nn.ModuleDict({n: nn.Embedding.from_pretrained(t, False) for n, t in tables})})
        for tables in [[(name, table.clone()) for name, table in start().items()] for _ in range(num_replicas)]
    ]
    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": lr, "eps": EPS}
    training = PlainTraining(modules, fused_params=fused, moment_scale=scale)
    for step in range(steps):
        parts = zip(ids_of(step).chunk(num_replicas), target_of(step).chunk(num_replicas), strict=True)
        for module, (ids, target) in zip(modules, parts, strict=True):
            module.zero_grad()
            tables = module["embedding_bags"].values()
            loss_of([table(ids[:, f]) for f, table in enumerate(tables)], target).backward()
        training.step()
    tables = training.tables[0].values()
    return torch.cat([t.weight.detach() for t in tables]), torch.cat([t.states[0][0].squeeze(1) for t in tables])


def simulated(num_replicas: int, scale: float, *, steps: int, lr: float) -> ReplicaTables:
    tables = ReplicaTables(start(), FEATURES, num_replicas=num_replicas, moment_scale=scale, eps=EPS)
    for step in range(steps):
        embeddings = tables(as_batch(ids_of(step)))
        loss_of([embeddings[name] for name in FEATURES], target_of(step)).backward()
        tables.step(lr)
    return tables


@pytest.mark.parametrize(("num_replicas", "scale"), [(1, 1.0), (2, 1.0), (4, 3.0), (8, 8.0), (2, 0.5)])
def test_one_copy_is_m_copies_written_out(num_replicas: int, scale: float) -> None:
    weight, moment = written_out(num_replicas, scale, steps=5, lr=0.1)
    tables = simulated(num_replicas, scale, steps=5, lr=0.1)
    torch.testing.assert_close(tables.weight, weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tables.moment, moment, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rows_of_replicas", "growth"), [([1, 1, 1, 1], 1.0), ([0, 1, 2, 3], 4.0)])
def test_moments_grow_by_1_where_replicas_agree_and_by_m_where_they_share_no_row(
    rows_of_replicas: list[int], growth: float
) -> None:
    tables = ReplicaTables({"t_a": torch.zeros(4, 2)}, ["a"], num_replicas=4, moment_scale=1.0, eps=EPS)
    ids = torch.tensor(rows_of_replicas)
    tables(KeyedJaggedTensor.from_lengths_sync(["a"], ids, torch.ones(4, dtype=torch.long)))["a"].sum().backward()
    tables.step(0.1)
    found = tables.moment_growth(torch.bincount(ids, minlength=4))
    assert found == pytest.approx((growth, growth))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="num_replicas=0 must be positive"):
        ReplicaTables(start(), FEATURES, num_replicas=0, moment_scale=1.0, eps=EPS)
    with pytest.raises(InputError, match=r"moment_scale=0\.0"):
        ReplicaTables(start(), FEATURES, num_replicas=1, moment_scale=0.0, eps=EPS)
    with pytest.raises(InputError, match="3 replicas do not divide a batch of 8 samples"):
        simulated(3, 1.0, steps=1, lr=0.1)


def test_the_warm_up_ends_at_one() -> None:
    assert [rate_share(step, 2) for step in range(4)] == [0.5, 0.75, 1.0, 1.0]


def differences_to_the_trainer(_: int, num_replicas: int, scale: float) -> dict[str, float]:
    torch.manual_seed(0)
    rows = [torch.randint(count, (256,)) for count in ROWS]
    part = (torch.randn(256, 3), torch.stack(rows, dim=1), torch.rand(256).round())
    tables = tuple(
        TableSpec(name=f"t_{name}", num_embeddings=count, embedding_dim=16, feature_names=(name,))
        for name, count in zip(FEATURES, ROWS, strict=True)
    )
    config = trial_config("tiny", "dlrm", study_set=STUDY_SETS["hotel"], plan=None)
    changed = {
        "optimizer": OptimizerConfig(sparse="rowwise_adagrad", sparse_lr=0.1, dense_lr=0.003, warmup_steps=4),
        "train": config.train.model_copy(update={"batch_size": 32}),
    }
    clicks = Clicks(tables=tables, train=part, test=part)
    return compare(config.model_copy(update=changed), clicks, num_replicas=num_replicas, moment_scale=scale, steps=8)


@pytest.mark.ranks
@pytest.mark.parametrize(("num_replicas", "scale"), [(1, 1.0), (4, 3.0)])
def test_the_simulation_is_what_the_trainer_computes(num_replicas: int, scale: float) -> None:
    (found,) = run_ranks(differences_to_the_trainer, 1, num_replicas, scale)
    assert found["weight_moved"] > 0.1
    assert found["weight"] < 1e-5
    assert found["moment"] < 1e-6 * found["moment_largest"] + 1e-9
    assert found["loss"] < 1e-6


def plain_records(runs: list[ReplicaRun]) -> dict[ReplicaRun, dict[str, float]]:
    """NE that grows with M, falls with c, and differs from seed to seed and rate to rate by a factor."""
    return {
        run: {
            "ne": (0.8 + 0.01 * run.seed)
            * (1 + run.sparse_lr)
            * (1 + 0.001 * (run.num_replicas - run.moment_scale) + 1e-5 * run.seed * (run.num_replicas > 1)),
            "auc": 0.7,
        }
        for run in runs
    }


def test_gaps_are_paired_by_seed_and_rate() -> None:
    records = plain_records(study_runs({"hotel": 0.2}, range(3)))
    gaps = {(row["num_replicas"], row["moment_scale"]): row for row in gap_findings(records, ["grid"])}
    assert len(gaps) == 12
    assert gaps[8, 1.0]["median"] == pytest.approx(0.1 * 7 + 1e-3)
    assert gaps[8, 8.0]["median"] == pytest.approx(1e-3)
    assert gaps[8, 8.0]["num_above"] == 2
    others = gap_findings(records, ["untuned", "rates"])
    assert {row["sparse_lr"] for row in others} == {0.05, 0.1, 0.4}
    assert [row["median"] for row in others if row["moment_scale"] == 1.0 and row["num_replicas"] == 8] == (
        pytest.approx([0.701] * 3)
    )


def test_trends_are_differences_of_gaps() -> None:
    records = plain_records(study_runs({"hotel": 0.2}, range(3)))
    found = {
        (row["num_replicas"], row["moment_scale"], *row["against"]): row["median"]
        for row in trend_findings(records, ["grid"])
    }
    assert found[8, 1.0, 2, 1.0] == pytest.approx(0.6)
    assert found[8, 8.0, 8, 1.0] == pytest.approx(-0.7)
    assert len(found) == 4


def test_noise_is_that_of_m_1_alone() -> None:
    records = plain_records(study_runs({"hotel": 0.2}, range(3)))
    (row,) = (row for row in noise_findings(records) if row["part"] == "grid")
    ne = np.array([0.8, 0.81, 0.82]) * 1.2
    assert row["ne"] == pytest.approx(0.81 * 1.2)
    assert row["seed_std"] == pytest.approx(100 * ne.std(ddof=1) / ne.mean())
    assert row["again_std"] == pytest.approx(0.0, abs=1e-9)


def test_summary_by_hand() -> None:
    found = summary_of_pairs([1.0, 2.0, 6.0, -1.0])
    assert (found["median"], found["mean"], found["num_above"]) == (1.5, 2.0, 3)
    assert (found["lower_quartile"], found["upper_quartile"]) == (0.5, 3.0)
    # t with 3 degrees of freedom: its 97.5 % quantile is 3.18245.
    assert found["half_width"] == pytest.approx(3.18245 * np.sqrt(26 / 3) / 2, rel=1e-5)
    assert summary_of_pairs([0.0, 0.0])["p"] == 1.0


def test_a_seed_with_a_run_missing_is_left_out_where_it_is_missing() -> None:
    runs = study_runs({"hotel": 0.2}, range(3))
    records = plain_records(runs)
    missing = next(run for run in runs if run.part == "grid" and run.seed == 1)
    del records[missing]
    whole = whole_seeds(records, runs)
    assert {run.seed for run in whole if run.part == "grid"} == {0, 2}
    assert {run.seed for run in whole if run.part == "untuned"} == {0, 1, 2}
    with pytest.raises(InputError, match="Fewer than two seeds"):
        whole_seeds({}, runs)


def test_runs_are_all_different_and_the_tuned_rate_is_the_best() -> None:
    runs = study_runs({"hotel": 0.05, "flights": 3.2}, range(7))
    assert len(set(runs)) == len(runs)
    assert {run.part for run in runs if run.dataset == "hotel"} == {"grid", "rates"}
    tuning = {run: {"ne": abs(run.sparse_lr - 0.11) + 0.1 * (run.seed == 100)} for run in tune_runs(["hotel"])}
    assert tuned_rates(tuning) == {"hotel": 0.1}


def test_finished_runs_are_not_trained_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    progress = Progress(data=tmp_path, path=tmp_path / "runs.jsonl")
    runs = tune_runs(["hotel"])
    lines = [json.dumps(asdict(run) | {"settings": progress._settings("hotel"), "ne": 0.5}) for run in runs]
    progress.path.write_text("\n".join(lines) + "\n")
    # There is no data: any training would fail.
    assert [record["ne"] for record in progress.train(runs).values()] == [0.5] * len(runs)
    with pytest.raises(InputError, match=r"holds runs of other settings \(hotel\)"):
        Progress(data=tmp_path, path=progress.path, max_rows=100).finished()
    with pytest.raises(InputError, match=r"has none of flights\.parquet"):
        progress.datasets()
