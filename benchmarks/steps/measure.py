"""`run_turn`: measures a turn of a contender on this rank: clocks of every step, bytes on the uplink, peak memory."""

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
    """Seconds on several clocks, from a fixed moment or between two readings."""

    seconds: float
    """Elapsed seconds."""
    cpu: float
    """CPU seconds of all threads of this process."""
    main_cpu: float
    """CPU seconds of the main thread."""
    no_core: float
    """Seconds in which the main thread was ready to run but had no core."""

    @property
    def waiting(self) -> float:
        """Seconds in which the main thread slept, which here means that it waited for communication."""
        return self.seconds - self.main_cpu - self.no_core

    @classmethod
    def read(cls) -> Clocks:
        """Returns the clocks now; call it on the main thread."""
        # The second number is nanoseconds of waiting in a run queue.
        delay = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        return cls(
            seconds=time.perf_counter(),
            cpu=time.process_time(),
            main_cpu=time.thread_time(),
            no_core=delay / 1e9,
        )

    def since(self, earlier: Clocks) -> Clocks:
        """Returns the seconds from an earlier reading to this one."""
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
    """Bytes that this host sent to others in the whole turn; None without emulated hosts."""
    peak_bytes: int | None
    """Growth of the process's memory up to its peak; None if it was not measured."""


def run_turn(built: Built, num_steps: int, *, with_memory: bool, meter: TrafficMeter | None = None) -> Turn:
    """Trains ``num_steps`` steps between two barriers, the first under the meter; returns measurements. Collective."""
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
    # Other ranks may still be in a step, and the bytes that they send belong to the turn.
    dist.barrier()
    after = _sent()
    return clocks, None if before is None or after is None else after - before


def _sent() -> int | None:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return None if interface is None else sent_bytes(interface)


def _start_peak() -> int:
    """Resets the peak of the process's memory, and returns the bytes in use."""
    # Freed memory that the allocator keeps would hide memory that the turn needs.
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(kilobytes)
