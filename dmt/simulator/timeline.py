"""`simulate`: operations of one rank, on its cores and its links, until all are done. Pure arithmetic.

Neo's Equation 1 (appendix B) takes the maximum of what overlaps and the sum of what does not; it is the special case in
which nothing is shared. Here an operation may need several resources at once, as gloo's collectives need a core and
the uplink, and operations that need one resource at the same time have equal shares of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = ["Kind", "Operation", "Resource", "Timeline", "simulate"]

Resource = Literal["core", "uplink", "host_link"]
"""The cores of a rank, the link of its host to others, and its link to ranks of its host."""
Kind = Literal["compute", "ids", "embeddings", "dense", "replicas", "program"]
"""Kinds that operations are booked under: computing; the collectives of ids, of embeddings and their gradients, of
dense gradients, of replicas; the program that starts all that."""

_DONE = 1e-12  # seconds; less is rounding


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that a rank does in a step."""

    name: str
    kind: Kind
    seconds: Mapping[Resource, float]
    """Seconds of each resource that it takes if it has it to itself; all of them at once."""
    after: Sequence[str] = ()
    """Names of the operations that must have ended before it begins; they come before it in the step."""
    latency: float = 0.0
    """Seconds that it takes before, in which it needs no resource."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each operation of a step ran."""

    seconds: float
    """From the first beginning to the last end."""
    spans: dict[str, tuple[float, float]]
    """Beginning and end of each operation, seconds from the beginning of the step."""
    exposed: dict[Kind, float] = field(default_factory=dict)
    """Seconds by kind, which add up to all: computing whenever something computes, otherwise the collectives that run,
    in equal parts, and the program where nothing else does."""


def simulate(operations: Sequence[Operation]) -> Timeline:
    """Runs operations, each as soon as those before it have ended; resources are shared equally.

    They come in an order in which each is after those that it waits for.

    Example:
        Two exchanges share the uplink while the rank computes.

        >>> compute = Operation(name="mlp", kind="compute", seconds={"core": 2.0})
        >>> sends = [Operation(name=name, kind="embeddings", seconds={"uplink": 1.5}) for name in "ab"]
        >>> found = simulate([compute, *sends])
        >>> found.seconds, found.exposed["embeddings"]
        (3.0, 1.0)
    """
    # Latency comes before the rest; an operation that has it uses nothing else.
    stages: dict[str, list[dict[str, float]]] = {
        operation.name: [{"latency": operation.latency}, dict(operation.seconds.items())] for operation in operations
    }
    waiting = {operation.name: set(operation.after) for operation in operations}
    kinds = {operation.name: operation.kind for operation in operations}
    begun: dict[str, float] = {}
    spans: dict[str, tuple[float, float]] = {}
    exposed: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
    now = 0.0
    while waiting or begun:
        for name in [name for name, others in waiting.items() if not others]:
            del waiting[name]
            begun[name] = now
        assert begun, "an operation waits for one that is not there"
        left = {name: _left(stages[name]) for name in begun}
        ended = [name for name, seconds in left.items() if not seconds]
        for name in ended:
            spans[name] = (begun.pop(name), now)
            for others in waiting.values():
                others.discard(name)
        if ended:
            continue
        users = Counter(resource for seconds in left.values() for resource in seconds if resource != "latency")
        # Until the next resource is free of an operation.
        step = min(s * users.get(resource, 1) for seconds in left.values() for resource, s in seconds.items())
        for seconds in left.values():
            for resource in seconds:
                seconds[resource] -= step / users.get(resource, 1)
        computing = [name for name in begun if kinds[name] == "compute"]
        seen = computing or [name for name in begun if kinds[name] != "program"] or list(begun)
        for name in seen:
            exposed[kinds[name]] += step / len(seen)
        now += step
    return Timeline(seconds=now, spans=spans, exposed=exposed)


def _left(stages: list[dict[str, float]]) -> dict[str, float]:
    """The stage that an operation is in, without what it has had of it; empty when it has ended."""
    while stages:
        for resource in [resource for resource, seconds in stages[0].items() if seconds <= _DONE]:
            del stages[0][resource]
        if stages[0]:
            return stages[0]
        stages.pop(0)
    return {}
