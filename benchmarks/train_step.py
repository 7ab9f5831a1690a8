"""Compares step times of flat TorchRec, TorchRec's towers and this library on emulated hosts.

    sudo python -m benchmarks.train_step --hosts 2 --ranks-per-host 2 --mbit 200 --contenders 'dmt-*' --out steps.json

All contenders share one job and take turns, in a new random order each round, so that disturbances of the machine
affect all of them. Emulated hosts need root. `benchmarks.steps.contenders` explains the names.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.emulation.hosts import EmulatedHosts
from benchmarks.emulation.wire import measure_wire
from benchmarks.report import about, write_json
from benchmarks.steps.contenders import CONTENDERS, Contender, select
from benchmarks.steps.measured import measure_run
from benchmarks.steps.report import times_table
from benchmarks.steps.setting import Ids, Setting
from dmt.errors import InputError

__all__ = ["about_job", "main", "run_setting"]

_MODULE = ["-m", "benchmarks.steps.rank"]
# Equal for all contenders. By default glibc returns every freed block above 32 MB to the system at once, which then has
# to zero the pages of the next one: at these sizes, this takes a fifth of the CPU time.
_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
_TIMEOUT = 6 * 3600.0


def run_setting(
    setting: Setting, contenders: Sequence[Contender], out: Path, *, deadline: float | None = None
) -> dict[str, Any]:
    """Runs a job with all contenders on emulated hosts.

    Args:
        setting: sizes of the job.
        contenders: the contenders to compare.
        out: JSON file of the run, updated after every round and at the end.
        deadline: seconds since 1970 after which no round begins; None: no limit.

    Returns:
        The run: ``setting``, ``wire`` and ``contenders``, as in ``out``.

    Raises:
        InputError: hosts cannot be emulated here.
        RuntimeError: the job failed, for example because a contender's losses are wrong.
        TimeoutError: the job did not end in six hours.
    """
    with tempfile.TemporaryDirectory(prefix="dmt-steps-") as folder:
        spec = Path(folder, "spec.json")
        names = [contender.name for contender in contenders]
        out = out.resolve()
        described = {"setting": asdict(setting), "contenders": names, "out": str(out), "deadline": deadline}
        spec.write_text(json.dumps(described))
        with EmulatedHosts(setting.hosts, mbit_per_s=setting.mbit_per_s) as hosts:
            wire = measure_wire(hosts, setting.ranks_per_host) if setting.hosts > 1 else None
            hosts.torchrun([*_MODULE, str(spec)], ranks_per_host=setting.ranks_per_host, timeout=_TIMEOUT, env=_ENV)
    run: dict[str, Any] = json.loads(out.read_text())
    run["wire"] = None if wire is None else asdict(wire)
    write_json(out, run)
    return run


def about_job(command: str) -> dict[str, Any]:
    """Returns the provenance of a job: `about`, with cores, memory, load and environment of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return about(command, cores=cores, memory_gib=round(memory / 2**30), load_average=os.getloadavg(), environment=_ENV)


@click.command(context_settings={"show_default": True})
@click.option("--hosts", type=click.IntRange(1), multiple=True, default=[2], help="Number of hosts; a job for each.")
@click.option("--ranks-per-host", type=click.IntRange(1), default=2, help="Ranks on each host.")
@click.option(
    "--mbit",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    help="Rate of each uplink, Mbit/s; a job for each; left out: no limit.",
)
@click.option("--batch", type=click.IntRange(1), default=4096, help="Samples per rank and step.")
@click.option("--rounds", type=click.IntRange(1), default=7, help="Measured turns of each contender.")
@click.option("--warm-up-rounds", type=click.IntRange(0), default=1, help="Turns before the measured ones.")
@click.option("--steps-per-turn", type=click.IntRange(1), default=2, help="Steps in a turn.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of weights, batches and order.")
@click.option("--rows-cap", type=click.IntRange(1), default=40_000, help="Most rows of a table.")
@click.option("--ids", type=click.Choice(get_args(Ids)), default="skewed", help="As skewed as Criteo's ids, or even.")
@click.option("--contenders", multiple=True, default=["*"], help="Name or pattern; may be given several times.")
@click.option("--list", "only_list", is_flag=True, help="Print the names of contenders and stop.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("runs/train_step.json"))
def main(
    *,
    hosts: tuple[int, ...],
    mbit: tuple[float, ...],
    contenders: tuple[str, ...],
    only_list: bool,
    out: Path,
    **sizes: Any,
) -> None:
    """Measures training steps of contenders on emulated hosts, prints a table, and writes JSON. Needs root."""
    if only_list:
        click.echo("\n".join(CONTENDERS))
        return
    try:
        common, each = {"batch_size": sizes.pop("batch"), **sizes}, product(mbit or (None,), hosts)
        settings = [Setting(mbit_per_s=rate, hosts=number, **common) for rate, number in each]
        runs = [run_setting(setting, select(contenders), out) for setting in settings]
    except InputError as error:
        raise click.UsageError(str(error)) from error
    made = about_job(f"python -m benchmarks.train_step {' '.join(sys.argv[1:])}")
    write_json(out, {"about": made, "runs": runs})
    for run in runs:
        click.echo(times_table(measure_run(run, cores=made["cores"])))
    click.echo(out)


if __name__ == "__main__":
    main()
