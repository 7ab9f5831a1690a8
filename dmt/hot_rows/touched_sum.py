"""`TouchedRowsSum`: sums over all hosts the gradients of the copied rows that a step touched (OPER, section 5.3).

Ranks exchange which rows they touched, between hosts one bit per row. One all-reduce, first inside each host and then
once between hosts, sums the rows that any rank touched. If these are nearly all rows, or there is only one host, it
sums all rows. Both give the same sums up to the order of additions.

Legend: n rows of all tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dmt.collectives import gather_parts, max_over_ranks, start_sum_over_hosts
from dmt.sharding.data_parallel import blocks_of

__all__ = ["TouchedRowsSum"]

# Rows are picked out and put back only if that saves this share of what is sent.
_WORTH = 0.05
_BITS = 8


class TouchedRowsSum:
    """Sums the gradients of tables with ``shapes`` [rows, columns] over the ranks of all hosts.

    ``inside`` has the ranks of this host, ``across`` the ranks in this rank's position on every host.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], inside: ProcessGroup, across: ProcessGroup) -> None:
        # Neighbours of equal width are summed as one table: thousands would take thousands of calls.
        self._shapes, self._inside, self._across = blocks_of(shapes), inside, across

    def start(self, gradient: Tensor, extra: Tensor) -> Callable[[], Tensor]:
        """Starts the in-place sum of ``gradient``; collective.

        Blocks until ranks have exchanged which rows they touched and each host has summed its ranks' gradients; the
        exchange between hosts is in flight when it returns.

        Args:
            gradient: this rank's gradient, [sum of rows * columns], table by table; zero in rows that it did not touch.
            extra: other numbers to sum, [k], in the dtype of ``gradient``; they are always sent.

        Returns:
            A function that waits, writes the sum into ``gradient`` and returns that of ``extra``; equal on all ranks.
        """
        numbers = gradient.split([rows * columns for rows, columns in self._shapes])
        tables = [part.view(shape) for part, shape in zip(numbers, self._shapes, strict=True)]
        # On one host picking rows saves nothing: its ranks sum their gradients anyway.
        picked: list[Tensor | slice] = [slice(None)] * len(tables)
        if self._across.size() > 1:
            touched = self._touched(tables).split([len(table) for table in tables])
            rows = [of_table.nonzero().flatten() for of_table in touched]
            size = sum(len(of_table) * table.shape[1] for of_table, table in zip(rows, tables, strict=True))
            # All ranks know the same union, and so pick alike.
            if size <= (1 - _WORTH) * len(gradient):
                picked = [*rows]
        sent = [table[of_table].flatten() for table, of_table in zip(tables, picked, strict=True)]
        end_sum = start_sum_over_hosts(torch.cat([*sent, extra]), self._inside, self._across)

        def end() -> Tensor:
            *sums, extra_sum = end_sum().split([*map(len, sent), len(extra)])
            # No rank touched the rows that are not picked: they are zero on every rank already.
            for table, of_table, summed in zip(tables, picked, sums, strict=True):
                table[of_table] = summed.view(-1, table.shape[1])
            return extra_sum

        return end

    def _touched(self, tables: Sequence[Tensor]) -> Tensor:
        """Returns which rows any rank touched, bool [n]; collective."""
        # NaN differs from zero, too, so it is not lost.
        touched = torch.cat([table.ne(0).any(1) for table in tables])
        touched = max_over_ranks(touched.to(torch.uint8), self._inside)
        hosts, ranks = self._across.size(), self._inside.size()
        bits = nn.functional.pad(touched, (0, -len(touched) % (_BITS * ranks))).view(-1, _BITS)
        places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
        # Each rank of a host sends its part of the host's bits.
        packed = (bits << places).sum(1, dtype=torch.uint8).chunk(ranks)[self._inside.rank()]
        by_host = gather_parts(packed.contiguous(), self._across).view(hosts, -1)
        union = gather_parts(functools.reduce(torch.bitwise_or, by_host.unbind(0)), self._inside)
        return (union.unsqueeze(1) >> places & 1).flatten()[: len(touched)].bool()
