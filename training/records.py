"""What a run leaves behind, written by rank 0: resolved config, metrics, TensorBoard scalars, the result."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shutil
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dmt.sharding_report import TowerSharding
from dmt.training.config import TrainingConfig, to_toml

__all__ = ["RunRecord", "read_curves", "read_result", "sharding_summary", "to_json", "versions"]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers; "absent" where one is missing."""
    found = {"python": platform.python_version()}
    for name in ("dmt-recsys", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


class RunRecord:
    """Files of one run in its output directory; does nothing on ranks other than 0.

    ``config.toml`` (resolved, reads again), ``metrics.jsonl`` (one JSON object a line), ``tensorboard/``,
    ``sharding.json`` (with the tower dataflow) and ``result.json``.

    Args:
        config: the run.
        enabled: whether this is rank 0.
    """

    def __init__(self, config: TrainingConfig, *, enabled: bool) -> None:
        self._enabled = enabled
        self.folder = Path(config.train.output_dir)
        if not enabled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # What an earlier run left here would be read as this one's.
        for stale in ("metrics.jsonl", "result.json"):
            (self.folder / stale).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        (self.folder / "config.toml").write_text(to_toml(config))
        self._board = SummaryWriter(str(self.folder / "tensorboard"))

    def sharding(self, plan: TowerSharding | None) -> None:
        """Writes the sharding plan as ``sharding.json``; None removes what an earlier run left."""
        if not self._enabled:
            return
        path = self.folder / "sharding.json"
        if plan is None:
            path.unlink(missing_ok=True)
        else:
            # In one step: it may be the very plan that the config names and other ranks still read.
            plan.save(path)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Adds numbers at a training step; names such as ``"train/loss"``."""
        if not self._enabled:
            return
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        with (self.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def close(self, result: dict[str, Any]) -> None:
        """Writes the result and the versions, and closes TensorBoard's file."""
        if not self._enabled:
            return
        self._board.close()
        (self.folder / "result.json").write_text(to_json({**result, "versions": versions()}) + "\n")


def sharding_summary(plan: TowerSharding) -> dict[str, Any]:
    """What ``result.json`` keeps of a sharding plan: imbalance, tables by scheme, bytes of the largest rank."""
    return {
        "imbalance": plan.imbalance,
        "tables_by_scheme": plan.tables_by_scheme,
        "largest_rank_bytes": max(rank.memory for rank in plan.ranks),
    }


def to_json(result: Any) -> str:
    """JSON that every parser reads: a number that is undefined (NaN) becomes null.

    Example:
        >>> to_json({"eval_auc": float("nan"), "steps": 3}).split()
        ['{', '"eval_auc":', 'null,', '"steps":', '3', '}']
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(result), indent=1)


def read_result(folder: Path) -> dict[str, Any]:
    """The result of a finished run; null becomes NaN again."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {key: math.nan if value is None else value for key, value in result.items()}


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a finished run: for each name its (step, value) pairs."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves
