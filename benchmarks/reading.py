"""Rows per second from files to batches, by ranks and workers, beside a plain scan by PyArrow.

    OMP_NUM_THREADS=1 python -m benchmarks.reading

Ranks make batches of 1,024 rows of a file in Criteo's format and of a Parquet file with the same columns, and do
nothing with them. In each round every contender reads every file once, so that what else the machine does meets all of
them. Time counts from the first batch on, when workers have started. On a busy machine, the CPU time of a rank tells
more than the clock: it should fall as 1 / ranks.

``wait``: the share of a rank's time that it waits for batches if each step computes for 50 ms and reading a batch takes
40 ms, without workers and with one (the batch size is set so that it does).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch.distributed as dist

from benchmarks.provenance import commit, processor
from dmt.files import atomic_write
from dmt.testing.ranks import RankPool
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import open_source
from dmt.training.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_BATCH = 1024
_BLOCK = 1 << 14  # rows of a rank that are read before the first batch
_STEP_S, _READ_S = 0.050, 0.040
_CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks, shared": (2, {"reading": "shared"}),
    "1 rank, 1 worker": (1, {"workers": 1}),
}


@click.command()
@click.option("--rows", default=500_000, help="Rows of a file.")
@click.option("--rounds", default=7, help="Rounds, of which medians are taken.")
@click.option("--out", default=str(_RESULTS / "reading.json"), help="The record.")
def main(rows: int, rounds: int, out: str) -> None:
    """Measures, prints a table, and writes the record."""
    with tempfile.TemporaryDirectory() as folder, RankPool({}) as pool:
        files = _write_files(Path(folder), rows)
        speeds: dict[str, dict[str, list[float]]] = {kind: {} for kind in files}
        cpu: dict[str, dict[str, list[float]]] = {kind: {} for kind in files}
        for _ in range(rounds):
            for kind, path in files.items():
                speeds[kind].setdefault("plain scan", []).append(rows / _scan(kind, path))
                for name, (ranks, settings) in _CONTENDERS.items():
                    found = pool.run(_read_on_rank, ranks, kind, path, settings, timeout_s=600)
                    read = rows - ranks * _BLOCK
                    speeds[kind].setdefault(name, []).append(read / max(seconds for seconds, _ in found))
                    cpu[kind].setdefault(name, []).append(max(used for _, used in found) / read)
        size = int(statistics.median(speeds["tsv"]["1 rank"]) * _READ_S)
        waits: dict[str, list[float]] = {}
        for _ in range(min(rounds, 3)):
            for workers in (0, 1):
                share = pool.run(_wait_on_rank, 1, files["tsv"], size, workers, timeout_s=600)[0]
                waits.setdefault(f"{workers} workers", []).append(share)
    medians = {kind: {name: statistics.median(values) for name, values in of.items()} for kind, of in speeds.items()}
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "versions": {name: version(name) for name in ("torch", "pyarrow", "numpy")},
        "rows": rows,
        "batch": _BATCH,
        "rows_per_second": speeds,
        "cpu_seconds_of_a_rank_per_row": cpu,
        "speed_up_of_2_ranks": {
            kind: statistics.median(b / a for a, b in zip(of["1 rank"], of["2 ranks"], strict=True))
            for kind, of in speeds.items()
        },
        "wait": {"batch": size, "step_s": _STEP_S, "read_s": _READ_S, "share": waits},
    }
    with atomic_write(Path(out)) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    for kind, of in medians.items():
        for name, speed in of.items():
            used = statistics.median(cpu[kind].get(name, [float("nan")])) * 1e6
            share = speed / of["1 rank"]
            click.echo(f"{kind:8} {name:18} {speed:12,.0f} rows/s  {share:5.2f} of 1 rank  {used:5.2f} us CPU a row")
    click.echo(f"median of the rounds' speed-ups of 2 ranks: {record['speed_up_of_2_ranks']}")
    click.echo(f"share of the time waited: { {name: statistics.median(shares) for name, shares in waits.items()} }")


def _write_files(folder: Path, rows: int) -> dict[str, str]:
    """Writes the same rows as Criteo's text and as Parquet in row groups of 32,768; ids are Zipf-distributed."""
    draw = np.random.default_rng(0)
    table = {"label": draw.integers(0, 2, rows)}
    table |= {name: draw.integers(0, 1000, rows) for name in CRITEO_DENSE}
    for name in CRITEO_CATEGORICAL:
        names = np.array([f"{x:08x}" for x in draw.integers(0, 2**32, 10_000)])
        table[name] = names[np.minimum(draw.zipf(1.2, rows), len(names)) - 1]
    columns = pa.table(table)
    pq.write_table(columns, folder / "clicks.parquet", row_group_size=1 << 15)
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(columns, folder / "clicks.tsv", options)
    return {"tsv": str(folder / "clicks.tsv"), "parquet": str(folder / "clicks.parquet")}


def _scan(kind: str, path: str) -> float:
    """Returns the seconds that PyArrow takes to read a file on one thread, unchecked."""
    began = time.perf_counter()
    if kind == "tsv":
        read = pa.csv.ReadOptions(use_threads=False, autogenerate_column_names=True)
        parse = pa.csv.ParseOptions(delimiter="\t")
        for _ in pa.csv.open_csv(path, read_options=read, parse_options=parse):
            pass
    else:
        for _ in pq.ParquetFile(path).iter_batches(use_threads=False):
            pass
    return time.perf_counter() - began


def _batches(kind: str, path: str, batch_size: int, settings: dict[str, Any]) -> Iterator[Any]:
    columns = {"dense": CRITEO_DENSE, "categorical": CRITEO_CATEGORICAL}
    shape = {"kind": "criteo_tsv"} if kind == "tsv" else {"kind": "columns", **columns}
    data = open_source(DataConfig.model_validate({"train_path": path, "eval_path": path, **shape, **settings}))
    group = dist.group.WORLD
    assert group is not None, "made by the pool"
    place = {"rank": group.rank(), "world_size": group.size(), "batch_size": batch_size}
    return data.batches("train", group=group, **place)


def _read_on_rank(rank: int, kind: str, path: str, settings: dict[str, Any]) -> tuple[float, float]:
    """Returns the seconds, by the clock and of this process, from the first batch on."""
    _allow_workers()
    batches = _batches(kind, path, _BATCH, {"shuffle_rows": _BLOCK, **settings})
    next(batches)
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    return time.perf_counter() - began, time.process_time() - used


def _wait_on_rank(rank: int, path: str, batch_size: int, workers: int) -> float:
    """Returns the share of the time that is waited, after the first batches."""
    _allow_workers()
    batches = _batches("tsv", path, batch_size, {"workers": workers, "shuffle_rows": batch_size})
    next(batches)
    time.sleep(1.0)  # the workers' start
    waited, began = 0.0, time.perf_counter()
    for _ in islice(iter(lambda: _timed_next(batches), None), 20):
        waited += _
        time.sleep(_STEP_S)
    return waited / (time.perf_counter() - began)


def _timed_next(batches: Iterator[Any]) -> float | None:
    began = time.perf_counter()
    return None if next(batches, None) is None else time.perf_counter() - began


def _allow_workers() -> None:
    """Lets a rank of the pool start processes; those of torchrun may anyway."""
    import multiprocessing as mp

    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # noqa: SLF001


if __name__ == "__main__":
    main()
