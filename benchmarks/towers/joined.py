"""A trial's tables as one: a lookup for all features at once, which is most of a small model's step saved.

The study's samples have one id for each feature, so all tables are the rows of one, each from its own offset. Weights
start as those of TorchRec's tables, the tower modules are the same objects, and AdaGrad goes by single numbers: what is
trained is the same to rounding.

Legend: B samples, F features, N embedding dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["JoinedTables"]


class JoinedTables(nn.Module):
    """Takes the place of a model's ``sparse_arch``; its input is ids [B, F] instead of a ``KeyedJaggedTensor``.

    Args:
        model: flat or in towers, with a table of its own for each feature.
        features: the F names, in the order of the columns of the ids.
    """

    def __init__(self, model: Any, features: list[str]) -> None:
        super().__init__()
        before = model.sparse_arch
        self._before = [before]  # in a list: not a submodule
        self._features = features
        weights = self._tables()
        sizes = torch.tensor([len(weights[name]) for name in features])
        self.register_buffer("offsets", torch.cumsum(sizes, 0) - sizes, persistent=False)
        # The name by which trials know the parameters of tables.
        self.embedding_bags = nn.Parameter(torch.cat([weights[name].detach() for name in features]))
        self.towers = nn.ModuleList(tower.interaction for tower in getattr(before, "towers", ()))

    def forward(self, ids: Tensor) -> Any:
        """Ids [B, F] int64 -> [B, N] by feature, or [B, sum O_t] of the towers."""
        vectors = nn.functional.embedding(ids + self.offsets, self.embedding_bags).unbind(1)
        by_name = dict(zip(self._features, vectors, strict=True))
        if not len(self.towers):
            return by_name
        return torch.cat([tower(by_name) for tower in self.towers], dim=1)

    def put_back(self, model: Any) -> None:
        """Gives the model its own tables again, with the weights as they are now."""
        weights = self._tables()
        parts = self.embedding_bags.detach().split([len(weights[name]) for name in self._features])
        with torch.no_grad():
            for name, part in zip(self._features, parts, strict=True):
                weights[name].copy_(part)
        model.sparse_arch = self._before[0]

    def _tables(self) -> dict[str, Tensor]:
        """The weight of each feature's table, which is named ``t_<feature>`` (`benchmarks.towers.clicks`)."""
        named = self._before[0].named_modules()
        return {
            name.rpartition(".")[2].removeprefix("t_"): module.weight
            for name, module in named
            if isinstance(module, nn.EmbeddingBag)
        }
