"""One turn of a contender on this rank: clocks of every step, bytes on the uplink, peak memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.emulation.hosts import sent_bytes
from benchmarks.steps.build import Built
from dmt.traffic import TrafficMeter

__all__ = ["Clocks", "Turn", "run_turn"]


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Seconds on several clocks, since some moment or between two."""

    seconds: float
    """On the wall."""
    cpu: float
    """Seconds of cores used by all threads of this process."""
    main_cpu: float
    """Seconds of a core used by the main thread."""
    no_core: float
    """The main thread could have run but had no core."""

    @property
    def waiting(self) -> float:
        """The main thread slept: it waited for others, which here is communication."""
        return self.seconds - self.main_cpu - self.no_core

    @classmethod
    def read(cls) -> Clocks:
        """The clocks now; to be called on the main thread."""
        # The second number: nanoseconds spent waiting on a run queue.
        delay = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        return cls(
            seconds=time.perf_counter(),
            cpu=time.process_time(),
            main_cpu=time.thread_time(),
            no_core=delay / 1e9,
        )

    def since(self, earlier: Clocks) -> Clocks:
        """The time from an earlier reading to this one."""
        return Clocks(
            seconds=self.seconds - earlier.seconds,
            cpu=self.cpu - earlier.cpu,
            main_cpu=self.main_cpu - earlier.main_cpu,
            no_core=self.no_core - earlier.no_core,
        )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Measurements of one rank in one turn."""

    steps: list[Clocks]
    uplink_bytes: int | None
    """Sent by this host in the whole turn; None off emulated hosts."""
    peak_bytes: int | None
    """Memory above what the process had before; None where it was not asked for."""


def run_turn(built: Built, num_steps: int, *, with_memory: bool, meter: TrafficMeter | None = None) -> Turn:
    """Trains a few steps between two barriers, the first under a meter if there is one. Collective."""
    before = _start_peak() if with_memory else None

    def steps() -> list[Clocks]:
        readings = [Clocks.read()]
        for number in range(num_steps):
            with meter if meter is not None and number == 0 else nullcontext():
                built.step()
            readings.append(Clocks.read())
        return [later.since(earlier) for earlier, later in pairwise(readings)]

    clocks, uplink = _between_barriers(steps)
    peak = None if before is None else _status_bytes("VmHWM") - before
    return Turn(steps=clocks, uplink_bytes=uplink, peak_bytes=peak)


def _between_barriers(work: Callable[[], list[Clocks]]) -> tuple[list[Clocks], int | None]:
    dist.barrier()
    before = _sent()
    clocks = work()
    # Others may be in the middle of a step, and what they send is part of the turn.
    dist.barrier()
    after = _sent()
    return clocks, None if before is None or after is None else after - before


def _sent() -> int | None:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return None if interface is None else sent_bytes(interface)


def _start_peak() -> int:
    """Begins a new peak, and returns the memory in use."""
    # Freed memory that the allocator keeps would hide what the turn takes.
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(kilobytes)
