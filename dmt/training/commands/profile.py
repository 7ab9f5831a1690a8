"""``dmt profile``: how unevenly rows are read, and what each way to serve a table would send between towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.files import check_output
from dmt.formatting import counted, human_bytes
from dmt.hot_rows.costs import TableBytes, table_bytes
from dmt.hot_rows.profile import AccessProfile
from dmt.plan.tables import TableSpec
from dmt.report.style import new_figure, save_figure
from dmt.training.access import collect_profile, load_profile, save_profile
from dmt.training.config import load_config
from dmt.training.console import make_table, table_console
from dmt.training.data import open_source

__all__ = ["ProfiledTables", "print_profile", "run_profile"]

_SHOWN_TABLES = 30
_SHARES = (0.001, 0.01, 0.1)
_WAYS = {
    "plain": "plain",
    "unique": "unique",
    "unique_host": "unique per host",
    "data_parallel": "data-parallel",
    "hot": "hot rows",
    "unique_hot": "unique + hot rows",
}


@dataclass(frozen=True)
class ProfiledTables:
    """The result of ``dmt profile``."""

    profile: AccessProfile
    batch_size: int
    """Samples of a rank, for which ``tables`` holds."""
    tables: list[TableBytes]

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers of all tables as JSON writes them."""
        tables = []
        for spec, found in zip(self.profile.tables, self.tables, strict=True):
            counts = self.profile[spec.name]
            tables.append(
                {
                    **asdict(found),
                    "rows": spec.num_embeddings,
                    "rows_read": len(counts.rows),
                    "ids_per_sample": self.profile.ids_per_sample(spec),
                    "top_shares": {f"{share:g}": share_of(self.profile, spec, share) for share in _SHARES},
                    "distinct_share": distinct_share(self.profile, spec, self.batch_size),
                    "least": found.best,
                }
            )
        return {"num_samples": self.profile.num_samples, "batch_size": self.batch_size, "tables": tables}


def share_of(profile: AccessProfile, table: TableSpec, share: float) -> float:
    """Returns the share of accesses that go to this share of a table's rows, the most read ones; at least one row."""
    return profile[table.name].top_share(max(round(share * table.num_embeddings), 1))


def run_profile(
    config: str,
    overrides: Sequence[str] = (),
    *,
    rows: int | None = None,
    load: Path | None = None,
    out: Path | None = None,
    picture: Path | None = None,
) -> ProfiledTables:
    """Counts a run's training rows, or reads counts of an earlier call, and estimates bytes on the run's topology.

    Raises:
        InputError: the config or a file cannot be read, or a row is malformed.
    """
    run = load_config(config, overrides)
    if rows is not None and rows < 1:
        raise InputError(f"--rows={rows} must be at least 1.")
    if run.data.tables is not None:
        raise InputError("dmt profile counts rows, but data.tables lists tables without any. Leave data.tables out.")
    if load and rows is not None:
        raise InputError("--rows is of no use with --load: the counts are there already. Leave out one of them.")
    if picture is not None:
        # Made and dropped: it refuses a suffix that is no picture format.
        new_figure(picture, size=(1.0, 1.0), caller="--picture")
    for option, path in (("--out", out), ("--picture", picture)):
        if path is not None:
            check_output(option, path)
    if load:
        profile = load_profile(load)
    else:
        model = run.model
        data = open_source(run.data, embedding_dim=model.embedding_dim, embedding_dims=model.embedding_dims)
        profile = collect_profile(data, num_samples=rows)
    found = table_bytes(profile, run.topology.build(), batch_size=run.train.batch_size)
    if out:
        save_profile(profile, out)
    if picture:
        _draw(profile, picture)
    return ProfiledTables(profile, run.train.batch_size, found)


def distinct_share(profile: AccessProfile, table: TableSpec, batch_size: int) -> float:
    """Returns the share of the ids of a feature in a rank's batch that are distinct."""
    ids = max(1, round(batch_size * profile.ids_per_sample(table)))
    return profile[table.name].expected_distinct(ids) / ids


