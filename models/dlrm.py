"""DLRM (arXiv 1906.00091) and its multi-tower form DMT-DLRM (arXiv 2403.00877, sections 3.2 and 4, Listing 1).

Legend: B samples, F features, T towers, F_t features of tower t, N embedding dimension, D tower dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from dmt.models.base import FlatModel, ModelOptions, TowerModel
from dmt.models.dense import DotInteraction
from dmt.models.presets import DMT_DLRM_OVER_ARCH_LAYER_SIZES
from dmt.models.sparse import MakeTowerSparseArch, tower_sparse_arch
from dmt.models.tower_modules import DLRMProductsTowerModule, DLRMTowerModule
from dmt.plan.towers import TowerPlan

__all__ = ["DLRM", "DMTDLRM", "DMTDLRMProducts"]


class DLRM(FlatModel):
    """Bottom MLP, embeddings, pairwise dot products, top MLP; with the paper's sizes 14.74 MFLOPs per sample.

    The MLPs are 13-512-256-N and 1024-1024-512-256-1 by default. `FlatModel` describes the arguments and errors,
    `dmt.models` has an example.
    """


class DMTDLRM(TowerModel):
    """DLRM over towers: each compresses its features to p + c F_t vectors of dimension D before they leave the host.

    With the paper's sizes and D=64, c=1, p=0 it takes 8.95 MFLOPs per sample, and the towers send half the bytes. The
    MLPs are 13-512-256-D and 1024-512-256-1 by default, one layer less than DLRM's.

    Args:
        c: projections of each feature.
        p: linear combinations of all features of a tower.

    `TowerModel` describes the other arguments.

    Raises:
        InputError: c and p are both 0, or as `TowerModel`.
    """

    paper_over_arch_layer_sizes = DMT_DLRM_OVER_ARCH_LAYER_SIZES
    tower_module: ClassVar[type[DLRMTowerModule]] = DLRMTowerModule

    def __init__(
        self,
        *,
        tables: Sequence[Any],
        tower_plan: TowerPlan,
        dense_in_features: int,
        tower_dim: int = 64,
        c: int = 1,
        p: int = 0,
        options: ModelOptions | None = None,
        make_sparse_arch: MakeTowerSparseArch = tower_sparse_arch,
    ) -> None:
        options = options or ModelOptions()
        towers = partial(self.tower_module, tower_dim=tower_dim, c=c, p=p, device=options.device)
        super().__init__(
            tables, tower_plan, dense_in_features, tower_dim, options, make_sparse_arch, towers, DotInteraction
        )


class DMTDLRMProducts(DMTDLRM):
    """Multi-tower DLRM whose tower modules pass on inner products too (`DLRMProductsTowerModule`); not in the paper.

    Arguments are those of `DMTDLRM`; p must be at least 1.
    """

    tower_module = DLRMProductsTowerModule
