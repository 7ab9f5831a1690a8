"""Writes the files of a run on rank 0 (resolved config, curves, result), and reads the curves and the result."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic_core

if TYPE_CHECKING:
    from dmt.sharding.explanation import TowerShardingPlan
    from dmt.training.metrics import MetricValues

from dmt.files import write_or_raise
from dmt.training.config import TrainingConfig, to_toml

__all__ = ["RunRecord", "quality_warnings", "read_curves", "read_result", "settings_lines", "to_json", "versions"]

logger = logging.getLogger(__name__)


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run's numbers depend on; "absent" if not installed."""
    by_package = {"python": platform.python_version()}
    for name in ("dmt-recsys", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_package[name] = "absent"
    return by_package


def settings_lines(config: TrainingConfig) -> list[str]:
    """Returns a line for each section with changed values, one with the file of all settings, and one with versions."""
    sections = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    lines = []
    for name, values in sections.items():
        texts = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append(f"{name}: {', '.join(text if len(text) <= 200 else f'{text[:200]} ...' for text in texts)}")
    return [*lines, f"all settings: {config.train.output_dir}/config.toml", f"versions: {versions()}"]


class RunRecord:
    """Writes the files of a run into its output folder; does nothing on ranks other than 0.

    The files are ``config.toml`` (resolved; `load_config` reads it), ``sharding.json``, ``metrics.jsonl`` (one JSON
    object per line) and ``result.json``; they replace those of an earlier run. A full disk does not stop training:
    numbers that cannot be written to ``metrics.jsonl`` are logged in a warning.

    Args:
        config: the run.
        enabled: true on rank 0.
        resumed_step: the step from which training resumes; later lines of ``metrics.jsonl`` are dropped.

    Raises:
        InputError: the folder cannot be written to.
    """

    def __init__(self, config: TrainingConfig, *, enabled: bool, resumed_step: int = 0) -> None:
        self.enabled = enabled
        self.folder = Path(config.train.output_dir)
        self._metrics = self.folder / "metrics.jsonl"
        if not enabled:
            return
        _write(self.folder / "config.toml", to_toml(config))
        self._earlier: dict[str, Any] = {}
        with suppress(OSError, ValueError, AttributeError):
            if (earlier := read_result(self.folder)).get("steps") == resumed_step:
                self._earlier = earlier
        for name in ("result.json", "sharding.json"):
            (self.folder / name).unlink(missing_ok=True)
        records = _read_metrics(self._metrics) if self._metrics.exists() else []
        kept = [values for values in records if values["step"] <= resumed_step]
        _write(self._metrics, "".join(f"{json.dumps(values)}\n" for values in kept))
        self._last = kept[-1:]

    def say(self, lines: Iterable[str]) -> None:
        """Prints lines to stdout, each after ``# ``; in a demo to stderr, as the demo's stdout may be JSON."""
        if self.enabled:
            stream = sys.stderr if "DMT_LAUNCHER" in os.environ else sys.stdout
            print("".join(f"# {line}\n" for line in lines), end="", flush=True, file=stream)

    def sharding(self, plan: TowerShardingPlan | None) -> None:
        """Writes a plan, if there is one, as ``sharding.json``, and prints its summary."""
        if self.enabled and plan is not None:
            plan.save(self.folder / "sharding.json")
            self.say([f"sharding: {plan.summary}"])

    def evaluation(self, step: int, values: MetricValues) -> None:
        """Records the metrics of an evaluation after ``step``, and prints them."""
        self.scalars(step, {f"eval/{name}": float(value) for name, value in asdict(values).items()})
        self.say([f"step {step:,}: AUC {values.auc:.4f}, NE {values.ne:.4f}, loss {values.loss:.4f}"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers after a training step, under names such as ``"train/loss"``."""
        record = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        if not self.enabled or record in self._last:  # an evaluation may be repeated when a run resumes
            return
        line = json.dumps(record)
        try:
            with self._metrics.open("a") as stream:
                stream.write(f"{line}\n")
        except OSError as error:
            logger.warning(f"{self._metrics} cannot be written to ({error}). Training continues. Not recorded: {line}")

    def close(self, result: dict[str, Any]) -> None:
        """Writes the result and the versions; if no step was trained, the earlier result's speeds replace those in it.

        Raises:
            InputError: the result cannot be written; the same job, started again, evaluates its last checkpoint.
        """
        if self.enabled:
            if all(self._earlier.get(key) == result.get(key) for key in ("steps", "world_size", "device")):
                speeds = ("samples_per_second", "samples_per_second_per_rank", "seconds")
                result |= {key: self._earlier[key] for key in speeds if key in self._earlier}
            _write(self.folder / "result.json", to_json({**result, "versions": versions()}) + "\n")


def quality_warnings(auc: float, ne: float) -> list[str]:
    """Returns warnings, with likely causes, if AUC is NaN or at most 0.52 (chance: 0.5), or NE is above 1.05."""
    texts = []
    if not auc > 0.52:
        texts.append(
            f"AUC {auc:.4f} is not clearly above chance (0.5). Check data.label (AUC is NaN if all labels are equal), "
            "the steps and learning rates (train.max_steps, optimizer.*_lr), and whether categorical values repeat."
        )
    if ne > 1.05:
        texts.append(
            f"NE {ne:.4f} is above 1: the predictions are worse than always predicting the mean click rate. Check the "
            "learning rates, whether your own model returns logits (no sigmoid), and whether the evaluation rows are "
            "from another period."
        )
    return texts


def to_json(result: Any) -> str:
    """Returns strict JSON: NaN and infinity become null."""
    return pydantic_core.to_json(result, indent=1, inf_nan_mode="null").decode()


def read_result(folder: Path) -> dict[str, Any]:
    """Reads ``result.json`` of a finished run; top-level nulls become NaN."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {key: math.nan if value is None else value for key, value in result.items()}


def read_curves(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the curves of a run: (step, value) pairs by name, with the last value of each step; nulls become NaN."""
    curves: dict[str, dict[int, float]] = {}
    for values in _read_metrics(Path(folder) / "metrics.jsonl"):
        step = values.pop("step")
        for name, value in values.items():
            curves.setdefault(name, {})[step] = math.nan if value is None else value
    return {name: list(curve.items()) for name, curve in curves.items()}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of ``metrics.jsonl``; a kill or a full disk can leave half a record, also before another."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line[max(line.rfind('{"step"'), 0) :])
        except ValueError:
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
    return records


def _write(path: Path, text: str) -> None:
    with write_or_raise(path, "File") as scratch:
        scratch.write_text(text, encoding="utf-8")
