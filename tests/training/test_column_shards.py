"""Plans that cut tables into column shards in different towers, in the trainer: refusals, parity, a whole run."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt.errors import InputError
from dmt.plan.towers import TowerPlan
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state, load_plain_state
from dmt.testing.plain import PlainTraining
from dmt.testing.state import table_layout
from dmt.training import train as run
from dmt.training.build import fused_params, shard_model
from dmt.training.checkpoints import load_plain, newest
from dmt.training.config import TrainingConfig
from dmt.training.job import open_data, open_job
from dmt.training.partition import affinity_of_run
from dmt.training.preflight import resolve
from tests.ranks import run_ranks
from tests.training.small import new_run, plain, small, train_loop

FEATURES = [f"C{i}" for i in range(1, 7)]
# Every table in both towers, and the towers of different dimensions.
ALL_CUT = TowerPlan.from_lists(
    [[f"{f}[4:16]" for f in FEATURES[::-1]], [f"{f}[0:4]" for f in FEATURES]],
    column_splits={f: (4, 12) for f in FEATURES},
)
# Whole tables among shards; C6 has bags.
SOME_CUT = TowerPlan.from_lists(
    [["C6[4:12]", "C1[12:16]", "C3", "C2"], ["C6[0:4]", "C4", "C1[0:12]", "C6[12:16]", "C5"]],
    column_splits={"C1": (12, 4), "C6": (4, 8, 4)},
)
# With a flat model the shards are joined, and the model is the uncut one.
CASES = [("dmt-dlrm", ALL_CUT), ("dmt-dcn", ALL_CUT), ("dlrm", SOME_CUT), ("dcn", SOME_CUT)]


def config_of(folder: Path, arch: str, plan: TowerPlan, **sections: dict[str, Any]) -> TrainingConfig:
    path = folder / f"{arch}.json"
    plan.save(path)
    sections["model"] = {"embedding_dim": 16} | sections.get("model", {})
    sections["synthetic"] = {"num_multi_hot": 2} | sections.get("synthetic", {})
    return small(arch, "sptt", towers={"plan": str(path)}, **sections)


def cut(towers: list[list[str]], splits: dict[str, tuple[int, ...]]) -> TowerPlan:
    return TowerPlan.from_lists(towers, column_splits=splits)


REST = FEATURES[1:]


@pytest.mark.parametrize("arch", ["dmt-dlrm", "dlrm"])
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            cut([["C1[0:6]", *REST], ["C1[6:16]"]], {"C1": (6, 10)}),
            r"cuts the table of feature 'C1' into column shards of \[6, 10\] columns; each must be a multiple of 4",
        ),
        (
            cut([["C1[0:4]", *REST], ["C1[4:8]"]], {"C1": (4, 4)}),
            r"Table 't_C1' has embedding_dim=16, but its column shards are \[4, 4\]; they must add up",
        ),
        (
            cut([["C7[0:4]", *FEATURES], ["C7[4:16]"]], {"C7": (4, 12)}),
            r"Features 'C7\[0:4\]', 'C7\[4:16\]' are in the tower plan but not in the model",
        ),
        (cut([["C1[0:4]", *REST[1:]], ["C1[4:16]"]], {"C1": (4, 12)}), r"Feature 'C2' is in no tower"),
    ],
    ids=["width", "sum", "unknown", "missing"],
)
def test_a_plan_with_wrong_cuts_is_refused(arch: str, plan: TowerPlan, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        resolve(config_of(tmp_path, arch, plan), 4)


def test_a_tower_of_shards_of_two_widths_is_refused_by_models_with_towers_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Table 't_C1\[12:16\]' has embedding_dim=4, but tower 'tower_0'"):
        resolve(config_of(tmp_path, "dmt-dlrm", SOME_CUT), 4)
    resolve(config_of(tmp_path, "dlrm", SOME_CUT), 4)


def test_batches_name_the_shards_and_tables_stay_whole(tmp_path: Path) -> None:
    job = resolve(config_of(tmp_path, "dlrm", SOME_CUT), 4)
    assert [table.embedding_dim for table in job.tables] == [16] * 6
    for split in ("train", "eval"):
        batch = next(job.data.batches(split, rank=0, world_size=1, batch_size=8)).split_columns(SOME_CUT.column_splits)
        ids = batch.sparse_features
        assert ids.keys() == ["C1[0:12]", "C1[12:16]", "C2", "C3", "C4", "C5", "C6[0:4]", "C6[4:12]", "C6[12:16]"]
        assert torch.equal(ids["C6[0:4]"].values(), ids["C6[12:16]"].values())


# Parity on 2 towers x 2 ranks.


def trained(
    rank: int, config: TrainingConfig, start: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], bool, Any]:
    """The weights after training, whether the pipeline runs the id exchange ahead, and which rank holds what."""
    mesh = TowerMesh(config.topology.build())
    model = shard_model(open_job(config), mesh)
    load_plain_state(model, start)
    train_loop(new_run(config, mesh, model=model))
    sparse_arch: Any = model.module.model.sparse_arch
    # A train pipeline puts an object of its own in the place of the method, where it can.
    is_ahead = not inspect.ismethod(getattr(sparse_arch, "shards", sparse_arch).forward)
    return gather_plain_state(model), is_ahead, table_layout(model)


def oracle_of(config: TrainingConfig, steps: int, start: Any, layout: Any) -> dict[str, torch.Tensor]:
    """The weights of the plain model of a config after training on the union of the ranks' batches."""
    model = plain(config)
    model.load_state_dict(start)
    training = PlainTraining(
        [model],
        fused_params=fused_params(config.optimizer),
        make_optimizer=lambda dense: torch.optim.SGD(dense.values(), lr=config.optimizer.dense_lr),
        layout=layout,
    )
    job = open_data(config)
    union = job.data.batches("train", rank=0, world_size=1, batch_size=4 * config.train.batch_size, lanes=4)
    for batch in itertools.islice(union, steps):
        model.zero_grad()
        model(batch.split_columns(job.towers.column_splits))[0].backward()
        training.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


