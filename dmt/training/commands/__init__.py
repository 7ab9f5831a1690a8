"""The ``dmt`` command: its subcommands with their options and output. Each imports what it needs when it runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click

from dmt import __version__
from dmt.errors import InputError
from dmt.files import check_output
from dmt.formatting import counted, human_bytes
from dmt.testing.ranks import end_with
from dmt.training.console import cells, make_table, quiet_libraries, rows_of, say_last, table_console

__all__ = ["Advanced", "Shown", "check_output_files", "emit", "main", "show_results"]

# The function that reads each kind of file that commands write.
_READERS = {
    "tower plan": "dmt.plan.towers:TowerPlan.load",
    "sharding plan": "dmt.sharding.explanation:TowerShardingPlan.load",
    "cluster": "dmt.simulator.cluster:load_cluster",
    "file of predictions": "dmt.training.serving.score:check_predictions",
    "program": "dmt.training.serving.export:read_manifest",
}
_PATH = click.Path(path_type=Path)


class Shown(NamedTuple):
    """What a command prints."""

    record: Any
    """What ``--json`` prints: plain data and dataclasses."""
    headers: Sequence[str] = ()
    """Headers of the table."""
    rows: Sequence[Sequence[str]] = ()
    title: str | None = None
    right: Sequence[int] = ()
    """Indices of the columns of numbers, which are right-aligned and never truncated."""
    lines: Sequence[str] = ()
    """Lines below the table."""
    exit_code: int = 0


def emit(shown: Shown, as_json: bool) -> None:
    """Prints a command's result: as JSON, in which NaN and infinity are null, or as a table and lines."""
    if as_json:
        from dmt.training.records import to_json

        click.echo(to_json(shown.record))
        return
    console = table_console()
    if shown.rows:
        console.print(make_table(shown.headers, shown.rows, title=shown.title, right=shown.right))
    for line in shown.lines:
        console.print(line, soft_wrap=True)


def show_results(results: Mapping[str, Mapping[str, Any]]) -> Shown:
    """Returns a table with a column for each run; ``results``: the content of each run's ``result.json``, by name."""
    rows = rows_of(results.values())
    columns = [[label for label, _, _ in rows], *(cells(result, rows) for result in results.values())]
    headers = ["", *results]
    return Shown(results, headers, list(zip(*columns, strict=True)), "evaluation and cost", range(1, len(headers)))


def check_output_files(outputs: Mapping[str, tuple[Path, str]], inputs: Iterable[object]) -> None:
    """Checks a command's outputs before it starts its work, and makes their missing folders.

    An existing file is replaced only if it is empty or of the kind that the command writes.

    Args:
        outputs: path and kind of each output, by its option. The kind is a key of `_READERS`, or "folder".
        inputs: arguments of the command; a string or path that names an existing file counts as an input file.

    Raises:
        InputError: an output is also an input (even through a link), lies in a checkpoint, exists and is of another
            kind, or cannot be written.
    """
    read = [given for given in inputs if isinstance(given, str | Path) and os.path.exists(given)]
    for option, (path, kind) in outputs.items():
        if path.exists() and any(path.samefile(given) for given in read):
            raise InputError(f"{option} {str(path)!r} is an input of this command. Name another file.")
        if (path.parent / "checkpoint.json").exists():
            raise InputError(f"{option} {str(path)!r} is in a checkpoint, which it would damage. Name another folder.")
        check_output(option, path, is_folder=kind == "folder")
        if path.is_file() and path.stat().st_size and not _is_kind(path, kind):
            raise InputError(f"{option} {str(path)!r} exists and is not a {kind}. Name another, or remove this file.")


def _is_kind(path: Path, kind: str) -> bool:
    module, name = _READERS[kind].split(":")
    try:
        attrgetter(name)(import_module(module))(path)
    except (OSError, ValueError):
        return False
    return True


class _Output(click.Path):
    """Type of an option that names an output of the command: a file or a folder."""

    def __init__(self, kind: str) -> None:
        super().__init__(path_type=Path)
        self.kind = kind


