"""Counts MFLOPs per sample, parameters and compression ratio of a built model; needs no TorchRec.

A model runs forward and backward once. As in the paper, only matrix products count, at two FLOPs per
multiply-accumulate. A training step therefore takes six FLOPs per multiply-accumulate, except that the first layer
needs no gradient of its input. Models of the paper's size are built on PyTorch's meta device, where the 22.78 G
parameters take no memory; the numbers are within 0.2 % of Tables 3 to 5 of the DMT paper (arXiv 2403.00877).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dmt.errors import InputError, did_you_mean
from dmt.models.dcn import DCN, DMTDCN
from dmt.models.dense import Device, ModelOptions
from dmt.models.dlrm import DLRM, DMTDLRM
from dmt.models.sparse import check_tower_modules
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.towers import TowerPlan

__all__ = [
    "CRITEO_DENSE_FEATURES",
    "Complexity",
    "MetaTables",
    "MetaTowers",
    "compression_ratio",
    "count_complexity",
    "count_on_meta",
    "criteo_1tb_tables",
    "meta_batch",
    "paper_complexity",
    "tower_modules",
]

_PAPER_MODELS: dict[str, tuple[Any, Any]] = {"dlrm": (DLRM, DMTDLRM), "dcn": (DCN, DMTDCN)}
"""The flat model and the model with towers, by architecture."""
CRITEO_DENSE_FEATURES = 13
"""Integer columns of a Criteo sample."""
_CRITEO_1TB_ROWS = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)


@dataclass(frozen=True, kw_only=True)
class Complexity:
    """Cost of a model."""

    mflops_per_sample: float
    """Millions of FLOPs per sample of a training step (forward and backward)."""
    parameters: int
    """Number of parameters, including those of tables."""
    compression_ratio: float
    """Numbers per sample that enter the tower modules (each item of a sequence counts), divided by those that leave:
    |F| N / sum O_t; 1 if flat. Section 4 of the paper prints the inverse; Table 5 has 2 for D=64 of N=128, as here."""


def count_complexity(model: nn.Module, dense_features: Tensor, sparse_features: Any) -> Complexity:
    """Counts the complexity of a built, unsharded model by running it forward and backward once on a batch.

    Leaves weights and ``.grad`` unchanged, and runs no optimizer.

    Args:
        model: any model on any device that returns a tensor from ``model(dense_features, sparse_features)``. Tower
            modules must have ``out_features``.
        dense_features: [B, dense_in_features] float32; its gradient is not counted.
        sparse_features: sparse input of the model, for B samples; attention is counted at its sequences' lengths.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modules, entered = tower_modules(model), [0]
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        with ExitStack() as hooks:
            for module in dict.fromkeys(modules):  # towers may share a module
                hook = module.register_forward_pre_hook(lambda _, args: entered.append(_numbers(*args)))
                hooks.callback(hook.remove)
            output = model(dense_features, sparse_features)
        if trained:
            # Not backward(): it would add to .grad and run optimizers that are fused into the backward pass.
            torch.autograd.grad(output.sum(), trained, allow_unused=True)
    return Complexity(
        mflops_per_sample=counter.get_total_flops() / len(dense_features) / 1e6,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        compression_ratio=sum(entered) / len(dense_features) / sum(m.out_features for m in modules) if modules else 1.0,
    )


def _numbers(embeddings: Any) -> int:
    """Returns how many numbers ``embeddings`` has: a ``KeyedTensor``, or a dict of tensors or ``JaggedTensor``."""
    values = embeddings.values()
    parts = [values] if isinstance(values, Tensor) else values
    return sum((part if isinstance(part, Tensor) else part.values()).numel() for part in parts)


def meta_batch(dense_in_features: int, num_samples: int = 2) -> tuple[Tensor, Tensor]:
    """Returns float32 [num_samples, dense_in_features] and int64 ids [num_samples] for `MetaTables`, without data."""
    dense_features = torch.empty(num_samples, dense_in_features, device="meta")
    return dense_features, torch.empty(num_samples, dtype=torch.long, device="meta")


def compression_ratio(model: nn.Module) -> float:
    """Returns how many numbers per sample enter the tower modules, divided by how many leave; 1.0 without towers.

    ``model`` must be unsharded. ``in_features`` counts a sequence as one embedding, `count_complexity` all its items.

    Raises:
        InputError: a tower module has no ``in_features`` or no ``out_features``.
    """
    modules = tower_modules(model)
    for module in modules:
        if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
            name = type(module).__name__
            raise InputError(f"Tower module {name} lacks in_features or out_features (numbers per sample). Set both.")
    return sum(m.in_features for m in modules) / sum(m.out_features for m in modules) if modules else 1.0


def tower_modules(model: nn.Module) -> list[Any]:
    """Returns the tower modules of all TorchRec ``EmbeddingTower`` and `MetaTowers` in an unsharded model."""
    # By the name of the class, since this module needs no TorchRec.
    kinds = ("EmbeddingTower", "_MetaTower")
    return [part.interaction for part in model.modules() if any(k.__name__ in kinds for k in type(part).__mro__)]


