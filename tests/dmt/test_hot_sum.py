"""Gradients of copied rows, summed over hosts in each way and counted byte by byte."""

from __future__ import annotations

import itertools
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dmt import TowerMesh, TowerTopology, TrafficMeter
from dmt.sptt.hot_sum import TouchedRowsSum, Way, cheapest_way
from tests.ranks import run_ranks

SHAPES = [(37, 4), (3, 8), (1, 1), (20, 2)]


def gradient_of(rank: int, touched: float, *, alike: bool = False) -> Tensor:
    """Every rank touches other rows, or all touch the same."""
    draw, draw_rows = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(0 if alike else 100 + rank)
    parts = []
    for rows, columns in SHAPES:
        is_touched = torch.rand(rows, 1, generator=draw_rows) < touched
        parts.append(torch.randn(rows, columns, generator=draw) * is_touched)
    return torch.cat([part.flatten() for part in parts])


def sums_on_rank(
    rank: int, topology: TowerTopology, touched: float, alike: bool
) -> list[tuple[str, Tensor, Tensor, Any, Any]]:
    mesh, found = TowerMesh(topology), []
    for way in (*get_args(Way), None):
        rows = TouchedRowsSum(SHAPES, mesh.tower_group, mesh.peer_group, device=torch.device("cpu"), way=way)
        with TrafficMeter(host_of=topology.host) as meter, meter.phase("backward"):
            numbers, told = rows.start(gradient_of(rank, touched, alike=alike), torch.tensor([1.0, rank]))()
        total = meter.total(mesh.global_group)
        found.append((rows.taken, numbers, told, total, rows.sent))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("towers", "ranks", "touched", "chosen"),
    [
        (2, 2, 0.1, "exchange"),
        (2, 2, 1.0, "dense"),
        (2, 2, 0.0, "union"),
        (2, 3, 0.3, "exchange"),
        (4, 2, 0.4, "union"),
        (3, 1, 0.3, "exchange"),
        (1, 4, 0.3, "dense"),
    ],
)
def test_every_way_sums_alike_and_sends_what_it_says(towers: int, ranks: int, touched: float, chosen: str) -> None:
    topology = TowerTopology(num_towers=towers, ranks_per_tower=ranks)
    world = topology.world_size
    alike = chosen == "union"
    of_ranks = run_ranks(sums_on_rank, world, topology, touched, alike)
    exact = torch.stack([gradient_of(rank, touched, alike=alike).double() for rank in range(world)]).sum(0)
    for ways in of_ranks:
        assert ways[-1][0] == chosen
        for (way, numbers, told, measured, sent), (_, first, *_) in zip(ways, of_ranks[0], strict=True):
            # Rounding of a sum of six numbers near 1. Two hosts of two ranks have one order of additions.
            assert (numbers - exact).abs().max() <= (2e-6 if touched else 0)
            assert torch.equal(numbers, first), f"{way}: ranks have other bits"
            assert world > 4 or towers != ranks or torch.equal(numbers, ways[0][1]), f"{way}: other bits than dense"
            assert told.tolist() == [world, sum(range(world))]
            assert {kind: getattr(measured, kind) for kind in sent} == pytest.approx(sent, abs=world), way


def lost_on_rank(rank: int) -> list[bool]:
    """NaN and infinity of one rank reach all, and so does a row that only the last host touched."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    found = []
    for way in get_args(Way):
        rows = TouchedRowsSum([(20, 3)], mesh.tower_group, mesh.peer_group, device=torch.device("cpu"), way=way)
        gradient = torch.zeros(20, 3)
        if rank == 3:
            gradient[4, 1], gradient[19, 2], gradient[8, 0] = torch.nan, torch.inf, 1e-38
        summed = rows.start(gradient.flatten(), torch.zeros(1))()[0].view(20, 3)
        least = torch.tensor(1e-38)
        found.append(bool(summed[4, 1].isnan() & summed[19, 2].isinf() & summed[8, 0].eq(least)))
    return found


@pytest.mark.ranks
def test_no_number_is_lost() -> None:
    assert run_ranks(lost_on_rank, 4) == [[True] * 3] * 4


def blind_on_rank(rank: int) -> bool:
    """A host that does not tell the other which rows it touched."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    rows = TouchedRowsSum(SHAPES, mesh.tower_group, mesh.peer_group, device=torch.device("cpu"), way="union")
    with patch("dmt.sptt.hot_sum.max_over_ranks", lambda value, _: value):
        summed = rows.start(gradient_of(rank, 0.1), torch.zeros(1))()[0]
    exact = torch.stack([gradient_of(other, 0.1) for other in range(4)]).sum(0)
    return bool((summed - exact).abs().max() < 1e-5)


@pytest.mark.ranks
def test_rows_that_one_rank_of_a_host_touched_count() -> None:
    assert not any(run_ranks(blind_on_rank, 4)), "the comparison does not see lost rows"


def test_the_cheapest_way_is_the_cheapest() -> None:
    for hosts, of_host, union in itertools.product((2, 3, 8), (10, 50, 90), (60, 94, 96)):
        of_hosts = [min(of_host, union)] * hosts
        sent = {"dense": 200, "union": 2 * union, "exchange": sum(of_hosts)}
        best = cheapest_way(every=100, union=union, of_hosts=of_hosts)
        assert 0.95 * sent[best] <= min(sent.values()), (hosts, of_host, union)