def print_profile(found: ProfiledTables, *, everything: bool, out: Path | None) -> None:
    """Prints skew and bytes of the tables that send most, or of all."""
    console, profile = table_console(markup=False), found.profile
    ranked = sorted(zip(profile.tables, found.tables, strict=True), key=lambda entry: -entry[1].plain)
    shown = ranked if everything else ranked[:_SHOWN_TABLES]
    skew, ways = [], []
    for spec, costs in shown:
        counts = profile[spec.name]
        tops = [f"{share_of(profile, spec, share):.1%}" for share in _SHARES]
        distinct = f"{distinct_share(profile, spec, found.batch_size):.1%}"
        skew.append([spec.name, f"{spec.num_embeddings:,}", f"{len(counts.rows):,}", *tops, distinct])
        numbers = [_bytes(getattr(costs, way)) for way in _WAYS]
        ways.append([spec.name, *numbers, f"{costs.unique_hot_rows:,}", _WAYS[costs.best]])
    more = len(ranked) - len(shown)
    title = f"Accesses of rows in {profile.num_samples:,} samples" + (f" (--all shows {more:,} more)" if more else "")
    headers = ["table", "rows", "rows read", *(f"top {share:.1%} of rows" for share in _SHARES), "distinct ids/batch"]
    console.print(make_table(headers, skew, title=title))
    title = (
        f"Bytes to other towers per step of {found.batch_size:,} samples a rank, all ranks, by way to serve the table"
    )
    console.print(make_table(["table", *_WAYS.values(), "hot rows that pay", "least"], ways, title=title))
    totals = {way: [getattr(costs, way) for costs in found.tables] for way in _WAYS}
    plain = sum(totals["plain"])
    for way, name in _WAYS.items():
        # A table that cannot be served so is served as it is.
        total = sum(own if own is not None else c.plain for own, c in zip(totals[way], found.tables, strict=True))
        times = "" if way == "plain" else f" ({plain / max(total, 1):.2f} times fewer than plain)"
        console.print(f"{name}: {human_bytes(round(total))}{times}")
    best = sum(getattr(costs, costs.best) for costs in found.tables)
    console.print(f"each table its own best: {human_bytes(round(best))} ({plain / max(best, 1):.2f} times fewer)")
    single = sum(costs.unique is None for costs in found.tables)
    if single:
        console.print(
            f"{counted(single, 'table')} with bags of several ids: what repeats among bags is not told by counts of "
            "rows; `dmt plan --distinct` counts it."
        )
    console.print(
        "These are bytes of a flat model over SPTT; tower modules send their outputs whichever rows are hot. unique: "
        "sharding.unique=rank; per host: host. hot rows: hot_rows.extra_memory. data-parallel across towers is an "
        "estimate: it cannot be configured yet."
    )
    if out is not None:
        console.print(f"Written to {out}.", soft_wrap=True)


def _bytes(number: float | None) -> str:
    return "-" if number is None else human_bytes(round(number))


def _draw(profile: AccessProfile, path: Path) -> None:
    """Draws for each table the share of accesses against the share of rows, the most read first."""
    figure = new_figure(path, size=(7, 4.5), caller="--picture")
    axes = figure.subplots()
    for spec in profile.tables:
        counts = profile[spec.name]
        shares = counts.descending.cumsum() / max(counts.total, 1)
        rows = np.arange(1, len(shares) + 1) / spec.num_embeddings
        axes.plot(rows, shares, linewidth=1, alpha=0.6, label=spec.name)
    axes.set(xscale="log", ylim=(0, 1), xlabel="share of the table's rows, most read first", ylabel="share of accesses")
    axes.set_title(f"Skew of {counted(len(profile.tables), 'table')}, {profile.num_samples:,} samples")
    if len(profile.tables) <= _SHOWN_TABLES:
        axes.legend(fontsize="xx-small", ncols=3)
    save_figure(figure, path, caller="--picture")
