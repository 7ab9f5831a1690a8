"""OPER's planner on Criteo-Kaggle's skew: Tables 2 and 3 of the paper beside ours, and its greedy competitors.

    python -m benchmarks.oper_tables

Arithmetic, no training: 26 tables with the rows of Criteo-Kaggle and 16 columns, 8 ranks of one node (section 6.4), the
accesses of `benchmarks.steps.criteo_ids`, which were fitted to 8,000 public rows. The paper counted the accesses in all
its rows and does not state its batch, so shares and ratios can be compared, bytes cannot.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.provenance import commit, processor
from benchmarks.steps.criteo_ids import criteo_skews
from benchmarks.towers.report import markdown_table
from dmt.files import atomic_write
from dmt.hot_rows.placement import (
    Partitions,
    Placement,
    partition_rows,
    place,
    replicate_for_inference,
    replicate_for_training,
)

__all__ = ["kaggle_accesses", "main"]

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
# Table 2, Kaggle: extra memory -> mean communication, MB
_PAPER_MEMORY = {0.0: 3.25, 0.01: 0.46, 0.02: 0.30, 0.05: 0.24, 0.10: 0.20, 0.15: 0.19, 0.20: 0.18}


def kaggle_accesses(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected accesses of every row of the 26 tables in a batch of one rank [rows], and the table of each [rows]."""
    of_tables = []
    for skew in criteo_skews():
        shares = skew.shares(np.arange(float(skew.rows)))
        of_tables.append(batch_size * np.concatenate([[skew.first], shares]))
    return np.concatenate(of_tables), np.repeat(np.arange(len(of_tables)), [len(one) for one in of_tables])


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


def memory_rows(accesses: np.ndarray) -> list[dict[str, Any]]:
    """Table 2: extra memory for copies, for serving and for training."""
    placement = place(partition_rows(accesses, 4 * _DIM, threshold=0.001), _RANKS)
    latency = np.where(np.eye(_RANKS, dtype=bool), 0.0, 1.0)
    whole = 4.0 * _DIM * len(accesses)
    rows: list[dict[str, Any]] = []
    for extra, paper in _PAPER_MEMORY.items():
        each = extra * whole / _RANKS
        found = {
            "inference": replicate_for_inference(placement, each, latency),
            "training": replicate_for_training(placement, each),
        }
        row: dict[str, Any] = {"extra_memory": extra, "paper_mean_mb": paper}
        for kind, one in found.items():
            links = off_diagonal(one.communication()) / 1e6
            row |= {f"{kind}_mean_mb": float(links.mean()), f"{kind}_variance": float(links.var())}
        rows.append(row)
    for row in rows:
        row["paper_times"] = rows[0]["paper_mean_mb"] / row["paper_mean_mb"]
        for kind in ("inference", "training"):
            row[f"{kind}_times"] = rows[0][f"{kind}_mean_mb"] / row[f"{kind}_mean_mb"]
    return rows