OPTIMIZERS = {"sgd": 2.0, "adagrad": 0.1, "rowwise_adagrad": 0.1}
# Every model once; models of towers and flat ones with SGD and with an optimizer that has moments.
TRAINED = [("sgd", CASES[0]), ("rowwise_adagrad", CASES[1]), ("adagrad", CASES[2]), ("sgd", CASES[3])]
STEPS = 6


def parity_on_rank(rank: int, folder: str, cases: list[Any]) -> dict[tuple[str, str], Any]:
    """By optimizer and arch, on rank 0: whether ids go ahead, and two sets of weights that must agree."""
    found: dict[tuple[str, str], Any] = {}
    for sparse, (arch, plan) in cases:
        rate = OPTIMIZERS[sparse]
        config = config_of(
            Path(folder) / str(rank),
            arch,
            plan,
            optimizer={"sparse": sparse, "sparse_lr": rate, "dense": "sgd", "dense_lr": 0.2},
            train={"max_steps": STEPS},
        )
        torch.manual_seed(5)
        start = plain(config).state_dict()
        ours, is_ahead, layout = trained(rank, config, start)
        if rank == 0:
            found[sparse, arch] = (is_ahead, ours, oracle_of(config, STEPS, start, layout))
    return found


@pytest.mark.ranks
def test_training_on_shards_is_training_the_plain_model(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
    found = run_ranks(parity_on_rank, 4, str(tmp_path), TRAINED)[0]
    assert len(found) == len(TRAINED)
    for case, (is_ahead, ours, oracle) in found.items():
        assert is_ahead, f"{case}: the pipeline does not exchange the ids of the next batch"
        assert sum("embedding_bags" in name for name in ours) == (12 if case[1].startswith("dmt") else 9)
        assert ours.keys() == oracle.keys()
        for name, value in oracle.items():
            # Same sums in another order: a few units in the last place of numbers up to 1, over six steps. AdaGrad
            # divides by roots of sums that can be small; eps bounds what that makes of them.
            torch.testing.assert_close(
                ours[name], value, rtol=0, atol=2e-6, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )


# A whole run, as torchrun would start it.


def run_on_rank(rank: int, folder: str, archs: list[str]) -> list[dict[str, Any]]:
    results, load, reads = [], TowerPlan.load, []

    def count(path: str | Path) -> TowerPlan:
        reads.append(str(path))
        return load(path)

    for arch in archs:
        config = small(
            arch,
            "sptt",
            model={"embedding_dim": 16},
            synthetic={"num_rows": 640, "num_eval_rows": 150, "num_multi_hot": 1},
            towers={"plan": f"{folder}/{arch}.json"},
            optimizer={"sparse_lr": 0.02},
            train={"eval_every": 7, "output_dir": f"{folder}/{arch}"},
        )
        made = contextlib.nullcontext(TowerMesh(config.topology.build()))
        with (
            patch.object(TowerPlan, "load", count),
            patch.object(run, "process_group", lambda config, made=made: made),
        ):
            results.append(run.train(config))
        # Once in a run, on every rank: the file may change while the run trains with what it held.
        assert reads == [config.towers.plan]
        reads.clear()
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    archs = ["dmt-dlrm", "dlrm"]
    for arch, plan in CASES:
        plan.save(folder / f"{arch}.json")
    return folder, run_ranks(run_on_rank, 4, str(folder), archs)[0]


@pytest.mark.ranks
def test_a_whole_run_with_cut_tables(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = runs
    for (arch, plan), result in zip([CASES[0], CASES[2]], results, strict=True):
        assert (result["steps"], result["eval_num_rows"]) == (10, 150)
        assert min(result["bytes_per_sample"].values()) >= 0 < max(result["bytes_per_sample"].values())
        checkpoint = newest(folder / arch / "checkpoint")
        assert checkpoint is not None
        saved = TowerPlan.load(checkpoint / "towers.json")
        assert saved.column_splits == plan.column_splits
        config = config_of(folder / arch, arch, saved, synthetic={"num_eval_rows": 150, "num_multi_hot": 1})
        assert len(saved.tables) == len(open_job(config).towers.features)
        model = plain(config)
        load_plain(model, checkpoint)
        # The evaluation of the run is that of its checkpoint in one process.
        batch = next(open_data(config).data.batches("eval", rank=0, world_size=1, batch_size=150))
        assert model(batch.split_columns(saved.column_splits))[0].item() == pytest.approx(result["eval_loss"], rel=1e-5)
        assert result["parameters"] == sum(p.numel() for p in model.parameters())
        assert math.isfinite(result["eval_auc"])


@pytest.mark.ranks
def test_no_affinity_is_measured_on_shards(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = runs
    with pytest.raises(InputError, match="tables are cut into column shards"):
        affinity_of_run(folder / CASES[0][0], max_rows=640)
