"""The launch files: Slurm's script under a stand-in for Slurm, and the commands of both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dmt.training.config import load_config, to_toml
from tests.ranks import wait_until
from tests.training.small import small

LAUNCH = Path(__file__).parent.parent.parent / "examples" / "launch"
STEPS = 400

# Starts every task of the job here and ends with the highest exit code. As srun does, it kills them when stopped.
SRUN = """
import os, signal, subprocess, sys
command = sys.argv[3:]
assert sys.argv[1:3] == ["--kill-on-bad-exit=0", "--cpus-per-task=1"] and command[:2] == ["bash", "-c"], sys.argv
number = int(os.environ["SLURM_NTASKS"])
local = number // int(os.environ["SLURM_NNODES"])
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % local)})
    for i in range(number)
]
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("127.0.0.1\\nsecond")
else:
    open("asked", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


def test_slurms_script_is_bash() -> None:
    script = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert (asked["signal"], int(asked["ntasks-per-node"])) == ("TERM@300", int(asked["gpus-per-node"]))


def test_the_command_of_the_pods_is_one_that_torchrun_knows(tmp_path: Path) -> None:
    text = (LAUNCH / "kubernetes.yaml").read_text()
    arguments = re.findall(r"^ {12}- (\S+)$", text.partition("args:")[2].partition("resources:")[0], re.MULTILINE)
    run = get_args_parser().parse_args([a.replace("$(JOB_COMPLETION_INDEX)", "3") for a in arguments])
    assert (run.nnodes, run.module, run.training_script) == (
        re.search(r"completions: (\d+)", text).group(1),  # type: ignore[union-attr]
        True,
        "dmt.training",
    )
    assert (run.master_addr, run.node_rank) == ("dmt-0.dmt", 3)
    assert f"nvidia.com/gpu: {run.nproc_per_node}" in text
    (tmp_path / "run.toml").write_text(to_toml(small()))
    assert load_config(tmp_path / "run.toml", run.training_script_args[1:]).train.output_dir == "/runs/first"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_job_that_slurm_stops_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """Two machines of one rank. The tasks are told as Slurm would, while the job trains."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(f"#!{sys.executable}{text}")
        (tmp_path / name).chmod(0o755)
    few = {"num_rows": 32 * STEPS, "num_eval_rows": 64}
    train = {"output_dir": str(tmp_path / "run"), "log_every": 1, "save_every": 100_000, "batch_size": 16}
    config = small("dmt-dlrm", synthetic=few, train=train, topology={"num_towers": 2, "ranks_per_tower": 1})
    (tmp_path / "run.toml").write_text(to_toml(config))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(LAUNCH.parent.parent),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "two",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
    }
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "run.toml", "train.prefetch_ids=true"]
    curve = tmp_path / "run" / "metrics.jsonl"
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
        try:
            assert wait_until(lambda: curve.exists() and len(curve.read_text().splitlines()) > 2, 200)
            for task in (tmp_path / "tasks").read_text().split():
                os.kill(int(task), signal.SIGTERM)
            assert job.wait(100) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()[-3000:]
        finally:
            job.kill()
    assert (tmp_path / "asked").read_text() == f"requeue {os.getpid()}\n"
    stopped = len(curve.read_text().splitlines())
    assert stopped < STEPS

    environment["SLURM_RESTART_COUNT"] = "1"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in curve.read_text().splitlines()]
    assert steps == [*range(1, STEPS + 1), STEPS]
