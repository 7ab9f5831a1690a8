"""Measures exported models, flat and in towers: AUC with INT8 and INT4 tables, file sizes, and latencies.

    OMP_NUM_THREADS=1 python -m benchmarks.serving --data DIR

DIR has ``flights.parquet``, ``hotel.parquet`` and ``census.parquet``; absent files are skipped. For each file, a flat
model and one in towers train on two ranks, are exported with FP32, INT8 and INT4 tables, and score the test rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.report import about, markdown_table
from dmt.training.console import quiet_libraries
from dmt.training.data.clicks import ClickData
from dmt.training.serving.export import export_run, load_program, tensors_of
from dmt.training.serving.score import score
from dmt.training.trained import trained_model

__all__ = ["main"]

_HERE = Path(__file__).parent
_SETS = ("flights", "hotel", "census")
_FORMATS = ("fp32", "int8", "int4")
_BATCHES = (1, 512)
_SETTINGS = """
[model]
embedding_dim = {dim}
dense_arch = [512, 256]
over_arch = [512, 256, 1]
tower_dim = {tower_dim}
[data]
kind = "columns"
train_path = "{data}"
categorical = ["c_*"]
dense = ["d_*"]
split_column = "split"
num_embeddings = 100000
[topology]
num_towers = 2
[train]
batch_size = 512
epochs = {epochs}
output_dir = "{run}"
"""


@click.command(context_settings={"show_default": True})
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Data folder."
)
@click.option("--dim", default=128, help="N; tower outputs have half as many columns.")
@click.option("--epochs", default=1, help="Passes over the training rows.")
@click.option("--repeats", default=1000, help="Calls per measured latency.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder of runs and programs; by default temporary.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="Results folder.")
def main(*, data: Path, dim: int, epochs: int, repeats: int, work: Path | None, out: Path) -> None:
    """Trains, exports, scores and times models, and writes serving.json and serving.md."""
    quiet_libraries(rank=1)
    settings = {"threads": torch.get_num_threads(), "dim": dim, "epochs": epochs, "repeats": repeats}
    made = about("python -m benchmarks.serving", **settings)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in _SETS:
            if not (data / f"{name}.parquet").exists():
                continue
            runs = {arch: (work or Path(scratch)) / f"{name}_{arch}" for arch in ("dlrm", "dmt-dlrm")}
            for arch, run in runs.items():
                settings = _SETTINGS.format(
                    dim=dim, tower_dim=dim // 2, data=data / f"{name}.parquet", epochs=epochs, run=run
                )
                results += _measure(name, arch, run, settings)
                print(json.dumps(results[-len(_FORMATS) :]), flush=True)
            for row, times in zip(results[-2 * len(_FORMATS) :], _latencies(runs, repeats), strict=True):
                row.update(times)
    (out / "serving.json").write_text(json.dumps({"about": made, "results": results}, indent=1) + "\n")
    (out / "serving.md").write_text(_table(made, results))


def _measure(name: str, arch: str, run: Path, settings: str) -> list[dict[str, Any]]:
    """Trains a model, and scores its evaluation rows by the exported programs; returns a row for each format."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "given.toml").write_text(settings)
    train = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dmt.training"]
    subprocess.run([sys.executable, *train, str(run / "given.toml"), f"model.arch={arch}"], check=True)
    rows = []
    for stored in _FORMATS:
        path = run / f"{stored}.pt2"
        exported = export_run(run, path, tables=stored)  # type: ignore[arg-type]
        metrics = score(path, run / "predictions.parquet").metrics
        assert metrics is not None, "the rows have labels"
        row = {"data": name, "arch": arch, "tables": stored, "auc": metrics.auc, "rows": metrics.num_rows}
        tables = {feature["table"]: feature["rows"] * feature["columns"] for feature in exported.manifest["features"]}
        rows.append(row | {"file_over_tables": exported.file_bytes / (4 * sum(tables.values()))})
    trained = json.loads((run / "result.json").read_text())["eval_auc"]
    return [row | {"auc_of_trainer": trained, "auc_lost": rows[0]["auc"] - row["auc"]} for row in rows]


def _latencies(runs: dict[str, Path], repeats: int) -> list[dict[str, float]]:
    """Returns milliseconds per call; programs take turns, so that a busy machine slows all of them alike."""
    found: list[dict[str, float]] = [{} for _ in range(len(runs) * len(_FORMATS))]
    for size in _BATCHES:
        calls: list[Callable[[], Any]] = []
        for run in runs.values():
            _, job, _ = trained_model(run)
            batch = next(ClickData(job.data.config).batches("eval", rank=0, world_size=1, batch_size=size))
            inputs = tensors_of(batch)
            for stored in _FORMATS:
                program = load_program(run / f"{stored}.pt2")
                calls.append(lambda program=program, inputs=inputs: program(*inputs))  # type: ignore[misc]
        times: list[list[float]] = [[] for _ in calls]
        with torch.inference_mode():
            for number in range(repeats + 20):
                for call, own in zip(calls, times, strict=True):
                    began = time.perf_counter()
                    call()
                    if number >= 20:  # the first calls allocate
                        own.append(1e3 * (time.perf_counter() - began))
        for own, row in zip(times, found, strict=True):
            own.sort()
            row |= {f"p50_ms_of_{size}": own[len(own) // 2], f"p99_ms_of_{size}": own[len(own) * 99 // 100]}
    return found


def _table(made: dict[str, Any], results: list[dict[str, Any]]) -> str:
    titles = ["data", "model", "tables", "AUC", "lost", "file / FP32 tables"]
    titles += [f"{p} of {size}, ms" for size in _BATCHES for p in ("p50", "p99")]
    rows = []
    for row in results:
        cells = [row["data"], row["arch"], row["tables"], f"{row['auc']:.6f}", f"{row['auc_lost']:+.1e}"]
        cells.append(f"{row['file_over_tables']:.3f}")
        cells += [f"{row[f'{p}_ms_of_{size}']:.2f}" for size in _BATCHES for p in ("p50", "p99")]
        rows.append(cells)
    facts = "; ".join(f"{name} {value}" for name, value in made.items())
    return "\n".join(["# Exported models", "", f"{facts}.", "", markdown_table(titles, rows), ""])


if __name__ == "__main__":
    main()
