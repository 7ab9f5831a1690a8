"""Operations on shared cores and links."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmt.simulator.steps import Operation, simulate


def op(
    name: str, kind: Any = "compute", after: tuple[str, ...] = (), latency: float = 0.0, **seconds: float
) -> Operation:
    return Operation(name=name, kind=kind, seconds=seconds, after=after, latency=latency)  # type: ignore[arg-type]


def test_what_waits_adds_up_and_what_does_not_overlaps() -> None:
    seconds = simulate([op("a", core=1.0), op("x", "ids", after=("a",), uplink=2.0), op("b", core=0.5, after=("a",))])
    assert seconds == {"compute": 1.5, "ids": 1.5, "embeddings": 0, "dense": 0, "replicas": 0, "program": 0}


def test_a_resource_is_shared_equally_and_free_for_the_rest_when_one_is_done() -> None:
    seconds = simulate([op("x", "ids", uplink=1.0), op("y", "dense", uplink=3.0)])
    # Half each for 2 s, until the first has had its second; both are exposed.
    assert seconds["ids"] == 1.0
    assert seconds["dense"] == 3.0


def test_an_operation_with_two_resources_ends_with_the_later_one() -> None:
    # A core works for the collective while the rank computes: both are slower. "b" begins when the collective ends.
    seconds = simulate([op("x", "embeddings", core=1.0, uplink=2.0), op("a", core=3.0), op("b", "ids", ("x",), 3.0)])
    assert (seconds["compute"], seconds["ids"]) == (4.0, 1.0)


def test_latency_needs_no_resource_and_the_program_is_seen_only_where_nothing_else_is() -> None:
    seconds = simulate(
        [op("program", "program", latency=5.0), op("x", "ids", latency=1.0, uplink=2.0), op("a", core=1.0)]
    )
    assert (seconds["compute"], seconds["ids"], seconds["program"]) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize("early", [0.5, 4.0])
@pytest.mark.parametrize("reduced", [0.1, 9.0])
def test_neos_equation_1_is_the_special_case_in_which_nothing_is_shared(early: float, reduced: float) -> None:
    lookup, exchange, over, back, update = 0.4, 1.1, 0.7, 1.3, 0.6
    found = simulate(
        [
            op("lookup", core=lookup),
            op("exchange", "embeddings", after=("lookup",), uplink=exchange),
            op("bottom", latency=early),
            op("over", after=("exchange", "bottom"), latency=over),
            op("over, backward", after=("over",), latency=2 * over),
            op("exchange, backward", "embeddings", after=("over, backward",), uplink=back),
            op("update", after=("exchange, backward",), latency=update),
            op("bottom, backward", after=("over, backward",), latency=2 * early),
            op("all-reduce", "dense", after=("over, backward",), latency=reduced),
        ]
    )
    forward = max(early, lookup + exchange) + over
    backward = 2 * over + max(back + update, 2 * early, reduced)
    assert sum(found.values()) == pytest.approx(forward + backward)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])  # others may take the cores
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=8)
)
def test_no_step_is_shorter_than_a_resource_needs_or_longer_than_all_in_a_row(
    drawn: list[tuple[float, float, float, int]],
) -> None:
    operations = []
    for i, (core, uplink, latency, back) in enumerate(drawn):
        after = (str(back % i),) if i and back % 2 else ()
        kind = ("compute", "ids", "embeddings")[back % 3]
        operations.append(op(str(i), kind, after, latency, core=core, uplink=uplink))
    found = sum(simulate(operations).values())
    for column in (0, 1):
        assert found >= sum(row[column] for row in drawn) - 1e-6
    assert found <= sum(sum(row[:3]) for row in drawn) + 1e-6
    ends: dict[str, float] = {}
    for operation in operations:
        begin = max((ends[name] for name in operation.after), default=0.0)
        ends[operation.name] = begin + operation.latency + max(operation.seconds.values())
    assert found >= max(ends.values()) - 1e-6
