"""The studies that compare arms: their arms, seeds and baselines.

==============  ======================================================================================================
study           question
==============  ======================================================================================================
towers          do learned towers train better than naive ones (the DMT paper's Table 6)?
interactions    do towers from measured interactions train better than strided ones, and than coherent ones (DMT-DCN)?
quality         what does compression cost, by ratio, tower module and towers?
sizes           the same with two and eight towers, and with N = 32
rates           the same at ratio 4, with learning rates tuned for each model
entities        do towers of entities send fewer bytes in batches of whole requests, and train as well?
outside         what do small tables on every rank change at ratios 2, 4 and 16, with the paper's modules and products?
batches         what do larger batches cost, with learning rates unchanged, times the root, times the size?
replicas        what do M replicas cost, and which moment scale makes up for it (2D sparse parallelism, Figure 4)?
==============  ======================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.study.data import Clicks
from benchmarks.study.runs import Run, Trials, outside_facts
from benchmarks.study.train import SETTINGS, Arm

__all__ = ["STUDIES", "Study", "runs_of", "with_tuned_rates"]

Pair = tuple[Arm, Arm]
RATIOS = (2, 4, 8, 16)
MODELS = ("dlrm", "dlrm-products", "dcn")
TUNING_SEEDS = (498, 499)
# Values of c by M. The last one for M = 8 is outside the paper's range, (0, M].
MOMENT_SCALES = {2: (0.5, 1.0, 2.0), 4: (1.0, 2.0, 3.0, 4.0), 8: (1.0, 2.0, 4.0, 8.0, 16.0)}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms and comparisons, the same for all data sets except for the number of towers."""

    stem: str
    """Name of the study, and of its record's files without endings."""
    title: str
    first_seed: int
    """First of the study's seeds."""
    arms: tuple[Arm, ...]
    comparisons: tuple[Pair, ...]
    """Pairs of an arm and its baseline, chosen before the runs."""
    own_towers: bool = False
    """True: the data set's settings give the number of towers."""
    tuned_at: tuple[tuple[float, float], ...] = ()
    """Factors of the settings' learning rates, for tables and for the rest; each model trains at those that were best
    for it (`with_tuned_rates`). Empty: at those of the arms."""
    metric: Literal["auc", "ne"] = "auc"
    """The metric that is compared."""
    facts: Callable[[Clicks], Mapping[str, Any]] = lambda clicks: {}
    """Returns facts on a data set for the record, besides its settings."""

    def on(self, data: str) -> Study:
        """Returns the study with the number of towers for a data set."""
        if not self.own_towers:
            return self

        def fit(arm: Arm) -> Arm:
            return arm if arm.towers == "flat" else replace(arm, num_towers=SETTINGS[data].num_towers)

        pairs = tuple((fit(arm), fit(baseline)) for arm, baseline in self.comparisons)
        return replace(self, arms=tuple(map(fit, self.arms)), comparisons=pairs)


def _against(arms: Sequence[Arm], *baselines: str) -> Iterator[Pair]:
    """Yields pairs of each arm and the same model in the towers of each baseline, or flat."""
    for arm in arms:
        for towers in baselines:
            if towers != arm.towers:
                yield arm, arm.flat if towers == "flat" else replace(arm, towers=towers)


def _towers() -> Study:
    arms = [
        Arm(model=model, towers=t) for model in ("dlrm", "dcn") for t in ("coherent", "diverse", "random", "strided")
    ]
    pairs = [pair for pair in _against(arms[:2] + arms[4:6], "strided", "random")]
    title = "Do learned towers train better than naive ones?"
    return Study(stem="towers", title=title, first_seed=0, arms=tuple(arms), comparisons=tuple(pairs), own_towers=True)


def _interactions() -> Study:
    arms = [Arm(model="dcn", towers=towers) for towers in ("together", "coherent", "strided")]
    pairs = [*_against(arms[:1], "strided", "coherent", "flat"), *_against(arms[1:2], "strided")]
    title = "Towers from interactions, DMT-DCN"
    return Study(stem="interactions", title=title, first_seed=100, arms=tuple(arms), comparisons=tuple(pairs))


def _grid(towers: Sequence[str], num_towers: Sequence[int], ratios: Sequence[int], dim: int) -> list[Arm]:
    arms = [(model, t) for model in MODELS for t in towers] + [("dlrm-each", "strided")]
    return [
        Arm(model=model, towers=t, num_towers=number, ratio=ratio, dim=dim)
        for number in num_towers
        for ratio in ratios
        for model, t in arms
    ]


def _quality() -> Study:
    arms = _grid(("interactions", "strided", "coherent", "random"), (4,), RATIOS, 16)
    interactions = [arm for arm in arms if arm.towers == "interactions"]
    pairs = [*_against(interactions, "strided", "coherent", "random", "flat")]
    pairs += _against([arm for arm in arms if arm.towers == "coherent"], "strided", "random")
    title = "What compression costs"
    return Study(stem="quality", title=title, first_seed=400, arms=tuple(arms), comparisons=tuple(pairs))


def _sizes() -> Study:
    arms = _grid(("interactions", "strided"), (2, 8), (4, 16), 16) + _grid(("interactions", "strided"), (4,), (2,), 32)
    pairs = tuple(_against([arm for arm in arms if arm.towers == "interactions"], "strided", "flat"))
    title = "What compression costs with two and eight towers, and with N = 32"
    return Study(stem="sizes", title=title, first_seed=400, arms=tuple(arms), comparisons=pairs)


