"""``dmt check``: a run's model, towers, sharding plan, precision and id route against the plain module.

Here are the data of its report, which need no torch: a `Finding` is one number that was compared; findings become the
rows of a `CheckReport`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dmt.formatting import shorten

__all__ = ["CheckReport", "CheckRow", "Finding", "Verdict", "make_rows"]

Verdict = Literal["ok", "FAILED", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison on one rank."""

    check: str
    """Name of the row it belongs to."""
    item: str
    """Table, tower or parameter."""
    difference: float
    """Largest found."""
    allowed: float
    """Largest that rounding explains; 0: bitwise."""
    place: str = ""
    """Rank and step."""

    @property
    def agrees(self) -> bool:
        """Is true if the difference is allowed; NaN never is."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        """Difference over the allowed difference, to find the worst."""
        if math.isnan(self.difference):
            return math.inf
        if self.difference == 0:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One row of the report."""

    check: str
    what: str
    """The two things compared."""
    verdict: Verdict
    difference: float | None = None
    """The worst one, by its share of what is allowed; None where nothing was compared."""
    allowed: float | None = None
    count: int = 0
    """Comparisons."""
    where: str = ""
    """Items and place that do not agree; or the reason why the check was left out."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of ``dmt check``."""

    rows: tuple[CheckRow, ...]
    reduced: tuple[str, ...]
    """Differences to the config that make the run smaller."""
    notes: tuple[str, ...]
    """Remarks for the reader."""
    ranks: int
    """On which it was checked."""
    seconds: float
    schemes: tuple[str, ...] = ()
    """Number of tables in each sharding scheme; and the tables that could not have the scheme asked for."""

    @property
    def agrees(self) -> bool:
        """Is true if no row has failed."""
        return all(row.verdict != "FAILED" for row in self.rows)

    def to_record(self) -> dict[str, Any]:
        """Returns the report as JSON has it."""
        return {"agrees": self.agrees, **asdict(self)}


def make_rows(
    findings: Iterable[Finding], titles: Mapping[str, str], skipped: Mapping[str, str]
) -> tuple[CheckRow, ...]:
    """Returns the findings of all ranks as a row for each check, by the titles' order; ``skipped`` has reasons.

    A check that found nothing to compare and was not skipped on purpose has failed.

    Example:
        >>> found = [Finding(check="a", item=f"t{i}", difference=i, allowed=1) for i in range(3)]
        >>> [(row.check, row.verdict, row.where) for row in make_rows(found, {"a": "", "b": ""}, {"b": "no towers"})]
        [('a', 'FAILED', 't2'), ('b', 'skipped', 'no towers')]
    """
    by_check: dict[str, list[Finding]] = {name: [] for name in titles}
    for finding in findings:
        by_check[finding.check].append(finding)
    return tuple(_row(name, what, by_check[name], skipped.get(name)) for name, what in titles.items())


def _row(name: str, what: str, found: Sequence[Finding], skipped: str | None) -> CheckRow:
    if not found:
        if skipped is None:
            return CheckRow(check=name, what=what, verdict="FAILED", where="nothing was compared")
        return CheckRow(check=name, what=what, verdict="skipped", where=skipped)
    worst = max(found, key=lambda finding: finding.share)
    wrong = sorted((f for f in found if not f.agrees), key=lambda finding: -finding.share)
    where = ""
    if wrong:
        items = list(dict.fromkeys(finding.item for finding in wrong))
        where = shorten(items, ", ") + (f" ({wrong[0].place})" if wrong[0].place else "")
    return CheckRow(
        check=name,
        what=what,
        verdict="FAILED" if wrong else "ok",
        difference=worst.difference,
        allowed=worst.allowed,
        count=len(found),
        where=where,
    )
