"""Files of a run, written by rank 0: resolved config, metrics, TensorBoard scalars, the result."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from dmt.errors import InputError
from dmt.files import atomic_write, read_json, read_toml
from dmt.formatting import printable, shorten
from dmt.sharding.plan import TowerShardingPlan
from dmt.training.config import TrainingConfig, to_toml

__all__ = [
    "RunRecord",
    "auc_warning",
    "ne_warning",
    "check_records",
    "compression_warning",
    "read_curves",
    "read_result",
    "result_warnings",
    "settings_lines",
    "to_json",
    "unwritable",
    "versions",
]

logger = logging.getLogger(__name__)
_FULL = "%s cannot be written to (%s). Training goes on; %s."
# Towers that compress more than this are remarked on: the paper studies ratios up to 16 (DMT, Table 5).
_MOST_COMPRESSION = 16.0
# Nearer to chance than this, an AUC is called chance.
_CHANCE = 0.02
_WORSE_THAN_MEAN = 1.05


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers; "absent" where one is missing."""
    names = ("dmt-recsys", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


@cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def settings_lines(config: TrainingConfig) -> list[str]:
    """Returns a line for each section with settings that are not at their defaults, and one with the versions."""
    sections = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    lines = [
        f"{name}: {', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items())}"
        for name, values in sections.items()
    ]
    return [*lines, f"all else by default, in full in {config.train.output_dir}/config.toml", f"versions: {versions()}"]


# A run writes all of them, and somebody who writes a config those that matter.
_SECTIONS = {"model", "data", "topology", "towers", "sharding", "replicas", "hot_rows", "optimizer", "train"}


def check_records(config: TrainingConfig) -> None:
    """Checks that what a run would delete or replace in its output directory is what an earlier run has left there.

    Raises:
        InputError: it is a link, or there is no ``config.toml`` of a run beside it.
    """
    folder, remedy = Path(config.train.output_dir), "Move it away, or give another train.output_dir."
    names = ["config.toml", "metrics.jsonl", "result.json", "tensorboard"]
    # Named by the config, it is replaced by itself.
    plan = config.sharding.plan and Path(config.sharding.plan).resolve()
    names += ["sharding.json"] if plan != (folder / "sharding.json").resolve() else []
    names += ["affinity.npz"] if config.train.affinity_rows else []
    found = [path for path in (folder / name for name in names) if path.is_symlink() or path.exists()]
    for path in found:
        if path.is_symlink():
            raise InputError(f"{path} is a link: a run deletes and replaces nothing through a link. {remedy}")
    try:
        values = read_toml(folder / "config.toml", place="", remedy="")
    except InputError:
        values = {}
    if found and found[0].name == "config.toml" and not values.keys() >= _SECTIONS:
        raise InputError(f"{found[0]} is no config that a run has left there, and a new run would replace it. {remedy}")
    if found and not values:
        raise InputError(
            f"{found[0]} is not what a run has left there: {folder} has no config.toml of a run. A new run would "
            f"delete or replace it. {remedy}"
        )


class RunRecord:
    """Files of one run in its output directory; does nothing on ranks other than 0.

    ``config.toml`` (resolved, reads again), ``metrics.jsonl`` (one JSON object a line), ``tensorboard/``,
    ``sharding.json`` (with the tower dataflow) and ``result.json``.

    A killed run goes on with ``resumed_step``: curves stay up to that step, and what came later, which will be
    recorded again, is dropped. A number that is there already at that very step is not recorded twice.

    A full disk stops no training: lines of ``metrics.jsonl`` wait in memory until there is room, and those that found
    none by the end are printed. TensorBoard's curves end where its own file could not be written.

    Args:
        config: the run.
        enabled: true on rank 0.
        resumed_step: steps of the checkpoint that training goes on from; None for a run of its own, which removes what
            an earlier one left.

    Raises:
        InputError: the folder cannot be written to.
    """

    def __init__(self, config: TrainingConfig, *, enabled: bool, resumed_step: int | None = None) -> None:
        self.enabled = enabled
        self.folder = Path(config.train.output_dir)
        self._metrics = self.folder / "metrics.jsonl"
        self._resumed_step, self._recorded = resumed_step, set[str]()
        self._waiting, self._whole_bytes, self._has_room = "", 0, True
        if not enabled:
            return
        try:
            self._begin(config)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _begin(self, config: TrainingConfig) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        if config.train.affinity_rows:
            # A file of an earlier run would be taken for this one's, should none be written.
            (self.folder / "affinity.npz").unlink(missing_ok=True)
        if self._resumed_step is None:
            # What an earlier run left here would be read as this one's.
            self._metrics.unlink(missing_ok=True)
            for path in (self.folder / "tensorboard").glob("events.out.tfevents.*"):
                path.unlink()
        elif self._metrics.exists():
            kept = [values for values in _read_metrics(self._metrics) if values["step"] <= self._resumed_step]
            self._recorded = {name for values in kept if values["step"] == self._resumed_step for name in values}
            _write(self._metrics, "".join(f"{json.dumps(values)}\n" for values in kept))
            self._whole_bytes = self._metrics.stat().st_size
        _write(self.folder / "config.toml", to_toml(config))
        # Imported here, or whoever reads a checkpoint or a result would load TensorBoard.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if self._resumed_step is None else self._resumed_step + 1
        self._board: SummaryWriter | None = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

    def say(self, lines: Iterable[str]) -> None:
        """Prints lines, marked as comments."""
        if self.enabled:
            print("".join(f"# {printable(line)}\n" for line in lines), end="", flush=True)

    def sharding(self, plan: TowerShardingPlan | None, notes: Iterable[str] = ()) -> None:
        """Writes the sharding plan as ``sharding.json`` and prints its summary; None removes what a run before left.

        ``notes`` are of a flat plan, which is not written.
        """
        if not self.enabled:
            return
        path = self.folder / "sharding.json"
        if plan is None:
            path.unlink(missing_ok=True)
            self.say(notes)
        else:
            # In one step: it may be the very plan that the config names and other ranks still read.
            plan.save(path)
            self.say([f"sharding: {plan.summary}", *plan.notes])

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Adds numbers at a training step; names such as ``"train/loss"``."""
        if step == self._resumed_step:
            values = {name: value for name, value in values.items() if name not in self._recorded}
        if self.enabled and values:
            self._waiting += json.dumps({"step": step, **values}) + "\n"
            self._write_waiting()

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers to TensorBoard only: those that a clock has measured, which no run repeats."""
        if self.enabled and self._board is not None:
            try:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)
            except OSError as error:
                self._lose_board(error)

    def end(self) -> None:
        """Prints what found no room in ``metrics.jsonl``, and closes TensorBoard's file."""
        if self.enabled and self._waiting:
            self._write_waiting()
            print(self._waiting, end="", flush=True)
        if self.enabled and self._board is not None:
            self._board.close()

    def close(self, result: dict[str, Any]) -> None:
        """Writes the result and the versions, draws its bytes per sample, and closes TensorBoard's file.

        Raises:
            InputError: the result cannot be written; it has been printed.
        """
        if not self.enabled:
            return
        if "bytes_per_sample" in result:
            self.draw(
                result["steps"], {f"bytes_per_sample/{n}": size for n, size in result["bytes_per_sample"].items()}
            )
        self.end()
        path, text = self.folder / "result.json", to_json({**result, "versions": versions()}) + "\n"
        try:
            _write(path, text)
        except OSError as error:
            print(text, end="", flush=True)
            raise InputError(
                f"{path} cannot be written: {error.strerror}. The run is finished and its result printed; make room "
                "and put it there, or run again, which evaluates the last checkpoint."
            ) from error

    def _write_waiting(self) -> None:
        """Writes the waiting lines, or warns at the first failure of several."""
        lines = self._waiting
        try:
            with self._metrics.open("ab") as stream:
                if stream.tell() > self._whole_bytes:
                    # Half a line that an earlier attempt found room for.
                    stream.truncate(self._whole_bytes)
                stream.write(lines.encode())
        except OSError as error:
            if self._has_room:
                logger.warning(_FULL, self.folder, error, "metrics.jsonl is completed when there is room")
            self._has_room = False
            return
        self._waiting, self._whole_bytes, self._has_room = "", self._metrics.stat().st_size, True
        if self._board is None:
            return
        try:
            for values in map(json.loads, lines.splitlines()):
                step = values.pop("step")
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)
            # At once, against a kill: the next attempt does not record it again.
            self._board.flush()
        except OSError as error:
            self._lose_board(error)

    def _lose_board(self, error: OSError) -> None:
        # Its writer does not recover.
        self._board = None
        logger.warning(_FULL, self.folder, error, "metrics.jsonl has all numbers, TensorBoard only those up to now")


