"""`dmt score` gives every row of a file its prediction, from a checkpoint or an exported program."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dmt.errors import InputError
from dmt.training import trained
from dmt.training.checkpoints.store import load_plain, write_manifest
from dmt.training.checkpoints.store import read_manifest as read_checkpoint
from dmt.training.config import TrainingConfig, load_config
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare
from dmt.training.job import open_unsharded
from dmt.training.serving import export
from dmt.training.serving import score as scoring
from dmt.training.serving.export import export_run, read_manifest
from dmt.training.serving.score import rows_to_score, score
from dmt.training.trained import checkpoint_of
from tests.training.data.helpers import numbered_lines, write
from tests.training.small import plain, save_run, small

ROWS = 50


def rows(**changes: Any) -> pa.Table:
    columns = {
        "label": [i % 3 == 0 for i in range(ROWS)],
        "c_ad": [f"ad{i % 7}" if i % 5 else None for i in range(ROWS)],
        "c_words": [[f"w{j}" for j in range(i % 4)] for i in range(ROWS)],
        "time": [f"2026-11-22T{i % 24:02}:00:00" for i in range(ROWS)],
        "d_age": [float(i) for i in range(ROWS)],
        "split": ["train" if i % 2 else "test" for i in range(ROWS)],
    } | changes
    return pa.table({name: values for name, values in columns.items() if values is not None})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, as far as files can tell, of a data set with columns and a split."""
    folder = tmp_path_factory.mktemp("run")
    pq.write_table(rows(), folder / "clicks.parquet")
    data = {"kind": "columns", "train_path": str(folder / "clicks.parquet"), "categorical": ["c_*"], "dense": ["d_*"]}
    data |= {"timestamps": ["time"], "split_column": "split", "num_embeddings": 30}
    model = {"arch": "dlrm", "embedding_dim": 8, "dense_arch": [6], "over_arch": [4, 1]}
    config = TrainingConfig.model_validate({"data": data, "model": model, "train": {"output_dir": str(folder)}})
    save_run(folder, config)
    export_run(folder, folder / "model.pt2")
    return folder


def test_a_checkpoint_tells_columns_of_bags_where_the_data_are_lost(run: Path, tmp_path: Path) -> None:
    """Rows as text score like the Parquet rows of the training, which are gone."""
    values = [(i % 7, "|".join(f"w{j}" for j in range(i % 4)), i) for i in range(8)]
    lines = [f"0,test,ad{ad},{words},2026-11-22T{i:02}:00:00,{i}" for ad, words, i in values]
    (tmp_path / "rows.csv").write_text("\n".join(["label,split,c_ad,c_words,time,d_age", *lines, ""]))
    score(run, tmp_path / "wanted.parquet", data_path=str(run / "clicks.parquet"))
    lost = shutil.move(run / "clicks.parquet", tmp_path / "rows.parquet")
    try:
        assert checkpoint_of(run, str(tmp_path / "rows.csv"))[1].data.multi_hot == ("c_words",)
        score(run, tmp_path / "out.parquet", data_path=str(tmp_path / "rows.csv"))
    finally:
        shutil.move(lost, run / "clicks.parquet")
    wanted, ours = (read(tmp_path / f"{name}.parquet")["logit"] for name in ("wanted", "out"))
    picked = [i for i in range(8) if i % 5]  # the others have no ad in the Parquet rows
    assert [ours[i] for i in picked] == pytest.approx([wanted[i] for i in picked], abs=1e-6)


def read(path: Path) -> dict[str, list[Any]]:
    return dict(pq.read_table(path).to_pydict())


def batch_of(run: Path) -> ClickBatch:
    """All rows, as the trainer reads them."""
    config = load_config(run / "checkpoint" / "step-00000001" / "config.toml")
    data = config.data.model_copy(update={"split_column": None, "eval_path": str(run / "clicks.parquet")})
    return next(ClickData(data, cache=run / "prepared-cache").batches("eval", rank=0, world_size=1, batch_size=ROWS))


