"""OPER's planner on the skews of public data: Tables 2 and 3 of the paper beside ours, and its greedy competitors.

    python -m benchmarks.oper_tables

Arithmetic, no training, 8 ranks of one node (section 6.4). Criteo-Kaggle: 26 tables of 16 columns, and the accesses of
`benchmarks.steps.criteo_ids`, which were fitted to 8,000 public rows. Avazu (16 columns) and Criteo-Terabyte (64):
`benchmarks.public_skews`, from published sizes and counts. The paper counted the accesses in all its rows.

The paper does not state its batch, but its means without copies do: a link carries F features x 4 dim bytes x B / 8 of
embeddings in a forward pass, which is 2.50, 13.00 and 3.25 MiB exactly for 20, 26 and 26 features at B = 16,384 samples
a rank. So Table 2 counts embeddings that are fetched, one way, without gradients and all-reduces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.oper_placement import (
    Partitions,
    Placement,
    partition_rows,
    place,
    replicate_for_inference,
    replicate_for_training,
)
from benchmarks.public_skews import avazu_skews, terabyte_skews
from benchmarks.report import commit, markdown_table, processor
from benchmarks.steps.criteo_ids import IdSkew, criteo_skews
from dmt.files import atomic_write

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
# Table 2: mean communication of a link in MiB, by extra memory
_PAPER_BATCH = 16_384
_EXTRA = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20)
_PAPER_MEMORY = {
    "Avazu": (2.50, 0.16, 0.15, 0.13, 0.12, 0.10, 0.10),
    "Terabyte": (13.00, 0.95, 0.84, 0.73, 0.66, 0.57, 0.52),
    "Kaggle": (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18),
}
_DIMS = {"Avazu": 16, "Terabyte": 64, "Kaggle": 16}


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


def row_blocks(skews: Sequence[IdSkew]) -> tuple[np.ndarray, np.ndarray]:
    """Mean share of the rows of a block, and its rows: single rows where they are popular, up to 0.4 % of a rank after.

    Terabyte's 242 million rows are then some 100,000 blocks.
    """
    shares, rows = [], []
    for skew in skews:
        others, near = skew.rows - 1, min(skew.rows - 1, 4096)
        edges = np.arange(near + 1.0)
        if others > near:
            far = np.geomspace(near, others, int(np.log(others / near) / 0.004) + 2).round()
            edges = np.unique(np.concatenate([edges, far]))
        rows += [np.ones(1), np.diff(edges)]
        shares += [np.array([skew.first]), skew.shares(edges) / np.diff(edges)]
    return np.concatenate(shares), np.concatenate(rows)


def memory_rows(name: str, skews: Sequence[IdSkew]) -> dict[str, Any]:
    """Table 2: extra memory for copies, for serving (Algorithm 1) and for training (equations 4 and 5)."""
    shares, rows = row_blocks(skews)
    accesses, size = _PAPER_BATCH * shares, 4.0 * _DIMS[name] * rows
    placement = place(partition_rows(accesses, size, threshold=0.001), _RANKS)
    latency = np.where(np.eye(_RANKS, dtype=bool), 0.0, 1.0)
    pays = accesses > 1
    found: dict[str, Any] = {
        "rows": float(rows.sum()),
        "rows_that_pay": float(rows[pays].sum()),
        "most_training_times": float(1 / (1 - (rows * shares)[pays].sum() / len(skews))),
        "memory": [],
    }
    for extra, paper in zip(_EXTRA, _PAPER_MEMORY[name], strict=True):
        each = extra * size.sum() / _RANKS
        row: dict[str, Any] = {"extra_memory": extra, "paper_mean_mib": paper}
        row["paper_times"] = _PAPER_MEMORY[name][0] / paper
        for kind, one in (
            ("inference", replicate_for_inference(placement, each, latency)),
            ("training", replicate_for_training(placement, each)),
        ):
            links = off_diagonal(one.communication()) / 2**20
            row |= {f"{kind}_mean_mib": float(links.mean()), f"{kind}_variance": float(links.var())}
            first = (found["memory"] or [row])[0]
            row[f"{kind}_times"] = first[f"{kind}_mean_mib"] / row[f"{kind}_mean_mib"]
        found["memory"].append(row)
    return found


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
    memory = []
    for name, of_data in record["memory"].items():
        rows = [
            [
                f"{100 * r['extra_memory']:g} %",
                *(f"{r[f'{kind}_times']:.1f}" for kind in ("paper", "inference", "training")),
                *(f"{r[f'{kind}_mean_mib']:.2f}" for kind in ("paper", "inference", "training")),
            ]
            for r in of_data["memory"]
        ]
        kinds = ("paper", "serving (Algorithm 1)", "training")
        headers = ["extra memory", *kinds, *(f"MiB a link: {kind}" for kind in kinds)]
        memory += [
            f"### {name}: {of_data['rows']:,.0f} rows, {_DIMS[name]} columns",
            markdown_table(headers, rows),
            f"Training: {of_data['rows_that_pay']:,.0f} rows are read more than once by a rank in a step; with copies "
            f"of them all, links carry {of_data['most_training_times']:.1f} times less, whatever the memory.",
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
        "# OPER's planner on the skews of public data",
        __doc__.strip().split("\n\n", 1)[1].replace("    python", "    python"),
        f"But for Table 2: Kaggle, {record['rows']:,} rows, {_DIM} columns, {_BATCH:,} samples a rank. "
        + record["provenance"],
        "## Balance against the size of partitions (Table 3)",
        markdown_table(
            ["threshold", "partitions", "time", "lookups min/max", "memory min/max", "paper's time", "paper's balance"],
            balance,
        ),
        f"## Communication against extra memory (Table 2): times less than without, {_PAPER_BATCH:,} samples a rank",
        *memory,
        "Of training this is, as in the paper's table, without the all-reduce of copied rows. A row is copied only if "
        "each rank reads it more than once in a step (equations 4 and 5 at equal rates), so more memory gains nothing "
        "once those have copies. The paper's numbers fall further up to 20 %: they are to be compared with serving, "
        "Algorithm 1, which copies what fits.",
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
    skews_of = {"Avazu": avazu_skews(), "Terabyte": terabyte_skews(), "Kaggle": criteo_skews()}
    record = {
        "provenance": f"{processor()}, NumPy {np.__version__}, commit {commit()}, one thread, one run.",
        "rows": len(accesses),
        "balance": balance_rows(accesses),
        "memory": {name: memory_rows(name, skews) for name, skews in skews_of.items()},
        "competitors": competitors(accesses, table),
        "rules": rule_rows(accesses / _BATCH),
    }
    with atomic_write(out / "oper_tables.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, out / "oper_tables.md")


if __name__ == "__main__":
    main()
