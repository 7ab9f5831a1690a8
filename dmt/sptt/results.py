"""Results of sharded modules: `LazyKeyedTensor`, read by key without a copy; `CachedAwaitable`, waited for once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt._torchrec import ReplaceableKeyedTensor

__all__ = ["CachedAwaitable", "LazyKeyedTensor", "output_keys", "split_rows"]


class CachedAwaitable(LazyGetItemMixin[Any, Any], LazyAwaitable[Any]):
    """A result that is waited for once, at its first use, and then passed through ``finish``."""

    def __init__(self, awaitable: Any, finish: Any = None) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._finish = finish
        self._value: Any = None

    def _wait_impl(self) -> Any:
        # TorchRec's exchange can be waited for only once, but a user may call wait() and use the result as well.
        if self._awaitable is not None:
            value: Tensor = self._awaitable.wait()
            self._value = value if self._finish is None else self._finish(value)
            self._awaitable = None
        return self._value


class LazyKeyedTensor(ReplaceableKeyedTensor):
    """A ``KeyedTensor`` whose columns are put in order only if they are read as a whole.

    The order in which a sharded collection delivers features depends on where its tables lie. To bring them into
    another is a copy of the whole batch, and so is its gradient; whoever reads by key needs neither. Nor does reading
    every key cost a whole matrix of zeros for each in the backward pass, as slices of TorchRec's class do: all keys
    come from one split. PyTorch refuses to change parts of a split in place.

    Args:
        arrived: the embeddings [B, columns] as they came.
        keys: the same keys in the order that `values` is to have; if they are others, the arrived ones are kept as they
            are.

    Example:
        >>> arrived = KeyedTensor(["b", "a"], [1, 2], torch.tensor([[3.0, 1.0, 2.0]]))
        >>> ordered = LazyKeyedTensor(arrived, ["a", "b"])
        >>> ordered.keys(), ordered["b"].tolist(), ordered.values().tolist()
        (['a', 'b'], [[3.0]], [[1.0, 2.0, 3.0]])
    """

    def __init__(self, arrived: KeyedTensor, keys: Sequence[str]) -> None:
        width = dict(zip(arrived.keys(), arrived.length_per_key(), strict=True))
        keys = list(keys) if sorted(keys) == sorted(width) else arrived.keys()
        super().__init__(keys, [width[key] for key in keys], arrived.values())
        self._hold(arrived)

    def _hold(self, arrived: KeyedTensor) -> None:
        self.arrived = arrived
        self._by_key: dict[str, Tensor] | None = None
        self._ordered: Tensor | None = None

    def replace_values(self, values: Tensor) -> None:
        """Replaces the embeddings by others, [B, columns] in the order of the keys."""
        self._hold(KeyedTensor(self.keys(), self.length_per_key(), values))

    def values(self) -> Tensor:
        """[B, columns] in the order of the keys."""
        if self.arrived.keys() == self.keys():
            return self.arrived.values()
        if self._ordered is None:
            by_key = self.to_dict()
            self._ordered = torch.cat([by_key[key] for key in self.keys()], dim=1)
        return self._ordered

    def to_dict(self) -> dict[str, Tensor]:
        """[B, N] of every key, in the order of the keys, all from one split."""
        if self._by_key is None:
            arrived = self.arrived.to_dict()
            self._by_key = {key: arrived[key] for key in self.keys()}
        return self._by_key

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]

    def device(self) -> torch.device:
        """Returns the device of the embeddings."""
        return self.arrived.device()

    def to(self, *args: Any, **kwargs: Any) -> LazyKeyedTensor:
        """Moves the embeddings to another device."""
        return LazyKeyedTensor(self.arrived.to(*args, **kwargs), self.keys())


def output_keys(tables: Sequence[Any]) -> list[str]:
    """Keys of the result of an unsharded collection: features, as ``feature@table`` where two tables look one up."""
    return [key for of_table in get_embedding_names_by_table(list(tables)) for key in of_table]


def split_rows(embeddings: KeyedTensor, rows: Sequence[int]) -> list[KeyedTensor]:
    """Splits embeddings [sum(rows), columns] into blocks of these numbers of samples."""
    if len(rows) == 1:
        return [embeddings]
    keys, widths = embeddings.keys(), embeddings.length_per_key()
    return [KeyedTensor(keys, widths, part) for part in embeddings.values().split(list(rows))]
