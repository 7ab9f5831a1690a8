"""Whole runs with hot rows: what they learn, send, save and report; settings that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dmt.errors import InputError, ReplicaMismatchError
from dmt.hot_rows.profile import AccessProfile
from dmt.hot_rows.runtime import HotRowsState
from dmt.simulator.cluster import load_cluster, save_cluster
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.mesh import TowerMesh
from dmt.training import build
from dmt.training.access import load_hot_rows, load_profile, save_hot_rows
from dmt.training.agreement import Agreement, Signals
from dmt.training.check.shrink import with_values
from dmt.training.checkpoints.store import load_plain
from dmt.training.config import TrainingConfig
from dmt.training.job import open_job, open_unsharded
from dmt.training.metrics import StepTimer
from dmt.training.resume import checkpoint_folder
from dmt.training.train import train_job
from tests.ranks import on_ranks, run_ranks
from tests.training.small import plain, small
from tests.training.test_build import on_one_host


def config_of(folder: Path, name: str, **sections: dict[str, Any]) -> TrainingConfig:
    # Large batches, beside which the numbers of rows that ranks tell each other are nothing.
    # Copies are compared at the steps at which rows are chosen.
    train = {"max_steps": 8, "log_every": 3, "batch_size": 256, **sections.pop("train", {})}
    train.setdefault("output_dir", str(folder / name))
    data = {"rows_per_table": 400, "num_rows": 9000, "num_eval_rows": 64}
    return small("dlrm", "sptt", synthetic=data, train=train, **sections)


PROFILED = {"sharding": {"unique": True}, "optimizer": {"sparse": "adagrad"}}


def runs_on_rank(rank: int, folder: str, sections: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The results of a run with hot rows and of one without, and how far their weights are."""
    weights, results = [], []
    for name, settings in (("plain", {}), ("hot", {"hot_rows": {"extra_memory": 0.25, "refresh_every": 3}})):
        config = config_of(Path(folder), name, topology={"ranks_per_tower": 1}, **sections, **settings)
        job = open_job(config)
        results.append(train_job(job, TowerMesh(job.topology)))
        # The saved weights are read in one process, by the names of the plain model.
        task = plain(config)
        load_plain(task, checkpoint_folder(config))
        weights.append({key: value.clone() for key, value in task.state_dict().items()})
    unlike, ours = weights
    return results[1], results[0], max(float((ours[key] - unlike[key]).abs().max()) for key in unlike)


@pytest.mark.ranks
@pytest.mark.parametrize("sections", [{}, pytest.param(PROFILED, marks=pytest.mark.slow)], ids=["plain", "unique"])
def test_a_run_with_hot_rows_learns_the_same_and_sends_less(tmp_path: Path, sections: dict[str, Any]) -> None:
    hot, unlike, apart = run_ranks(runs_on_rank, 2, str(tmp_path), sections)[0]
    # Gradients are added up in another order; Adam's first steps divide small ones by their own size.
    assert 0 < apart < 1e-4
    assert hot["eval_loss"] == pytest.approx(unlike["eval_loss"], abs=1e-4)
    least, share = (100, 0.9) if sections else (300, 0.8)  # of distinct ids, fewer rows are worth a copy
    assert hot["hot_rows"]["rows"] > least
    assert hot["hot_rows"]["bytes_per_rank"] == 32 * hot["hot_rows"]["rows"] <= 0.25 * 6 * 400 * 32
    assert hot["hot_rows"]["left_out"] == {}
    assert hot["bytes_per_sample"]["forward"] < share * unlike["bytes_per_sample"]["forward"]


def test_copies_count_in_the_memory_that_a_rank_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "large", hot_rows={"extra_memory": 0.25}, optimizer={"sparse": "adagrad"})
    # On one host no row is ever chosen.
    job, other = (open_job(one) for one in (config, with_values(config, "topology", ranks_per_host=4)))
    # Weights and gradients of a quarter of 6 tables with 400 rows of 32 bytes.
    with pytest.raises(InputError, match=r"for tables, .*, 38.4 kB for copies of hot rows .*, and more for dense"):
        on_one_host(job, monkeypatch, 2)
    with pytest.raises(InputError, match=r"for tables, .*, 0 bytes for copies"):
        on_one_host(other, monkeypatch, 2)


