"""The ``dmt`` command: options, what they compute, and how it is shown. Each imports what it needs when it runs."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dmt import __version__
from dmt.errors import InputError
from dmt.formatting import printable
from dmt.training.commands.outputs import Kind, check_output_files
from dmt.training.console import make_table, print_summary, quiet_libraries

__all__ = ["emit", "main"]

# Packages of the full installation; without them plans, partitions of saved affinities and complexity still work.
_FULL = ("torchrec", "fbgemm_gpu", "pydantic", "pyarrow", "pandas", "tensorboard", "tomli_w", "jinja2", "torchmetrics")
_PATH = click.Path(path_type=Path)


class _Rare(click.Option):
    """An option that help lists last."""


class _Output(click.Path):
    """A file that a command writes; it must not be one that it reads, or one of another kind."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(path_type=Path)
        self.kind = kind


class _Command(click.Command):
    """Checks outputs before it runs, and lists rarely needed options by themselves."""

    def invoke(self, ctx: click.Context) -> Any:
        kinds = {p.name: (max(p.opts, key=len), p.type.kind) for p in self.params if isinstance(p.type, _Output)}
        outputs = {option: (ctx.params[name or ""], kind) for name, (option, kind) in kinds.items()}
        check_output_files(outputs, [value for name, value in ctx.params.items() if name not in kinds])
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for title, is_rare in (("Options", False), ("Advanced", True)):
            rows = [option.get_help_record(ctx) for option in options if isinstance(option, _Rare) == is_rare]
            if rows:
                with formatter.section(title):
                    formatter.write_dl([row for row in rows if row is not None])


class _Commands(click.Group):
    """Turns what the user can fix into one line and exit code 2."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        quiet_libraries(rank=0)
        # As Ctrl-C does, it ends what this process has started, and removes its temporary folders.
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return super().invoke(ctx)
        except InputError as error:
            click.echo(f"error: {printable(str(error))}", err=True)
        except click.MissingParameter as error:
            if error.ctx is None or not isinstance(error.param, click.Option):
                raise
            name, usage = " or ".join(error.param.opts), error.ctx.command.epilog
            text = f"dmt {error.ctx.info_name} needs {name}. {error.param.help} {usage}"
            click.echo(f"error: {text}", err=True)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _FULL:
                raise
            click.echo(f"error: {error.name} is not installed. `dmt doctor` tells how to fix it.", err=True)
        finally:
            signal.signal(signal.SIGTERM, previous)
        return ctx.exit(2)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_function = click.option(
    "--function", cls=_Rare, multiple=True, metavar="NAME", help="A function of the checkpoint that may run."
)


def _config(command: Callable[..., None]) -> Callable[..., None]:
    return click.argument("config")(click.argument("overrides", nargs=-1)(command))


@click.group(
    cls=_Commands,
    context_settings={"show_default": True},
    epilog="Begin with: dmt demo. Train with: torchrun --nproc-per-node 4 -m dmt.training CONFIG",
)
@click.version_option(__version__, prog_name="dmt")
def main() -> None:
    """Disaggregated Multi-Tower training of recommendation models."""


@main.command(epilog="Example: dmt demo --data clicks.parquet train.max_steps=200")
@click.option(
    "--data",
    metavar="PATH",
    help="A Criteo TSV, a Parquet or CSV file with label, c_* and d_* columns, or package.module:function.",
)
@click.option(
    "--out", type=_Output("folder"), default="demo_output", help="Folder for towers.json, pictures, the report."
)
@_json
@click.argument("overrides", nargs=-1)
def demo(*, data: str | None, out: Path, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Trains a flat model, then learned towers, and compares them.

    Takes a few minutes on two cores. Without --data it makes its own clicks. OVERRIDES are section.key=value.
    """
    from dmt.training.commands.demo import demo as run_demo

    emit(run_demo(data, out, overrides, command=_typed()), as_json, print_summary)


