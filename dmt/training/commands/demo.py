"""``dmt demo``: the whole job on one machine, from clicks to a comparison of the flat and the multi-tower model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dmt.errors import InputError
from dmt.partitioner import TowerPartitioner, write_partition_report
from dmt.sharding.explanation import TowerShardingPlan
from dmt.training.affinity import affinity_of_run
from dmt.training.checkpoints.store import checkpoints
from dmt.training.config import KEYS_OF_TOWERS, load_config, to_override, to_toml
from dmt.training.data.config import DataConfig
from dmt.training.data.files import MANIFEST, expand_path, format_of
from dmt.training.data.raw import schema_of
from dmt.training.job import PREPARED, open_job
from dmt.training.preflight import check_rows, checked_model
from dmt.training.records import quality_warnings, read_result
from dmt.training.report.page import plot_curves, write_report

__all__ = ["demo", "demo_settings", "flat_settings", "step_settings", "train_here"]

_STEPS = 1000  # enough to tell the models apart, and done within minutes
_TABLE_ROWS = 20_000
_CONFIG = "run.toml"  # in the folder of each of a demo's runs


def demo(data: str | None, out: Path, overrides: Sequence[str], *, command: str) -> dict[str, dict[str, Any]]:
    """Trains the flat model, partitions its features, trains the multi-tower model, and returns both results by arch.

    ``data`` names clicks (see `demo_settings`); None: ``overrides`` name rows, or else they are generated. Files go to
    ``out``, where checkpoints of an earlier demo are deleted. ``overrides`` apply to both runs, except that keys of the
    tower dataflow apply to the second only. The plan of the towers and the reports show ``command``.

    Raises:
        InputError: anything the user can fix; raised before training where possible.
    """
    console = Console(stderr=True, highlight=False)
    for key in ("towers.plan", "train.output_dir"):
        if any(override.partition("=")[0].strip() == key for override in overrides):
            raise InputError(f"The demo sets {key} itself: it learns the towers, and writes to --out. Leave it out.")
    console.print("[bold]1/4[/] checking data and sizes")
    # Batch size and epochs follow from the number of rows, which is known once the file is open.
    settings, smallest = ([], []) if data is None else (demo_settings(data), ["train.batch_size=16"])
    first = load_config("demo", [*settings, *smallest, *overrides, to_override("train.output_dir", out)])
    arch, ranks = first.model.arch, first.topology.build().world_size
    if first.model.factory is not None or not arch.startswith("dmt-"):
        raise InputError(
            f"{first.model.chosen}: the demo compares a shipped multi-tower model with its flat form. Set model.arch "
            "to dmt-dlrm, dmt-dlrm-products or dmt-dcn, without model.factory."
        )
    if first.data.train_path:  # else a folder beside `out` would be used, which the two runs do not look for
        (out / PREPARED).mkdir(parents=True, exist_ok=True)
    job = open_job(first)
    checked_model(job)
    given = data or first.data.source or first.data.prepared or first.data.train_path
    rows = job.data.num_rows("train")
    shared = [*settings, *([] if data is None or rows is None else step_settings(rows, ranks)), *overrides]
    check_rows(load_config("demo", shared), ranks, rows)

    flat_arch = arch.removeprefix("dmt-").removesuffix("-products")
    for folder in (out / flat_arch, out / arch):
        if checkpoints(folder / "checkpoint") and not (folder / _CONFIG).exists():
            raise InputError(
                f"--out {str(out)!r}: the demo would delete the checkpoints of another run, in {folder}. Name another."
            )
    console.print(f"[bold]2/4[/] training the flat model, {flat_arch}, on {ranks} ranks")
    runs = {flat_arch: train_here(out / flat_arch, [*flat_settings(shared), f"model.arch={flat_arch}"])}

    console.print("[bold]3/4[/] learning which features belong together")
    affinity = affinity_of_run(out / flat_arch, functions=[first.data.source or ""])
    partition = TowerPartitioner(num_towers=first.topology.num_towers, seed=first.train.seed).partition(affinity)
    plan = replace(partition.plan, command=command)
    plan.save(out / "towers.json")
    back = [("../report.html", "The models trained with and without these towers")]
    towers_page = write_partition_report(replace(partition, plan=plan), out / "towers", links=back)

    console.print(f"[bold]4/4[/] training the multi-tower model, {arch}, with these towers")
    runs[arch] = train_here(out / arch, [*shared, to_override("towers.plan", out / "towers.json")])

    page = write_report(
        out / "report.html",
        runs=runs,
        plan=plan,
        sharding=TowerShardingPlan.load(out / arch / "sharding.json"),
        pictures=(
            towers_page.with_name("affinity.png"),
            plot_curves({name: out / name for name in runs}, out / "curves.png"),
        ),
        data_description=given or "synthetic clicks in Criteo's shape with planted feature groups",
        notes=[
            *partition.notes,
            *(f"{n}: {text}" for n, run in runs.items() for text in quality_warnings(run["eval_auc"], run["eval_ne"])),
        ],
    )
    console.print(f"Report: {page}   towers: {out / 'towers.json'}", markup=False)
    return runs


def train_here(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Trains the demo's config from scratch in ``folder``, with overrides ``settings``, and returns the result.

    Deletes checkpoints of an earlier run in it first. Raises `InputError` if an override is wrong or training fails.
    """
    config = load_config("demo", [*settings, to_override("train.output_dir", folder)])
    for path in checkpoints(folder / "checkpoint"):
        shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(to_toml(config), encoding="utf-8")
    try:
        _start_ranks(folder / _CONFIG, config.topology.build().world_size)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        raise InputError(
            f"Training {config.model.arch} ended with exit code {code}. Correct the error printed above, and try again."
        ) from error
    return read_result(folder)


