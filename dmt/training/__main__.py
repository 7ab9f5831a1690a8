"""``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``: trains one model."""

# ruff: noqa: E402
from __future__ import annotations

import os

# Before what takes seconds to load: whoever asks after its parent has died is told of the one that adopts orphans.
_PARENT = int(os.environ.get("DMT_LAUNCHER", os.getppid()))

import signal
import subprocess
import sys
import time
from pathlib import Path

import click
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dmt.errors import InputError, ReplicaMismatchError
from dmt.testing.ranks import end_with
from dmt.training.config import load_config
from dmt.training.console import LET_RANK_0_SPEAK_S, print_summary, quiet_libraries

EXAMPLE = "torchrun --nproc-per-node 4 -m dmt.training demo train.max_steps=200 model.arch=dlrm"
_WHEN_IT_HAS_ENDED = """
import os, select, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except OSError:  # it has ended, or the system has no such call
    pass
print(sys.argv[2], file=sys.stderr)
"""


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
    try:
        settings = load_config(config, overrides)
        from dmt.training.train import train

        result = train(settings)
    except (InputError, ReplicaMismatchError) as error:
        if rank != 0:
            time.sleep(LET_RANK_0_SPEAK_S)
        # In the exception itself, without a traceback: torchrun prints it too.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        _say_last(f"{'' if rank == 0 else f'[rank {rank}] '}error: {error}")
        get_error_handler().record_exception(error)
        sys.exit(2)
    except KeyboardInterrupt:
        # Before the first step, or after the last one, which is saved.
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        get_error_handler().record_exception(error)
        raise
    if "stopped_by" in result:
        if rank == 0:
            _say_last(_how_to_go_on(Path(settings.train.output_dir), result["stopped_by"]))
        sys.exit(128 + result["signal"])
    if rank == 0 and "DMT_LAUNCHER" not in os.environ:  # a demo shows its runs side by side
        print_summary({settings.model.name: result})
        folder = settings.train.output_dir
        print(f"Results: {folder}/result.json   curves: {folder}/metrics.jsonl")


def _say_last(text: str) -> None:
    """Prints a line, and prints it again when torchrun has ended, which adds dozens of lines of its own."""
    print(text, file=sys.stderr, flush=True)
    attempt, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if attempt is not None and attempt == most and "DMT_LAUNCHER" not in os.environ:
        # A process that torchrun does not know, and does not end.
        command = [sys.executable, "-I", "-S", "-c", _WHEN_IT_HAS_ENDED, str(_PARENT), text]
        subprocess.Popen(command, start_new_session=True)


def _how_to_go_on(output_dir: Path, stopped_by: str) -> str:
    """Returns the last line of a run that a signal ended."""
    from dmt.training.checkpoints.store import checkpoints

    saved = checkpoints(output_dir / "checkpoint")
    what = f"the newest checkpoint is {saved[0]}" if saved else "nothing was saved yet"
    return f"stopped by {stopped_by}: {what}. To resume, run the same command again."


if __name__ == "__main__":
    main()
