"""``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``: trains one model."""

# ruff: noqa: E402
from __future__ import annotations

import os

# Before what takes seconds to load: whoever asks after its parent has died is told of the one that adopts orphans.
_PARENT = int(os.environ.get("DMT_LAUNCHER", os.getppid()))

import signal
import sys
import time

import click
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import printable
from dmt.processes import end_with, say_after
from dmt.training.config import TrainingConfig, load_config
from dmt.training.console import quiet_libraries

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
        # In the exception itself: torchrun prints it too.
        error.args = (printable(str(error)),)
        line = f"{'' if rank == 0 else f'[rank {rank}] '}error: {error}"
        print(line, file=sys.stderr, flush=True)
        if rank == 0:
            _say_last(line)
        # torchrun ends with a report of its own; this puts the reason at its end too, without a traceback, which says
        # nothing to somebody who has mistyped a key.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        get_error_handler().record_exception(error)
        sys.exit(2)
    except KeyboardInterrupt:
        # Before the first step, or after the last one, which is saved.
        if rank == 0 and settings is not None:
            from dmt.training.resume import say_stopped

            say_stopped(settings.train, "Ctrl-C")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        # When another rank dies, this one meets a broken connection. The traceback first, and what to do at its end.
        sys.excepthook(*sys.exc_info())  # torch's, which begins its lines with the rank
        get_error_handler().record_exception(error)
        if settings is not None and rank < 2:  # one of the two is alive, whichever died
            from dmt.training.resume import say_stopped

            say_stopped(settings.train, "an error")
        sys.exit(1)
    if "stopped_at" in result:
        if rank == 0:
            _say_last(result["line"])
        sys.exit(128 + result["signal"])
    if rank == 0:
        from dmt.training.console import print_summary

        print_summary({settings.model.name: result})
        folder = settings.train.output_dir
        print(f"Results: {printable(folder)}/result.json   curves: tensorboard --logdir {printable(folder)}")


def _say_last(line: str) -> None:
    """Prints a line again below the report with which torchrun ends, unless it starts the ranks again."""
    environ = os.environ
    is_last = environ.get("TORCHELASTIC_RESTART_COUNT") == environ.get("TORCHELASTIC_MAX_RESTARTS")
    # A demo's torchrun has no report.
    if "TORCHELASTIC_RUN_ID" in environ and is_last and "DMT_LAUNCHER" not in environ:
        say_after(_PARENT, line)


if __name__ == "__main__":
    main()