def test_the_state_of_a_run_is_read_again_and_damaged_files_are_refused(tmp_path: Path) -> None:
    profile, draw = AccessProfile(open_unsharded(small()).tables), np.random.default_rng(0)
    profile.add({f: draw.integers(0, 11, 100) for t in profile.tables for f in t.feature_names}, num_samples=100)
    name, path = profile.tables[0].name, tmp_path / "hot_rows_counts.parquet"
    save_hot_rows(HotRowsState(rows={name: np.array([3])}, counts=profile, steps=7, batch_size=9), tmp_path)
    read = load_hot_rows(tmp_path)
    assert read is not None
    assert (read.steps, read.batch_size) == (7, 9)
    assert {key: rows.tolist() for key, rows in read.rows.items()} == {name: [3]}
    assert (read.counts.tables, read.counts.num_samples) == (profile.tables, profile.num_samples)
    for spec in profile.tables:
        for part in ("rows", "counts"):
            assert np.array_equal(getattr(read.counts[spec.name], part), getattr(profile[spec.name], part))
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"dmt"])
    for values, message in (({"format": 3}, "has format 3; this version reads format 2"), ({"tables": 1}, "tables: ")):
        pq.write_table(table.replace_schema_metadata({"dmt": json.dumps({**header, **values})}), path)
        with pytest.raises(InputError, match=rf"{message}.*Start from another checkpoint\.$"):
            load_hot_rows(tmp_path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"Access profile .*: cannot be read .* `dmt prepare`"):
        load_profile(path)


@on_ranks(4)
def test_copies_that_differ_end_a_run(rank: int, tmp_path: Path) -> None:
    """One number of a copy changes on rank 2."""
    job = open_job(config_of(tmp_path, "unsound", hot_rows={"extra_memory": 0.5}))
    mesh = TowerMesh(job.topology)
    hot = build.hot_rows(job, model := build.shard_model(job, mesh), mesh)
    assert hot is not None
    hot.replicate({next(iter(job.tables)).name: [3, 5]})
    check = Agreement(job.config.train, model, mesh, timer=StepTimer(), replicas=None, signals=Signals())
    model(next(iter(job.data.batches("train", rank=rank, world_size=4, batch_size=16))))[0].backward()
    check.check(1)
    (copies,) = (part.hot for part in model.modules() if isinstance(part, SPTTModule))
    assert copies is not None
    if rank == 2:
        next(iter(copies.tensors.values()))[1, 3] += 1e-6
    with pytest.raises(ReplicaMismatchError, match=r"the hot rows of .*\.weight of rank 2 differs from that of rank 0"):
        check.check(2)


def test_a_run_with_hot_rows_cuts_no_table_into_columns(tmp_path: Path) -> None:
    cluster = load_cluster("a100")
    save_cluster(replace(cluster, all_to_all=replace(cluster.all_to_all, latency_s=0.0)), tmp_path / "prompt.toml")
    sharding = {"dataflow": "sptt", "cluster": str(tmp_path / "prompt.toml")}
    settings = {"sharding": sharding, "topology": {"num_towers": 1, "ranks_per_tower": 4}}
    settings |= {"synthetic": {"rows_per_table": 4000}, "train": {"batch_size": 256}}
    assert "column_wise" in open_job(small("dlrm", "sptt", **settings)).sharding.tables_by_scheme
    hot = open_job(small("dlrm", "sptt", hot_rows={"extra_memory": 0.1}, **settings)).sharding
    assert "column_wise" not in hot.tables_by_scheme
    assert hot.reasons["t_C1"].endswith("; it is not cut into columns, so that its rows can have copies")


@on_ranks(2)
def test_copies_draw_no_random_numbers_of_the_run(rank: int) -> None:
    job = open_job(small("dlrm", "sptt", hot_rows={"extra_memory": 0.5}, topology={"ranks_per_tower": 1}))
    mesh = TowerMesh(job.topology)
    hot = build.hot_rows(job, build.shard_model(job, mesh), mesh)
    assert hot is not None
    state = torch.get_rng_state()
    hot.replicate({next(iter(job.tables)).name: [3, 5]})
    assert torch.equal(torch.get_rng_state(), state)
