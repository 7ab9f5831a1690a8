"""Whole runs: the loop with every row known, then programs through torchrun as a user starts them."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.explanation import TowerShardingPlan
from dmt.simulator.cluster import load_cluster, save_cluster
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import shard_model
from dmt.training.checkpoints.store import load_plain, newest
from dmt.training.config import load_config, to_toml
from dmt.training.device import compare_hosts
from dmt.training.job import open_job
from dmt.training.metrics import MetricValues
from dmt.training.records import read_curves
from dmt.training.resume import open_lock
from dmt.training.train import train
from tests.ranks import run_program, run_ranks
from tests.training.small import new_run, numbered, plain, small, train_loop

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("name", LAUNCHED)
def test_training_without_torchrun_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in LAUNCHED.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    with pytest.raises(InputError, match=rf"{name} is not set: start training with torchrun"):
        train(small)


NEIGHBORS = "Start equal numbers of ranks on all machines, with consecutive ranks on each"


@pytest.mark.parametrize(
    ("machines", "per_host", "told"),
    [
        ("aabbccdd", None, ""),
        ("aaaabbbb", None, "Set topology.ranks_per_host=4."),
        ("aaaabbbb", 4, ""),
        ("aaaaaaaa", None, ""),  # one machine emulates four hosts
        ("abcdabcd", None, NEIGHBORS),
        ("aaabbbbb", None, NEIGHBORS),
    ],
)
def test_hosts_other_than_the_machines_are_told(machines: str, per_host: int | None, told: str) -> None:
    problem = compare_hosts(TowerTopology(num_towers=4, ranks_per_tower=2, ranks_per_host=per_host), machines)
    assert told in problem
    assert bool(told) == bool(problem)


# Then the loop on ranks, with every row known.


class Recorder:
    """Stands in for `RunRecord`."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str]] = []

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.points += [(step, name) for name in values if name in ("train/loss", "eval/auc")]

    def evaluation(self, step: int, values: MetricValues) -> None:
        self.scalars(step, {"eval/auc": values.auc})


def loop_on_rank(rank: int, data: dict[str, Any], **settings: Any) -> tuple[list[int], list[tuple[int, str]], int]:
    """Trains on numbered rows; returns the rows this rank's model saw in training, what was recorded, the steps."""
    config = small(
        "dlrm",
        topology={"num_towers": 1, "ranks_per_tower": 2},
        data={**data, "shuffle_rows": 10},
        train={"batch_size": 4, "log_every": 2, **settings},
    )
    mesh = TowerMesh(config.topology.build())
    model = shard_model(open_job(config), mesh)
    seen: list[int] = []

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training:
            seen.extend(inputs[0].sparse_features.values().tolist())

    model.register_forward_pre_hook(look)
    record: Any = Recorder()
    at = train_loop(new_run(config, mesh, model=model, record=record))
    return seen, record.points, at.step


# settings -> steps, times that each row is seen, steps at which the loop itself evaluates
LOOPS: list[tuple[dict[str, Any], int, set[int], list[int]]] = [
    ({"epochs": 2, "eval_every": 5}, 10, {2}, [5]),  # not at 10: the end is evaluated by the caller
    ({"epochs": 9, "max_steps": 6, "eval_every": 2}, 6, {1, 2}, [2, 4]),
    ({"max_steps": 1}, 1, {0, 1}, []),
    ({"prefetch_ids": False, "epochs": 2, "eval_every": 3}, 10, {2}, [3, 6, 9]),
]


def loops_on_rank(rank: int, data: dict[str, Any]) -> Any:
    return [loop_on_rank(rank, data, **settings) for settings, *_ in LOOPS]


@pytest.mark.ranks
def test_the_loop_sees_each_row_as_often_as_asked(tmp_path: Path) -> None:
    first, second = run_ranks(loops_on_rank, 2, numbered(tmp_path / "rows.parquet"))
    for (settings, steps, times, points), mine, other in zip(LOOPS, first, second, strict=True):
        assert mine[2] == other[2] == steps, settings
        counts = Counter(mine[0] + other[0])
        assert {counts[row] for row in range(40)} == times, settings
        assert sum(counts.values()) == steps * 8, settings
        assert [step for step, name in mine[1] if name == "eval/auc"] == points, settings
        assert [step for step, name in mine[1] if name == "train/loss"] == list(range(2, steps + 1, 2)), settings
    epochs = first[0][0]
    assert epochs[:20] != epochs[20:], "the second epoch has the order of the first"


# Then whole programs; one through torchrun, as a user starts it, which starts four Python processes.

