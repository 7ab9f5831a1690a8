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

from dmt.files import replacing
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

    A killed run goes on with ``resumed_step``: curves stay up to that step, and what came later, which will be
    recorded again, is dropped. A number that is there already at that very step is not recorded twice.

    Args:
        config: the run.
        enabled: whether this is rank 0.
        resumed_step: steps of the checkpoint that training goes on from; None for a run of its own, which removes what
            an earlier one left.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = TrainingConfig.model_validate({"train": {"output_dir": folder}})
        ...     record = RunRecord(config, enabled=True)
        ...     for step in (10, 20, 30):
        ...         record.scalars(step, {"train/loss": 1 / step})
        ...     resumed = RunRecord(config, enabled=True, resumed_step=20)
        ...     read_curves(Path(folder))
        {'train/loss': [(10, 0.1), (20, 0.05)]}
    """

    def __init__(self, config: TrainingConfig, *, enabled: bool, resumed_step: int | None = None) -> None:
        self._enabled = enabled
        self.folder = Path(config.train.output_dir)
        self._resumed_step, self._recorded = resumed_step, set[str]()
        if not enabled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        if resumed_step is None:
            # What an earlier run left here would be read as this one's.
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        else:
            self._drop_later(resumed_step)
        _write(self.folder / "config.toml", to_toml(config))
        self._board = SummaryWriter(
            str(self.folder / "tensorboard"), purge_step=None if resumed_step is None else resumed_step + 1
        )

    def _drop_later(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        kept = [line for line in _finished_lines(path) if json.loads(line)["step"] <= step]
        self._recorded = {name for values in map(json.loads, kept) if values["step"] == step for name in values}
        _write(path, "".join(f"{line}\n" for line in kept))

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
        if step == self._resumed_step:
            values = {name: value for name, value in values.items() if name not in self._recorded}
        if not values:
            return
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        # At once, against a kill: the next attempt does not record it again.
        self._board.flush()
        with (self.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def close(self, result: dict[str, Any]) -> None:
        """Writes the result and the versions, and closes TensorBoard's file."""
        if not self._enabled:
            return
        self._board.close()
        _write(self.folder / "result.json", to_json({**result, "versions": versions()}) + "\n")


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
    """The curves of a run, also of one under way: for each name its (step, value) pairs."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in _finished_lines(folder / "metrics.jsonl"):
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _finished_lines(path: Path) -> list[str]:
    """The lines of a file, but for one that its writer has not ended, or was killed in."""
    return path.read_text().split("\n")[:-1]


def _write(path: Path, text: str) -> None:
    with replacing(path) as scratch:
        scratch.write_text(text)