@main.command(epilog="Example: dmt doctor")
@_json
def doctor(as_json: bool) -> None:
    """Says what is installed, what is missing, and what fixes it."""
    from dmt.training.commands.doctor import diagnose, print_findings

    findings = diagnose()
    emit(findings, as_json, print_findings)
    if any(finding.fix for finding in findings):
        sys.exit(1)


@main.command(
    epilog="Example: dmt partition --checkpoint runs/flat --towers 8 --report report; or without a model: "
    "dmt partition --data rows.parquet --tower-module dcn --towers 8"
)
@click.option("--checkpoint", type=_PATH, help="output_dir of a training run.")
@click.option("--affinity", cls=_Rare, type=_PATH, help="A saved affinity matrix (.npz) instead.")
@_function
@click.option("--data", metavar="PATH", help="Rows to collect on, not the run's own.")
@click.option("--towers", type=int, required=True, help="Number of towers.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "coherent", "diverse", "interactions"]),
    default="auto",
    help="How features are put together.",
)
@click.option(
    "--tower-module",
    type=click.Choice(["dcn", "dlrm", "dlrm-products"]),
    help="Of the towers, for interactions; by default that of --checkpoint.",
)
@click.option("--balance-ratio", default="1", help="Largest tower over smallest, at most; or free.")
@click.option("--rules", type=_PATH, help="TOML file: categories, entities, together, limits.")
@click.option("--entity", multiple=True, metavar="NAME=FEATURES", help="Features, as names or globs, in one tower.")
@click.option(
    "--refine/--no-refine", cls=_Rare, default=True, help="Improve on the distances themselves; the paper does not."
)
@click.option("--seed", cls=_Rare, default=0, help="Seed of the partitioner.")
@click.option("--out", default="towers.json", type=_Output("tower plan"))
@click.option("--report", type=_Output("folder"), help="Also write a page with pictures into this folder.")
@click.option("--save-affinity", cls=_Rare, type=_Output("matrix"), help="Also keep the collected affinity (.npz).")
@_json
def partition(*, as_json: bool, **options: Any) -> None:
    """Learns which features belong together, and writes towers."""
    from dmt.training.commands.partition import print_partition, run_partition

    found = run_partition(options, _typed())
    emit(json.loads(options["out"].read_text()) if as_json else found, as_json, print_partition)


@main.command(
    epilog="Example: dmt plan demo sharding.memory_gib=16; or for tables without data: dmt plan CONFIG.toml "
    "data.tables=tables.json topology.num_towers=4 --out plan.json",
)
@_config
@click.option("--cluster", metavar="FILE", help="Rates of a file of dmt bench-comms, or of v100, a100, h100.")
@click.option("--out", type=_Output("sharding plan"), help="Also write the plan as JSON.")
@click.option("--all", "everything", is_flag=True, help="Print all ranks and tables.")
@_json
def plan(
    config: str, overrides: tuple[str, ...], *, out: Path | None, everything: bool, as_json: bool, cluster: str | None
) -> None:
    """Places the tables of each tower on its ranks, and says why.

    CONFIG is a training config or the name of a shipped one, planned as the trainer will; with data.tables in it, the
    tables of that file are planned. OVERRIDES are section.key=value.
    """
    from dmt.training.commands.plan import print_plan, run_plan

    found = run_plan(config, overrides, out=out, cluster=cluster)
    emit(found, as_json, print_plan, everything=everything, out=out)