class Advanced(click.Option):
    """An option that few runs need; the help lists it under "Advanced"."""


class _Command(click.Command):
    """A command that checks its outputs, runs, and prints its function's `Shown`, with ``--json`` as JSON."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, is_advanced in (("Options", False), ("Advanced", True)):
            options = (option for option in self.get_params(ctx) if isinstance(option, click.Option))
            shown = (option for option in options if isinstance(option, Advanced) == is_advanced)
            if rows := [record for option in shown if (record := option.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        as_json, inputs = ctx.params.pop("as_json"), dict(ctx.params)
        outputs = {}
        for parameter in self.params:
            name = parameter.name or ""
            if isinstance(parameter.type, _Output) and inputs.get(name) is not None:
                outputs[max(parameter.opts, key=len)] = (inputs.pop(name), parameter.type.kind)
        if os.environ.get("RANK", "0") == "0":  # under torchrun, only rank 0 writes
            check_output_files(outputs, inputs.values())
        if (shown := super().invoke(ctx)) is not None:
            emit(shown, as_json)
            ctx.exit(shown.exit_code)


class _Commands(click.Group):
    """The group of all commands; turns errors that the user can fix into one line and exit code 2."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        rank, launcher = int(os.environ.get("RANK", "0")), os.getppid()
        quiet_libraries(rank=rank)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(launcher)
        # Like Ctrl-C, SIGTERM must end child processes and remove temporary folders.
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return super().invoke(ctx)
        except InputError as error:
            say_last(f"error: {error}", rank=rank, launcher=launcher)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("dmt"):
                raise
            click.echo(f"error: {error.name} is not installed. `dmt doctor` says how to fix it.", err=True)
        finally:
            signal.signal(signal.SIGTERM, previous)
        return ctx.exit(2)


_function = click.option(
    "--function", multiple=True, metavar="MODULE:FUNCTION", help="Allow the checkpoint's config to call this function."
)
_overrides = click.argument("overrides", nargs=-1)


