"""DeepFM (arXiv 1703.04247) as a factory for the trainer: flat, or in towers.

Its factorization machine needs two sums over the features' vectors v: of v and of v squared. Each tower sends its two
sums, and a few more numbers for the deep part. Run it in the folder of this file:

    dmt check deepfm.toml
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import PoolingType

from dmt import TowerPlan
from dmt.models import flat_sparse_arch, tower_sparse_arch


class FMTower(nn.Module):
    """Tower module: reads embeddings of any width; returns sum v, sum v^2, each [B, k], and ``deep`` more numbers."""

    def __init__(self, widths: dict[str, int], k: int, deep: int, device: torch.device | None) -> None:
        super().__init__()
        self.features = tuple(widths)
        self.in_features = sum(widths.values())
        self.out_features = 2 * k + deep
        # One projection for each feature: embeddings may differ in width, but the machine's vectors must not.
        self.project = nn.ModuleList(nn.Linear(width, k, bias=False, device=device) for width in widths.values())
        self.deep = nn.Linear(self.in_features, deep, device=device)

    def forward(self, embeddings: KeyedTensor) -> Tensor:
        """Embeddings [B, N_i] by feature -> [B, 2 k + deep]."""
        vector_of = embeddings.to_dict()
        inputs = [vector_of[name] for name in self.features]
        vectors = torch.stack([project(x) for project, x in zip(self.project, inputs, strict=True)])
        return torch.cat([vectors.sum(0), vectors.square().sum(0), self.deep(torch.cat(inputs, dim=1)).relu()], dim=1)


class DeepFM(nn.Module):
    """DeepFM over the outputs of its sparse part, [B, T (2 k + deep)]; ``sizes`` are k, deep and the hidden width."""

    def __init__(self, sparse: nn.Module, num_towers: int, num_dense: int, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.k, deep, hidden = sizes
        self.sparse = sparse
        self.num_towers = num_towers
        width = num_towers * deep + num_dense
        self.over = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1, bias=False))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense features [B, num_dense] and ids of B samples -> logits [B, 1]."""
        outputs = self.sparse(sparse_features)
        towers = outputs.reshape(outputs.shape[0], self.num_towers, -1)
        total, squares, deep = towers[:, :, : self.k], towers[:, :, self.k : 2 * self.k], towers[:, :, 2 * self.k :]
        machine = (total.sum(1).square() - squares.sum(1)).sum(1, keepdim=True) / 2
        return machine + self.over(torch.cat([deep.flatten(1), dense_features], dim=1)) + self.bias


def deepfm(
    tables: list[EmbeddingBagConfig],
    num_dense: int,
    options: dict[str, Any],
    towers: TowerPlan | None,
    device: torch.device | None,
) -> nn.Module:
    """Factory: returns the model, flat or in towers; averages the bags of features in the option ``mean``."""
    averaged = set(options.get("mean", []))
    tables = [replace(t, pooling=PoolingType.MEAN) if averaged & set(t.feature_names) else t for t in tables]
    widths = {name: table.embedding_dim for table in tables for name in table.feature_names}
    if unknown := [*options.keys() - {"mean", "k", "deep", "hidden"}, *averaged - widths.keys()]:
        raise ValueError(f"[model.options] names unknown options or features: {unknown}. Correct the names.")
    sizes = k, deep, _ = options.get("k", 8), options.get("deep", 16), options.get("hidden", 32)
    if towers is None:
        sparse = nn.Sequential(flat_sparse_arch(tables, device), FMTower(widths, k, deep, device))
        return DeepFM(sparse, 1, num_dense, sizes)
    modules = [FMTower({name: widths[name] for name in t.features}, k, deep, device) for t in towers.towers]
    return DeepFM(tower_sparse_arch(tables, towers, modules, device), towers.num_towers, num_dense, sizes)
