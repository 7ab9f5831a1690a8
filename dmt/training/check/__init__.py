"""``dmt check`` compares a run's model, towers, sharding plan and precision with the plain, unsharded module.

`check_run` shrinks the run, starts `check_on_rank` on gloo ranks, and turns their findings into the rows of a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from dmt.formatting import shorten
from dmt.testing.ranks import run_on_ranks
from dmt.training.check.on_rank import Finding, RankReport, check_on_rank, name_in_report
from dmt.training.check.shrink import CheckedRun, CheckLimits, shrink
from dmt.training.config import TrainingConfig
from dmt.training.console import quiet_libraries
from dmt.training.factory import probability_warning
from dmt.training.job import open_job
from dmt.training.preflight import checked_model

__all__ = ["CheckReport", "CheckRow", "Finding", "Verdict", "check_run", "compare_ranks", "make_rows"]

Verdict = Literal["ok", "FAILED"]

_TITLES = {
    "logits": "one batch, of unequal sizes on the ranks",
    "dense gradients": "means over ranks, also of tower modules",
    "table gradients": "means over a replica's ranks (data-parallel: all ranks)",
    "training": "losses of all steps, then the weights",
    "replicas": "copies on several ranks are equal",
}


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One row of the report: one check, over all ranks."""

    check: str
    """Name of the check, such as ``"logits"``."""
    what: str
    """What was compared; with the plain module unless it names something else."""
    verdict: Verdict
    difference: float | None = None
    """Difference in the worst comparison, the one with the largest `Finding.share`; None if nothing was compared."""
    allowed: float | None = None
    """Allowed difference in that comparison."""
    where: str = ""
    """What differs, with rank and step of the worst, or that nothing was compared; empty if all agree."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of ``dmt check``."""

    rows: tuple[CheckRow, ...]
    """One row for each check."""
    reduced: tuple[str, ...]
    """Sizes and settings that were made smaller or replaced (but not the device), one clause each."""
    notes: tuple[str, ...]
    """Warnings for the user."""
    ranks: int
    """Number of ranks that ran the check."""
    schemes: Mapping[str, int]
    """Number of tables by sharding scheme; empty in the flat dataflow."""
    seconds: float = 0.0
    """Duration of ``dmt check`` in seconds, including imports; 0 in what `check_run` returns."""

    @property
    def agrees(self) -> bool:
        """Whether no check failed."""
        return all(row.verdict != "FAILED" for row in self.rows)

    def to_record(self) -> dict[str, Any]:
        """Returns the report as a dict for JSON, with ``agrees``."""
        return {"agrees": self.agrees, **asdict(self)}


def check_run(config: TrainingConfig, limits: CheckLimits) -> CheckReport:
    """Shrinks a run that is configured for a cluster, and compares it with the plain module on local gloo ranks.

    Raises:
        InputError: see `open_job`, `checked_model`, `shrink` and `check_on_rank`.
        RanksFailedError: a rank failed, died, or did not end in time.
    """
    job = open_job(config)
    checked_model(job)
    with TemporaryDirectory(prefix="dmt-check-") as folder:
        run = shrink(job, limits=limits, folder=Path(folder))
        reports = run_on_ranks(_quietly, run.job.topology.world_size, run, timeout_s=600)
    return compare_ranks(run, reports)


def _quietly(rank: int, run: CheckedRun) -> RankReport:
    quiet_libraries(rank=1)
    return check_on_rank(rank, run)


def compare_ranks(run: CheckedRun, reports: Sequence[RankReport]) -> CheckReport:
    """Returns the report of all ranks: their findings, and a comparison of the copies that several ranks hold."""
    findings = [finding for report in reports for finding in report.findings]
    findings += _replicas(reports)
    lows, highs = zip(*(report.outputs for report in reports), strict=True)
    factory = run.config.model.factory
    note = None if factory is None else probability_warning(factory, min(lows), max(highs))
    return CheckReport(
        rows=make_rows(findings, _TITLES),
        reduced=run.reduced,
        schemes={} if run.job.sharding is None else dict(run.job.sharding.tables_by_scheme),
        notes=(note,) if note else (),
        ranks=len(reports),
    )


def _replicas(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Compares checksums of what several ranks hold: tensors that are not sharded, and the same shards of replicas."""
    holders: dict[tuple[str, object], dict[int, int]] = {}
    for rank, report in enumerate(reports):
        for (name, offsets, sizes), value in report.checksums.items():
            holders.setdefault((name, (offsets, sizes)), {})[rank] = value
    for (name, _), checksums in holders.items():
        first = min(checksums)
        differing = [rank for rank, checksum in checksums.items() if checksum != checksums[first]]
        where = f"ranks {differing} differ from rank {first}" if differing else ""
        yield Finding(check="replicas", item=name_in_report(name), difference=len(differing), allowed=0, place=where)


def make_rows(findings: Sequence[Finding], titles: Mapping[str, str]) -> tuple[CheckRow, ...]:
    """Returns a row for each check in ``titles`` (what it compares, by name); a check without findings fails."""
    return tuple(_row(name, what, [f for f in findings if f.check == name]) for name, what in titles.items())


def _row(name: str, what: str, findings: Sequence[Finding]) -> CheckRow:
    if not findings:
        return CheckRow(check=name, what=what, verdict="FAILED", where="nothing was compared")
    findings = sorted(findings, key=lambda finding: -finding.share)
    wrong = [finding for finding in findings if not finding.agrees]
    where = shorten(list(dict.fromkeys(finding.item for finding in wrong)), ", ")
    return CheckRow(
        check=name,
        what=what,
        verdict="FAILED" if wrong else "ok",
        difference=findings[0].difference,
        allowed=findings[0].allowed,
        where=where + (f" ({wrong[0].place})" if wrong and wrong[0].place else ""),
    )
