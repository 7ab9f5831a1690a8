"""A run that is interrupted and started again: the same losses, bit for bit; other layouts; what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.training import train as training
from dmt.training.checkpoints.store import checkpoints, read_manifest
from dmt.training.config import TrainingConfig
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare
from dmt.training.job import open_job, open_unsharded
from dmt.training.records import RunRecord, read_curves, read_result
from dmt.training.resume import Position, Start, checkpoint_folder, start_from, starting_folder
from dmt.training.train import train_job
from dmt.training.trained import check_encoding
from tests.ranks import run_ranks
from tests.seeds import some_slow
from tests.training.small import small, source

STEPS, SAVE_EVERY = 10, 4


class Interrupted(Exception):
    pass


def run_on_rank(rank: int, values: dict[str, Any], stop_at: int | None) -> dict[str, Any] | None:
    """One attempt at a run, which may be interrupted at a step; None if it was."""
    config = TrainingConfig.model_validate(values)
    job = open_job(config)
    log = RunRecord.scalars

    def interrupt(self: RunRecord, step: int, numbers: dict[str, float]) -> None:
        log(self, step, numbers)
        if step == stop_at:
            raise Interrupted

    with patch.object(RunRecord, "scalars", interrupt), contextlib.suppress(Interrupted):
        return train_job(job, TowerMesh(job.topology))
    return None


def config(folder: Path, *, arch: str = "dmt-dlrm", dataflow: str = "auto", **sections: dict[str, Any]) -> Any:
    train = {"save_every": SAVE_EVERY, "log_every": 1, "max_steps": STEPS, "output_dir": str(folder), "epochs": 2}
    sections["train"] = train | sections.get("train", {})
    sections.setdefault("optimizer", {"warmup_steps": 3})
    sections.setdefault("synthetic", {"num_rows": 450, "num_eval_rows": 200})
    return small(arch, dataflow, **sections)


def attempt(run: TrainingConfig, stop_at: int | None = None) -> dict[str, Any] | None:
    world_size = run.topology.build().world_size
    return run_ranks(run_on_rank, world_size, run.model_dump(mode="json"), stop_at)[0]


def trained(run: TrainingConfig, steps: int) -> dict[str, Any]:
    """The result of a run that goes on until it has taken so many steps."""
    result = attempt(run.model_copy(update={"train": run.train.model_copy(update={"max_steps": steps})}))
    assert result is not None
    assert result["steps"] == steps
    return result


def losses(run: TrainingConfig) -> dict[str, list[tuple[int, float]]]:
    return read_curves(Path(run.train.output_dir))


REPLICAS = {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2, "replica_placement": "intra_host"}
COPIES = REPLICAS | {"num_towers": 1}
THREE = {"topology": {"num_towers": 1, "ranks_per_tower": 3}, "model": {"over_arch": [77, 40, 1]}}
SYNTHETIC = {"num_rows": 450, "num_eval_rows": 200, "num_multi_hot": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "towers": {"sharding": {"scheme": "table_wise"}},
    "row-wise": {"sharding": {"scheme": "row_wise"}, "train": {"async_save": True, "prefetch_ids": False}},
    "flat": {"arch": "dlrm"},
    "first step": THREE | {"arch": "dmt-dcn", "train": {"save_every": 1}},
    "sequences": {"data": {"sequences": {"C6": "C1"}}, "synthetic": SYNTHETIC, "sharding": {"scheme": "row_wise"}},
    "flat sequences": {
        **{"arch": "dcn", "data": {"sequences": {"C6": "C1"}}, "synthetic": SYNTHETIC},
        "topology": {"ranks_per_tower": 1},
    },
    "replicas": {"topology": REPLICAS, "replicas": {"sync_every": 2}, "towers": {"outside": ["C2"]}},
    "replicas, delayed": {"topology": COPIES, "replicas": {"sync_every": 2, "optimizer_state": "delayed"}},
    "random bits and hot rows": {
        "dataflow": "sptt",
        "model": {"factory": "tests.training.small:dropped", "in_towers": False},
        "hot_rows": {"extra_memory": 0.5, "refresh_every": 3},
        "topology": {"ranks_per_tower": 1},
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", some_slow(LAYOUTS, ("towers", "flat", "replicas", "row-wise", "sequences")))
def test_an_interrupted_run_has_the_losses_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    undisturbed, interrupted = (config(tmp_path / kind, **LAYOUTS[name]) for kind in ("a", "b"))
    expected, stop_at = trained(undisturbed, STEPS), 2 if name == "first step" else 7
    assert attempt(interrupted, stop_at=stop_at) is None
    assert name != "first step" or steps_of(interrupted) == [1]
    assert [step for step, _ in losses(interrupted)["train/loss"]] == list(range(1, stop_at + 1))
    found = trained(interrupted, STEPS)
    assert losses(interrupted) == losses(undisturbed)
    assert [step for step, _ in losses(undisturbed)["train/loss"]] == [*range(1, STEPS + 1)]
    assert (found["eval_auc"], found["eval_ne"]) == (expected["eval_auc"], expected["eval_ne"])
    assert "hot_rows" not in LAYOUTS[name] or expected["hot_rows"]["rows"] > 0


def rows_seen_on_rank(rank: int, values: dict[str, Any], stop_at: int | None) -> list[list[float]]:
    """The dense rows that this rank trains on, step by step, in one attempt."""
    seen: list[list[float]] = []
    run_pipeline = training.run_pipeline

    def spied(pipeline: Any, batches: Any) -> Any:
        def spy() -> Any:
            for batch in batches:
                seen.append(batch.dense_features[:, 0].tolist())
                yield batch

        return run_pipeline(pipeline, spy() if torch.is_grad_enabled() else batches)

    with patch.object(training, "run_pipeline", spied):
        run_on_rank(rank, values, stop_at)
    return seen


@pytest.mark.ranks
def test_a_run_goes_on_at_the_right_sample_on_other_ranks(tmp_path: Path) -> None:
    """4 ranks x 16 rows for 4 steps, then 2 ranks x 2 x 20 rows, flat instead of towers: every row once, in order."""
    run = config(tmp_path, arch="dlrm", dataflow="sptt", train={"epochs": 1, "max_steps": None})
    before = run_ranks(rows_seen_on_rank, 4, run.model_dump(mode="json"), 5)
    values = run.model_dump(mode="json")
    values["topology"] = {"num_towers": 2, "ranks_per_tower": 1}
    # As many steps as an epoch of these batches would have: the save of the fifth is due, and the sixth is the last.
    values["train"] |= {"batch_size": 20, "save_every": 5}
    values["sharding"] = {"dataflow": "flat"}
    after = run_ranks(rows_seen_on_rank, 2, values, None)
    assert steps_of(run) == [6, 5, 4]
    data, alone = source(run), {"rank": 0, "world_size": 1, "lanes": 4}
    steps = [
        *islice(data.batches("train", batch_size=64, **alone), 4),
        *data.batches("train", batch_size=80, rows=256, **alone),
    ]
    stream = [row for batch in steps for row in batch.dense_features[:, 0].tolist()]
    assert len(stream) == 256 + 160
    trained = [row for step in range(SAVE_EVERY) for rank in range(4) for row in before[rank][step]]
    assert trained == stream[:256]
    assert len(after[0]) == (450 - 256) // 80
    # A ring of two ranks sends the gradients of 3 x 6, 6 x 8, 29 x 4 and 4 x 1 weights and of the biases twice.
    sent = read_result(tmp_path)["bytes_per_sample"]["dense"] * 80
    assert sent == 2 * 4 * (4 * 6 + 7 * 8 + 30 * 4 + 5)
    # With batches of 120 rows for each lane, 2 ranks take 480 rows at a time, and 450 are not even a step.
    values["train"] |= {"batch_size": 120}
    with pytest.raises(InputError, match=r"450 training rows, fewer than one step takes: 4 ranks x .*=120 = 480\."):
        run_ranks(rows_seen_on_rank, 2, values, None)
    trained += [row for step in range(len(after[0])) for rank in range(2) for row in after[rank][step]]
    assert trained == stream


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainingConfig:
    """A finished run of one epoch: 7 steps of 64 rows."""
    run: TrainingConfig = config(tmp_path_factory.mktemp("run"), train={"epochs": 1, "max_steps": None})
    assert attempt(run) is not None
    return run


def changed(run: TrainingConfig, **sections: dict[str, Any]) -> TrainingConfig:
    values = run.model_dump(mode="json")
    for name, section in sections.items():
        values[name] |= section
    return TrainingConfig.model_validate(values)


def start(run: TrainingConfig, folder: Path | None = None) -> Start:
    return start_from(checkpoints(folder or checkpoint_folder(run))[0], open_unsharded(run))


@pytest.mark.ranks
def test_where_a_run_begins(finished: TrainingConfig, tmp_path: Path) -> None:
    own = checkpoint_folder(finished)
    assert starting_folder(finished) == own
    assert starting_folder(changed(finished, train={"output_dir": str(tmp_path)})) == tmp_path / "checkpoint"
    other = {"output_dir": str(tmp_path), "resume": finished.train.output_dir}
    assert starting_folder(changed(finished, train=other)) == own
    whole = checkpoints(own)[0]
    assert starting_folder(changed(finished, train={**other, "resume": str(whole)})) == whole
    with pytest.raises(InputError, match=r"train\.resume='nowhere' holds no checkpoint"):
        starting_folder(changed(finished, train={**other, "resume": "nowhere"}))
    with pytest.raises(InputError, match=r"train\.resume='.*' is a checkpoint of this run, which resumes from its"):
        starting_folder(changed(finished, train={"resume": str(whole)}))
    # Its own checkpoints go before the one it began with.
    assert starting_folder(changed(finished, train={"resume": "nowhere"})) == own


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"tower_dim": 8}}, r"does not fit this run: model\.tower_dim: 4 -> 8\. Undo these changes, or give"),
        ({"optimizer": {"sparse": "sgd"}}, r"optimizer\.sparse: 'rowwise_adagrad' -> 'sgd'"),
        ({"train": {"seed": 5}}, r"train\.seed: 0 -> 5"),
        ({"data": {"shuffle_rows": 100}}, r"data\.shuffle_rows: \d+ -> 100"),
        ({"towers": {"outside": "auto"}}, r"towers\.plan='.*towers\.json', towers\.outside='none'\)\. Undo th"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(finished: TrainingConfig, sections: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        start(changed(finished, **sections))


@pytest.mark.ranks
def test_a_run_goes_on_with_other_settings_and_says_so(finished: TrainingConfig, tmp_path: Path) -> None:
    longer = changed(finished, train={"epochs": 2, "dense_reduce": "hierarchical"}, optimizer={"sparse_lr": 0.5})
    found = start(longer)
    assert found.position == Position(step=7, epoch=1, rows=0, lanes=4)
    assert found.lines[1:] == ("optimizer.sparse_lr: 0.05 -> 0.5", "train.dense_reduce: 'ring' -> 'hierarchical'")
    other_ranks = changed(finished, topology={"num_towers": 2, "ranks_per_tower": 1})
    assert len(start(other_ranks).lines) == 1
    # What is advised where `auto` now chooses tables.
    its_own = {"plan": str(checkpoints(checkpoint_folder(finished))[0] / "towers.json"), "outside": "none"}
    assert start(changed(finished, towers=its_own)).position == found.position
    # Another day's data, from the checkpoint of yesterday's run.
    today = changed(finished, train={"output_dir": str(tmp_path)}, data={"shuffle_rows": 100})
    found = start(today, checkpoint_folder(finished))
    assert (found.position, len(found.lines)) == (Position(), 1)


@pytest.mark.ranks
def test_a_finished_run_is_evaluated_again_and_keeps_its_record(finished: TrainingConfig) -> None:
    before, folder = steps_of(finished), Path(finished.train.output_dir)
    result, metrics = read_result(folder), (folder / "metrics.jsonl").read_text()
    again = attempt(finished)
    assert again is not None
    for name in ("steps", "eval_ne", "samples_per_second", "samples_per_second_per_rank", "seconds"):
        assert again[name] == result[name] == read_result(folder)[name]
    assert (folder / "metrics.jsonl").read_text() == metrics, "one line of the evaluation"
    assert steps_of(finished) == before
    with pytest.raises(InputError, match=r"has ended, so optimizer\.sparse_lr: 0\.05 -> 0\.5 would change nothing\."):
        attempt(changed(finished, optimizer={"sparse_lr": 0.5}))
    assert (folder / "result.json").exists()


def steps_of(run: TrainingConfig) -> list[int]:
    return [read_manifest(path).step for path in checkpoints(checkpoint_folder(run))]


FILES = {"kind": "columns", "split_column": "split", "categorical": ["c_*"], "dense": ["d_*"], "num_embeddings": 11}


def write_day(folder: Path, day: int, rows: int) -> None:
    draw = random.Random(day)
    lines = ["d_1,d_2,d_3,c_1,c_2,label,split"]
    for row in range(rows):
        numbers = [draw.random(), draw.random(), draw.random(), draw.randrange(9), draw.randrange(9), draw.randrange(2)]
        lines.append(",".join([*map(str, numbers), "test" if row % 5 == 0 else "train"]))
    (folder / f"day_{day}.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.ranks
def test_files_that_are_others_are_seen(tmp_path: Path) -> None:
    write_day(tmp_path, 1, 320)
    values = {**FILES, "train_path": str(tmp_path / "day_*.csv")}
    sections = {"data": values, "topology": {"num_towers": 2, "ranks_per_tower": 1}}
    train = {"epochs": 1, "max_steps": None, "batch_size": 32}
    run = config(tmp_path / "run", arch="dlrm", dataflow="sptt", train=train, **sections)
    assert attempt(run) is not None
    longer = changed(run, train={"epochs": 2})
    assert start(longer).position == Position(step=4, epoch=1, rows=0, lanes=2)
    with pytest.raises(InputError, match=r"data\.eval_path: None -> '.*day_1\.csv'"):
        start(changed(longer, data={"eval_path": str(tmp_path / "day_1.csv"), "split_column": None}))
    write_day(tmp_path, 2, 320)
    with pytest.raises(InputError, match=r"the training files have changed: train/part-00000\.parquet"):
        start(longer)
    (tmp_path / "day_2.csv").unlink()
    text = (tmp_path / "day_1.csv").read_text()
    (tmp_path / "day_1.csv").write_text(text)
    assert start(longer).position.epoch == 1, "the same bytes, written anew"
    copied = shutil.copytree(tmp_path, tmp_path / "moved", ignore=shutil.ignore_patterns("run"))
    assert start(changed(longer, data={"train_path": str(copied / "day_*.csv")})).position.epoch == 1
    (tmp_path / "day_1.csv").write_text(text.replace(",1,train", ",0,train", 1))
    with pytest.raises(InputError, match=r"the training files have changed: train/part-00000\.parquet"):
        start(longer)
    (tmp_path / "day_1.csv").write_text(text)
    write_day(tmp_path, 2, 320)
    # From Monday's checkpoint on Tuesday's files: from the first row on.
    tuesday = changed(run, train={"output_dir": str(tmp_path / "tuesday"), "resume": run.train.output_dir})
    assert start(tuesday, checkpoint_folder(run)).position == Position()
    trained = attempt(tuesday)
    assert trained is not None
    assert trained["steps"] == 8


@pytest.mark.ranks
def test_the_warm_up_may_be_taken_out_and_averagings_stay_where_they_were(tmp_path: Path) -> None:
    """A run that ended between two averagings has the next at a multiple of sync_every."""
    sections = {"topology": COPIES, "sharding": {"scheme": "table_wise"}, "replicas": {"sync_every": 4}}
    run = config(tmp_path, **sections, train={"eval_every": 4, "max_steps": 6, "save_every": 100})
    assert attempt(run) is not None
    values = changed(run, train={"max_steps": 13}, optimizer={"warmup_steps": 0}).model_dump(mode="json")
    assert run_ranks(checked_evaluations_on_rank, 2, values) == [[8, 12, 13]] * 2


def checked_evaluations_on_rank(rank: int, values: dict[str, Any]) -> list[int]:
    """Steps at which replicas were evaluated; at each of them they are equal."""
    steps, evaluate = [], training.evaluate

    def checked(run: training.Run, *meet: Any) -> Any:
        assert run.replicas is not None
        run.replicas.check()
        steps.append(run.optimizer.steps)
        return evaluate(run, *meet)

    with patch.object(training, "evaluate", checked):
        run_on_rank(rank, values, None)
    return steps


def test_another_encoding_of_the_rows_is_refused(tmp_path: Path) -> None:
    """The weights would load, and each row of a table would mean another value."""
    write_day(tmp_path, 1, 320)
    columns = {"dense": ["d_1", "d_2", "d_3"], "categorical": ["c_1", "c_2"]}
    data = {**FILES, "train_path": str(tmp_path / "day_*.csv"), **columns}
    run = config(tmp_path / "run", arch="dlrm", data=data)
    job = open_unsharded(run)
    (tmp_path / "raw_data.json").write_text(job.data.raw.model_dump_json())
    check_encoding(tmp_path, job)
    for change in ({"dense": ["d_3", "d_2", "d_1"]}, {"dense_transform": "none"}, {"id_mode": "frequency"}):
        with pytest.raises(InputError, match=rf"rows with a different encoding: data\.{next(iter(change))}: .* -> "):
            check_encoding(tmp_path, job := open_unsharded(changed(run, data=change)))
    told = pytest.raises(InputError, match=r"different encoding: the vocabulary \(prepare the rows")
    for name, expected in ((f"moved/{job.data.raw.vocabulary}", contextlib.nullcontext()), ("other#00000000", told)):
        saved = job.data.raw.model_copy(update={"vocabulary": name})
        (tmp_path / "raw_data.json").write_text(saved.model_dump_json())
        with expected:
            check_encoding(tmp_path, job)


@pytest.mark.ranks
def test_a_run_from_the_weights_of_another_drops_out_by_its_own_seed(tmp_path: Path) -> None:
    first = config(tmp_path, **LAYOUTS["random bits and hot rows"], train={"max_steps": 1})
    assert attempt(first) is not None
    found = set()
    for folder, resume, seed in (("a", str(tmp_path), 1), ("b", str(tmp_path), 2), ("from scratch", "auto", 1)):
        train = {"output_dir": str(tmp_path / folder), "resume": resume, "seed": seed}
        found.add((attempt(changed(first, train=train)) or {})["eval_loss"])
    assert len(found) == 3


@pytest.mark.ranks
def test_another_order_of_columns_is_refused_where_another_program_prepared_the_rows(tmp_path: Path) -> None:
    write_day(tmp_path, 1, 320)
    prepare(DataConfig.model_validate({**FILES, "train_path": str(tmp_path / "day_1.csv")}), tmp_path / "rows")
    path = tmp_path / "rows" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"raw": None}
    path.write_text(json.dumps(manifest))
    sections = {"data": {"prepared": str(path.parent)}, "topology": {"num_towers": 1, "ranks_per_tower": 1}}
    run = config(tmp_path / "run", arch="dlrm", **sections, train={"max_steps": 1})
    assert attempt(run) is not None
    start(run)
    path.write_text(json.dumps(manifest | {"dense": ["d_2", "d_1", "d_3"]}))
    with pytest.raises(InputError, match=r"different encoding: column 'd_1' -> 'd_2'; column 'd_2' -> 'd_1'\."):
        start(run)
