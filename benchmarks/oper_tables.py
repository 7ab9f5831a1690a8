"""OPER's planner on the skew of Criteo-Kaggle: Tables 2 and 3 of the paper, and which rows pay between hosts.

    python -m benchmarks.oper_tables

Arithmetic, no training, 8 ranks of one node (section 6.4). Criteo-Kaggle: 26 tables of 16 columns, and the accesses of
`benchmarks.steps.criteo_ids`, which were fitted to 8,000 public rows; the paper counted the accesses of all rows. It
does not state its batch, but its mean without copies does: a link carries F features x 4 dim bytes x B / 8 of
embeddings in a forward pass, which is 3.25 MiB exactly for 26 features at B = 16,384 samples a rank. So Table 2 counts
embeddings that are fetched, one way, without gradients and all-reduces.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.oper_placement import partition_rows, place, replicate_for_inference, replicate_for_training
from benchmarks.report import commit, markdown_table, processor
from benchmarks.steps.criteo_ids import criteo_skews
from dmt.files import atomic_write

__all__ = ["kaggle_shares", "main"]

_RANKS, _DIM, _BATCH = 8, 16, 4096
_RESULTS = Path(__file__).parent / "results"
# Table 3: threshold -> seconds, largest and least communication, degree of balance
_PAPER_BALANCE = {
    0.05: (15.8, 71.6),
    0.01: (28.4, 80.1),
    0.005: (41.5, 88.3),
    0.001: (120.3, 99.1),
    0.0005: (235.2, 99.1),
}
# Table 2: mean communication of a link in MiB, by extra memory
_PAPER_BATCH = 16_384
_EXTRA = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20)
_PAPER_MEMORY = (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18)


def kaggle_shares() -> np.ndarray:
    """Share of its feature's accesses of every row of the 26 tables, [rows]."""
    return np.concatenate([np.append(skew.first, skew.shares(np.arange(float(skew.rows)))) for skew in criteo_skews()])


def off_diagonal(matrix: np.ndarray) -> np.ndarray:
    """Bytes that cross links, [M * (M - 1)]."""
    return matrix[~np.eye(len(matrix), dtype=bool)]


def balance_rows(accesses: np.ndarray) -> list[dict[str, Any]]:
    """Table 3: partitions ever smaller."""
    rows = []
    for threshold, (seconds, percent) in _PAPER_BALANCE.items():
        begun = time.perf_counter()
        placement = place(partition_rows(accesses, 4 * _DIM, threshold=threshold), _RANKS)
        taken = time.perf_counter() - begun
        memory = placement.memory()
        rows.append(
            {
                "threshold": threshold,
                "partitions": len(placement.partitions.traffic),
                "seconds": taken,
                "balance": placement.balance,
                "memory_balance": float(memory.min() / memory.max()),
                "paper_seconds": seconds,
                "paper_balance": percent / 100,
            }
        )
    return rows


def memory_rows(shares: np.ndarray) -> list[dict[str, Any]]:
    """Table 2: extra memory for copies, for serving (Algorithm 1) and for training (equations 4 and 5)."""
    size = np.full(len(shares), 4.0 * _DIM)
    placement = place(partition_rows(_PAPER_BATCH * shares, size, threshold=0.001), _RANKS)
    latency = np.where(np.eye(_RANKS, dtype=bool), 0.0, 1.0)
    found: list[dict[str, Any]] = []
    for extra, paper in zip(_EXTRA, _PAPER_MEMORY, strict=True):
        each = extra * size.sum() / _RANKS
        copied = {
            "serving": replicate_for_inference(placement, each, latency),
            "training": replicate_for_training(placement, each),
        }
        means = {kind: float(off_diagonal(one.communication()).mean() / 2**20) for kind, one in copied.items()}
        found.append({"extra_memory": extra, "mean_mib": {"paper": paper, **means}})
    return found


