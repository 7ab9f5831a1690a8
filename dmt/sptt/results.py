"""Results of sharded modules: `Pending`, made at its first use, and embeddings in the order of their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["Pending", "in_order", "output_keys", "split_rows"]


class Pending(LazyGetItemMixin[Any, Any], LazyAwaitable[Any]):
    """What is in flight, all over the dataflow: ``end(*arguments)`` waits for it, once, when the result is used."""

    def __init__(self, end: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self._end: tuple[Callable[..., Any], tuple[Any, ...]] | None = (end, arguments)
        self._value: Any = None

    def _wait_impl(self) -> Any:
        # TorchRec's exchange can be waited for only once, but a user may call wait() and use the result as well.
        if self._end is not None:
            end, arguments = self._end
            self._value, self._end = end(*arguments), None
        return self._value


def in_order(arrived: KeyedTensor, keys: Sequence[str]) -> KeyedTensor:
    """Brings the columns of embeddings [B, columns] into the order of these keys; other keys are left as they are.

    Example:
        >>> arrived = KeyedTensor(["b", "a"], [1, 2], torch.tensor([[3.0, 1.0, 2.0]]))
        >>> in_order(arrived, ["a", "b"]).values().tolist()
        [[1.0, 2.0, 3.0]]
    """
    if arrived.keys() == list(keys) or sorted(arrived.keys()) != sorted(keys):
        return arrived
    by_key = arrived.to_dict()
    return KeyedTensor(list(keys), [by_key[key].shape[1] for key in keys], torch.cat([by_key[k] for k in keys], dim=1))


def output_keys(tables: Sequence[Any]) -> list[str]:
    """Keys of the result of an unsharded collection: features, as ``feature@table`` where two tables look one up."""
    return [key for of_table in get_embedding_names_by_table(list(tables)) for key in of_table]


def split_rows(embeddings: KeyedTensor, rows: Sequence[int]) -> list[KeyedTensor]:
    """Splits embeddings [sum(rows), columns] into blocks of these numbers of rows."""
    keys, widths = embeddings.keys(), embeddings.length_per_key()
    return [KeyedTensor(keys, widths, block) for block in embeddings.values().split(list(rows))]
