"""Training on ranks of this machine, for commands that train: `train_here`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.records import read_result

__all__ = ["train_here"]

# torchrun kills ranks that have not saved 30 s after Ctrl-C.
_SAVING_S = 40.0
# A demo that is killed takes torchrun along, which takes its ranks along. Both say who they are: asked for its parent,
# a process that is still starting when that one ends would name the one that adopts orphans.
_TORCHRUN = (
    "import os, sys; from dmt.processes import end_with; end_with(int(sys.argv.pop(1))); "
    "os.environ['DMT_LAUNCHER'] = str(os.getpid()); "
    "from torch.distributed.elastic.multiprocessing.api import SignalException\n"
    "from torch.distributed.run import main\n"
    "try: main()\n"
    "except SignalException as stop: sys.exit(128 + stop.sigval)"  # a rank has said what is to be said
)


def train_here(config: TrainingConfig) -> dict[str, Any]:
    """Trains a config on ranks of this machine; its table goes to ``train.log``, the rest to the terminal."""
    folder = Path(config.train.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(to_toml(config), encoding="utf-8")
    code = _torchrun(folder / "run.toml", config.topology.build().world_size, folder / "train.log")
    if code:
        raise InputError(f"Training {config.model.arch} ended with exit code {code}; the reason is printed above.")
    return read_result(folder)


def _torchrun(config: Path, ranks: int, log: Path) -> int:
    launcher = [sys.executable, "-c", _TORCHRUN, str(os.getpid())]
    command = [*launcher, "--standalone", f"--nproc-per-node={ranks}", "-m", "dmt.training", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with log.open("w") as stdout, subprocess.Popen(command, stdout=stdout, env=environment) as run:
        try:
            return run.wait()
        except KeyboardInterrupt:
            # The terminal has told torchrun too: its ranks save what they have trained, and a second signal would end
            # them before.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            with suppress(subprocess.TimeoutExpired):
                run.wait(_SAVING_S)
            signal.signal(signal.SIGINT, before)
            run.terminate()  # nothing, where it has ended
            raise
        except BaseException:
            run.terminate()
            raise