def competitors(accesses: np.ndarray, table: np.ndarray) -> list[dict[str, Any]]:
    """Section 6.4: balances of the greedy ways and of whole tables, beside OPER's without copies."""
    size = np.full(len(accesses), 4.0 * _DIM)
    by_table = [np.bincount(table, weights=values) for values in (size, size * accesses)]
    pieces = partition_rows(accesses, size, threshold=0.001)

    def placed(partitions: Partitions, owner: np.ndarray) -> Placement:
        return Placement(partitions=partitions, source=np.repeat(owner[:, None], _RANKS, axis=1))

    def partitions_of_blocks(edges: np.ndarray) -> Partitions:
        sums = [np.add.reduceat(values, edges[:-1]) for values in (size, size * accesses)]
        none = np.zeros(len(sums[0]), dtype=bool)
        return Partitions(order=np.arange(len(size)), starts=edges, num_bytes=sums[0], traffic=sums[1], by_access=none)

    edges = np.linspace(0, len(size), _RANKS + 1).round().astype(np.int64)
    tables = partitions_of_blocks(np.concatenate([[0], np.flatnonzero(np.diff(table)) + 1, [len(table)]]))
    greedy = place(Partitions(**{**pieces.__dict__, "by_access": np.ones_like(pieces.by_access)}), _RANKS)
    found = {
        "OPER, threshold 0.1 %": place(pieces, _RANKS),
        "memory-greedy": placed(partitions_of_blocks(edges), np.arange(_RANKS)),
        "access-greedy": greedy,
        "table-wise": placed(tables, np.arange(len(by_table[0])) % _RANKS),
    }
    rows = []
    for name, placement in found.items():
        memory, links = placement.memory(), off_diagonal(placement.communication())
        rows.append(
            {
                "way": name,
                "memory_balance": float(memory.min() / memory.max()),
                "lookup_balance": placement.balance,
                "link_balance": float(links.min() / links.max()),
            }
        )
    return rows


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
            f"{100 * r['threshold']:g} %",
            str(r["partitions"]),
            f"{r['seconds']:.2f} s",
            f"{r['balance']:.1%}",
            f"{r['memory_balance']:.1%}",
            f"{r['paper_seconds']:g} s",
            f"{r['paper_balance']:.1%}",
        ]
        for r in record["balance"]
    ]
    memory = [
        [
            f"{100 * r['extra_memory']:g} %",
            *(f"{r[f'{kind}_times']:.1f}" for kind in ("paper", "inference", "training")),
            f"{r['inference_mean_mb']:.3f}",
            f"{r['training_mean_mb']:.3f}",
        ]
        for r in record["memory"]
    ]
    ways = [
        [r["way"], f"{r['memory_balance']:.1%}", f"{r['lookup_balance']:.1%}", f"{r['link_balance']:.1%}"]
        for r in record["competitors"]
    ]
    names = [name for name in record["rules"][0] if name not in ("hosts", "ranks_per_host", "batch_size", "dim")]
    rules = [
        [
            f"{r['hosts']} x {r['ranks_per_host']}, {r['batch_size']:,}, {r['dim']}",
            *(f"{r[name]['times']:.2f} ({r[name]['rows']:,})" for name in names),
        ]
        for r in record["rules"]
    ]
    parts = [
        "# OPER's planner on Criteo-Kaggle's skew",
        __doc__.strip().split("\n\n", 1)[1].replace("    python", "    python"),
        f"{record['rows']:,} rows, {_DIM} columns, {_RANKS} ranks, {_BATCH:,} samples a rank. {record['provenance']}",
        "## Balance against the size of partitions (Table 3)",
        markdown_table(
            ["threshold", "partitions", "time", "lookups min/max", "memory min/max", "paper's time", "paper's balance"],
            balance,
        ),
        "## Communication against extra memory (Table 2, Kaggle): times less than without copies",
        markdown_table(
            ["extra memory", "paper", "serving (Algorithm 1)", "training", "MB a link, serving", "MB a link, training"],
            memory,
        ),
        "Training: without the all-reduce of copied rows, as the paper's table. A row is copied only if each rank "
        "reads it more than once in a step.",
        "## Other ways (section 6.4), without copies: least over most of a rank or link",
        markdown_table(["way", "memory", "lookups", "links"], ways),
        "## Hot rows in training: bytes between hosts, times fewer than a flat model over SPTT (rows replicated)",
        markdown_table(["hosts x ranks, samples a rank, columns", *names], rules),
        "Expected bytes of outputs, gradients and ids; gradients of hot rows are summed by the way that sends least "
        "(`dmt.sptt.hot_sum`). The cost rule replicates a row if that is less to send and worth the work.",
    ]
    with atomic_write(path) as scratch:
        scratch.write_text("\n\n".join(parts) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, help="Folder of the record.")
def main(*, out: Path) -> None:
    """Writes oper_tables.json and oper_tables.md."""
    accesses, table = kaggle_accesses(_BATCH)
    record = {
        "provenance": f"{processor()}, NumPy {np.__version__}, commit {commit()}, one thread, one run.",
        "rows": len(accesses),
        "balance": balance_rows(accesses),
        "memory": memory_rows(accesses),
        "competitors": competitors(accesses, table),
        "rules": rule_rows(accesses / _BATCH),
    }
    with atomic_write(out / "oper_tables.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, out / "oper_tables.md")


if __name__ == "__main__":
    main()
