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

    def __init__(
        self, shapes: Sequence[tuple[int, int]], inside: ProcessGroup, across: ProcessGroup, *, device: torch.device
    ) -> None:
        self._shapes, self._inside, self._across = list(shapes), inside, across
        self._heights, widths = (list(sizes) for sizes in zip(*shapes, strict=True))
        self._widths = torch.tensor(widths, dtype=torch.int64, device=device)

    def start(self, gradient: Tensor, told: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts a sum; collective.

        It blocks until ranks have told each other what they touched and a host has summed its own ranks' gradients;
        what travels between hosts after that is in flight when it returns.

        Args:
            gradient: of all rows on this rank, [numbers], zeros where it touched none.
            told: more numbers to sum, [k], which always travel.

        Returns:
            Waits and returns both sums, [numbers] and [k], the same bits on all ranks.
        """
        rows = None
        if self._across.size() > 1:
            rows = self._touched(gradient)
            by_table = torch.stack([of_table.sum() for of_table in rows.split(self._heights)])
            if int(by_table.mul(self._widths).sum()) > (1 - _WORTH) * len(gradient):
                rows = None
        picked = gradient if rows is None else self._picked(gradient, rows)
        end_sum = start_sum_over_hosts(torch.cat([picked, told]), self._inside, self._across)

        def end() -> tuple[Tensor, Tensor]:
            summed, told_sum = end_sum().split([len(picked), len(told)])
            return (summed if rows is None else self._put_back(summed, rows)), told_sum

        return end

    def _tables(self, numbers: Tensor) -> list[Tensor]:
        """Views of numbers of all rows, [rows, columns] of each table."""
        parts = numbers.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _picked(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Numbers of some rows, bool [n]."""
        of_tables = zip(self._tables(numbers), rows.split(self._heights), strict=True)
        return torch.cat([table[own].flatten() for table, own in of_tables])

    def _put_back(self, picked: Tensor, rows: Tensor) -> Tensor:
        """Numbers of all rows, zeros but for what was picked of some."""
        total, first = picked.new_zeros(sum(rows * columns for rows, columns in self._shapes)), 0
        for table, own in zip(self._tables(total), rows.split(self._heights), strict=True):
            places = own.nonzero().flatten()
            size = len(places) * table.shape[1]
            table[places] = picked[first : first + size].view(-1, table.shape[1])
            first += size
        return total

    def _touched(self, gradient: Tensor) -> Tensor:
        """Rows that some rank touched, bool [n]."""
        # NaN is not equal to zero either: it must not get lost.
        touched = torch.cat([table.ne(0).any(1) for table in self._tables(gradient)])
        touched = max_over_ranks(touched.to(torch.uint8), self._inside)
        hosts, ranks = self._across.size(), self._inside.size()
        bits = nn.functional.pad(touched, (0, -len(touched) % (_BITS * ranks))).view(-1, _BITS)
        places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
        # Each rank of a host sends its part of the host's bits.
        packed = (bits << places).sum(1, dtype=torch.uint8).chunk(ranks)[self._inside.rank()]
        by_host = gather_parts(packed.contiguous(), self._across).view(hosts, -1)
        union = gather_parts(functools.reduce(torch.bitwise_or, by_host.unbind(0)), self._inside)
        return (union.unsqueeze(1) >> places & 1).flatten()[: len(touched)].bool()
