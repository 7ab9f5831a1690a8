"""`run_agents`: runs the agents of a job, one per host, and kills all of them if one fails or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

__all__ = ["run_agents"]

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class _Agent:
    host: int
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_agents(commands: Sequence[Sequence[str]], *, timeout: float, env: Mapping[str, str]) -> None:
    """Runs one command per host from the repository's root, and waits for all; prints the output of host 0.

    No command outlives the call. The caller must end processes that a command starts in a new session.

    Args:
        commands: the command of each host, with arguments.
        timeout: seconds after which all commands are killed.
        env: environment of the commands.

    Raises:
        RuntimeError: a command failed; the message ends with the last lines of every host.
        TimeoutError: the commands did not end in time.
    """
    agents: list[_Agent] = []
    with tempfile.TemporaryDirectory(prefix="dmt-agents-") as folder:
        try:
            for host, command in enumerate(commands):
                agents.append(_start(host, command, env, Path(folder, f"host{host}.log")))
            _watch(agents, timeout)
        finally:
            for agent in agents:
                agent.kill()


def _start(host: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> _Agent:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Agent(host=host, process=process, log=log)


def _watch(agents: Sequence[_Agent], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with agents[0].log.open(errors="replace") as output:
        while True:
            codes = [agent.process.poll() for agent in agents]
            _pass_on(output)
            failed = [host for host, code in enumerate(codes) if code]
            if failed:
                raise RuntimeError(
                    f"The job failed on host {failed[0]} (exit code {codes[failed[0]]}).{_last_lines(agents)}"
                )
            running = [host for host, code in enumerate(codes) if code is None]
            if not running:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Host {running[0]} is still running after {timeout:g} s. Raise timeout.{_last_lines(agents)}"
                )
            time.sleep(0.05)


def _pass_on(output: TextIO) -> None:
    text = output.read()
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _last_lines(agents: Sequence[_Agent], number: int = 60) -> str:
    texts = []
    for agent in agents:
        lines = agent.log.read_text(errors="replace").splitlines()[-number:]
        texts.append("\n".join([f"\nLast lines of host {agent.host}:", *lines]))
    return "\n".join(texts)
