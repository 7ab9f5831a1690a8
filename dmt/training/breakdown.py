"""`break_down`: where a step's time went, from a trace of ``torch.profiler``: computing, exposed and hidden exchanges.

An exchange is *exposed* while nothing computes and *hidden* while something does (DMT, figures 1 and 13; Neo,
figure 10).

======== ========================================================== ====================================================
on       computing is                                               exchanges are
======== ========================================================== ====================================================
a GPU    every kernel, copy and memset on any stream, but NCCL's    NCCL's kernels, by the collective in their names
a CPU    every operator of PyTorch and FBGEMM, on any thread        what Gloo reports, from when it is begun
======== ========================================================== ====================================================
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmt.errors import InputError

__all__ = ["Breakdown", "Interval", "break_down", "read_trace"]

_COLLECTIVES = {
    "alltoall": "all-to-all",
    "sendrecv": "exchange",
    "send": "exchange",
    "recv": "exchange",
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "broadcast": "broadcast",
}
_WAITING = ("c10d::", "autograd::", "torch::autograd::")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Something that ran, seconds from the beginning of the trace."""

    begin: float
    end: float
    exchange: str | None
    """Kind of exchange; None of computing."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The seconds of a step; computing, exposed exchanges and the rest add up to it."""

    seconds: float
    steps: int
    """Steps of the trace; all seconds are means over them."""
    computing: float
    exposed: dict[str, float]
    """Seconds by kind of exchange in which nothing computed; of several at once equal parts."""
    hidden: dict[str, float]
    """Seconds by kind in which something computed as well; kinds may overlap each other."""
    rest: float
    """Nothing computed and nothing was exchanged: the program, and waiting for what other ranks had not begun."""


def break_down(intervals: Sequence[Interval], begin: float, end: float, steps: int = 1) -> Breakdown:
    """Sums up what ran between two moments.

    Example:
        A product of 2 s, and an all-reduce that begins with it and takes 5 s of a step of 6 s.

        >>> product = Interval(begin=0.0, end=2.0, exchange=None)
        >>> found = break_down([product, Interval(begin=0.0, end=5.0, exchange="all-reduce")], 0.0, 6.0)
        >>> found.computing, found.exposed["all-reduce"], found.hidden["all-reduce"], found.rest
        (2.0, 3.0, 2.0, 1.0)
    """
    cut = [(max(one.begin, begin), min(one.end, end), one.exchange) for one in intervals]
    changes = [change for b, e, kind in cut if b < e for change in ((b, 1, kind), (e, -1, kind))]
    running: Counter[str | None] = Counter()
    exposed: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    computing = rest = 0.0
    now = begin
    for moment, more, kind in [*sorted(changes, key=lambda change: change[0]), (end, 0, None)]:
        kinds = [name for name, number in running.items() if number and name is not None]
        took, now = moment - now, moment
        if running[None]:
            computing += took
            hidden.update(dict.fromkeys(kinds, took))
        elif kinds:
            exposed.update(dict.fromkeys(kinds, took / len(kinds)))
        else:
            rest += took
        running[kind] += more
    return Breakdown(
        seconds=(end - begin) / steps,
        steps=steps,
        computing=computing / steps,
        exposed={name: seconds / steps for name, seconds in sorted(exposed.items())},
        hidden={name: seconds / steps for name, seconds in sorted(hidden.items())},
        rest=rest / steps,
    )


def read_trace(path: Path) -> Breakdown:
    """Breaks down a trace that ``export_chrome_trace`` wrote, ``.json`` or ``.json.gz``.

    Steps are those that ``profiler.step()`` marks; without marks the whole trace is one.

    Raises:
        InputError: it cannot be read, or holds nothing that computes.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(content)
        # Those without a duration say nothing of where time went.
        events = [event for event in found["traceEvents"] if event.get("ph") == "X" and float(event.get("dur", 0)) > 0]
        if not all(math.isfinite(float(event["ts"]) + float(event["dur"])) for event in events):
            raise ValueError("an event has no finite ts and dur")
    except (OSError, EOFError, zlib.error, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no trace of torch.profiler ({type(error).__name__}: {error}). Write one with "
            "profile.export_chrome_trace."
        ) from error
    is_gpu = any(event.get("cat") in _ON_GPU for event in events)
    intervals = [_interval(event) for event in (_on_gpu(events) if is_gpu else _on_cpu(events))]
    if all(one.exchange is not None for one in intervals):
        raise InputError(
            f"{path} holds {len(events):,} events, none of which computes. Profile whole training steps, with "
            "activities=[ProfilerActivity.CPU] and CUDA where there is a GPU."
        )
    marks = [_interval(event) for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
    whole = marks or [_interval(event) for event in events if event.get("cat") == "Trace"] or intervals
    begin, end = min(one.begin for one in whole), max(one.end for one in whole)
    # Of several threads each has a mark for the step.
    names = {str(event["name"]) for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    return break_down(intervals, begin, end, max(len(names), 1))


def _on_gpu(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in _ON_GPU]


def _on_cpu(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what Gloo reports, and operators of libraries; what is around them, in Python or autograd, also waits."""
    names = [(str(event.get("name", "")), event) for event in events]
    return [
        event
        for name, event in names
        if name.startswith("gloo:") or (event.get("cat") == "cpu_op" and "::" in name and not name.startswith(_WAITING))
    ]


def _interval(event: dict[str, Any]) -> Interval:
    begin = 1e-6 * float(event["ts"])
    return Interval(begin=begin, end=begin + 1e-6 * float(event["dur"]), exchange=_exchange(event))


def _exchange(event: dict[str, Any]) -> str | None:
    name = str(event.get("name", "")).lower()
    if not name.startswith(("nccl", "gloo:")):
        return None
    words = re.sub(r"[^a-z]", "", name.removeprefix("gloo:").replace("nccldevkernel", "").replace("ncclkernel", ""))
    return next((kind for word, kind in _COLLECTIVES.items() if words.startswith(word)), "other")
