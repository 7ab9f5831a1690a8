"""A factory of a flat model whose steps draw random bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


class Dropped(nn.Module):
    """A linear model on embeddings and dense columns, half of which are left out of each step."""

    def __init__(self, tables: list[EmbeddingBagConfig], num_dense: int, device: torch.device | None) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables, device=device or torch.device("cpu"))
        self.features = [name for table in tables for name in table.feature_names]
        self.dropout = nn.Dropout(0.5)
        self.over = nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables) + num_dense, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Returns logits [B, 1]."""
        embeddings = self.embeddings(ids)
        inputs = torch.cat([dense, *(embeddings[name] for name in self.features)], dim=1)
        logits: Tensor = self.over(self.dropout(inputs))
        return logits


def make(tables: list[EmbeddingBagConfig], num_dense: int, device: torch.device | None) -> nn.Module:
    return Dropped(tables, num_dense, device)
