"""The jobs of the speed study: which contenders run at which settings, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.steps.contenders import EMBEDDING_DIM, Contender, all_contenders, parse_contender
from benchmarks.steps.setting import Setting
from benchmarks.steps_report.measures import bytes_per_second
from benchmarks.steps_report.sweeps import SWEEPS

__all__ = [
    "FLAT_CONTENDERS",
    "MAIN_CONTENDERS",
    "PARTS",
    "Job",
    "flat_jobs",
    "main_jobs",
    "quick_jobs",
    "sweep_jobs",
    "unique_jobs",
]

PARTS = ("flat", "main", *SWEEPS, "unique")

# TorchRec's row-wise towers are slower than its column-wise ones.
MAIN_CONTENDERS = tuple(
    one.name for one in all_contenders() if not one.name.startswith(("flat", "etc-cr2-", "etc-cr4-"))
)
FLAT_CONTENDERS = tuple(one.name for one in all_contenders() if one.family == "flat")
_SWEEP_OURS = ("sptt+all", "dmt-cr2+all", "dmt-cr16+all+rank-towers")
_VALUES: dict[str, tuple[float | None, ...]] = {
    "hosts": (1, 4),
    "batch": (512, 1024, 2048, 8192),
    "rate": (100.0, 500.0, 1000.0, None),
}

# The best of trials, the best choice of data-parallel tables, TorchRec's, and choices to both sides of it.
_UNIQUE_FLATS = (
    *("flat-cw+prefetch", "flat-tw-dp", "flat-tw-dp+prefetch", "flat-cw-dp+prefetch", "flat-planner+prefetch"),
    *("flat-tw-dp600+prefetch", "flat-tw-dp15000+prefetch"),
)
_UNIQUE_PAIRS = ("sptt", "sptt+unique", "dmt-cr2", "dmt-cr2+unique")
# Fewer micro-batches than in "+all": with so few bytes there is less to hide. In 16 bits, flat and SPTT.
_UNIQUE_OPTIONS = (
    *("sptt+all", "sptt+prefetch+hier+mb2+unique", "sptt+hier+unique-host", "dmt-cr2+all"),
    *("flat-tw-dp+fp16+prefetch", "sptt+fp16+prefetch+bf16-dense+mb2+unique"),
)
_REQUEST = 8

# For the estimate, from runs on two cores: starting a job, building one contender, computing one sample's step.
_START_SECONDS, _BUILD_SECONDS, _SAMPLE_SECONDS = 25.0, 2.0, 1.2e-4
_FEATURES, _DENSE_BYTES = 26, 9e6
# After the rounds: what the pipeline has begun, and a step whose bytes are counted.
_LAST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """Contenders that run side by side at one setting."""

    part: str
    setting: Setting
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its file, without suffix."""
        if self.part == "unique":
            return f"unique-{'requests' if self.setting.group > 1 else self.setting.ids}"
        if self.part not in SWEEPS:
            return self.part
        value = getattr(self.setting, SWEEPS[self.part])
        return f"{self.part}-{'unlimited' if value is None else f'{value:g}'}"

    @property
    def estimate(self) -> float:
        """Seconds that it will take, roughly."""
        num_steps = (self.setting.rounds + self.setting.warm_up_rounds) * self.setting.steps_per_turn + _LAST_STEPS
        steps = sum(_step_seconds(parse_contender(name), self.setting) for name in self.contenders)
        return _START_SECONDS + _BUILD_SECONDS * len(self.contenders) + num_steps * steps


def _step_seconds(contender: Contender, setting: Setting) -> float:
    columns = _FEATURES * EMBEDDING_DIM * (2 if contender.precision == "fp16" else 4) / contender.compression
    # A row-wise table leaves a partial sum on every rank, and each of them travels.
    copies = setting.ranks_per_host * setting.hosts * 0.75 if contender.scheme == "row_wise" else 1
    others = setting.batch_size * setting.ranks_per_host * (setting.hosts - 1) / setting.hosts
    across = 2 * others * columns * copies + 2 * _DENSE_BYTES * (setting.hosts > 1)
    wire = 0.0 if setting.mbit_per_s is None else across / bytes_per_second(setting.mbit_per_s)
    return wire + _SAMPLE_SECONDS * setting.batch_size * setting.world_size


def flat_jobs(*, rounds: int) -> list[Job]:
    """All flat contenders at the setting of the goals; they would not fit into memory beside all others."""
    return [Job(part="flat", setting=Setting(rounds=rounds, steps_per_turn=1), contenders=FLAT_CONTENDERS)]


def main_jobs(flats: Sequence[str], *, rounds: int) -> list[Job]:
    """All contenders at the setting of the goals.

    Args:
        flats: the flat contenders to compare with.
        rounds: measured ones.
    """
    setting = Setting(rounds=rounds, steps_per_turn=1)
    return [Job(part="main", setting=setting, contenders=(*flats, *MAIN_CONTENDERS))]


def sweep_jobs(part: str, *, flat: str, rounds: int) -> list[Job]:
    """The settings of one sweep but the main one, which has run already.

    Args:
        part: a key of ``SWEEPS``.
        flat: the flat contender to compare with.
        rounds: measured ones.
    """
    settings = [replace(Setting(rounds=rounds, steps_per_turn=1), **{SWEEPS[part]: value}) for value in _VALUES[part]]
    return [Job(part=part, setting=setting, contenders=(flat, *_SWEEP_OURS)) for setting in settings]


def unique_jobs(*, rounds: int) -> list[Job]:
    """Contenders that send each input once, and others: with Criteo's skew, with no input twice, and with requests.

    Args:
        rounds: measured ones.
    """
    setting = Setting(rounds=rounds, steps_per_turn=1)
    contenders = (*_UNIQUE_FLATS, *_UNIQUE_PAIRS, *_UNIQUE_OPTIONS)
    return [
        Job(part="unique", setting=setting, contenders=contenders),
        Job(part="unique", setting=replace(setting, ids="distinct"), contenders=_UNIQUE_PAIRS),
        Job(part="unique", setting=replace(setting, group=_REQUEST), contenders=_UNIQUE_PAIRS),
    ]


def quick_jobs(parts: Sequence[str]) -> list[Job]:
    """A few contenders, one round, small batches: whether everything runs, not how fast."""
    small = Setting(batch_size=256, rounds=1, steps_per_turn=1)
    values: dict[str, float | None] = {"hosts": 1, "batch": 512, "rate": None}
    contenders = ("flat-tw", "flat-tw+fp16", "etc-cr2", "sptt", "dmt-cr2+all", "dmt-cr2+fp16", "dmt-cr2-2d+all")
    jobs = [Job(part="flat", setting=small, contenders=("flat-cw-dp", "flat-planner+fp16"))]
    jobs.append(Job(part="main", setting=small, contenders=contenders))
    for part, value in values.items():
        setting = replace(small, **{SWEEPS[part]: value})
        jobs.append(Job(part=part, setting=setting, contenders=("flat-tw", "sptt", "dmt-cr2")))
    unique = ("flat-tw-dp", "sptt+unique", "dmt-cr2+unique")
    jobs.append(Job(part="unique", setting=replace(small, group=_REQUEST), contenders=unique))
    return [job for job in jobs if job.part in parts]