def unwritable(folder: Path, error: OSError) -> InputError:
    """Returns the error for an output folder that cannot be written to."""
    return InputError(f"train.output_dir={str(folder)!r} cannot be written: {error.strerror}.")


def result_warnings(result: Mapping[str, Any]) -> list[str]:
    """Returns warnings for the reader of a run's result: an AUC near chance, much compression, no hot row."""
    texts = [
        auc_warning(result["eval_auc"]),
        ne_warning(result["eval_ne"]),
        compression_warning(result["compression_ratio"]),
    ]
    if "hot_rows" in result and not result["hot_rows"]["rows"]:
        texts.append(
            "No row had a copy: rows are chosen for the first time after 100 steps (with hot_rows.profile after one), "
            "and hot_rows.left_out in result.json says why a table has none."
        )
    return [text for text in texts if text]


def compression_warning(ratio: float) -> str:
    """Returns a warning for towers that send very few numbers; else ""."""
    if ratio <= _MOST_COMPRESSION:
        return ""
    return (
        f"The towers send 1 of {ratio:.0f} numbers of their embeddings, which may cost accuracy: compare with a larger "
        "model.tower_dim (or c, p), or with a flat model."
    )


def auc_warning(auc: float) -> str:
    """Returns a warning with likely causes for an AUC no better than chance, or below it; else ""."""
    if math.isnan(auc):
        return "AUC is undefined: the evaluation rows have one label only. Check data.label and the split."
    if auc < 0.5 - _CHANCE:
        return (
            f"AUC {auc:.4f} is below chance (0.5): rows with label 0 score higher than those with label 1. Likely "
            "causes: data.label means the opposite of what it did in training; evaluation rows from another source or "
            "time; a model that has learned its training rows by heart (fewer epochs, smaller tables)."
        )
    if auc > 0.5 + _CHANCE:
        return ""
    return (
        f"AUC {auc:.4f} is close to chance (0.5). Likely causes: too few training steps or too small a learning rate "
        "(train.max_steps, optimizer.*_lr); labels not aligned with the features or drawn from another column "
        "(data.label); categorical values that never repeat, so nothing can be learned of them; training and "
        "evaluation files from unrelated sources."
    )