def _start_ranks(config: Path, ranks: int) -> None:
    """Trains a config as torchrun would, on ranks that are children of this process and end with it.

    An interrupt, such as Ctrl-C, makes the ranks stop; they may save a checkpoint first.
    """
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # Python's own handlers of Ctrl-C and SIGTERM remain.
        signals_to_handle="SIGHUP",
    )
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    # Pass this process's id: if it ended while a rank starts, getppid() would return the process that adopts orphans.
    settings = [f"DMT_LAUNCHER={os.getpid()}", f"OMP_NUM_THREADS={threads}"]
    elastic_launch(launch, "env")(*settings, sys.executable, "-m", "dmt.training", str(config))


def demo_settings(data: str) -> list[str]:
    """Returns the overrides that make the demo's config read a file of clicks or a prepared folder.

    A text file that is not .csv and has no column ``label`` is read in Criteo's format. Other files need the columns
    ``label``, ``c_*`` (categorical) and ``d_*`` (dense); a column ``split`` says which rows are for evaluation.

    Raises:
        InputError: the file does not exist, cannot be read, or is of an unknown kind.
    """
    if (Path(data) / MANIFEST).is_file():
        return [to_override("data.prepared", data)]
    file = expand_path("--data", data, columns=False)[0]
    settings = [to_override("data.train_path", data), f"data.num_embeddings={_TABLE_ROWS}"]
    names = schema_of(file, DataConfig(kind="columns", train_path=data, categorical=("c_*",))).names
    if "label" not in names and format_of(file) == "text" and not file.endswith((".csv", ".csv.gz")):
        return ['data.kind="criteo_tsv"', *settings]
    expand_path("--data", data, columns=True)
    settings += ['data.kind="columns"', 'data.categorical=["c_*"]', 'data.dense=["d_*"]']
    return [*settings, 'data.split_column="split"'] if "split" in names else settings


def step_settings(rows: int, ranks: int) -> list[str]:
    """Returns overrides for 1,000 to 2,000 steps on ``rows`` training rows, if batches of 16 to 512 per rank allow it.

    Small data sets get one epoch: in a second one, a click model would overfit. There are about five evaluations.

    Example:
        >>> step_settings(rows=262_144, ranks=4)
        ['train.batch_size=128', 'train.epochs=2', 'train.eval_every=204']
    """
    epochs = 2 if rows >= 50_000 else 1
    wanted = max(1, rows * epochs // (_STEPS * ranks))
    size = min(512, max(16, 2 ** (wanted.bit_length() - 1)))
    eval_every = max(10, rows * epochs // (size * ranks) // 5)
    return [f"train.batch_size={size}", f"train.epochs={epochs}", f"train.eval_every={eval_every}"]


def flat_settings(settings: Sequence[str]) -> list[str]:
    """Returns the settings without those of the tower dataflow, which a flat run refuses."""
    prefixes = tuple(f"{name}." for name in KEYS_OF_TOWERS)
    return [text for text in settings if not f"{text.partition('=')[0].strip()}.".startswith(prefixes)]
