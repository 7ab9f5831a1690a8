"""The grid of the quality study: what is trained, at which sizes, in which order; its bytes across hosts.

Legend: F features, T towers, N embedding dim, D tower dim, CR compression ratio (`dmt.models.complexity`), O_t numbers
per sample that leave a tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.towers.clicks import Clicks
from benchmarks.towers.trials import STUDY_SETS, StudySet, trial_config
from dmt.plan.towers import TowerPlan
from dmt.training.build import build_model
from dmt.training.config import ShardingConfig, TrainingConfig
from dmt.training.exchanges import step_exchanges
from dmt.training.job import make_job

__all__ = [
    "FLAT",
    "MADE",
    "MODELS",
    "SETTINGS",
    "STAGES",
    "TUNED_AT",
    "Cell",
    "bytes_across",
    "cell_config",
    "cells_of",
    "tower_sizes",
]

FLAT = {"dlrm": "dlrm", "dlrm-each": "dlrm", "dlrm-products": "dlrm", "dcn": "dcn"}
"""The flat model that each model in towers is held against."""
MODELS = ("dlrm", "dlrm-products", "dcn")
"""Models in towers. ``dlrm``: the paper's linear module, combinations only (c = 0, its 16-tower setting); beside them
``dlrm-each``: the paper's projection of each feature (c = 1, p = 0, D = N / CR, its Table 5)."""
RATIOS = (4, 2, 8, 16)
# The rates of the study's settings, and each rate halved and doubled: for tables, for the rest.
TUNED_AT = ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0))
_TUNING_SEEDS = (498, 499)

# Data that are drawn (`benchmarks.quality.made`), at hotel's settings, which were not tuned for them.
MADE = ("planted", "madelon")
SETTINGS = STUDY_SETS | {name: replace(STUDY_SETS["hotel"], epochs=3) for name in MADE}
"""The training settings of each data set."""


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One model to train."""

    data: str
    model: str
    """One of `FLAT`."""
    towers: str
    """``flat``, ``strided``, ``random``, ``interactions`` or ``coherent``."""
    num_towers: int = 1
    """T; 1 for a flat model."""
    ratio: int = 1
    """CR that is aimed at; 1 for a flat model."""
    dim: int = 16
    """N."""
    sparse: float = 1.0
    """Learning rate of the tables over that of the study's settings, which were chosen for flat models."""
    dense: float = 1.0
    """Learning rate of everything else, likewise."""
    tuning: bool = False
    """Trained on nine tenths of the training rows and tested on the rest."""
    seed: int


