"""Gradients clipped by the norm over all towers: as in the unsharded module, the same on every rank."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from dmt import InputError, TowerMesh, TowerTopology
from dmt.hot_rows.copies import HotCopies
from dmt.hot_rows.runtime import HotRows
from dmt.sptt import towers
from dmt.sptt.towers import ShardedTowerCollection, clip_grad_norm
from tests.parity import loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import Case, build, shard

NUM_TOWERS, ROWS, BATCH = 3, 10, 4


def test_a_norm_that_is_not_above_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"max_norm=0\.0 must be above 0"):
        clip_grad_norm(nn.Linear(1, 1), 0.0)


def test_towers_on_several_meshes_are_refused() -> None:
    parts = nn.ModuleList()
    for _ in range(2):
        part = ShardedTowerCollection.__new__(ShardedTowerCollection)
        nn.Module.__init__(part)
        part.mesh = object()  # type: ignore[assignment]
        parts.append(part)
    with pytest.raises(InputError, match="towers on several meshes"):
        clip_grad_norm(parts, 1.0)


def test_a_rank_without_dense_gradients_adds_up_on_its_device() -> None:
    assert towers._square([], torch.device("meta")).device.type == "meta"


def copies_stay_on_rank(rank: int) -> bool:
    """Clipping reads no table, so it does not bring tables up to date with the copies of their hot rows."""
    case = Case(towers=2, ranks=1, kind="flat")
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    model = shard(case, build(case), mesh)
    hot = HotRows(model, mesh, refresh_every=None)
    hot.replicate({"t0": [1, 2]})
    ids, labels = case.batches().draw(rank, 0, make_tables(list(case.dims)))
    loss_of(model(ids)[1], labels).backward()
    with patch.object(HotCopies, "write_back", side_effect=AssertionError("tables were read")):
        return bool(clip_grad_norm(model, 1e-3) > 0)


@pytest.mark.ranks
def test_clipping_brings_no_table_up_to_date() -> None:
    assert all(run_ranks(copies_stay_on_rank, 2))
