"""Rows per second from files to batches, and memory, by ranks and workers, beside PyArrow's scan and TorchRec's reader.

    OMP_NUM_THREADS=1 python -m benchmarks.reading

Ranks make batches of 1,024 rows and do nothing with them: of a file in Criteo's format, plain and gzip, of Parquet
with the same columns, of what ``dmt prepare`` makes of that, and of a ``data.source`` that yields its record batches.
In each round every contender reads every file once, so that what else the machine does meets all of them. Time counts
from the opening of the files on, with the workers' start. On a busy machine, the CPU time of a rank tells more than the
clock: it should fall as 1 / ranks.

``2 alone`` is the ceiling: two readers at once that share nothing, each of a whole file, as ``1 rank`` does. What they
miss of twice its speed the machine takes (memory, caches, clock), and ``2 ranks`` can get no further.

TorchRec's reader of Criteo's lines makes them lists of numbers, without checks or hashing;
they are made into tensors of 1,024 rows here.

Memory is the most that a rank has used since before it opened the data.

``wait``: the share of a rank's time that it waits for batches if each step computes for 50 ms and reading a batch takes
40 ms, without workers and with one (the batch size is set so that it does).
"""

from __future__ import annotations

import gc
import gzip
import json
import os
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
from dmt.training.data.prepare import PrepareOptions, prepare
from dmt.training.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from dmt.training.data.workers import BatchThread

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_COLUMNS: dict[str, Any] = {"kind": "columns", "dense": CRITEO_DENSE, "categorical": CRITEO_CATEGORICAL}
_BATCH = 1024
_BLOCK = 1 << 14  # rows that are shuffled together
_STEP_S, _READ_S = 0.050, 0.040
_ALONE = "2 alone"
_CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    _ALONE: (2, {}),
    "2 ranks": (2, {}),
    "2 ranks, shared": (2, {"reading": "shared"}),
    "1 rank, 1 worker": (1, {"workers": 1}),
}
_OTHERS = dict.fromkeys(("gzip", "prepared", "source"), ("1 rank", _ALONE, "2 ranks"))
_TORCHREC_ROWS = 50_000


@click.command()
@click.option("--rows", default=1 << 19, help="Rows of a file.")
@click.option("--rounds", default=5, help="Rounds, of which medians are taken.")
@click.option("--out", default=str(_RESULTS / "reading.json"), help="The record.")
def main(rows: int, rounds: int, out: str) -> None:
    """Measures, prints a table, and writes the record."""
    load = os.getloadavg()[1]
    with tempfile.TemporaryDirectory() as folder, RankPool({}) as pool:
        files = _write_files(Path(folder), rows)
        speeds: dict[str, dict[str, list[float]]] = {kind: {} for kind in files}
        cpu: dict[str, dict[str, list[float]]] = {kind: {} for kind in files}
        memory: dict[str, dict[str, float]] = {kind: {} for kind in files}
        for _ in range(rounds):
            for kind, path in files.items():
                if kind != "source":
                    speeds[kind].setdefault("plain scan", []).append(rows / _scan(kind, path))
                if kind == "tsv":
                    speeds[kind].setdefault("TorchRec", []).append(_TORCHREC_ROWS / _read_by_torchrec(path))
                for name, (ranks, settings) in _CONTENDERS.items():
                    if name not in _OTHERS.get(kind, _CONTENDERS):
                        continue
                    settings = {"source_shards": 2, **settings} if kind == "source" else settings
                    alone = name == _ALONE
                    found = pool.run(_read_on_rank, ranks, kind, path, settings, alone, timeout_s=600)
                    read = ranks * rows if alone else rows
                    speeds[kind].setdefault(name, []).append(read / max(seconds for seconds, _, _ in found))
                    cpu[kind].setdefault(name, []).append(max(used for _, used, _ in found) / read)
        for kind, name in [(form, contender) for form in files for contender in cpu[form]]:
            # Of processes that have read nothing before, which would have kept memory.
            with RankPool({}) as fresh:
                ranks, settings = _CONTENDERS[name]
                found = fresh.run(_read_on_rank, ranks, kind, files[kind], settings, name == _ALONE, timeout_s=600)
                memory[kind][name] = max(most for _, _, most in found)
        size = int(statistics.median(speeds["tsv"]["1 rank"]) * _READ_S)
        waits: dict[str, list[float]] = {}
        for _ in range(min(rounds, 3)):
            for workers in (0, 1):
                share = pool.run(_wait_on_rank, 1, files["tsv"], size, workers, timeout_s=600)[0]
                waits.setdefault(f"{workers} workers", []).append(share)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "versions": {name: version(name) for name in ("torch", "pyarrow", "numpy")},
        "rows": rows,
        "load_before_and_after": [load, os.getloadavg()[1]],
        "batch": _BATCH,
        "rows_per_second": speeds,
        "cpu_seconds_of_a_rank_per_row": cpu,
        "megabytes_of_a_rank": memory,
        "speed_up_of_2_ranks": {kind: _ratio(of, "2 ranks", "1 rank") for kind, of in speeds.items()},
        "ceiling_of_2_ranks": {kind: _ratio(of, _ALONE, "1 rank") for kind, of in speeds.items()},
        "share_of_the_ceiling": {kind: _ratio(of, "2 ranks", _ALONE) for kind, of in speeds.items()},
        "wait": {"batch": size, "step_s": _STEP_S, "read_s": _READ_S, "share": waits},
    }
    with atomic_write(Path(out)) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    _print(record)


