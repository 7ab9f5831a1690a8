"""The goals of the speed study, each with the measured number and whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.steps_report.compare import best_flat, fastest, precisions, speedup
from benchmarks.steps_report.measures import Measured

__all__ = ["Goal", "judge", "judge_unique"]

_DMT_GOALS = {2.0: 1.85, 4.0: 3.0, 16.0: 6.0}
_SPTT_GOAL, _ETC_GOAL = 0.97, 1.1
_BYTES_GOAL, _BOUND_GOAL, _BALANCE_GOAL = 0.03, 1.15, 0.10
_UNIQUE_GOAL, _UNIQUE_ALL_GOAL, _OVERHEAD_GOAL, _REQUESTS_GOAL = 2.5, 3.5, 0.98, 0.9
OURS = ("sptt", "dmt")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal and what became of it."""

    text: str
    measured: str
    held: bool | None
    """None: not measured."""

    @property
    def verdict(self) -> str:
        """In words."""
        return "not measured" if self.held is None else "held" if self.held else "**not held**"


def judge(contenders: Sequence[Measured], *, header_share: float = 0.0) -> list[Goal]:
    """The goals of a run at the main setting.

    Args:
        contenders: of the run.
        header_share: headers of packets over payload, which the uplinks' counters include.
    """
    # The fastest of each kind: the others show what an option is worth.
    kinds = {(found.family, found.precision, found.compression) for found in contenders if found.family in OURS}
    fastest_ones = [fastest(contenders, family, precision=p, compression=c) for family, p, c in sorted(kinds)]
    ours = [found for found in fastest_ones if found is not None]
    return [
        *_against_flat(contenders),
        *_against_towers(contenders),
        _worst(
            f"bytes across hosts within {_BYTES_GOAL:.0%} of what the algorithm needs, counted at the collectives",
            ours,
            lambda found: None if found.counted_ratio is None else abs(found.counted_ratio - 1),
            _BYTES_GOAL,
        ),
        _worst(
            f"the same by the uplinks' counters, less {header_share:.1%} for headers",
            ours,
            lambda found: None if found.counters_ratio is None else abs(found.counters_ratio / (1 + header_share) - 1),
            _BYTES_GOAL,
        ),
        _worst(
            f"step time at most {_BOUND_GOAL} x the own bound", ours, lambda found: found.bound_ratio, _BOUND_GOAL, "x"
        ),
        _worst(
            f"no host idle more than {_BALANCE_GOAL:.0%} of a step for want of balance",
            ours,
            lambda found: found.imbalance,
            _BALANCE_GOAL,
        ),
    ]


def judge_unique(skewed: Sequence[Measured], distinct: Sequence[Measured], requests: Sequence[Measured]) -> list[Goal]:
    """The goals of sending each input once.

    Args:
        skewed: contenders of the run with Criteo's skew.
        distinct: of the run in which no input repeats.
        requests: of the run with requests.
    """
    flat = best_flat(skewed, "fp32")
    plain, unique = (_named(requests, name) for name in ("dmt-cr2", "dmt-cr2+unique"))
    target = _REQUESTS_GOAL
    if plain is not None and unique is not None:
        target *= sum(plain.across.values()) / sum(unique.across.values())
    return [
        _ratio_goal(
            f"SPTT with unique inputs, nothing else, at least {_UNIQUE_GOAL} x the best flat",
            _named(skewed, "sptt+unique"),
            flat,
            _UNIQUE_GOAL,
        ),
        _ratio_goal(
            f"SPTT with the best options in FP32 at least {_UNIQUE_ALL_GOAL} x the best flat",
            fastest(skewed, "sptt", precision="fp32"),
            flat,
            _UNIQUE_ALL_GOAL,
        ),
        _ratio_goal(
            f"DMT at CR 2 with unique inputs at least {_OVERHEAD_GOAL} x without, where no input repeats",
            *(_named(distinct, name) for name in ("dmt-cr2+unique", "dmt-cr2")),
            _OVERHEAD_GOAL,
        ),
        _ratio_goal(
            f"the same with requests at least {_REQUESTS_GOAL} x the ratio of bytes across hosts, that is {target:.2f}",
            unique,
            plain,
            target,
        ),
    ]


def _named(contenders: Sequence[Measured], name: str) -> Measured | None:
    return next((found for found in contenders if found.name == name), None)


def _against_flat(contenders: Sequence[Measured]) -> list[Goal]:
    goals = []
    for precision in precisions(contenders) or ["fp32"]:
        flat = best_flat(contenders, precision)
        for compression, target in _DMT_GOALS.items():
            text = f"DMT at CR {compression:g} at least {target:g} x the best flat, {precision}"
            ours = fastest(contenders, "dmt", precision=precision, compression=compression)
            goals.append(_ratio_goal(text, ours, flat, target))
        text = f"SPTT alone at least {_SPTT_GOAL} x the best flat, {precision}"
        goals.append(_ratio_goal(text, fastest(contenders, "sptt", precision=precision), flat, _SPTT_GOAL))
    return goals


def _against_towers(contenders: Sequence[Measured]) -> list[Goal]:
    pairs = sorted({(found.compression, found.precision) for found in contenders if found.family == "etc"})
    goals = []
    for compression, precision in pairs or [(2.0, "fp32")]:
        text = f"DMT at CR {compression:g} at least {_ETC_GOAL} x TorchRec's EmbeddingTowerCollection, {precision}"
        ours, theirs = (
            fastest(contenders, family, precision=precision, compression=compression) for family in ("dmt", "etc")
        )
        goals.append(_ratio_goal(text, ours, theirs, _ETC_GOAL))
    return goals


def _ratio_goal(text: str, ours: Measured | None, theirs: Measured | None, target: float) -> Goal:
    if ours is None or theirs is None:
        return Goal(text=text, measured="", held=None)
    found = speedup(ours, theirs)
    return Goal(text=text, measured=f"{found} ({ours.name} over {theirs.name})", held=found.ratio >= target)


def _worst(
    text: str, ours: Iterable[Measured], value: Callable[[Measured], float | None], limit: float, unit: str = "%"
) -> Goal:
    found = {one.name: number for one in ours if (number := value(one)) is not None}
    if not found:
        return Goal(text=text, measured="", held=None)
    name = max(found, key=lambda name: found[name])
    kept = sum(number <= limit for number in found.values())
    number = f"{found[name]:.1%}" if unit == "%" else f"{found[name]:.2f} x"
    return Goal(text=text, measured=f"at most {number} ({name}); {kept} of {len(found)} hold", held=kept == len(found))
