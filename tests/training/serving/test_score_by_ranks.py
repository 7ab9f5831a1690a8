"""`dmt score` under torchrun: ranks write what one process writes, whatever layout they shard the model in."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from dmt.errors import InputError
from dmt.plan.towers import TowerPlan
from dmt.sptt.mesh import TowerMesh
from dmt.training.affinity import affinity_of_run
from dmt.training.config import TrainingConfig
from dmt.training.job import open_unsharded
from dmt.training.serving import score_by_ranks as module
from dmt.training.serving.export import export_run
from dmt.training.serving.score import Predictions, Scored, score
from dmt.training.serving.score_by_ranks import score_by_ranks
from tests.ranks import run_ranks
from tests.training.small import save_run, small

BATCH = 16
TWO = {"num_towers": 2, "ranks_per_tower": 1}


def scored_on_rank(
    rank: int, world_size: int, model: str, out: str, data: str | None = None, fault: str = ""
) -> Scored:
    add = Predictions.write

    def faulty(self: Predictions, logits: Tensor, *rest: Tensor) -> None:
        if fault == "full disk" and rank == 1 and self.row:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, logits * float("nan" if fault == "NaN" and rank == 1 else 1), *rest)

    # Training would not fit, with its gradients.
    no_room = patch("dmt.training.preflight.memory_limit", lambda: 1)
    with (
        no_room,
        patch.object(module, "process_group", on_mesh),
        patch.object(Predictions, "write", faulty),
    ):
        return score_by_ranks(Path(model), Path(out), world_size=world_size, data_path=data)


def on_mesh(load: Callable[[], TrainingConfig]) -> nullcontext[tuple[TrainingConfig, TowerMesh]]:
    return nullcontext((config := load(), TowerMesh(config.topology.build())))


def by_ranks(world_size: int, model: Path, out: Path, data: str | None = None) -> Scored:
    results = run_ranks(scored_on_rank, world_size, world_size, str(model), str(out), data)
    assert len({repr(result) for result in results}) == 1, "NaN differs from itself"
    return results[0]


RUNS: dict[str, dict[str, Any]] = {
    "flat": {"arch": "dlrm", "dataflow": "flat", "sharding": {"scheme": "row_wise", "forward_precision": "fp16"}},
    "flat over towers": {
        "arch": "dcn",
        "dataflow": "sptt",
        "sharding": {"unique": True},
        "towers": {"plan": "towers.json"},
    },
    "towers": {
        "arch": "dmt-dlrm",
        "sharding": {"forward_precision": "fp16"},
        "optimizer": {"sparse": "adam"},
        "towers": {"outside": ["C6", "C2"]},
    },
    "towers of FP16 lists": {"arch": "dmt-dlrm", "sharding": {"table_precision": "fp16"}},
    "sequences": {"data": {"sequences": {"C6": "C1", "C5": "C2"}}},
    "flat sequences": {"arch": "dlrm", "data": {"sequences": {"C6": "C1"}}},
    "replicas": {"arch": "dmt-dcn", "topology": {"num_towers": 1, "ranks_per_tower": 1, "num_replicas": 2}},
}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", RUNS)
def test_ranks_predict_what_one_process_predicts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own layout on two ranks, one tower or a flat layout on three; rows that no number divides, or one."""
    monkeypatch.chdir(tmp_path)
    towers = [["C1[0:4]", "C2", "C3"], ["C4", "C1[4:8]", "C5", "C6"]]
    TowerPlan.from_lists(towers, column_splits={"C1": (4, 4)}).save("towers.json")
    # Attention and sums of few items are more alike.
    least = 0.02 if "sequences" in kind else 0.05
    most = 1e-4 if "FP16" in kind else 1e-5  # one process rounds sums of FP16 rows to FP16
    for rows, world_sizes in ((50, (2, 3)), *([(1, (3,))] if kind == "towers" else [])):
        sections = {"topology": TWO, "train": {"device": "cpu", "batch_size": BATCH}} | RUNS[kind]
        config = small(**sections, synthetic={"num_eval_rows": rows, "num_multi_hot": 2})
        run = save_run(tmp_path / str(rows), config)
        wanted, expected = score(run, tmp_path / "one.parquet"), pq.read_table(tmp_path / "one.parquet")
        for world_size in world_sizes:
            out = tmp_path / f"{rows} by {world_size}"
            found = by_ranks(world_size, run, out)
            assert [path.name for path in sorted(out.iterdir())] == [f"part-0000{r}.parquet" for r in range(world_size)]
            table = pq.read_table(out)
            assert table.schema.equals(expected.schema)
            for name in ("row", "label"):
                assert table[name].equals(expected[name])
            for name in ("logit", "probability"):
                assert table[name].to_pylist() == pytest.approx(expected[name].to_pylist(), abs=most, rel=0)
            assert np.ptp(expected["logit"].to_numpy()) > (least if rows > 1 else -1), "tables matter"
            assert asdict(found.metrics) == pytest.approx(asdict(wanted.metrics), abs=most / 10, nan_ok=True)
            assert found.num_rows == rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on files, of which every other row is for evaluation."""
    folder = tmp_path_factory.mktemp("run")
    pq.write_table(rows_of(40), folder / "clicks.parquet")
    data = {"kind": "columns", "train_path": str(folder / "clicks.parquet"), "num_embeddings": 30}
    data |= {"categorical": ["c_*"], "dense": ["d_*"], "eval_fraction": 0.5}
    return save_run(folder, small("dmt-dlrm", topology=TWO, data=data, synthetic={}, train={"output_dir": str(folder)}))


def rows_of(number: int, **changes: Any) -> pa.Table:
    columns = {"label": [i % 3 == 0 for i in range(number)], "d_age": [float(i) for i in range(number)]}
    columns |= {f"c_{name}": [f"{name}{i % 7}" for i in range(number)] for name in ("ad", "user", "site")} | changes
    return pa.table({name: values for name, values in columns.items() if values is not None})


@pytest.mark.ranks
def test_rows_of_files_keep_their_numbers_and_need_no_label(run: Path, tmp_path: Path) -> None:
    for number, part in enumerate((rows_of(30, label=None), rows_of(9, label=None))):
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=4)
    glob = str(tmp_path / "*.parquet")
    score(run, tmp_path / "one", data_path=glob)
    found = by_ranks(2, run, tmp_path / "two", glob)
    one, two = pq.read_table(tmp_path / "one"), pq.read_table(tmp_path / "two")
    assert (found.num_rows, found.metrics) == (39, None)
    assert two.column_names == one.column_names == ["row", "logit", "probability"]
    assert two["row"].to_pylist() == list(range(39))
    assert two["logit"].to_pylist() == pytest.approx(one["logit"].to_pylist(), abs=1e-5, rel=0)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        (rows_of(0), "", r"--data '.*rows.parquet' has no row"),
        (rows_of(40, c_ad=None), "", "c_ad"),
        (rows_of(40), "full disk", "No space left on device"),
        (rows_of(40, label=None), "NaN", "The model predicts NaN or infinity"),
    ],
    ids=["no row", "a column is missing", "the disk of one rank is full", "one rank predicts NaN"],
)
def test_what_fails_on_a_rank_fails_on_all_and_leaves_no_folder(
    data: pa.Table, fault: str, words: str, run: Path, tmp_path: Path
) -> None:
    pq.write_table(data, tmp_path / "rows.parquet")
    errors = run_ranks(error_on_rank, 2, str(run), str(tmp_path / "out"), str(tmp_path / "rows.parquet"), fault)
    assert errors[0] == errors[1]
    assert re.search(words, errors[0])
    assert {path.name for path in tmp_path.iterdir()} == {"rows.parquet", "prepared-cache"}


def error_on_rank(rank: int, *arguments: Any) -> str:
    with pytest.raises(InputError) as error:
        scored_on_rank(rank, 2, *arguments)
    return str(error.value)


@pytest.mark.ranks
def test_columns_in_another_order_than_in_training_are_refused(run: Path, tmp_path: Path) -> None:
    """Globs name them in the order of the file, in which the weights would stand for other columns."""
    file, words = run / "clicks.parquet", r"with a different encoding: data\.categorical: \['c_ad', 'c_user', .*--data"
    trained = pq.read_table(file)
    pq.write_table(trained.select(trained.column_names[::-1]), file)
    for use in (partial(score, out=tmp_path / "p"), partial(export_run, out=tmp_path / "m.pt2"), affinity_of_run):
        with pytest.raises(InputError, match=words):
            use(run)
    assert re.search(words, run_ranks(error_on_rank, 2, str(run), str(tmp_path / "out"))[1])
    assert score(run, tmp_path / "p", data_path=str(file)).num_rows == 40
    pq.write_table(trained, file)


def test_what_only_one_process_does_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").touch()
    for model, out, words in (
        (tmp_path / "model.pt2", tmp_path / "new", r"model\.pt2 is an exported model, .* this job has 2 ranks"),
        (run, tmp_path / "model.pt2", r"--out '.*model\.pt2' exists, but under torchrun `dmt score` writes"),
        (run, Path("/proc/none/new"), r"--out '/proc/none/new' cannot be written: No such file"),
    ):
        with pytest.raises(InputError, match=words):
            module._joining(model, out, 2)
    own = {"source": "tests.training.data.test_source:malformed", "categorical": ["c"], "dense": ["d"]}
    with pytest.raises(InputError, match=r"data\.source='tests.*malformed' deals rows to ranks itself"):
        module._placed(open_unsharded(small(data=own, synthetic={}, topology={"num_towers": 1})), 2)