def count_on_meta(model: nn.Module, dense_in_features: int) -> Complexity:
    """Returns the complexity of a model on the meta device whose tables are `MetaTables` or `MetaTowers`."""
    # 128 samples, so that mean sequence lengths are barely rounded: a batch has a whole number of items.
    return count_complexity(model, *meta_batch(dense_in_features, 128))


def criteo_1tb_tables(embedding_dim: int = 128) -> tuple[TableSpec, ...]:
    """Returns the 26 tables of Criteo-1TB with their numbers of rows: table ``t_C1`` of feature ``C1`` and so on.

    All have ``embedding_dim`` columns, in the paper 128 (22.78 G parameters). Raises `InputError` if it is below 1.
    """
    return tuple(
        TableSpec(name=f"t_C{i}", num_embeddings=rows, embedding_dim=embedding_dim, feature_names=(f"C{i}",))
        for i, rows in enumerate(_CRITEO_1TB_ROWS, start=1)
    )


def paper_complexity(
    arch: str, num_towers: int | None = None, *, tower_dim: int | None = None, c: int = 1, p: int = 0
) -> Complexity:
    """Returns MFLOPs per sample, parameters and compression ratio of a model of the paper's size (Tables 3, 4 and 5).

    Args:
        arch: ``"dlrm"`` or ``"dcn"``.
        num_towers: T from 1 to 26; towers have strided features (`TowerPlan.strided`). None for the flat model.
        tower_dim: D; by default the paper's, 64 for DLRM and 128 for DCN.
        c: number of projections of each feature; like p, only for DLRM with towers.
        p: number of linear combinations of a tower's features. The paper's 16-tower DLRM has D=128, c=0, p=1.

    Raises:
        InputError: the architecture is unknown or lacks a given setting, or the model refuses a size.

    Example:
        >>> round(paper_complexity("dlrm").mflops_per_sample, 2)
        14.74
        >>> paper_complexity("dlrm", num_towers=8, tower_dim=64).compression_ratio
        2.0
    """
    if arch not in _PAPER_MODELS:
        known = " or ".join(map(repr, _PAPER_MODELS))
        raise InputError(f"arch={arch!r} is unknown; use {known}.{did_you_mean(arch, _PAPER_MODELS)}")
    if (num_towers is None and tower_dim is not None) or ((c, p) != (1, 0) and (num_towers is None or arch == "dcn")):
        raise InputError(
            f"arch={arch!r}, num_towers={num_towers}, tower_dim={tower_dim}, c={c}, p={p}: only models with towers "
            "have tower_dim, and only DLRM with towers has c and p. Leave out the others, or give num_towers."
        )
    flat, with_towers = _PAPER_MODELS[arch]
    tables = criteo_1tb_tables()
    settings: dict[str, Any] = {"dense_in_features": CRITEO_DENSE_FEATURES, "options": ModelOptions(device="meta")}
    if num_towers is None:
        model = flat(tables=tables, make_sparse_arch=MetaTables, **settings)
    else:
        settings |= {} if tower_dim is None else {"tower_dim": tower_dim}  # the models default to the paper's D
        settings |= {} if arch == "dcn" else {"c": c, "p": p}
        plan = TowerPlan.strided(feature_names(tables), num_towers)
        model = with_towers(tables=tables, tower_plan=plan, make_sparse_arch=MetaTowers, **settings)
    return count_on_meta(model, CRITEO_DENSE_FEATURES)


class MetaTables(nn.Module):
    """Stands in for TorchRec's tables: weights of the same sizes on ``device``, one id per feature and sample."""

    def __init__(self, tables: Sequence[Any], device: Device) -> None:
        super().__init__()
        # A parameter per table, not a module: there may be thousands.
        self._tables = nn.ParameterList(
            torch.empty(table.num_embeddings, table.embedding_dim, device=device) for table in tables
        )
        self._features = [tuple(table.feature_names) for table in tables]

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Ids [B], whose values are not used -> [B, N] float32 by feature name, with gradients but without a lookup."""
        widths = [table.shape[1] for table in self._tables]
        number = self._tables[0][:1, :1]
        pairs = zip(number.expand(len(ids), sum(widths)).split(widths, dim=1), self._features, strict=True)
        return {feature: embedding for embedding, features in pairs for feature in features}


class _MetaTower(nn.Sequential):
    """A tower of `MetaTowers`."""


class MetaTowers(nn.Module):
    """Stands in for TorchRec's ``EmbeddingTowerCollection``: real tower modules over `MetaTables`."""

    def __init__(
        self, tables: Sequence[Any], plan: TowerPlan, tower_modules: Sequence[nn.Module], device: Device
    ) -> None:
        super().__init__()
        check_tower_modules(plan, tower_modules)
        pairs = zip(plan.tables_by_tower(tables), tower_modules, strict=True)
        self.towers = nn.ModuleList(
            _MetaTower(OrderedDict(embedding=MetaTables(held, device), interaction=module)) for held, module in pairs
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B] -> [B, outputs of all towers] float32."""
        return torch.cat([tower(ids) for tower in self.towers], dim=1)
