"""``torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml [section.key=value ...]``: trains one model."""

# ruff: noqa: E402
from __future__ import annotations

import os

# Read before the slow imports: after the launcher has died, getppid() names the process that adopts orphans.
_PARENT = int(os.environ.get("DMT_LAUNCHER", os.getppid()))

import signal
import sys
from functools import cache
from pathlib import Path

import click
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dmt.errors import InputError, ReplicaMismatchError
from dmt.testing.ranks import end_with
from dmt.training.commands import emit, show_results
from dmt.training.config import load_config
from dmt.training.console import quiet_libraries, say_last


@click.command(epilog="Example: torchrun --nproc-per-node 4 -m dmt.training demo train.max_steps=200 model.arch=dlrm")
@click.argument("config")
@click.argument("overrides", nargs=-1)
def main(config: str, overrides: tuple[str, ...]) -> None:
    """Trains the model that CONFIG (a TOML file or a shipped config) describes.

    OVERRIDES replace single values, as section.key=value.
    """
    rank = int(os.environ.get("RANK", "0"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Without this, ranks would keep training after their torchrun is killed.
        end_with(_PARENT)
    quiet_libraries(rank=rank)
    load = cache(lambda: load_config(config, overrides))
    try:
        from dmt.training.train import train

        result = train(load)
    except (InputError, ReplicaMismatchError) as error:
        # Drop the traceback: torchrun also prints the exception that is recorded here.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        say_last(f"error: {error}", rank=rank, launcher=_PARENT)
        get_error_handler().record_exception(error)
        sys.exit(2)
    except KeyboardInterrupt:
        # Ctrl-C came before the first step, or after the last one, which has been saved.
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        get_error_handler().record_exception(error)
        raise
    settings = load()
    if "stopped_by" in result:
        if rank == 0:
            say_last(_how_to_resume(Path(settings.train.output_dir), result["stopped_by"]), rank=rank, launcher=_PARENT)
        sys.exit(128 + result["signal"])
    if rank == 0 and "DMT_LAUNCHER" not in os.environ:  # a demo shows its runs side by side
        emit(show_results({settings.model.name: result}), as_json=False)
        print(f"Results: {settings.train.output_dir}/result.json   curves: {settings.train.output_dir}/metrics.jsonl")


def _how_to_resume(output_dir: Path, stopped_by: str) -> str:
    """Returns the last line that a run prints after a signal has stopped it."""
    from dmt.training.checkpoints.store import checkpoints

    saved = checkpoints(output_dir / "checkpoint")
    what = f"the newest checkpoint is {saved[0]}" if saved else "nothing was saved yet"
    return f"stopped by {stopped_by}: {what}. To resume, run the same command again."


if __name__ == "__main__":
    main()