@main.command(
    "what-if", epilog="Example: dmt what-if demo topology.num_towers=16 topology.ranks_per_tower=8 --cluster a100"
)
@_config
@click.option("--cluster", required=True, metavar="FILE", help="File of `dmt bench-comms`, or v100, a100, h100.")
@click.option(
    "--uplink-gbit-per-s", "uplink", type=float, help="Rate of a host's link to others, all its ranks together."
)
@click.option("--write", type=_Output("config"), help="Write the config of the fastest one here (TOML).")
@_json
def what_if(config: str, overrides: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Predicts training steps on a described cluster.

    Of the run as it is, flat, in towers and compressed. CONFIG names data, model, batch size and topology; nothing is
    trained. OVERRIDES are section.key=value.
    """
    from dmt.training.commands.what_if import print_what_if, run_what_if

    emit(run_what_if(config, overrides, **options), as_json, print_what_if)


@main.command("bench-comms", epilog="Example: torchrun --nproc-per-node 2 --no-python dmt bench-comms --out my.toml")
@click.option("--out", type=_PATH, default="cluster.toml", help="The cluster file.")
@_json
def bench_comms(*, out: Path, as_json: bool) -> None:
    """Measures ranks and links of this job, for dmt what-if.

    To be started by torchrun on every host.
    """
    from dmt.training.commands.bench_comms import print_measured, run_bench_comms

    cluster = run_bench_comms(out)
    if cluster is not None:  # the first rank
        emit(cluster, as_json, print_measured, out)


@main.command(epilog="Example: dmt prepare demo data.kind=criteo_tsv data.train_path=day_0.tsv --out prepared")
@_config
@click.option("--out", required=True, type=_PATH, help="The folder; it must not exist.")
@click.option(
    "--ids",
    default="config",
    type=click.Choice(["config", "frequency"]),
    help="As training on the raw rows has them (hashed, or as they are), or by frequency.",
)
@click.option("--min-count", default=1, help="Rarer values share an id, by frequency.")
@click.option("--vocabulary", cls=_Rare, type=_PATH, help="Use the ids of this prepared folder.")
@click.option("--max-rejects", default=0, help="Rows that may be left out, listed in rejects.csv.")
@click.option("--row-group-rows", "group_rows", cls=_Rare, default=32_768, help="Rows of a row group.")
@click.option("--memory-gib", cls=_Rare, default=2.0, help="Memory of DuckDB; about a gibibyte comes on top.")
@_json
def prepare(config: str, overrides: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Writes raw rows as Parquet with ids, to train on.

    Of CSV, TSV, JSON lines, Parquet or Criteo's files; with a manifest, access counts and a summary of the columns.
    data.prepared names the folder. CONFIG's [data] names the rows, their columns and the most rows of a table.
    OVERRIDES are section.key=value.
    """
    from dmt.training.commands.prepare import print_prepared, run_prepare

    emit(run_prepare(config, overrides, **options), as_json, print_prepared, options["out"])


@main.command(epilog="Example: dmt check demo sharding.id_route=global --rows 500")
@_config
@click.option("--rows", "max_rows", type=click.IntRange(8), default=1000, help="Most per table.")
@click.option("--max-ranks", cls=_Rare, type=click.IntRange(4, 64), default=8, help="Processes, at most.")
@click.option("--batch-size", cls=_Rare, type=click.IntRange(1), default=16, help="Rows per rank and step.")
@click.option("--steps", cls=_Rare, type=click.IntRange(2), default=4, help="Training steps.")
@_json
def check(config: str, overrides: tuple[str, ...], *, as_json: bool, **limits: Any) -> None:
    """Checks a run on this machine before a cluster is spent on it.

    CONFIG's model, towers, sharding plan, precision and id route, made small, against the same model in one process:
    forward pass, gradients, a few steps. Data files are opened for their columns, but no row of them is read.
    OVERRIDES are section.key=value. Exit code 1: something does not agree.
    """
    from dmt.testing.ranks import RanksFailedError
    from dmt.training.commands.results import print_report, run_check

    try:
        report = run_check(config, overrides, **limits)
    except RanksFailedError as error:
        click.echo(f"FAILED: {printable(str(error))}", err=True)
        sys.exit(1)
    emit(report, as_json, print_report)
    if not report.agrees:
        sys.exit(1)


@main.command(epilog="Example: dmt export runs/towers -o model.pt2 --tables int8")
@click.argument("checkpoint", type=_PATH)
@click.option("-o", "--out", required=True, type=_Output("program"), help="The .pt2 file.")
@click.option("--tables", default="fp32", type=click.Choice(["fp32", "int8", "int4"]), help="Their format.")
@click.option("--data", metavar="PATH", help="A file with the run's columns, where its own data are gone.")
@_function
@_json
def export(
    *, checkpoint: Path, out: Path, tables: Any, data: str | None, function: tuple[str, ...], as_json: bool
) -> None:
    """Writes a trained model as a program for plain PyTorch.

    CHECKPOINT is the output_dir of a run, or a checkpoint, of any layout. The file holds a manifest, too.
    """
    from dmt.training.commands.results import print_exported
    from dmt.training.serving.export import export_run

    exported = export_run(checkpoint, out, tables=tables, data_path=data, functions=function)
    emit(exported, as_json, print_exported, out)


@main.command(epilog="Example: dmt score runs/towers --data tomorrow.parquet -o predictions.parquet")
@click.argument("model", type=_PATH)
@click.option("--data", metavar="PATH", help="Rows to score; by default the run's evaluation rows.")
@click.option("-o", "--out", required=True, type=_Output("Parquet"), help="The Parquet file.")
@click.option("--batch-size", cls=_Rare, default=4096, help="Rows in one go.")
@_function
@_json
def score(
    *, model: Path, data: str | None, out: Path, batch_size: int, function: tuple[str, ...], as_json: bool
) -> None:
    """Writes the predictions of a model for rows of files.

    MODEL is the output_dir of a run, a checkpoint, or a .pt2 file of dmt export. The label column may be absent.
    """
    from dmt.training.commands.results import print_scored
    from dmt.training.serving.score import score as score_rows

    scored = score_rows(model, out, data_path=data, batch_size=batch_size, functions=function)
    record = {"rows": scored.num_rows, **(dataclasses.asdict(scored.metrics) if scored.metrics else {})}
    emit(record if as_json else scored, as_json, print_scored, out)


@main.command(epilog="Example: dmt complexity --arch dlrm --towers 8 --tower-dim 64")
@click.option("--arch", required=True, help="dlrm or dcn.")
@click.option("--towers", type=int, help="Number of towers; the flat model without it.")
@click.option("--tower-dim", type=int, help="D; by default 64 for dlrm, 128 for dcn.")
@click.option("--c", default=1, help="Outputs per feature (dlrm).")
@click.option("--p", default=0, help="Outputs per tower (dlrm).")
@_json
def complexity(*, arch: str, towers: int | None, tower_dim: int | None, c: int, p: int, as_json: bool) -> None:
    """Counts MFLOPs, parameters and ratio of a paper-sized model.

    MFLOPs are per sample; the sizes are those for Criteo-1TB.
    """
    from dmt.models.complexity import Complexity, paper_complexity

    def show(counted: Complexity) -> None:
        rows = [
            ["MFLOPs/sample", f"{counted.mflops_per_sample:.2f}"],
            ["parameters", f"{counted.parameters:,} ({counted.parameters / 1e9:.2f} G)"],
            ["compression ratio", f"{counted.compression_ratio:.2f}"],
        ]
        Console().print(make_table(["", f"{arch}, {towers} towers" if towers else arch], rows))

    emit(paper_complexity(arch, towers, tower_dim=tower_dim, c=c, p=p), as_json, show)


def emit(record: Any, as_json: bool, show: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Prints the result of a command: as JSON, in which undefined numbers are null, or by ``show``.

    A result is plain data, a dataclass, a list of these, or has a method ``to_record``.
    """
    if not as_json:
        show(record, *arguments, **options)
        return

    def plain(value: Any) -> Any:
        if hasattr(value, "to_record"):
            return plain(value.to_record())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {entry.name: plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        if isinstance(value, Path):
            return str(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    click.echo(json.dumps(plain(record), indent=1))


def _typed() -> str:
    # As text that a plan can hold: an argument is any bytes.
    return printable(shlex.join(["dmt", *sys.argv[1:]]))
