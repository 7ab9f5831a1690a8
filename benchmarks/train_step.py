"""Step times of flat TorchRec, TorchRec's towers and this library, side by side on emulated hosts.

    sudo python -m benchmarks.train_step --hosts 2 --ranks-per-host 2 --mbit 200 --contenders 'dmt-*' --out steps.json

All contenders live in one job and take turns, in a new random order each round, so that disturbances of the machine
affect all of them. Emulated hosts need root; ``--no-hosts`` runs the job on this machine's own network, for
development. `benchmarks.steps.contenders` explains the names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.emulation.hosts import EmulatedHosts
from benchmarks.emulation.wire import WireCheck, measure_wire
from benchmarks.report import about
from benchmarks.steps.contenders import CONTENDERS, Contender, select
from benchmarks.steps.measured import measure_run
from benchmarks.steps.report import times_table
from benchmarks.steps.setting import Ids, Setting
from dmt.errors import InputError
from dmt.files import atomic_write

__all__ = ["about_job", "main", "run_setting", "write_json"]

_ROOT = Path(__file__).resolve().parent.parent
_MODULE = ["-m", "benchmarks.steps.rank"]
# The same for all contenders. glibc gives every block above 32 MB back to the system at once, and the pages of the next
# one are zeroed again: at these sizes that is a fifth of all time on a core.
_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
_TIMEOUT = 6 * 3600.0


def run_setting(
    setting: Setting,
    contenders: Sequence[Contender],
    out: Path,
    *,
    emulated: bool = True,
    timeout: float = _TIMEOUT,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Runs one job of all contenders.

    Args:
        setting: its sizes.
        contenders: what to compare.
        out: a JSON file that holds the run so far after every round, and in the end.
        emulated: whether on hosts of their own; else the hosts of the setting are played in name only, at full rate.
        timeout: seconds after which the job is killed.
        deadline: seconds since 1970 after which no further round begins.

    Returns:
        The run: ``setting``, ``wire`` and ``contenders``, as in ``out``.

    Raises:
        InputError: emulated hosts cannot be had, or a rate is asked for without them.
        RuntimeError: the job failed, which it does where a contender computes what it should not.
    """
    if not emulated and setting.mbit_per_s is not None:
        raise InputError(
            f"run_setting: mbit_per_s={setting.mbit_per_s} needs emulated hosts. Set it to None, or run as root with "
            "them."
        )
    wire: WireCheck | None = None
    with tempfile.TemporaryDirectory(prefix="dmt-steps-") as folder:
        spec = Path(folder, "spec.json")
        names = [contender.name for contender in contenders]
        out = out.resolve()
        described = {"setting": asdict(setting), "contenders": names, "out": str(out), "deadline": deadline}
        spec.write_text(json.dumps(described))
        if emulated:
            with EmulatedHosts(setting.hosts, mbit_per_s=setting.mbit_per_s) as hosts:
                if setting.hosts > 1:
                    wire = measure_wire(hosts, setting.ranks_per_host)
                hosts.torchrun([*_MODULE, str(spec)], ranks_per_host=setting.ranks_per_host, timeout=timeout, env=_ENV)
        else:
            _run_here(setting, spec, timeout)
    run: dict[str, Any] = json.loads(out.read_text())
    run["wire"] = None if wire is None else asdict(wire)
    write_json(out, run)
    return run


def _run_here(setting: Setting, spec: Path, timeout: float) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={setting.world_size}",
        *_MODULE,
    ]
    done = subprocess.run([*command, str(spec)], cwd=_ROOT, env=_ENV | os.environ, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"The job of the step benchmark failed with exit code {done.returncode}; see above.")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(value, indent=1) + "\n")


def about_job(command: str) -> dict[str, Any]:
    """What a job is made by, on and with."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return about(command, cores=cores, memory_gib=round(memory / 2**30), load_average=os.getloadavg(), environment=_ENV)


@click.command(context_settings={"show_default": True})
@click.option("--hosts", type=click.IntRange(1), multiple=True, default=[2], help="Emulated hosts; a job for each.")
@click.option("--ranks-per-host", type=click.IntRange(1), default=2, help="Ranks on each.")
@click.option(
    "--mbit",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    help="Rate of each uplink, Mbit/s; a job for each; left out: no limit.",
)
@click.option("--batch", type=click.IntRange(1), default=4096, help="Samples per rank and step.")
@click.option("--rounds", type=click.IntRange(1), default=7, help="Measured turns of each contender.")
@click.option("--warm-up-rounds", type=click.IntRange(0), default=1, help="Turns before them.")
@click.option("--steps-per-turn", type=click.IntRange(1), default=2, help="Steps in a turn.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of weights, batches and order.")
@click.option("--rows-cap", type=click.IntRange(1), default=40_000, help="Most rows of a table.")
@click.option("--ids", type=click.Choice(get_args(Ids)), default="skewed", help="With Criteo's skew, or evenly.")
@click.option("--group", type=click.IntRange(1), default=1, help="Samples of a request, which share the user's ids.")
@click.option("--history", type=click.IntRange(0), multiple=True, default=[0], help="Ids of a history; a job for each.")
@click.option("--contenders", multiple=True, default=["*"], help="Name or pattern; may be given several times.")
@click.option("--emulated/--no-hosts", default=True, help="Whether on emulated hosts (needs root).")
@click.option("--list", "only_list", is_flag=True, help="Print the names of contenders and stop.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("runs/train_step.json"))
def main(
    *,
    hosts: tuple[int, ...],
    mbit: tuple[float, ...],
    history: tuple[int, ...],
    contenders: tuple[str, ...],
    emulated: bool,
    only_list: bool,
    out: Path,
    **sizes: Any,
) -> None:
    """Measures training steps of contenders and writes JSON."""
    if only_list:
        click.echo("\n".join(CONTENDERS))
        return
    try:
        common, each = {"batch_size": sizes.pop("batch"), **sizes}, product(mbit or (None,), hosts, history)
        settings = [Setting(mbit_per_s=rate, hosts=number, history=length, **common) for rate, number, length in each]
        runs = [run_setting(setting, select(contenders), out, emulated=emulated) for setting in settings]
    except InputError as error:
        raise click.UsageError(str(error)) from error
    made = about_job(f"python -m benchmarks.train_step {' '.join(sys.argv[1:])}")
    write_json(out, {"about": made, "runs": runs})
    for run in runs:
        click.echo(times_table(measure_run(run, cores=made["cores"])))
    click.echo(out)


if __name__ == "__main__":
    main()