@pytest.mark.parametrize("name", ["", "model.pt2"])
def test_every_row_is_scored_in_the_order_of_the_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In batches whose embeddings take few bytes: thousands of features need more memory than there is."""
    sizes, write = [], scoring.Predictions.write
    monkeypatch.setattr(scoring.Predictions, "write", lambda *batch: (sizes.append(len(batch[1])), write(*batch)))
    monkeypatch.setattr(scoring, "_BATCH_BYTES", 16 * 4 * 8 * 4)  # of 16 rows of 4 features with 8 columns
    found = score(run / name, tmp_path / "p.parquet", data_path=str(run / "clicks.parquet"))
    assert sizes == [16, 16, 16, 16]
    table = read(tmp_path / "p.parquet")
    assert found.num_rows == ROWS
    assert table["row"] == list(range(ROWS))
    assert table["label"] == [float(i % 3 == 0) for i in range(ROWS)]
    task = plain(load_config(run / "checkpoint" / "step-00000001" / "config.toml"))
    load_plain(task, run / "checkpoint")
    with torch.no_grad():
        loss, (logits, _, _) = task(batch_of(run))
    assert torch.tensor(table["logit"]).allclose(logits, rtol=0, atol=1e-6)
    assert torch.tensor(table["probability"]).allclose(torch.sigmoid(logits), rtol=0, atol=1e-6)
    assert found.metrics is not None
    assert found.metrics.loss == pytest.approx(float(loss), abs=1e-6)


def test_a_program_is_given_the_rows_of_its_run_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prepared rows requests are contiguous within row groups, here smaller ones than the raw rows would get."""
    path = str(tmp_path / "clicks.parquet")
    pq.write_table(rows(request=[i % 4 for i in range(ROWS)]), path)
    names: dict[str, Any] = {"group_by": "request", "categorical": ("c_*",), "dense": ("d_*",)}
    raw = DataConfig(kind="columns", train_path=path, eval_path=path, **names)
    prepare(raw, tmp_path / "ready", group_rows=8)
    job = open_unsharded(small("dlrm").model_copy(update={"data": DataConfig(prepared=str(tmp_path / "ready"))}))
    monkeypatch.setattr(export, "read_checkpoint", lambda _: SimpleNamespace(step=0, progress={}))
    monkeypatch.setattr(scoring, "read_manifest", lambda _: export._manifest(job, Path(), "fp32"))
    monkeypatch.setattr(scoring, "load_program", lambda _: None)
    data = (job.data, scoring._open(tmp_path / "model.pt2", None, (), tmp_path / "out.parquet")[1])
    first, second = (next(part.batches("eval", rank=0, world_size=1, batch_size=ROWS)) for part in data)
    assert torch.equal(first.dense_features, second.dense_features)
    others = rows_to_score(raw, path, tmp_path / "out.parquet").batches("eval", rank=0, world_size=1, batch_size=ROWS)
    ages = next(others).dense_features[:, 0]
    assert torch.equal(ages, ages.sort().values), "rows of other files are scored in their order"
    assert not torch.equal(ages, first.dense_features[:, 0])
    manifest = tmp_path / "ready" / "manifest.json"
    record = json.loads(manifest.read_text())
    for change in ({"raw": record["raw"] | {"id_mode": "index"}}, {"features": record["features"][::-1]}):
        manifest.write_text(json.dumps(record | change))
        with pytest.raises(InputError, match=r"data\.prepared='.*ready' changed after .*model\.pt2 was exported"):
            scoring._open(tmp_path / "model.pt2", None, (), tmp_path / "out.parquet")


def test_a_checkpoint_that_its_run_deletes_meanwhile_leads_to_the_newer_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "checkpoint", tmp_path / "checkpoint")
    load = trained.load

    def load_late(checkpoint: Path, *rest: Any) -> Any:
        if not (newer := tmp_path / "checkpoint" / "step-00000009").exists():
            checkpoint.rename(newer)
        return load(checkpoint, *rest)

    monkeypatch.setattr(trained, "load", load_late)
    assert score(tmp_path, tmp_path / "scores.parquet").num_rows == ROWS // 2


@pytest.mark.parametrize("model", ["", "model.pt2"])
def test_rows_need_no_label(model: str, run: Path, tmp_path: Path) -> None:
    # Other columns that the training's globs would match, and no split.
    pq.write_table(rows(label=None, split=None, c_more=["x"] * ROWS), tmp_path / "new.parquet")
    found = score(run / model, tmp_path / "p.parquet", data_path=str(tmp_path / "new.parquet"))
    score(run / model, tmp_path / "labeled.parquet", data_path=str(run / "clicks.parquet"))
    assert found.metrics is None
    table = read(tmp_path / "p.parquet")
    assert list(table) == ["row", "logit", "probability"]
    assert table["logit"] == read(tmp_path / "labeled.parquet")["logit"]
    pq.write_table(rows(label=[None] * ROWS), tmp_path / "unknown.parquet")
    with pytest.raises(InputError, match=r"found nothing.*If labels are unknown, leave out their column\."):
        score(run / model, tmp_path / "p.parquet", data_path=str(tmp_path / "unknown.parquet"))


