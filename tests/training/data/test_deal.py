"""Rows dealt by arithmetic: each exactly once, for any numbers of ranks; test_clicks.py compares global batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dmt.training.data.deal import Deal, Span, rank_batch

SIZES = [
    np.array([1]),
    np.array([7] * 12),
    np.array([5, 1, 0, 13, 8, 8, 2, 30, 4]),
    np.random.default_rng(0).integers(0, 4000, 37),
]


def rows_of(deal: Deal, parts: list[Span]) -> list[tuple[int, int]]:
    pieces = [piece for part in parts for piece in deal.groups(part)]
    return [(piece.number, row) for piece in pieces for row in range(piece.start, piece.stop)]


@pytest.mark.parametrize("seed", [None, (3, 1)])
@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} groups")
def test_every_row_is_in_one_lane(sizes: np.ndarray, lanes: int, seed: tuple[int, int] | None) -> None:
    deal = Deal(sizes, lanes, seed)
    found = [rows_of(deal, [Span(v, 0, (deal.num_rows + lanes - 1 - v) // lanes)]) for v in range(lanes)]
    assert sorted(row for lane in found for row in lane) == [(g, i) for g, n in enumerate(sizes) for i in range(n)]
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} groups")
def test_rows_are_used_once_whatever_ranks_go_on(sizes: np.ndarray) -> None:
    draw = np.random.default_rng(1)
    for lanes in (4, 5):
        deal, used, at = Deal(sizes, lanes), Counter[tuple[int, int]](), 0
        while at < deal.num_rows:
            world_size = int(draw.integers(1, 7))
            stop = min(deal.num_rows, at + world_size * int(draw.integers(1, 60)))
            sizes_of_ranks = []
            for rank in range(world_size):
                rows = rows_of(deal, deal.of_rank(at, stop, rank=rank, world_size=world_size))
                used.update(rows)
                sizes_of_ranks.append(len(rows))
            if (stop - at) % world_size == 0:
                assert len(set(sizes_of_ranks)) == 1
            at = stop
        assert set(used.values()) == {1}
        assert len(used) == deal.num_rows


def test_lanes_stay_near_one_another_in_time_without_a_seed() -> None:
    deal = Deal(np.full(40, 10), lanes=4)
    for k in range(0, 400, 40):
        groups = {group for group, _ in rows_of(deal, deal.of_rank(k, k + 40, rank=0, world_size=1))}
        assert groups == {k // 10, k // 10 + 1, k // 10 + 2, k // 10 + 3}


def test_another_number_of_ranks_is_said_to_change_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    assert [rank_batch(8, ranks, 16) for ranks in (8, 4, 1)] == [16, 32, 128]
    assert not caplog.records
    assert rank_batch(4, 3, 16) == 16
    assert "began on 4 ranks, which 3 do not divide: the global batch is now 48 rows instead of 64" in caplog.text
