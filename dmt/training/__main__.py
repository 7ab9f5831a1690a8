"""``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``: trains one model."""

# ruff: noqa: E402
from __future__ import annotations

import os

# Before what takes seconds to load: whoever asks after its parent has died is told of the one that adopts orphans.
_PARENT = int(os.environ.get("DMT_LAUNCHER", os.getppid()))

import shlex
import signal
import sys
import time
from pathlib import Path

import click
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import printable
from dmt.processes import end_with, say_after
from dmt.training.config import TrainingConfig, load_config
from dmt.training.console import print_summary, quiet_libraries

EXAMPLE = "torchrun --nproc-per-node 4 -m dmt.training demo train.max_steps=200 model.arch=dlrm"
# Ranks that find the same fault as rank 0 leave it time to say so before torchrun stops everyone.
_LET_RANK_0_SPEAK_S = 10


@click.command(epilog=f"Example: {EXAMPLE}")
@click.argument("config")
@click.argument("overrides", nargs=-1)
def main(config: str, overrides: tuple[str, ...]) -> None:
    """Trains the model that CONFIG (a TOML file or a shipped config) describes.

    OVERRIDES replace single values, as section.key=value.
    """
    rank = int(os.environ.get("RANK", "0"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed would leave its ranks training.
        end_with(_PARENT)
    quiet_libraries(rank=rank)
    settings: TrainingConfig | None = None
    try:
        settings = load_config(config, overrides)
        from dmt.training.train import train

        result = train(settings)
    except (InputError, ReplicaMismatchError) as error:
        if rank != 0:
            time.sleep(_LET_RANK_0_SPEAK_S)
        # In the exception itself, without a traceback: torchrun prints it too.
        error.args = (printable(str(error)),)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        _say_last(f"{'' if rank == 0 else f'[rank {rank}] '}error: {error}", rank)
        get_error_handler().record_exception(error)
        sys.exit(2)
    except (KeyboardInterrupt, Exception) as error:
        # Ctrl-C comes here before the first step, or after the last one, which is saved. Another rank that dies leaves
        # this one with a broken connection: the traceback first, and what to do at its end.
        is_stop = isinstance(error, KeyboardInterrupt)
        if not is_stop:
            sys.excepthook(*sys.exc_info())  # torch's, which begins its lines with the rank
            get_error_handler().record_exception(error)
        if settings is not None and rank < (1 if is_stop else 2):  # one of the two is alive, whichever died
            print(_how_to_go_on(settings, "Ctrl-C" if is_stop else "an error"), file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT if is_stop else 1)
    if "stopped_by" in result:
        if rank == 0:
            _say_last(_how_to_go_on(settings, result["stopped_by"]), rank)
        sys.exit(128 + result["signal"])
    if rank == 0:
        print_summary({settings.model.name: result})
        folder = printable(settings.train.output_dir)
        print(f"Results: {folder}/result.json   curves: {folder}/metrics.jsonl")


def _say_last(line: str, rank: int) -> None:
    """Prints a line, on rank 0 again below the report with which torchrun ends unless it starts the ranks again."""
    # On stderr: a demo keeps what its runs print on stdout in a file.
    print(line, file=sys.stderr, flush=True)
    environ = os.environ
    is_last = environ.get("TORCHELASTIC_RESTART_COUNT") == environ.get("TORCHELASTIC_MAX_RESTARTS")
    # A demo's torchrun has no report.
    if rank == 0 and "TORCHELASTIC_RUN_ID" in environ and is_last and "DMT_LAUNCHER" not in environ:
        say_after(_PARENT, line)


def _how_to_go_on(settings: TrainingConfig, stopped_by: str) -> str:
    """The last line of a run that a signal or an error ended: its newest checkpoint, and the command to go on."""
    from dmt.training.checkpoints import checkpoints

    saved = checkpoints(Path(settings.train.output_dir) / "checkpoint")
    what = f"the newest checkpoint is {saved[0]}. To go on" if saved else "nothing was saved yet. To start again"
    command = "the same command again"
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE") == "1":
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        command = shlex.join(["torchrun", "--nproc-per-node", ranks, "-m", "dmt.training", *sys.argv[1:]])
    return printable(f"stopped by {stopped_by}: {what}: {command}")


if __name__ == "__main__":
    main()
