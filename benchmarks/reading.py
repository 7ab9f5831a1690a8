"""Compares the reader's rows per second with a PyArrow scan of the same prepared file; also times `dmt prepare`.

    python -m benchmarks.reading [--rows 1000000] [--memory-gib 0.5] [--out reading.json]

Scan and reader take turns in one run: 26 ids, 13 dense columns, batches of 4,096 shuffled rows. "two ranks" are two
processes that read at the same time; "waited" is the share of the time that training with steps of 50 ms waits for
batches. The memory of `dmt prepare` is the growth of the process's peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.report import about
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.data.columns import CRITEO_CATEGORICAL
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare

_BATCH, _BLOCK, _STEP_S, _STEPS = 4096, 20_000, 0.05, 40


def write_clicks(path: Path, rows: int) -> None:
    """Writes rows in Criteo's format, with Zipf ids of up to a million values and 30 % of the integers missing."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for start in range(0, rows, _BLOCK):
            number = min(_BLOCK, rows - start)
            numbers = draw.integers(-2, 9999, (number, 13)).astype(str)
            numbers[draw.random((number, 13)) < 0.3] = ""
            ids = np.minimum(draw.zipf(1.2, (number, len(CRITEO_CATEGORICAL))), 10**6)
            for label, dense, values in zip(draw.integers(0, 2, number), numbers, ids, strict=True):
                file.write("\t".join([str(label), *dense, *(f"{value:08x}" for value in values)]) + "\n")


def scan(folder: Path) -> float:
    """Returns the rows per second that PyArrow reads on one thread."""
    began, rows = time.perf_counter(), 0
    for path in sorted((folder / "train").glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            rows += file.read_row_group(group, use_threads=False).num_rows
    return rows / (time.perf_counter() - began)


def read(folder: Path, rank: int = 0, world_size: int = 1) -> float:
    """Returns the rows per second that one rank reads in batches."""
    torch.set_num_threads(1)
    assert ClickBatch is not None, "TorchRec is imported before the clock starts"
    data = ClickData(DataConfig.model_validate({"prepared": str(folder)}))
    began, rows = time.perf_counter(), 0
    for batch in data.batches("train", rank=rank, world_size=world_size, batch_size=_BATCH):
        rows += len(batch.labels)
    return rows / (time.perf_counter() - began)


def waited(folder: Path) -> float:
    """Returns the share of the time that training waits for batches, after the first one."""
    data = ClickData(DataConfig.model_validate({"prepared": str(folder)}))
    batches = data.batches("train", rank=0, world_size=1, batch_size=_BATCH)
    next(batches)
    waits, began = 0.0, time.perf_counter()
    for _ in range(_STEPS):
        time.sleep(_STEP_S)
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        waits += time.perf_counter() - asked
    return waits / (time.perf_counter() - began)


def prepared(text: Path, folder: Path, memory_gib: float) -> dict[str, float]:
    """Returns the rows per CPU second of `dmt prepare`, its memory in MiB, and the size of the text in GiB."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    record = prepare(DataConfig(kind="criteo_tsv", train_path=str(text)), folder, memory_gib=memory_gib)
    rate = sum(record.rows.values()) / (time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"rows_per_s": rate, "peak_mib": peak / 1024, "text_gib": text.stat().st_size / 2**30}


def measure(rows: int, memory_gib: float, repeats: int = 5) -> dict[str, Any]:
    """Returns the record; of ``repeats`` measurements of each rate, the highest counts."""
    with TemporaryDirectory() as scratch:
        text, folder = Path(scratch, "clicks.tsv"), Path(scratch, "prepared")
        write_clicks(text, rows)
        made = prepared(text, folder, memory_gib)
        both = [(folder, rank, 2) for rank in (0, 1)]
        with mp.get_context("spawn").Pool(2) as pool:
            rates = [(scan(folder), read(folder), sum(pool.starmap(read, both))) for _ in range(repeats)]
        scanned, one, two = map(max, zip(*rates, strict=True))
        return {
            "about": about(f"python -m benchmarks.reading --rows {rows} --memory-gib {memory_gib}"),
            "rows": rows,
            "prepare": made,
            "scan_rows_per_s": scanned,
            "one_rank_rows_per_s": one,
            "one_rank_over_scan": one / scanned,
            "two_ranks_over_one": two / one,
            "waited": waited(folder),
        }


def main() -> None:
    """Measures and prints the record as JSON; ``--out`` also writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory-gib", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.rows, arguments.memory_gib), indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