def _config(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("config")(_overrides(command))


@click.group(
    cls=_Commands,
    context_settings={"show_default": True},
    epilog="Start with: dmt demo. Train with: torchrun --nproc-per-node 4 -m dmt.training CONFIG",
)
@click.version_option(__version__, prog_name="dmt")
def main() -> None:
    """Disaggregated Multi-Tower training of recommendation models."""


@main.command("demo", epilog="Example: dmt demo --data clicks.parquet train.max_steps=200")
@click.option("--data", metavar="PATH", help="Criteo TSV, file with columns label, c_* and d_*, or prepared folder.")
@click.option(
    "--out", type=_Output("folder"), default="demo_output", help="Folder for runs, towers.json, pictures and reports."
)
@_overrides
def _demo(overrides: tuple[str, ...], *, data: str | None, out: Path) -> Shown:
    """Trains a flat and a multi-tower model, and compares them.

    Learns the towers from the flat model. Takes a few minutes on two cores. Without --data, it generates clicks.
    OVERRIDES set config keys, as section.key=value.
    """
    from dmt.training.commands.demo import demo

    note = "All hosts are this machine, so no link is slow: compare bytes, not samples/s. The report explains all rows."
    return show_results(demo(data, out, overrides, command=_command_line()))._replace(lines=[note])


@main.command("doctor", epilog="Example: dmt doctor")
def _doctor() -> Shown:
    """Reports missing or unsuitable packages, and how to fix them."""
    from dmt.training.commands.doctor import diagnose, show_findings

    return show_findings(diagnose())


@main.command(
    "partition",
    epilog="Example: dmt partition --checkpoint runs/flat --towers 8 --report report\n\n"
    "Without a model: dmt partition --data rows.parquet --tower-module dcn --towers 8",
)
@click.option("--checkpoint", type=_PATH, help="The output_dir of a trained run.")
@click.option("--data", metavar="PATH", help="Rows to measure instead of the run's own.")
@click.option("--towers", type=int, required=True, help="Number of towers.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "coherent", "diverse", "interactions"]),
    default="auto",
    help="Group features by similarity (coherent), dissimilarity (diverse) or interactions; auto: by tower module.",
)
@click.option(
    "--tower-module",
    type=click.Choice(["dcn", "dlrm", "dlrm-products"]),
    help="Tower module that the towers will have; by default the run's.",
)
@click.option(
    "--balance-ratio",
    cls=Advanced,
    default=1.0,
    help="Maximum of the largest tower's features over the smallest's (or one more); inf: no limit.",
)
@click.option("--rules", type=_PATH, help="TOML file of rules, such as categories and limits.")
@click.option("--out", default="towers.json", type=_Output("tower plan"), help="Tower plan to write.")
@click.option("--report", type=_Output("folder"), help="Also write a report into this folder.")
@click.option("--seed", cls=Advanced, default=0, help="Random seed.")
@_function
def _partition(**options: Any) -> Shown:
    """Groups features into towers, and writes a tower plan."""
    from dmt.training.commands.plans import run_partition

    return run_partition(options, _command_line())


@main.command(
    "plan",
    epilog="Example: dmt plan demo sharding.memory_gib=16\n\n"
    "For tables without data: dmt plan CONFIG.toml data.tables=tables.json topology.num_towers=4 --out plan.json",
)
@_config
@click.option("--out", type=_Output("sharding plan"), help="Also write the plan to this JSON file.")
def _plan(config: str, overrides: tuple[str, ...], *, out: Path | None) -> Shown:
    """Places the tables of each tower on its ranks, and says why.

    CONFIG is a training config or the name of a shipped one; if it sets data.tables, the tables of that file are
    planned. OVERRIDES set keys of CONFIG, as section.key=value.
    """
    from dmt.training.commands.plans import run_plan

    return run_plan(config, overrides, out=out)


@main.command(
    "what-if", epilog="Example: dmt what-if demo topology.num_towers=16 topology.ranks_per_tower=8 --cluster a100"
)
@_config
@click.option("--cluster", required=True, metavar="FILE", help="File of `dmt bench-comms`, or v100, a100 or h100.")
@click.option(
    "--uplink-gbit-per-s",
    "uplink",
    cls=Advanced,
    type=float,
    help="Rate of the link from a host to other hosts, shared by its ranks; by default the cluster's.",
)
def _what_if(config: str, overrides: tuple[str, ...], **options: Any) -> Shown:
    """Predicts the time of a training step on a described cluster.

    Compares the run of CONFIG with flat models, towers, and towers that compress, without training. OVERRIDES set keys
    of CONFIG, as section.key=value.
    """
    from dmt.training.commands.what_if import run_what_if

    return run_what_if(config, overrides, **options)


@main.command("bench-comms", epilog="Example: torchrun --nproc-per-node 2 --no-python dmt bench-comms --out my.toml")
@click.option("--out", type=_Output("cluster"), default="cluster.toml", help="Cluster file to write.")
def _bench_comms(out: Path) -> Shown | None:
    """Measures the speed of ranks and links, for dmt what-if.

    Start it with torchrun on every host.
    """
    from dmt.training.commands.bench_comms import run_bench_comms

    return run_bench_comms(out)


@main.command(
    "prepare", epilog="Example: dmt prepare demo data.kind=criteo_tsv data.train_path=day_0.tsv --out prepared"
)
@_config
@click.option("--out", required=True, type=_PATH, help="New folder to write.")
@click.option(
    "--ids",
    default="config",
    type=click.Choice(["config", "frequency"]),
    help="How to turn values into ids: as the config says, or by frequency.",
)
@click.option("--min-count", type=click.IntRange(1), default=1, help="With ids by frequency, rarer values share an id.")
@click.option("--vocabulary", type=_PATH, help="With ids by frequency, reuse the ids of this prepared folder.")
@click.option(
    "--max-rejects",
    type=click.IntRange(0),
    default=0,
    help="Leave out at most this many invalid rows, and list them in rejects.csv.",
)
@click.option(
    "--row-group-rows", "group_rows", cls=Advanced, type=click.IntRange(1), default=32_768, help="Rows per row group."
)
@click.option(
    "--memory-gib",
    cls=Advanced,
    type=click.FloatRange(0.25),
    default=2.0,
    help="Memory limit of DuckDB; the process needs about 1 GiB more.",
)
def _prepare(config: str, overrides: tuple[str, ...], **options: Any) -> Shown:
    """Converts raw rows to Parquet with ids, for training.

    Reads the CSV, TSV, JSON lines, Parquet or Criteo files of CONFIG's [data], and summarizes their columns. To train
    on the folder, set data.prepared=FOLDER. OVERRIDES set keys of CONFIG, as section.key=value.
    """
    from dmt.training.commands.prepare import run_prepare

    return run_prepare(config, overrides, **options)


@main.command("check", epilog="Example: dmt check demo sharding.unique=true --rows 500")
@_config
@click.option("--rows", "max_rows", cls=Advanced, type=click.IntRange(8), default=1000, help="Maximum rows of a table.")
@click.option("--max-ranks", cls=Advanced, type=click.IntRange(4, 64), default=8, help="Maximum number of ranks.")
def _check(config: str, overrides: tuple[str, ...], **limits: int) -> Shown:
    """Checks a run on this machine before it runs on a cluster.

    Shrinks the run of CONFIG, and compares its forward pass, gradients and a few training steps with the same model in
    one process, on random ids. Exits with 1 if a comparison fails. OVERRIDES set keys of CONFIG, as section.key=value.
    """
    # The ranks' packages take as long to load as this process's: load both at once.
    from dmt.testing.ranks import RanksFailedError, prepare_ranks
    from dmt.training.config import load_config

    began, settings = time.perf_counter(), load_config(config, overrides)
    prepare_ranks(["dmt.training.check"])
    from dmt.training.check import check_run
    from dmt.training.check.shrink import CheckLimits

    # Hide INFO messages about the full-size run, such as that its batch is far too large for one process.
    logging.getLogger("dmt").setLevel(logging.WARNING)
    try:
        report = check_run(settings, CheckLimits(**limits))
    except RanksFailedError as error:
        click.echo(f"FAILED: {error}", err=True)
        sys.exit(1)
    return _show_check(dataclasses.replace(report, seconds=time.perf_counter() - began))


def _show_check(report: Any) -> Shown:
    def shown(number: float | None) -> str:
        if number is None:
            return ""
        return f"{number:.1e}" if number else "0"

    rows = [
        (row.check, f"{row.what}\n{row.where}".strip(), shown(row.difference), shown(row.allowed), row.verdict)
        for row in report.rows
    ]
    failed = [row.check for row in report.rows if row.verdict == "FAILED"]
    schemes = [f"{count} {scheme}" for scheme, count in report.schemes.items()]
    lines = [f"Changed: {line}" for line in report.reduced]
    lines += [f"Schemes: {', '.join(schemes)}"] if schemes else []
    lines += [f"Note: {note}" for note in report.notes]
    verdict = f"These differ too much: {', '.join(failed)}." if failed else "Everything agrees."
    lines.append(f"{verdict} {report.ranks} ranks, {report.seconds:.0f} s.")
    headers = ("", "comparison (with the plain module)", "difference", "allowed", "")
    return Shown(report.to_record(), headers, rows, right=(2, 3), lines=lines, exit_code=1 if failed else 0)


@main.command("export", epilog="Example: dmt export runs/towers -o model.pt2 --tables int8")
@click.argument("checkpoint", type=_PATH)
@click.option("-o", "--out", required=True, type=_Output("program"), help="The .pt2 file to write.")
@click.option("--tables", default="fp32", type=click.Choice(["fp32", "int8", "int4"]), help="Number format of tables.")
@click.option("--data", metavar="PATH", help="A file with the run's columns, if the run's data are gone.")
@_function
def _export(checkpoint: Path, *, out: Path, tables: Any, data: str | None, function: tuple[str, ...]) -> Shown:
    """Exports a trained model as a program for plain PyTorch.

    CHECKPOINT is the output_dir of a run, or a checkpoint.
    """
    from dmt.training.serving.export import export_run

    exported = export_run(checkpoint, out, tables=tables, data_path=data, functions=function)
    manifest, difference = exported.manifest, exported.difference
    towers = counted(len(manifest["towers"]), "tower") if manifest["towers"] else "flat"
    lines = [
        f"{exported.checkpoint}, step {manifest['step']}: {manifest['model']}, {towers}, tables in "
        f"{manifest['tables']}. Logits of random samples: within {difference:.1e} of the model's.",
        f"Written to {out}: {human_bytes(exported.file_bytes)}.",
        f"Plain PyTorch loads it: torch.export.load({str(out)!r}).module(). `dmt score` reads it, too.",
    ]
    return Shown(exported, lines=lines)


@main.command(
    "score",
    epilog="Example: dmt score runs/towers --data tomorrow.parquet -o predictions.parquet\n\n"
    "On four ranks: torchrun --nproc-per-node 4 --no-python dmt score runs/towers --data tomorrow.parquet "
    "-o predictions",
)
@click.argument("model", type=_PATH)
@click.option("--data", metavar="PATH", help="Rows to score; by default the run's evaluation rows.")
@click.option("-o", "--out", required=True, type=_PATH, help="Parquet file to write; under torchrun, a new folder.")
@_function
def _score(model: Path, *, data: str | None, out: Path, function: tuple[str, ...]) -> Shown | None:
    """Writes a model's predictions for rows of data files.

    MODEL is the output_dir of a run, a checkpoint, or a .pt2 file of dmt export. Rows may lack the label. Under
    torchrun, each rank scores a contiguous part of the rows and writes one file.
    """
    from dmt.training.records import quality_warnings

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        from dmt.training.serving.score_by_ranks import score_by_ranks

        scored = score_by_ranks(model, out, world_size=world_size, data_path=data, functions=function)
        if os.environ.get("RANK", "0") != "0":
            return None
    else:
        from dmt.training.serving.score import score

        check_output_files({"--out": (out, "file of predictions")}, [model, data])
        scored = score(model, out, data_path=data, functions=function)
    lines, metrics = [f"{counted(scored.num_rows, 'row')}. Written to {out}."], scored.metrics
    if metrics is None:
        lines.append("The rows have no label, so there are no metrics.")
    else:
        lines.append(f"AUC {metrics.auc:.4f}, NE {metrics.ne:.4f}, loss {metrics.loss:.4f}.")
        lines += quality_warnings(metrics.auc, metrics.ne)
    return Shown({"rows": scored.num_rows, **(dataclasses.asdict(metrics) if metrics else {})}, lines=lines)


@main.command("complexity", epilog="Example: dmt complexity --arch dlrm --towers 8 --tower-dim 64")
@click.option("--arch", required=True, help="dlrm or dcn.")
@click.option("--towers", type=int, help="Number of towers; by default the model is flat.")
@click.option("--tower-dim", type=int, help="Dimension of tower outputs; by default 64 for dlrm, 128 for dcn.")
def _complexity(arch: str, *, towers: int | None, tower_dim: int | None) -> Shown:
    """Counts the MFLOPs and parameters of a model of the paper's size.

    MFLOPs are per sample; layers and tables have the paper's sizes for Criteo-1TB. Also prints the compression ratio.
    """
    from dmt.models.complexity import paper_complexity

    counts = paper_complexity(arch, towers, tower_dim=tower_dim)
    rows = [
        ["MFLOPs/sample", f"{counts.mflops_per_sample:.2f}"],
        ["parameters", f"{counts.parameters:,}"],
        ["compression ratio", f"{counts.compression_ratio:.2f}"],
    ]
    return Shown(counts, ["", f"{arch}, {towers} towers" if towers else arch], rows, right=[1])


def _command_line() -> str:
    return shlex.join(["dmt", *sys.argv[1:]])
