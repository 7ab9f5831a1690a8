"""Gradients of copied rows, summed over hosts in each way and counted byte by byte."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dmt import TowerMesh, TowerTopology, TrafficMeter
from dmt.hot_rows.touched_sum import TouchedRowsSum
from tests.ranks import run_ranks

SHAPES = [(37, 4), (3, 8), (1, 1), (20, 2)]


def gradient_of(rank: int, touched: float) -> Tensor:
    """Every rank touches other rows."""
    draw, draw_rows = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100 + rank)
    parts = []
    for rows, columns in SHAPES:
        is_touched = torch.rand(rows, 1, generator=draw_rows) < touched
        parts.append(torch.randn(rows, columns, generator=draw) * is_touched)
    return torch.cat([part.flatten() for part in parts])


def sums_on_rank(rank: int, topology: TowerTopology, touched: float) -> tuple[Tensor, Tensor, Any]:
    mesh = TowerMesh(topology)
    rows = TouchedRowsSum(SHAPES, mesh.tower_group, mesh.peer_group, device=torch.device("cpu"))
    with TrafficMeter(host_of=topology.host) as meter:
        numbers, told = rows.start(gradient_of(rank, touched), torch.tensor([1.0, rank]))()
    return numbers, told, meter.total(mesh.global_group)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("towers", "ranks", "touched"), [(2, 2, 0.1), (2, 2, 1.0), (2, 2, 0.0), (2, 3, 0.1), (3, 1, 0.3), (1, 4, 0.3)]
)
def test_touched_rows_are_summed_and_others_are_not_sent(towers: int, ranks: int, touched: float) -> None:
    topology = TowerTopology(num_towers=towers, ranks_per_tower=ranks)
    world = topology.world_size
    of_ranks = run_ranks(sums_on_rank, world, topology, touched)
    exact = torch.stack([gradient_of(rank, touched).double() for rank in range(world)]).sum(0)
    whole = 2 * (towers - 1) * 4 * exact.numel()
    for numbers, told, measured in of_ranks:
        # Rounding of a sum of six numbers near 1.
        assert (numbers - exact).abs().max() <= (2e-6 if touched else 0)
        assert torch.equal(numbers, of_ranks[0][0]), "ranks have other bits"
        assert told.tolist() == [world, sum(range(world))]
        assert measured.dense >= whole if touched == 1.0 or towers == 1 else measured.dense < whole


def lost_on_rank(rank: int) -> bool:
    """NaN and infinity of one rank reach all, and so does a row that only the last host touched."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    rows = TouchedRowsSum([(20, 3)], mesh.tower_group, mesh.peer_group, device=torch.device("cpu"))
    gradient = torch.zeros(20, 3)
    if rank == 3:
        gradient[4, 1], gradient[19, 2], gradient[8, 0] = torch.nan, torch.inf, 1e-38
    summed = rows.start(gradient.flatten(), torch.zeros(1))()[0].view(20, 3)
    return bool(summed[4, 1].isnan() & summed[19, 2].isinf() & summed[8, 0].eq(torch.tensor(1e-38)))


@pytest.mark.ranks
def test_no_number_is_lost() -> None:
    assert all(run_ranks(lost_on_rank, 4))


def blind_on_rank(rank: int) -> bool:
    """The ranks of a host do not tell each other which rows they touched."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    rows = TouchedRowsSum(SHAPES, mesh.tower_group, mesh.peer_group, device=torch.device("cpu"))
    with patch("dmt.hot_rows.touched_sum.max_over_ranks", lambda value, _: value):
        try:
            summed = rows.start(gradient_of(rank, 0.1), torch.zeros(1))()[0]
        except RuntimeError:
            return False
    exact = torch.stack([gradient_of(other, 0.1) for other in range(4)]).sum(0)
    return bool((summed - exact).abs().max() < 1e-5)


@pytest.mark.ranks
def test_rows_that_one_rank_of_a_host_touched_count() -> None:
    assert not any(run_ranks(blind_on_rank, 4)), "the comparison does not see lost rows"