def test_predictions_that_are_not_finite_are_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = scoring._open
    monkeypatch.setattr(scoring, "_open", lambda *given: (lambda batch: batch.labels / 0, *opened(*given)[1:]))
    for name, table in (("labeled", rows()), ("unlabeled", rows(label=None))):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(InputError, match="The model predicts NaN or infinity"):
            score(run, tmp_path / "out", data_path=str(tmp_path / f"{name}.parquet"))
        assert not (tmp_path / "out").exists()


def test_rows_in_criteos_format_need_no_label(tmp_path: Path) -> None:
    lines, config = numbered_lines(5), DataConfig(kind="criteo_tsv", train_path="train.txt")
    lines = [line.replace("0a", "0000000a") for line in lines]
    labeled = write(tmp_path / "train.txt", lines)
    without = write(tmp_path / "test.txt", [line.partition("\t")[2] for line in lines])
    data = [rows_to_score(config, path, tmp_path / "p.parquet") for path in (labeled, without)]
    assert [one.columns.label for one in data] == ["label", None]
    batches = [next(one.batches("eval", rank=0, world_size=1, batch_size=5)) for one in data]
    assert torch.equal(*(batch.dense_features for batch in batches))
    assert torch.equal(*(batch.sparse_features.values() for batch in batches))
    wrong = write(tmp_path / "wrong.txt", [lines[0].partition("\t")[2], lines[1]])
    with pytest.raises(InputError, match=r"wrong\.txt, line 2: expected 39 columns, found 40"):
        rows_to_score(config, wrong, tmp_path / "p.parquet")
    short = write(tmp_path / "short.txt", [line.rpartition("\t")[0] for line in lines])
    with pytest.raises(InputError, match=r"short\.txt, line 1: expected 40 columns, found 39"):
        rows_to_score(config, short, tmp_path / "p.parquet")


def test_evaluation_rows_are_not_taken_from_other_files_than_those_of_training(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "day_2.parquet")
    data = {"kind": "columns", "train_path": str(tmp_path / "day_*.parquet"), "categorical": ["c_*"], "dense": ["d_*"]}
    model, train = {"arch": "dlrm", "embedding_dim": 8}, {"output_dir": str(tmp_path / "before")}
    config = TrainingConfig.model_validate({"data": data, "model": model, "train": train})
    run = save_run(tmp_path / "before", config).rename(tmp_path / "run")
    checkpoint = run / "checkpoint" / "step-00000001"
    progress = {"files": ClickData(config.data, cache=run / "prepared-cache").files("train")}
    write_manifest(checkpoint, replace(read_checkpoint(checkpoint), progress=progress))
    assert score(run, tmp_path / "p.parquet").num_rows == ROWS // 10
    assert not (tmp_path / "before").exists(), "where the run was"
    export_run(run, tmp_path / "model.pt2")
    assert score(tmp_path / "model.pt2", tmp_path / "p.parquet").num_rows == ROWS // 10
    pq.write_table(rows(), tmp_path / "day_1.parquet")
    for model in (run, tmp_path / "model.pt2"):
        with pytest.raises(InputError, match=r"The training files have changed since .*Name the rows to score \(--da"):
            score(model, tmp_path / "p.parquet")


def test_another_ending_than_that_of_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.csv' is written as Parquet. Name a file that ends in \.parquet\."):
        score(tmp_path, tmp_path / "p.csv")


def test_the_manifest_has_examples_of_the_hash(run: Path) -> None:
    manifest = read_manifest(run / "model.pt2")
    ad, words, hour, _ = manifest["features"]
    assert not ad["multi_hot"]
    assert words["multi_hot"]
    assert ad["examples"].keys() == {"1", "abc"}
    assert ad["examples"] != words["examples"], "the feature is no part of the hash"
    assert manifest["hash_key"]
    assert all(0 < row < 30 for row in ad["examples"].values())
    assert batch_of(run).sparse_features.keys() == [ad["name"], words["name"], hour["name"], "time_weekday"]
    assert (hour["name"], hour["rows"], hour["time_column"], hour["time_part"]) == ("time_hour", 25, "time", "hour")
    assert (hour["examples"], manifest["dense"]) == ({}, ["d_age"])
    assert manifest["data"]["categorical"] == ["c_ad", "c_words"]