def _rates() -> Study:
    arms = [Arm(model=model, towers=towers) for model in MODELS for towers in ("interactions", "strided")]
    pairs = tuple(_against(arms[::2], "strided", "flat"))
    title = "What compression costs at learning rates tuned for each model"
    # Unchanged, and each one halved and doubled.
    at = ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0))
    return Study(stem="rates", title=title, first_seed=400, arms=tuple(arms), comparisons=pairs, tuned_at=at)


def _entities() -> Study:
    kinds = [(model, towers) for model in ("dlrm", "dcn") for towers in ("entities", "strided")]
    arms = [Arm(model=model, towers=towers, by_request=True) for model, towers in kinds]
    pairs = tuple(_against(arms[::2], "strided", "flat"))
    title = "Towers of entities against strided towers"
    return Study(stem="entities", title=title, first_seed=0, arms=tuple(arms), comparisons=pairs)


def _outside() -> Study:
    arms, pairs = tuple[Arm, ...](), tuple[Pair, ...]()
    kinds = [("dlrm-each", "strided", "outside"), ("dlrm-products", "interactions", "interactions, outside")]
    for model, *ways in kinds:
        for ratio in (2, 4, 16):
            inside, outside = (Arm(model=model, towers=towers, ratio=ratio) for towers in ways)
            arms += (inside, outside)
            pairs += ((outside, inside), (outside, outside.flat), (inside, inside.flat))
    title = "What small tables on every rank change, by tower module"
    return Study(stem="outside", title=title, first_seed=400, arms=arms, comparisons=pairs, facts=outside_facts)


def _batches() -> Study:
    arms = [
        Arm(model="dlrm", batch=batch, sparse=rate, dense=rate)
        for batch in (4, 16, 64, 128)
        for rate in (1.0, math.sqrt(batch), float(batch))
    ]
    pairs = tuple((arm, Arm(model="dlrm")) for arm in arms)
    title = "What larger global batches cost"
    return Study(stem="batches", title=title, first_seed=500, arms=tuple(arms), comparisons=pairs, metric="ne")


def _replicas() -> Study:
    """Figure 4 of the 2D sparse parallelism paper, at the tables' rate that is best without replicas."""
    pairs = [(number, scale) for number, scales in MOMENT_SCALES.items() for scale in scales]
    arms = tuple(Arm(model="dlrm", replicas=number, moment_scale=scale) for number, scale in pairs)
    title, against = "What M replicas cost, by moment scale c", tuple((arm, arm.flat) for arm in arms)
    # The settings' rates were chosen for AdaGrad by element.
    at = tuple((factor, 1.0) for factor in (1.0, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0))
    sizes: dict[str, Any] = {"first_seed": 0, "metric": "ne", "tuned_at": at}
    return Study(stem="replicas", title=title, arms=arms, comparisons=against, **sizes)


STUDIES: Mapping[str, Study] = {
    study.stem: study
    for study in (
        _towers(),
        _interactions(),
        _quality(),
        _sizes(),
        _rates(),
        _entities(),
        _outside(),
        _batches(),
        _replicas(),
    )
}
"""All studies by name."""


def runs_of(study: Study, data: str, seeds: Sequence[int]) -> list[Run]:
    """Returns the runs of a study on a data set, seed by seed; flat baselines come first."""
    arms = study.on(data).arms
    flats = [baseline for _, baseline in study.comparisons if baseline.towers == "flat"]
    if not study.tuned_at:
        flats += [arm.flat for arm in arms]
    return [Run(data=data, seed=seed, arm=arm) for seed in seeds for arm in dict.fromkeys((*flats, *arms))]


def with_tuned_rates(study: Study, data: str, trials: Trials) -> Study:
    """Returns the study at the learning rates of `Study.tuned_at` that were best on a tenth of the training rows.

    Trains any missing run with two seeds outside the study: each model with towers in strided ones, each flat model,
    and without replicas.
    """
    if not study.tuned_at:
        return study
    best: dict[Arm, tuple[float, float]] = {}
    for arm in dict.fromkeys(map(_tuned_as, (*study.arms, *(baseline for _, baseline in study.comparisons)))):
        found: dict[tuple[float, float], float] = {}
        for sparse, dense in study.tuned_at:
            runs = [Run(data=data, seed=s, arm=replace(arm, sparse=sparse, dense=dense)) for s in TUNING_SEEDS]
            trials.train(runs, f"{data}, rates of {arm.name}")
            found[sparse, dense] = float(np.mean([trials.progress.records[run][study.metric] for run in runs]))
        # The first ones stay unless others are better.
        best[arm] = max(found, key=found.__getitem__) if study.metric == "auc" else min(found, key=found.__getitem__)

    def at_best(arm: Arm) -> Arm:
        sparse, dense = best[_tuned_as(arm)]
        return replace(arm, sparse=sparse, dense=dense)

    pairs = tuple((at_best(arm), at_best(baseline)) for arm, baseline in study.comparisons)
    return replace(study, arms=tuple(map(at_best, study.arms)), comparisons=pairs)


def _tuned_as(arm: Arm) -> Arm:
    """Returns the arm whose learning rates are chosen for this one."""
    return replace(arm.flat if arm.towers == "flat" else replace(arm, towers="strided"), tuning=True)
