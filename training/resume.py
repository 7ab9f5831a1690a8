"""Where a run begins: anew, or with a checkpoint of its own or of another run, and whether that fits this run."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dmt.errors import InputError
from dmt.plan import TowerPlan
from dmt.training.checkpoints import checkpoints, read_manifest
from dmt.training.config import TrainingConfig
from dmt.training.loop import Position

__all__ = ["Start", "begin_anew", "checkpoint_folder", "start_with", "starting_point"]

# Sections that say what the parameters are; another value is another model.
_SAME_MODEL = ("model", "optimizer.sparse", "optimizer.dense")
# What decides which row comes when; another value, and a position among rows means nothing.
_SAME_ROWS = "data"
_NOT_THE_ROWS = ("data.eval_path", "data.eval_split", "data.max_eval_rows", "data.validate_rows", "data.skip_bad_lines")
# What decides how training goes on, and may be changed on the way.
_TRAINING = (
    "optimizer",
    "replicas",
    "sharding.forward_precision",
    "sharding.backward_precision",
    "sharding.table_precision",
    "train.batch_size",
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checkpoint to begin with."""

    folder: Path
    """The checkpoint."""
    position: Position
    """Where training goes on."""
    notes: tuple[str, ...] = ()
    """What is different from now on."""
    is_own: bool = True
    """Whether the checkpoint is this run's."""


def checkpoint_folder(config: TrainingConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.train.output_dir) / "checkpoint"


def begin_anew(config: TrainingConfig) -> None:
    """Removes the run's checkpoints where ``train.resume`` is ``"never"``, but not in a restart by torchrun."""
    if config.train.resume == "never" and not _is_restart() and checkpoint_folder(config).is_dir():
        shutil.rmtree(checkpoint_folder(config))


def starting_point(config: TrainingConfig) -> Path | None:
    """A checkpoint, or a folder of them, that a run begins with; None for a run that begins anew.

    Its own come before the one that ``train.resume`` names: a run that began with that and was interrupted goes on.

    Raises:
        InputError: ``train.resume`` names a folder without a checkpoint.
    """
    own, asked = checkpoint_folder(config), config.train.resume
    if checkpoints(own):
        return own
    if asked in ("auto", "never"):
        return None
    for folder in (Path(asked), Path(asked) / "checkpoint"):
        if checkpoints(folder):
            return folder
    raise InputError(
        f"train.resume={asked!r} holds no checkpoint. Give a checkpoint's folder, the output_dir of a run, 'auto' or "
        "'never'."
    )


def _is_restart() -> bool:
    """Whether torchrun has started this job's processes before (``--max-restarts``)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def start_with(folder: Path, config: TrainingConfig, plan: TowerPlan | None) -> Start:
    """How a run goes on from a checkpoint.

    Args:
        folder: whole, of `starting_point`.
        config: the run.
        plan: its tower plan; None with the flat dataflow.

    Raises:
        InputError: the checkpoint cannot be read or is of a run with another model or other towers; it is this run's
            own and of other data; or it is finished, so that settings that have changed would never be used.
    """
    manifest, saved, now = read_manifest(folder), _saved_config(folder), config.model_dump(mode="json")
    is_own = folder.parent == checkpoint_folder(config)
    changed = {key: (old, new) for key, old, new in _differences(saved, now)}
    _refuse(folder, {key: pair for key, pair in changed.items() if _is_under(key, _SAME_MODEL)}, is_own=is_own)
    if plan is not None and config.model.has_towers:
        _check_towers(folder, plan)
    of_rows = {k: v for k, v in changed.items() if _is_under(k, (_SAME_ROWS,)) and not _is_under(k, _NOT_THE_ROWS)}
    notes = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items() if _is_under(key, _TRAINING)]
    if of_rows and not is_own:
        return Start(
            folder=folder, position=Position(), notes=("other data: from the first row on", *notes), is_own=False
        )
    _refuse(folder, of_rows, is_own=is_own)
    position = Position(step=manifest.step, epoch=manifest.progress["epoch"], row=manifest.progress["row"])
    if notes and _is_finished(position, config):
        raise InputError(
            f"The run in {config.train.output_dir} is finished, with other settings ({'; '.join(notes[:3])}). Give "
            "another train.output_dir, train.resume=never to begin anew and remove its checkpoints, or more "
            "train.max_steps or train.epochs to go on."
        )
    return Start(folder=folder, position=position, notes=tuple(notes), is_own=is_own)


def _is_finished(position: Position, config: TrainingConfig) -> bool:
    most = config.train.max_steps
    return position.epoch >= config.train.epochs or (most is not None and position.step >= most)


def _refuse(folder: Path, changed: Mapping[str, tuple[Any, Any]], *, is_own: bool) -> None:
    if not changed:
        return
    shown = [f"{key} = {old!r}, not {new!r}" for key, (old, new) in changed.items()]
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    remedy = (
        "Give another train.output_dir, or train.resume=never to begin anew and remove the checkpoints there."
        if is_own
        else "Give train.resume a checkpoint of the same model."
    )
    raise InputError(f"{folder} is of a run with {'; '.join(shown[:3])}{more}. {remedy}")


def _check_towers(folder: Path, plan: TowerPlan) -> None:
    saved = TowerPlan.load(folder / "towers.json")
    for number, (old, new) in enumerate(zip(saved.towers, plan.towers, strict=False)):
        if old.features != new.features:
            raise InputError(
                f"{folder} is of a run with other towers: tower {number} has features {list(old.features)}, not "
                f"{list(new.features)}. Set towers.plan to {str(folder / 'towers.json')!r}."
            )
    if len(saved.towers) != len(plan.towers):
        raise InputError(
            f"{folder} is of a run with {len(saved.towers)} towers, not {len(plan.towers)}. Set towers.plan to "
            f"{str(folder / 'towers.json')!r}."
        )


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        saved = tomllib.loads((folder / "config.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{folder} has no readable config.toml ({error}). Use another checkpoint.") from error
    try:
        # Keys that are newer than the checkpoint have their defaults.
        return TrainingConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys with other values; one that is None now is the same as one that was not saved.

    Example:
        >>> list(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": None}}))
        [('a.c', 2, 3)]
    """
    for key in {**saved, **now}:
        old, new = saved.get(key), now.get(key)
        where = f"{path}.{key}" if path else key
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, where)
        elif old != new:
            yield where, old, new


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)
