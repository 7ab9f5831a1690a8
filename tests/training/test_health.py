"""Faults put into numbers and data of one rank: the run stops, says where, and goes on from its last checkpoint."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.errors import InputError, ReplicaMismatchError
from dmt.sptt.mesh import TowerMesh
from dmt.training import preflight
from dmt.training import train as training
from dmt.training.checkpoints.store import checkpoints, read_manifest, write_manifest
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.job import open_job
from dmt.training.preflight import check_same_input, checked_model
from dmt.training.resume import checkpoint_folder, find_start
from dmt.training.train import Run, train_job
from tests.ranks import run_ranks
from tests.training.small import make_checkpoint, new_run, numbered, small, train_loop
from tests.training.test_resume import attempt, config, run_on_rank

LOG_EVERY = 3
PAIR = {"num_towers": 1, "ranks_per_tower": 2}
DENSE, TOWER = "over_arch.2.weight", "towers.0.interaction.project.weight"
DATA_PARALLEL, TABLE = "embedding_bags.t_C1.weight", "embedding_bags.t_C2.weight"
KINDS: dict[str, Callable[[float], float]] = {
    "nan": lambda number: math.nan,
    "infinity": lambda number: -math.inf,
    "flipped sign": lambda number: -number,
}
# (place, kind, step before or in which the fault comes)
FAULTS = [
    *(("gradient", kind, step) for kind, step in zip(KINDS, (1, 2, 3), strict=True)),
    (DENSE, "infinity", 3),
    (DENSE, "flipped sign", 4),
    (TOWER, "nan", 2),
    (TOWER, "flipped sign", 1),
    (DATA_PARALLEL, "nan", 4),
    (DATA_PARALLEL, "flipped sign", 6),
    (TABLE, "nan", 6),
    (TABLE, "infinity", 1),
]


def spoil(tensor: Tensor, kind: str) -> None:
    with torch.no_grad():
        # A number of the first row, whose id is read most often.
        index = int(tensor.reshape(-1)[: tensor.shape[-1]].abs().argmax())
        tensor.view(-1)[index] = KINDS[kind](float(tensor.view(-1)[index]))


def held(model: nn.Module, name: str) -> list[Tensor]:
    (value,) = [value for key, value in model.state_dict().items() if key.endswith(name)]
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def gradient(model: nn.Module, name: str) -> Tensor:
    (found,) = [parameter.grad for key, parameter in model.named_parameters() if key.endswith(name)]
    assert found is not None
    return found


def put_in(run: Run, place: str, kind: str, step: int) -> None:
    """Spoils a number of this rank before a step; of a gradient, when it has been averaged."""
    owner, name = (run.optimizer, "step") if place == "gradient" else (run.pipeline, "progress")
    original, done = getattr(owner, name), list[int]()

    def spoiled(*args: Any) -> Any:
        if run.optimizer.steps + 1 == step and run.model.training and not done:
            done.append(step)
            for tensor in [gradient(run.model, DENSE)] if place == "gradient" else held(run.model, place):
                spoil(tensor, kind)
        return original(*args)

    setattr(owner, name, spoiled)


def stops_on_rank(rank: int) -> list[tuple[str, int, str]]:
    """For each fault on rank 1, or on the one rank that holds the table: the error, and the step it came after."""
    values: dict[str, Any] = {
        "topology": PAIR,
        "sharding": {"scheme": "table_wise", "tables": {"t_C1": "data_parallel"}},
        "train": {"log_every": LOG_EVERY, "max_steps": 20, "epochs": 9},
    }
    config = small(**values)
    mesh = TowerMesh(config.topology.build())
    found = []
    for place, kind, step in FAULTS:
        run = new_run(config, mesh)
        if rank == 1 or place == TABLE:
            put_in(run, place, kind, step)
        try:
            train_loop(run)
        except (InputError, ReplicaMismatchError) as error:
            found.append((type(error).__name__, run.optimizer.steps, str(error)))
        else:
            found.append(("nothing", run.optimizer.steps, ""))
    return found


@pytest.mark.ranks
def test_a_fault_in_numbers_stops_the_run_at_the_next_look_and_is_located() -> None:
    first, second = run_ranks(stops_on_rank, 2)
    assert first == second, "all ranks stop alike"
    for (place, kind, step), (error, stopped, message) in zip(FAULTS, first, strict=True):
        # A sign that is flipped before a step is seen after it, and at the latest at the next look.
        assert step <= stopped <= math.ceil(step / LOG_EVERY) * LOG_EVERY, (place, kind, step, stopped)
        if kind == "flipped sign":
            assert error == "ReplicaMismatchError", (place, message)
            where = DENSE if place == "gradient" else place
            assert re.search(
                rf"seen at step {stopped}: \S*{re.escape(where)} of rank 1 differs from that of rank 0", message
            ), (place, message)
        else:
            assert error == "InputError", (place, kind)
            noted = re.search(
                r"has diverged: NaN or infinity at step (\d+) in (the loss|a gradient) of rank \d", message
            )
            assert noted, message
            # A row of a table is noticed when a sample reads it.
            assert int(noted[1]) == step if "embedding" not in place else step <= int(noted[1]) <= stopped
            assert "Lower optimizer.sparse_lr" in message
    assert "at step 1 in a gradient of rank 1. This state is not" in first[0][2]


def diverges_on_rank(rank: int, values: dict[str, Any], step: int) -> None:
    train_steps = training.train_steps

    def spoiled(run: Run, *args: Any) -> Any:
        if rank == 1:
            put_in(run, DENSE, "nan", step)
        return train_steps(run, *args)

    training.train_steps = spoiled
    run_on_rank(rank, values, None)


@pytest.mark.ranks
@pytest.mark.parametrize(("asynchronous", "step", "saved"), [(False, 7, 4), (True, 10, 8)])  # 10 is the last step
def test_the_checkpoint_before_a_divergence_stays_and_resumes(
    asynchronous: bool, step: int, saved: int, tmp_path: Path
) -> None:
    train = {"async_save": asynchronous, "keep_checkpoints": 1, "log_every": 50}
    run: TrainingConfig = config(tmp_path, topology=PAIR, train=train)
    with pytest.raises(InputError, match=rf"at step {step} in the loss of rank 1.*This state is not saved\. Low"):
        run_ranks(diverges_on_rank, 2, run.model_dump(mode="json"), step, fresh=True)
    folder = checkpoint_folder(run)
    assert [path.name for path in checkpoints(folder)] == [f"step-0000000{saved}"]
    result = attempt(run)
    assert result is not None
    assert result["steps"] == 10
    assert math.isfinite(result["eval_loss"])


def on_files(folder: Path, ids: Sequence[int] = range(40), **sections: dict[str, Any]) -> TrainingConfig:
    """A run of a file in a folder beside that of its output."""
    data = numbered(folder / "day.parquet", ids) | sections.pop("data", {})
    train = {"output_dir": str(folder.parent / "run")}
    return small("dlrm", data=data, topology=PAIR, train=train, **sections)


def compare_on_rank(rank: int, configs: list[dict[str, Any]], versions: Sequence[str] = ("2.13.0", "2.13.0")) -> None:
    opened = open_job(TrainingConfig.model_validate(configs[rank]))
    with patch.object(preflight, "versions", lambda: {"torch": versions[rank]}):
        check_same_input(opened, nn.Linear(1, 1), TowerMesh(opened.topology))


def test_a_run_without_a_row_to_evaluate_or_without_labels_is_refused_before_it_trains(tmp_path: Path) -> None:
    run = on_files(tmp_path / "a", data={"eval_path": None, "eval_fraction": 0.001})
    with pytest.raises(InputError, match=r"There are no rows to evaluate. Check data\.eval_path"):
        checked_model(open_job(run))
    job = open_job(run)
    job.data.columns = replace(job.data.columns, label=None)  # as another program may have written them
    with pytest.raises(InputError, match="has rows without labels"):
        checked_model(job)


def start_on_rank(rank: int, configs: list[dict[str, Any]]) -> tuple[str, ...] | str:
    job = open_job(TrainingConfig.model_validate(configs[rank]))
    try:
        start = find_start(job, TowerMesh(job.topology))
        train_job(job, TowerMesh(job.topology))
    except InputError as error:
        return start.lines[0], str(error)
    raise AssertionError("config.toml is a folder")


@pytest.mark.ranks
def test_ranks_begin_together_with_other_paths_and_end_together_without_a_record(tmp_path: Path) -> None:
    first, second = on_files(tmp_path / "a"), on_files(tmp_path / "b")
    job, folder = open_job(first), tmp_path / "run"
    path = make_checkpoint(folder / "checkpoint", 8, {"config.toml": to_toml(job.config)})
    write_manifest(path, replace(read_manifest(path), progress={"files": job.data.files("train")}))
    (folder / "config.toml").mkdir()
    found = run_ranks(start_on_rank, 2, [run.model_dump(mode="json") for run in (first, second)])
    assert found[0] == found[1]
    assert found[0][0].startswith("resumes from")
    assert re.match(r"File .*config\.toml: cannot be written", found[0][1])


@pytest.mark.ranks
def test_ranks_with_other_input_are_told_apart(tmp_path: Path) -> None:
    same, elsewhere = on_files(tmp_path / "a"), on_files(tmp_path / "b")
    other_order = on_files(tmp_path / "c", random.Random(0).sample(range(40), 40))
    source = {"source": "tests.training.data.test_source:of_rank", "categorical": ["c_1"], "num_embeddings": 40}
    dense = small("dcn", data=source | {"dense": ["d_*"]}, topology=PAIR)
    # A shipped model needs a dense column, whose name differs between these ranks.
    bags = small("dcn", model={"factory": "tests.training.small:dropped"}, data=source, topology=PAIR)
    crc = r"train/part-00000\.parquet of [\d,]+ bytes \(CRC-32 \w{8}\)"
    run_ranks(compare_on_rank, 2, [config.model_dump(mode="json") for config in (same, elsewhere)])
    for first, second, message in (
        (same, other_order, rf"file 0 of data\.train_path is {crc} on rank 0, but {crc} on rank 1"),
        (
            same,
            on_files(tmp_path / "a", optimizer={"sparse_lr": 0.5}),
            r"Training: optimizer\.sparse_lr is 0\.05 on rank 0, but 0\.5 on rank 1\. ",
        ),
        (dense, dense, r"dense columns is \('d_0',\) on rank 0, but \('d_1',\) on rank 1"),
        (bags, bags, r"features with bags\.c_1 is True on rank 0, but False on rank 1"),
    ):
        with pytest.raises(InputError, match=message):
            run_ranks(compare_on_rank, 2, [config.model_dump(mode="json") for config in (first, second)])
    with pytest.raises(InputError, match=r"versions\.torch is 2\.13\.0 on rank 0, but 2\.14\.1 on rank 1\. Give every"):
        run_ranks(compare_on_rank, 2, [dense.model_dump(mode="json")] * 2, ["2.13.0", "2.14.1"])