def ne_warning(ne: float) -> str:
    """Returns a warning with likely causes for predictions worse than always the mean; else ""."""
    if not ne > _WORSE_THAN_MEAN:
        return ""
    return (
        f"NE {ne:.4f} is above 1: the predictions are worse than always predicting the mean click rate. Likely causes: "
        "a model of your own that returns probabilities (it must return logits, without a sigmoid); too large a "
        "learning rate, or a model that has learned its training rows by heart; evaluation rows of another time."
    )


def to_json(result: Any) -> str:
    """Writes JSON that every parser reads: a number that is undefined (NaN) becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(result), indent=1)


def read_result(folder: Path) -> dict[str, Any]:
    """Reads the result of a finished run; null becomes NaN again. `InputError` if it cannot be read."""
    place = str(folder / "result.json")
    result = read_json(place, place=place, remedy="Run the job again, which evaluates its last checkpoint.")
    if not isinstance(result, dict):
        raise InputError(f"{place} is no result of a run. Run the job again, which evaluates its last checkpoint.")
    return {key: math.nan if value is None else value for key, value in result.items()}


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the curves of a run, finished or not: for each name its (step, value) pairs."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for values in _read_metrics(folder / "metrics.jsonl"):
        step = values.pop("step")
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the whole records of ``metrics.jsonl``, and warns of other lines: a crash or a full disk can leave some.

    No line is expected after the last line feed, where a killed writer may have left half of one.
    """
    records, damaged = [], list[int]()
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        is_whole = isinstance(record, dict) and all(type(value) in (int, float) for value in record.values())
        if is_whole and type(record.get("step")) is int:
            records.append(record)
        else:
            damaged.append(number)
    if damaged:
        logger.warning(
            "%s: %d of its lines are no records of a run and are left out: %s.",
            path,
            len(damaged),
            shorten([f"line {number}" for number in damaged], ", "),
        )
    return records


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
