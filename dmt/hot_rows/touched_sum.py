"""`TouchedRowsSum`: sums over hosts the gradients of those copied rows that a step touched (OPER, section 5.3).

Ranks tell each other which rows they touched, one bit for each. The rows that some rank touched are then summed by one
all-reduce, first inside each host and once between hosts; where nearly all were touched, all rows are. Both give the
same sums up to the order of additions.

Legend: n rows of all tables, H hosts of L ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dmt.collectives import gather_parts, max_over_ranks, start_sum_over_hosts

__all__ = ["TouchedRowsSum"]

# Rows are picked out and put back only where it saves this share of what is sent.
_WORTH = 0.05
_BITS = 8


class TouchedRowsSum:
    """Sums gradients of tables of these shapes, [rows, columns], over the ranks of all hosts.

    ``inside`` are the ranks of this host, ``across`` one rank of each.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], inside: ProcessGroup, across: ProcessGroup) -> None:
        self._shapes, self._inside, self._across = list(shapes), inside, across

    def start(self, gradient: Tensor, told: Tensor) -> Callable[[], Tensor]:
        """Starts a sum of the gradient in place; collective.

        It blocks until ranks have told each other what they touched and a host has summed its own ranks' gradients;
        what travels between hosts after that is in flight when it returns.

        Args:
            gradient: of all rows on this rank, [numbers], zeros where it touched none.
            told: more numbers to sum, [k], which always travel.

        Returns:
            Waits, leaves the sum in ``gradient``, and returns that of ``told``, [k]; the same bits on all ranks.
        """
        numbers = gradient.split([rows * columns for rows, columns in self._shapes])
        tables = [part.view(shape) for part, shape in zip(numbers, self._shapes, strict=True)]
        # On one host nothing would be saved: gradients are summed inside it anyway.
        picked: list[Tensor | slice] = [slice(None)] * len(tables)
        if self._across.size() > 1:
            touched = self._touched(tables).split([len(table) for table in tables])
            rows = [of_table.nonzero().flatten() for of_table in touched]
            size = sum(len(of_table) * table.shape[1] for of_table, table in zip(rows, tables, strict=True))
            # All ranks know the same union, and so pick alike.
            if size <= (1 - _WORTH) * len(gradient):
                picked = [*rows]
        sent = [table[of_table].flatten() for table, of_table in zip(tables, picked, strict=True)]
        end_sum = start_sum_over_hosts(torch.cat([*sent, told]), self._inside, self._across)

        def end() -> Tensor:
            *sums, told_sum = end_sum().split([*map(len, sent), len(told)])
            # Rows that are not picked were touched by nobody: they are zeros on every rank already.
            for table, of_table, summed in zip(tables, picked, sums, strict=True):
                table[of_table] = summed.view(-1, table.shape[1])
            return told_sum

        return end

    def _touched(self, tables: Sequence[Tensor]) -> Tensor:
        """Rows that some rank touched, bool [n]."""
        # NaN is not equal to zero either: it must not get lost.
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