def rule_rows(shares: np.ndarray) -> list[dict[str, Any]]:
    """Bytes between hosts of a flat model over SPTT with hot rows chosen in several ways: times fewer than without."""
    rows = []
    for hosts, ranks, batch, dim in ((2, 2, 4096, 128), (4, 4, 16384, 64), (16, 8, 4096, 128)):
        sent = (hosts - 1) * ranks * (8 * dim + 8) * batch * shares
        logs = np.log1p(-np.minimum(shares, 1 - 1e-12))
        once = (hosts - 1) * ranks * (8 * dim + 8) * -np.expm1(batch * logs)
        # As in `dmt.hot_rows.costs`: rows that a host touched between two, otherwise those that any rank touched.
        dense = 2 * (hosts - 1) * 4 * dim
        copied = dense * -np.expm1((1 if hosts == 2 else hosts) * ranks * batch * logs)
        held = dense / 300
        most_read = np.argsort(-shares, kind="stable")
        chosen = {
            "cost rule": sent > copied + held,
            "OPER's rule": batch * shares > 1,
            **{f"{share:.1%} of rows": most_read[: round(share * len(shares))] for share in (0.001, 0.01, 0.05)},
        }
        row: dict[str, Any] = {"hosts": hosts, "ranks_per_host": ranks, "batch_size": batch, "dim": dim}
        for name, hot in chosen.items():
            count = int(np.count_nonzero(hot)) if np.asarray(hot).dtype == bool else len(hot)
            row[name] = {"rows": count, "times": float(sent.sum() / (sent.sum() - (sent - copied)[hot].sum()))}
        row["unique"] = {"rows": 0, "times": float(sent.sum() / once.sum())}
        both = once > copied + held
        left = once.sum() - (once - copied)[both].sum()
        row["unique + hot rows"] = {"rows": int(both.sum()), "times": float(sent.sum() / left)}
        rows.append(row)
    return rows


def write_page(record: dict[str, Any], path: Path) -> None:
    """The record as a page."""
    balance = [
        [
            *(f"{100 * r['threshold']:g} %", str(r["partitions"]), f"{r['seconds']:.2f} s", f"{r['balance']:.1%}"),
            *(f"{r['memory_balance']:.1%}", f"{r['paper_seconds']:g} s", f"{r['paper_balance']:.1%}"),
        ]
        for r in record["balance"]
    ]
    first, kinds = record["memory"][0]["mean_mib"], ("paper", "serving", "training")
    memory = [
        [f"{100 * r['extra_memory']:g} %", *(f"{first[k] / r['mean_mib'][k]:.1f}" for k in kinds)]
        for r in record["memory"]
    ]
    names = [name for name in record["rules"][0] if name not in ("hosts", "ranks_per_host", "batch_size", "dim")]
    rules = [
        [
            f"{r['hosts']} x {r['ranks_per_host']}, {r['batch_size']:,}, {r['dim']}",
            *(f"{r[name]['times']:.2f} ({r[name]['rows']:,})" for name in names),
        ]
        for r in record["rules"]
    ]
    header = ["threshold", "partitions", "time", "lookups min/max", "memory min/max", "paper's time", "paper's balance"]
    parts = [
        "# OPER's planner on the skew of Criteo-Kaggle",
        __doc__.strip().split("\n\n", 1)[1],
        record["provenance"],
        f"## Balance against the size of partitions (Table 3), {_BATCH:,} samples a rank",
        markdown_table(header, balance),
        f"## Communication against extra memory (Table 2): times less than without, {_PAPER_BATCH:,} samples a rank",
        markdown_table(["extra memory", *kinds], memory),
        "Of training this is, as in the paper's table, without the all-reduce of copied rows. A row is copied only if "
        "each rank reads it more than once in a step (equations 4 and 5 at equal rates), so more memory gains nothing "
        "once those have copies.",
        "## Hot rows in training: bytes between hosts, times fewer than a flat model over SPTT (rows replicated)",
        markdown_table(["hosts x ranks, samples a rank, columns", *names], rules),
        "Expected bytes of outputs, gradients and ids. The cost rule replicates a row if that is less to send and "
        "worth the work.",
    ]
    with atomic_write(path) as scratch:
        scratch.write_text("\n\n".join(parts) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, help="Folder of the record.")
def main(*, out: Path) -> None:
    """Writes oper_tables.json and oper_tables.md."""
    shares = kaggle_shares()
    record = {
        "provenance": f"{len(shares):,} rows, {_DIM} columns. {processor()}, commit {commit()}, one thread, one run.",
        "balance": balance_rows(_BATCH * shares),
        "memory": memory_rows(shares),
        "rules": rule_rows(shares),
    }
    with atomic_write(out / "oper_tables.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, out / "oper_tables.md")


if __name__ == "__main__":
    main()
