"""Fits the skew of Criteo's ids for the step benchmark, and holds draws against the data.

    python -m benchmarks.fit_criteo_ids --data DIR

DIR holds `criteo_train.tsv.gz` and `criteo_test.tsv.gz` in Criteo's format. Of each feature three numbers are kept
(`steps/criteo_ids.json`): the share of its most frequent id, and exponent and shift of `IdSkew`, for which a batch of
64 to 8,000 samples is expected to have as many distinct ids as one drawn from the data. A missing value is an id.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from scipy.optimize import least_squares
from scipy.special import gammaln

from benchmarks.steps.criteo_ids import CRITEO_KAGGLE_ROWS, IDS_FILE, IdSkew, criteo_skews
from benchmarks.steps.inputs import random_batch
from benchmarks.steps.setting import Setting
from benchmarks.towers.report import markdown_table
from dmt.files import atomic_write

__all__ = ["distinct_in_data", "expected_distinct", "fit_skew", "main"]

_BATCHES = (64, 256, 1024, 2048, 4096, 8000)
_STARTS = [(exponent, shift) for exponent in (0.5, 1.05, 1.6, 3.0) for shift in (0.3, 3.0, 30.0)]
_REPORT = Path(__file__).parent / "results" / "criteo_ids.md"
_COMPARED = 4096


def distinct_in_data(counts: np.ndarray, batch: int) -> float:
    """Distinct ids expected in a batch drawn from data without repetition.

    Args:
        counts: of each id in the data.
        batch: samples.

    Example:
        >>> distinct_in_data(np.array([1, 1]), 1), distinct_in_data(np.array([3, 1]), 4)
        (1.0, 2.0)
    """
    total = counts.sum()
    rest = total - counts
    missed = _log_choices(rest, batch) - _log_choices(total, batch)
    return float((1 - np.where(rest >= batch, np.exp(missed), 0.0)).sum())


def _log_choices(number: np.ndarray, chosen: int) -> np.ndarray:
    return gammaln(number + 1) - gammaln(chosen + 1) - gammaln(np.maximum(number - chosen, 0) + 1)


def expected_distinct(skew: IdSkew, batch: int) -> float:
    """Distinct ids expected in a batch drawn from a skew.

    Example:
        >>> round(expected_distinct(IdSkew(rows=2, first=0.5, exponent=2.0, shift=1.0), 2), 3)
        1.5
    """
    others = skew.rows - 1
    near = min(others, 2000)
    far = np.geomspace(near, others, 600).round() if others > near else np.empty(0)
    edges = np.unique(np.concatenate([np.arange(near + 1.0), far]))
    widths = np.diff(edges)
    each = np.clip(skew.shares(edges) / widths, 0.0, 1 - 1e-12)
    return float(1 - (1 - skew.first) ** batch + (widths * -np.expm1(batch * np.log1p(-each))).sum())


def fit_skew(counts: np.ndarray, rows: int) -> IdSkew:
    """The skew whose batches are expected to have as many distinct ids as those of the data.

    Args:
        counts: of each id in the data.
        rows: ids that exist.
    """
    wanted = np.log([distinct_in_data(counts, batch) for batch in _BATCHES])
    skew = IdSkew(rows=rows, first=round(float(counts.max() / counts.sum()), 3), exponent=2.0, shift=1.0)

    def with_law(law: np.ndarray) -> IdSkew:
        return replace(skew, exponent=float(law[0]), shift=float(np.exp(law[1])))

    def off(law: np.ndarray) -> np.ndarray:
        return np.log([expected_distinct(with_law(law), batch) for batch in _BATCHES]) - wanted

    bounds = ([0.1, -5.0], [12.0, 10.0])
    fits = [least_squares(off, [exponent, np.log(shift)], bounds=bounds) for exponent, shift in _STARTS]
    best = with_law(min(fits, key=lambda fit: fit.cost).x)
    return replace(best, exponent=round(best.exponent, 3), shift=round(best.shift, 3))


def _columns(data: Path) -> list[np.ndarray]:
    rows = []
    for name in ("criteo_train.tsv.gz", "criteo_test.tsv.gz"):
        with gzip.open(data / name, "rt") as lines:
            rows += [line.rstrip("\n").split("\t")[14:] for line in lines]
    return list(np.array(rows).T)


def _report(columns: Sequence[np.ndarray]) -> str:
    """The table of data, fit and draws at 4,096 samples, as the benchmark draws them."""
    counts = [np.unique(column, return_counts=True)[1] for column in columns]
    starts = range(0, len(columns[0]) - _COMPARED + 1, 300)
    setting = Setting(ids="skewed")
    batches = [random_batch(setting, _COMPARED, step, rank=0).sparse_features.values() for step in range(10)]
    drawn = np.mean([[len(ids.unique()) for ids in batch.view(len(columns), -1)] for batch in batches], axis=0)
    cells = np.array(
        [
            [
                distinct_in_data(count, _COMPARED),
                np.mean([len(np.unique(column[start : start + _COMPARED])) for start in starts]),
                expected_distinct(skew, _COMPARED),
                drawn[i],
            ]
            for i, (column, count, skew) in enumerate(zip(columns, counts, criteo_skews(), strict=True))
        ]
    )
    rows = [
        [
            f"C{i + 1}",
            f"{skew.rows:,}",
            f"{min(skew.rows, setting.rows_cap):,}",
            *(f"{number:g}" for number in (skew.first, skew.exponent, skew.shift)),
            *(f"{number:,.0f}" for number in cells[i]),
            f"{cells[i, 3] / cells[i, 0]:.3f}",
        ]
        for i, skew in enumerate(criteo_skews())
    ]
    total = cells.sum(axis=0)
    repeats = [f"{len(columns) * _COMPARED / number:.2f}" for number in total]
    rows.append(["all", *[""] * 5, *(f"{number:,.0f}" for number in total), f"{total[3] / total[0]:.3f}"])
    rows.append(["repeats", *[""] * 5, *repeats, ""])
    header = [
        *("feature", "rows", "rows here", "first", "exponent", "shift"),
        *("data, shuffled", "data, in order", "fit", "drawn", "drawn / data"),
    ]
    return (
        "# Ids with the skew of Criteo's\n\n"
        "Made by `benchmarks/fit_criteo_ids.py`. Distinct ids in a batch of 4,096 samples, in the 8,000 rows of "
        f"Criteo's sample and as the step benchmark draws them, where tables have at most {setting.rows_cap:,} rows "
        "(mean of ten batches). Repeats: samples over distinct ids.\n\n"
        f"{markdown_table(header, rows)}\n"
    )


@click.command(context_settings={"show_default": True})
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--only-report", is_flag=True, help="Keep the fit, and write the comparison.")
def main(*, data: Path, only_report: bool) -> None:
    """Fits the ids of Criteo's sample and writes the numbers and a comparison."""
    columns = _columns(data)
    if not only_report:
        features = []
        for column, rows in zip(columns, CRITEO_KAGGLE_ROWS, strict=True):
            counts = np.unique(column, return_counts=True)[1]
            skew = fit_skew(counts, rows)
            distinct = round(distinct_in_data(counts, _COMPARED), 1)
            law = {"first": skew.first, "exponent": skew.exponent, "shift": skew.shift}
            features.append(json.dumps({**law, f"distinct_of_{_COMPARED}": distinct}))
        lines = ",\n  ".join(features)
        with atomic_write(IDS_FILE) as scratch:
            scratch.write_text(f'{{"features": [\n  {lines}\n]}}\n')
    report = _report(columns)
    with atomic_write(_REPORT) as scratch:
        scratch.write_text(report)
    click.echo(report)


if __name__ == "__main__":
    main()
