"""The live tensors of a rank's tables: weights and fused optimizer states, with their names and places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.sptt.dataflow import SPTTModule

__all__ = ["HeldShard", "TableTensor", "checksum", "table_tensors", "uncovered"]

_CHUNK = 2**16
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TableTensor:
    """A tensor that the fused optimizer of a table updates."""

    name: str
    """``t_ad.weight``, ``t_ad.momentum1``; the n-th further shard on this rank gets the suffix ``#n``."""
    table: str
    """Table, with the prefix of its module."""
    part: str
    """``weight``, or the state's own name, such as ``momentum1``."""
    tensor: Tensor
    """Live tensor that the kernels read and write, not a copy."""
    is_weight: bool
    """True for the table's weights, False for optimizer state."""
    is_replicated: bool
    """True if each replica trains its own copy; False for data-parallel tables, whose gradients are averaged."""
    shard: HeldShard | None = None
    """Part of the whole weight or state; None for data-parallel tables, which are whole on each rank."""


def table_tensors(module: SPTTModule, prefix: str = "") -> list[TableTensor]:
    """Floating-point weights and states of this rank's tables, by collection; names begin with ``prefix``."""
    return [one for collection in module.collections for one in _collection_tensors(collection, prefix)]


def _collection_tensors(collection: Any, prefix: str) -> Iterator[TableTensor]:
    optimizer = collection.fused_optimizer
    for key, weight in optimizer.params.items():
        table = prefix + key.split(".")[-2]
        states = {prefix + name: value for name, value in optimizer.state.get(weight, {}).items()}
        values = {f"{table}.weight": weight, **states}
        for name, value in values.items():
            where = {"table": table, "part": name.removeprefix(f"{table}."), "is_weight": value is weight}
            if not isinstance(value, ShardedTensor):
                if value.is_floating_point():
                    yield TableTensor(name=name, tensor=value.detach(), is_replicated=False, **where)
                continue
            for number, shard in enumerate(value.local_shards()):
                if not shard.tensor.is_floating_point():
                    continue
                place = HeldShard(
                    table=table,
                    size=tuple(value.metadata().size),
                    offsets=tuple(shard.metadata.shard_offsets),
                    sizes=tuple(shard.tensor.shape),
                )
                yield TableTensor(
                    name=f"{name}#{number}" if number else name,
                    tensor=shard.tensor.detach(),
                    is_replicated=True,
                    shard=place,
                    **where,
                )


class HeldShard(NamedTuple):
    """A part of a table, or of a state of its optimizer, that some rank holds."""

    table: str
    size: tuple[int, ...]
    """Rows and columns of the table; rows alone of a state with one number for each row."""
    offsets: tuple[int, ...]
    """First row and column of the part."""
    sizes: tuple[int, ...]
    """Rows and columns of the part."""


def checksum(tensor: Tensor) -> int:
    """Position-dependent checksum of a floating-point tensor's bits, modulo 2**64; equal for equal tensors.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0)), checksum(-a) == checksum(a)
        (True, False, False)
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Each place has an odd weight of its own: no change of a single number is lost modulo a power of two.
    weights = 2 * torch.arange(min(_CHUNK, bits.numel()), dtype=torch.int64, device=tensor.device) + 1
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total = total + (chunk.to(torch.int64) * (weights[: chunk.numel()] + 2 * _CHUNK * number)).sum()
    return int(total)


def uncovered(shards: Iterable[HeldShard], tables: Iterable[str] = ()) -> list[str]:
    """Tables whose shards leave a part out or hold one twice, with what is wrong; ``tables`` must have shards.

    Example:
        >>> upper = HeldShard("t", (4, 2), (0, 0), (2, 2))
        >>> uncovered([upper, upper._replace(offsets=(2, 0))])
        []
        >>> uncovered([upper], ["t", "u"])
        ["no rank holds a shard of table 'u'", "shards of table 't' hold 4 of its 8 numbers"]
    """
    by_table: dict[str, list[HeldShard]] = {}
    for shard in shards:
        by_table.setdefault(shard.table, []).append(shard)
    problems = [f"no rank holds a shard of table {table!r}" for table in tables if table not in by_table]
    for table, parts in by_table.items():
        rows, columns = parts[0].size
        held = sum(part.sizes[0] * part.sizes[1] for part in parts)
        outside = any(o + n > s for p in parts for o, n, s in zip(p.offsets, p.sizes, p.size, strict=True))
        twice = any(_overlap(a, b) for i, a in enumerate(parts) for b in parts[:i])
        if len({part.size for part in parts}) > 1 or outside or twice:
            problems.append(f"shards of table {table!r} overlap or do not fit each other")
        elif held != rows * columns:
            problems.append(f"shards of table {table!r} hold {held} of its {rows * columns} numbers")
    return problems


def _overlap(a: HeldShard, b: HeldShard) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(max(o, p) < min(o + n, p + m) for o, n, p, m in spans)