def tower_sizes(cell: Cell, num_features: int) -> tuple[int, int, int]:
    """D, c and p of a cell: O_t is the largest power of two that gives the ratio, in vectors of N numbers or fewer.

    Example:
        >>> tower_sizes(Cell(data="flights", model="dlrm", towers="strided", num_towers=4, ratio=2, seed=0), 17)
        (16, 0, 2)
        >>> tower_sizes(Cell(data="flights", model="dcn", towers="strided", num_towers=4, ratio=2, seed=0), 17)
        (32, 0, 1)
        >>> tower_sizes(Cell(data="flights", model="dlrm-each", towers="strided", num_towers=4, ratio=2, seed=0), 17)
        (8, 1, 0)
    """
    if cell.towers == "flat":
        return cell.dim, 0, 1
    if cell.model == "dlrm-each":
        return cell.dim // cell.ratio, 1, 0
    outputs = 1 << (num_features * cell.dim // (cell.num_towers * cell.ratio)).bit_length() - 1
    if cell.model == "dcn":
        return outputs, 0, 1
    dim = min(cell.dim, outputs)
    return dim, 0, outputs // dim


def cell_config(cell: Cell, num_features: int, plan: str | None) -> TrainingConfig:
    """The config of a cell's model; ``plan`` is a file, ``strided``, or None for the flat model."""
    known = SETTINGS[cell.data]
    settings: StudySet = replace(
        known,
        num_towers=cell.num_towers,
        sparse_lr=known.sparse_lr * cell.sparse,
        dense_lr=known.dense_lr * cell.dense,
    )
    arch = FLAT[cell.model] if plan is None or cell.model == "dlrm-each" else cell.model
    config = trial_config(cell.data, arch, study_set=settings, plan=plan)
    tower_dim, c, p = tower_sizes(cell, num_features)
    sizes = {"embedding_dim": cell.dim, "tower_dim": tower_dim, "c": c, "p": p}
    return config.model_copy(update={"model": config.model.model_copy(update=sizes)})


def bytes_across(config: TrainingConfig, clicks: Clicks, plan: TowerPlan | None, num_towers: int) -> dict[str, float]:
    """Planned bytes per sample that cross hosts, with one rank on each of T hosts, a tower each.

    Ids and lengths, and embeddings with their gradients (32-bit floats); not the all-reduce of dense gradients, which
    is once per step and not per sample. A flat model is taken in the tower dataflow, with strided tables.
    """
    sharding = ShardingConfig(dataflow="sptt", scheme="table_wise")
    topology = config.topology.model_copy(update={"num_towers": num_towers})
    placed = config.model_copy(update={"sharding": sharding, "topology": topology})
    towers = plan or TowerPlan.strided(clicks.features, num_towers)
    job = make_job(placed, clicks.tables, clicks.train[0].shape[1], towers=towers)
    traffic = step_exchanges(job, build_model(job, device="meta", without_tables=True)).traffic()
    samples = config.train.batch_size * num_towers
    return {"ids": traffic.ids / samples, "embeddings": (traffic.forward + traffic.backward) / samples}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Cells that are trained together, all of a seed before the next seed's; the flat models too."""

    data: str
    arms: Sequence[tuple[str, str]]
    """Models and their towers."""
    num_towers: Sequence[int] = (4,)
    ratios: Sequence[int] = RATIOS
    dim: int = 16
    own_rates: bool = False
    """At the rates tuned for each model, instead of those of the study's settings."""
    tuning: bool = False


def _arms(*towers: str) -> list[tuple[str, str]]:
    return [(model, strategy) for model in MODELS for strategy in towers]


# Which tower a feature is in hardly matters to projections of each feature.
_EACH = ("dlrm-each", "strided")
_KEEPING = [arm for arm in _arms("strided", "interactions") if arm[0] != "dlrm"]


def _stages() -> dict[str, Stage]:
    stages = {}
    for data in SETTINGS:
        every = _arms("strided", "interactions")
        stages |= {
            data: Stage(data=data, arms=[*every, _EACH]),
            f"{data}-short": Stage(data=data, arms=[*_KEEPING, ("dlrm", "strided"), _EACH], ratios=(4, 16, 2)),
            f"{data}-four": Stage(data=data, arms=[*_KEEPING, ("dlrm", "strided"), _EACH], ratios=(4,)),
            f"{data}-towers": Stage(data=data, arms=_KEEPING, num_towers=(2, 8), ratios=(4, 16)),
            f"{data}-arms": Stage(data=data, arms=_arms("random", "coherent")),
            f"{data}-arms-four": Stage(data=data, arms=_arms("random", "coherent"), ratios=(4,)),
            f"{data}-n32": Stage(data=data, arms=[*every, _EACH], dim=32, ratios=(2,)),
            f"{data}-tune": Stage(data=data, arms=_arms("strided"), ratios=(4,), tuning=True),
            f"{data}-own": Stage(data=data, arms=every, ratios=(4,), own_rates=True),
        }
    return stages


STAGES = _stages()
"""By name: the whole grid of a data set at T = 4; ``short`` and ``four``, its more telling parts; what is beside it."""


def cells_of(stage: Stage, seeds: Sequence[int]) -> Iterator[Cell]:
    """The cells of a stage at the study's rates, flat models first, seed by seed."""
    flats = list(dict.fromkeys(FLAT[model] for model, _ in stage.arms))
    if stage.tuning:
        for seed in _TUNING_SEEDS:
            for sparse, dense in TUNED_AT:
                own = Cell(data=stage.data, model="", towers="flat", sparse=sparse, dense=dense, tuning=True, seed=seed)
                yield from (replace(own, model=model) for model in flats)
                for model, towers in stage.arms:
                    yield replace(own, model=model, towers=towers, num_towers=4, ratio=4)
        return
    for seed in seeds:
        for model in flats:
            yield Cell(data=stage.data, model=model, towers="flat", dim=stage.dim, seed=seed)
        for ratio in stage.ratios:
            for num_towers in stage.num_towers:
                for model, towers in stage.arms:
                    yield Cell(
                        data=stage.data,
                        model=model,
                        towers=towers,
                        num_towers=num_towers,
                        ratio=ratio,
                        dim=stage.dim,
                        seed=seed,
                    )
