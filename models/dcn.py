"""DCN v2 (arXiv 2008.13535, as in TorchRec's reference) and DMT-DCN (arXiv 2403.00877, sections 3.2 and 4, Listing 2).

Legend: F features, T towers, N embedding dimension, D tower dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dmt.models.base import FlatModel, ModelOptions, TowerModel
from dmt.models.dense import CrossInteraction
from dmt.models.presets import CROSS_LAYERS, CROSS_RANK
from dmt.models.sparse import MakeFlatSparseArch, MakeTowerSparseArch, flat_sparse_arch, tower_sparse_arch
from dmt.models.tower_modules import DCNTowerModule
from dmt.plan.towers import TowerPlan

__all__ = ["DCN", "DMTDCN"]


class DCN(FlatModel):
    """Bottom MLP, embeddings, low-rank cross layers, top MLP; with the paper's sizes 96.22 MFLOPs per sample.

    The MLPs are 13-512-256-N and 1024-1024-512-256-1 by default.

    Args:
        num_cross_layers: cross layers over the (F + 1) N numbers of a sample.
        cross_rank: rank of each.

    `FlatModel` describes the other arguments and the errors.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        dense_in_features: int,
        num_cross_layers: int = CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeFlatSparseArch = flat_sparse_arch,
    ) -> None:
        options = options or ModelOptions()
        cross = partial(CrossInteraction, num_layers=num_cross_layers, rank=cross_rank, device=options.device)
        super().__init__(
            tables=tables,
            dense_in_features=dense_in_features,
            options=options,
            make_sparse_arch=make_sparse_arch,
            make_interaction=cross,
        )


class DMTDCN(TowerModel):
    """DCN over towers: a cross layer in each tower, then the cross layers over the T tower vectors and the dense one.

    With the paper's sizes and D=128 it takes 43.71 to 87.19 MFLOPs per sample for 2 to 16 towers. The MLPs are
    13-512-256-D and 1024-1024-512-256-1 by default.

    Args:
        num_cross_layers: cross layers over the (T + 1) D numbers of a sample; a tower has one.
        cross_rank: rank of each cross layer, in the towers too.

    `TowerModel` describes the other arguments and the errors.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        tower_plan: TowerPlan,
        dense_in_features: int,
        tower_dim: int = 128,
        num_cross_layers: int = CROSS_LAYERS,
        cross_rank: int = CROSS_RANK,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeTowerSparseArch = tower_sparse_arch,
    ) -> None:
        options = options or ModelOptions()
        towers = partial(DCNTowerModule, tower_dim=tower_dim, rank=cross_rank, device=options.device)
        cross = partial(CrossInteraction, num_layers=num_cross_layers, rank=cross_rank, device=options.device)
        super().__init__(tables, tower_plan, dense_in_features, tower_dim, options, make_sparse_arch, towers, cross)