SMALL_RUN = [
    "data.synthetic.num_features=6",
    "data.synthetic.num_groups=2",
    "data.synthetic.rows_per_table=30",
    "data.synthetic.num_rows=12900",  # 50 steps of 2 x 128 rows, and 100 rows that are left out
    "data.synthetic.num_eval_rows=3000",
    "topology.ranks_per_tower=1",
    "train.batch_size=128",
    "train.eval_every=25",
    "train.log_every=10",
    "optimizer.warmup_steps=10",
    "optimizer.dense_lr=0.005",
]


@pytest.mark.ranks
def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "sharding.json").write_text("of an earlier run")
    (folder / "config.toml").write_text(to_toml(small()))  # which tells that they are a run's
    save_cluster(replace(load_cluster("a100"), ranks_per_host=1), tmp_path / "cluster.toml")
    overrides = [*SMALL_RUN, f"train.output_dir={folder}", f"sharding.cluster={tmp_path}/cluster.toml"]
    finished = run_program(["-m", "dmt.training", "demo", *overrides], 2)
    printed = finished.stdout + finished.stderr
    assert finished.returncode == 0, printed
    result = json.loads((folder / "result.json").read_text())
    # Where no terminal shows a bar, a few lines with the number of steps.
    assert 0 < finished.stderr.count("train: ") < 9, finished.stderr
    assert result["eval_auc"] > 0.6
    assert result["eval_ne"] < 1.0
    assert result["peak_memory"]["largest"] >= result["peak_memory"]["mean"] > 2**27
    assert len(result["lookups"]["by_rank"]) == 2
    assert result["seconds"] > result["lookups"]["largest"] == max(result["lookups"]["by_rank"]) > 0
    assert 1 <= result["lookups"]["imbalance"] <= 2
    assert result["samples_per_second_per_rank"] == result["samples_per_second"] / 2
    assert result["samples_per_second"] > 45 * 256 / result["seconds"]  # which has the first five steps, too
    assert "predicted" in result
    described = {"arch": "dmt-dlrm", "dataflow": "sptt", "world_size": 2, "steps": 50, "eval_num_rows": 3000}
    assert {key: result[key] for key in described} == described
    assert result["versions"]["torchrec"] == importlib.metadata.version("torchrec")
    assert read_curves(folder)["eval/auc"][-1] == (50, result["eval_auc"])

    # The config reads again, and with it the plain model takes the checkpoint.
    config = load_config(folder / "config.toml")
    assert (config.model.arch, config.train.eval_every) == ("dmt-dlrm", 25)
    checkpoint = newest(folder / "checkpoint")
    assert checkpoint is not None
    load_plain(plain(config), checkpoint)
    plan = TowerPlan.load(checkpoint / "towers.json")
    assert (plan.to_lists(), len(plan.tables)) == ([["C1", "C3", "C5"], ["C2", "C4", "C6"]], 6)
    # The sharding plan is in the run's folder and in its checkpoint; that of an earlier run is replaced.
    plans = [TowerShardingPlan.load(place / "sharding.json") for place in (folder, checkpoint)]
    assert plans == [open_job(config).sharding] * 2
    assert sum(result["sharding"]["tables_by_scheme"].values()) == 6


def read_errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.match(r"(\[rank \d+\] )?error: ", line)]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["config key", "line"])
def test_a_fault_ends_the_job_with_one_line_before_training(fault: str, tmp_path: Path) -> None:
    if fault == "config key":  # every rank finds it
        arguments = ["train.batchsize=3"]
        expected = "error: Config key 'train.batchsize' is unknown. Did you mean 'batch_size'?"
    else:  # rank 0 finds it, the others wait for rank 0
        line = "\t".join(["1", *["5"] * 13, *["0a"] * 26])
        (tmp_path / "day.tsv").write_text("\n".join([line] * 6 + ["1\t2\t3"] + [line] * 6) + "\n")
        arguments = ["data.kind=criteo_tsv", f"data.train_path={tmp_path / 'day.tsv'}"]
        expected = f"error: {tmp_path / 'day.tsv'}, line 7: "
    result = run_program(["-m", "dmt.training", "demo", *arguments, f"train.output_dir={tmp_path / 'out'}"], 4)
    assert result.returncode != 0
    errors = read_errors(result.stdout + result.stderr)
    assert len(set(errors)) == 1, result.stdout + result.stderr
    assert errors[0].startswith(expected)
    assert "train:" not in result.stdout + result.stderr
    assert not [path for path in (tmp_path / "out").rglob("[!.]*") if path.is_file()]


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"train\.output_dir '.*file' cannot be written: File exists"):
        open_lock(tmp_path / "file")
    open_lock(tmp_path / "new" / "folder").close()
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [".lock"]