def _print(record: dict[str, Any]) -> None:
    for kind, of in record["rows_per_second"].items():
        cpu, memory = record["cpu_seconds_of_a_rank_per_row"][kind], record["megabytes_of_a_rank"][kind]
        for name, speeds in of.items():
            used = statistics.median(cpu.get(name, [float("nan")])) * 1e6
            speed, most = statistics.median(speeds), memory.get(name, float("nan"))
            share = speed / statistics.median(of["1 rank"])
            click.echo(
                f"{kind:8} {name:18} {speed:12,.0f} rows/s  {share:5.2f} of 1 rank  {used:5.2f} us CPU a row  "
                f"{most:6,.0f} MB"
            )
    for title in ("speed_up_of_2_ranks", "ceiling_of_2_ranks", "share_of_the_ceiling"):
        found = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in record[title].items())
        click.echo(f"{title.replace('_', ' ')}, median of the rounds: {found}")
    shares = {name: statistics.median(shares) for name, shares in record["wait"]["share"].items()}
    click.echo(f"share of the time waited: {shares}")


def _ratio(speeds: dict[str, list[float]], one: str, other: str) -> float:
    """Returns the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(speeds[one], speeds[other], strict=True))


def _write_files(folder: Path, rows: int) -> dict[str, str]:
    """Writes the same rows in all forms, Parquet in row groups of 32,768; ids are Zipf-distributed."""
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
    plain = (folder / "clicks.tsv").read_bytes()
    (folder / "clicks.tsv.gz").write_bytes(gzip.compress(plain, compresslevel=1))
    parquet, prepared = str(folder / "clicks.parquet"), folder / "prepared"
    prepare(DataConfig(train_path=parquet, eval_path=parquet, **_COLUMNS), prepared, PrepareOptions())
    files = {"tsv": folder / "clicks.tsv", "gzip": folder / "clicks.tsv.gz", "parquet": parquet}
    return {kind: str(path) for kind, path in {**files, "prepared": prepared, "source": parquet}.items()}


def _scan(kind: str, path: str) -> float:
    """Returns the seconds that PyArrow takes to read a file on one thread, unchecked."""
    began = time.perf_counter()
    if kind in ("tsv", "gzip"):
        read = pa.csv.ReadOptions(use_threads=False, autogenerate_column_names=True)
        parse = pa.csv.ParseOptions(delimiter="\t")
        for _ in pa.csv.open_csv(path, read_options=read, parse_options=parse):
            pass
    else:
        for _ in pq.ParquetFile(path if kind == "parquet" else f"{path}/train/part-00000.parquet").iter_batches(
            use_threads=False
        ):
            pass
    return time.perf_counter() - began


def _read_by_torchrec(path: str) -> float:
    """Returns the seconds that TorchRec's reader of Criteo's lines takes for the first rows, made into tensors."""
    import torch
    from torchrec.datasets.utils import ReadLinesFromCSV

    began = time.perf_counter()
    with open(path) as file:  # as CriteoIterDataPipe, which opens files by a package that need not be there
        rows = map(_numbers, islice(ReadLinesFromCSV([(path, file)], delimiter="\t"), _TORCHREC_ROWS))
        while batch := list(islice(rows, _BATCH)):
            _ = [torch.tensor(part) for part in zip(*batch, strict=True)]
    return time.perf_counter() - began


def _numbers(row: list[str]) -> tuple[int, list[int], list[int]]:
    """Turns a line's columns into numbers, as TorchRec's own conversion to .npy does."""
    return int(row[0]), [int(x or "0") for x in row[1:14]], [int(x or "0", 16) for x in row[14:]]


def batches_of_parquet(shard: int, num_shards: int, options: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yields every other row group or so of a Parquet file: a ``data.source``."""
    file = pq.ParquetFile(options["path"])
    yield from file.iter_batches(1 << 14, row_groups=range(shard, file.num_row_groups, num_shards), use_threads=False)


def _batches(kind: str, path: str, batch_size: int, settings: dict[str, Any], *, alone: bool = False) -> Iterator[Any]:
    shape: dict[str, Any] = {"train_path": path, "eval_path": path, "kind": "criteo_tsv"}
    if kind == "source":
        function = "benchmarks.reading:batches_of_parquet"
        shape = {**_COLUMNS, "kind": "source", "source": function, "options": {"path": path}, "eval_fraction": 1e-6}
    elif kind == "prepared":
        shape = {"prepared": path}
    elif kind == "parquet":
        shape |= _COLUMNS
    data = open_source(DataConfig.model_validate({**shape, **settings}))
    group = dist.group.WORLD
    assert group is not None, "made by the pool"
    if alone:
        return data.batches("train", rank=0, world_size=1, batch_size=batch_size)
    return data.batches("train", rank=group.rank(), world_size=group.size(), batch_size=batch_size, group=group)


def _read_on_rank(rank: int, kind: str, path: str, settings: dict[str, Any], alone: bool) -> tuple[float, float, float]:
    """Returns the seconds, by the clock and of this process, of a pass, and the most MB in use."""
    _allow_workers()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = _megabytes("VmRSS")
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in _batches(kind, path, _BATCH, {"shuffle_rows": _BLOCK, **settings}, alone=alone):
        pass
    return time.perf_counter() - began, time.process_time() - used, _megabytes("VmHWM") - before


def _megabytes(name: str) -> float:
    text = Path("/proc/self/status").read_text().partition(f"{name}:")[2]
    return int(text.split()[0]) / 1000


def _wait_on_rank(rank: int, path: str, batch_size: int, workers: int) -> float:
    """Returns the share of the time that is waited, after the first batches."""
    _allow_workers()
    batches = _batches("tsv", path, batch_size, {"workers": workers, "shuffle_rows": batch_size})
    if workers:
        batches = BatchThread().ahead(batches)
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
