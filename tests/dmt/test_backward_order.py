"""Tower-module gradients are reduced while the embedding backward runs: their all-reduce is started before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmt import TowerMesh, TowerTopology
from dmt.collectives import profiler_range
from tests.parity import loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import Case, build, shard


class Collectives(TorchDispatchMode):
    """Names of the collectives in the order in which they are started."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def order_on_rank(rank: int, scheme: str) -> list[str]:
    case = Case(towers=2, ranks=2, scheme=scheme)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2)))
    tables = make_tables(list(case.dims))
    for step in range(2):  # DDP arranges its buckets anew after the first step
        ids, labels = case.batches().draw(rank, step, tables)
        loss = loss_of(model(ids)[1], labels)
        with Collectives() as seen:
            loss.backward()
    return seen.names


@pytest.mark.ranks
@pytest.mark.parametrize(("scheme", "embeddings"), [("table_wise", "alltoall_base_"), ("row_wise", "_allgather_base_")])
def test_tower_gradients_are_under_way_before_the_embedding_backward(scheme: str, embeddings: str) -> None:
    names = run_ranks(order_on_rank, 4, scheme)[0]
    peers = names.index("send")
    tower_module = names.index("allreduce_", peers)
    assert embeddings in names[tower_module:], names
    assert set(names[:peers]) <= {"allreduce_", "recv_"}, names  # the over arch's alone comes before


def ranges_on_rank(rank: int, id_route: str) -> list[str]:
    case = Case(towers=2, ranks=1, id_route=id_route)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1)))
    ids, labels = case.batches().draw(rank, 0, make_tables(list(case.dims)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model(ids)[1], labels).backward()
    ranges = [(event.time_range.start, event.name) for event in profile.events() if "## dmt:" in event.name]
    return [name for _, name in sorted(ranges)]


@pytest.mark.ranks
@pytest.mark.parametrize("id_route", ["peer", "global"])
def test_steps_are_profiler_ranges_in_both_directions(id_route: str) -> None:
    steps = ["exchange_ids", "look_up", "run_towers", "exchange_outputs", "exchange_outputs:bwd"]
    assert run_ranks(ranges_on_rank, 2, id_route) == [[f"## dmt:{step} ##" for step in steps]] * 2


def test_a_range_of_two_calls_at_once_is_two_ranges() -> None:
    """A decorator is made once, for the calls of all threads: here one call ends inside the other."""

    @profiler_range("step")
    def step(inner: Callable[[], Any]) -> None:
        inner()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(lambda: [torch.ones(1), step(lambda: None), torch.ones(1)])
    outer, inner = sorted(
        (event.time_range for event in profile.events() if event.name == "## dmt:step ##"), key=lambda span: span.start
    )
    assert outer.start <= inner.start <= inner.end <= outer.end
