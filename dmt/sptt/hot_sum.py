"""`TouchedRowsSum`: sums over hosts the gradients of those copied rows that a step touched (OPER, section 5.3).

Ranks tell each other which rows they touched, one bit for each. All know then what each way would send between hosts,
and take the one that sends least; its sums are those of the dense way up to the order of additions.

============== ======================================================================= ==========================
way            what crosses between hosts                                              numbers, of all H hosts
============== ======================================================================= ==========================
``dense``      an all-reduce of all rows                                               2 (H - 1) numbers of all
``union``      an all-reduce of the rows that some rank touched: the paper's way        2 (H - 1) numbers of these
``exchange``   each host sends the sum of its ranks' rows, those that it touched, to    (H - 1) times the sum over
               the other hosts                                                         hosts of these
============== ======================================================================= ==========================

Between two hosts ``exchange`` sends no more than ``union``, between many hosts that touch the same rows it sends H / 2
times as much. The paper's other contender, an all-gather of each *rank's* rows, is ``exchange`` with hosts of one rank.

Legend: n rows of all tables, H hosts of L ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dmt.collectives import gather_parts, max_over_ranks, scatter_sum, start_exchange, start_sum_over_hosts

__all__ = ["TouchedRowsSum", "Way", "cheapest_way"]

Way = Literal["dense", "union", "exchange"]

# Rows are picked out and put back only where it saves this share of what is sent.
_WORTH = 0.05
_BITS = 8


def cheapest_way(*, every: int, union: int, of_hosts: Sequence[int]) -> Way:
    """Returns the way that sends least between hosts, ``dense`` where nothing saves a twentieth of that.

    ``every`` are the numbers of all rows, ``union`` of those that some rank touched, ``of_hosts`` that each host did.

    Example:
        >>> [cheapest_way(every=100, union=u, of_hosts=hosts) for u, hosts in ((60, [50, 30]), (60, [60] * 3))]
        ['exchange', 'union']
        >>> cheapest_way(every=100, union=99, of_hosts=[97, 96])
        'dense'
    """
    # Each H - 1 times.
    sent: dict[Way, int] = {"dense": 2 * every, "union": 2 * union, "exchange": sum(of_hosts)}
    best = min(sent, key=lambda way: sent[way])
    return best if sent[best] < (1 - _WORTH) * sent["dense"] else "dense"


class TouchedRowsSum:
    """Sums gradients of tables of these shapes, [rows, columns], over the ranks of all hosts.

    ``inside`` are the ranks of this host, ``across`` one rank of each. Without a ``way`` each sum takes the cheapest.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        inside: ProcessGroup,
        across: ProcessGroup,
        *,
        device: torch.device,
        way: Way | None = None,
    ) -> None:
        self._shapes, self._inside, self._across, self._way = list(shapes), inside, across, way
        self._heights, widths = (list(sizes) for sizes in zip(*shapes, strict=True))
        self._num_rows = sum(self._heights)
        self._widths = torch.tensor(widths, dtype=torch.int64, device=device)
        self.sent = {"backward": 0, "dense": 0, "inside": 0}
        """Bytes that all ranks sent in the last sum, by the names of `dmt.traffic.Traffic`."""
        self.taken: Way = "dense"
        """Way of the last sum."""

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
        hosts = self._across.size()
        if hosts == 1 or self._way == "dense":
            self._note("dense", {"every": len(gradient)}, told, bitmap=False)
            return self._start_all_reduce(gradient, None, told)
        by_host = self._touched_by_host(gradient)
        union = by_host.any(0)
        # Counted by tables: a number for each row and host would take more memory than the gradient.
        by_table = torch.cat([by_host, union[None]]).split(self._heights, dim=1)
        *of_hosts, of_union = torch.stack([rows.sum(1) for rows in by_table], 1).mul(self._widths).sum(1).tolist()
        sizes: dict[str, Any] = {"every": len(gradient), "union": of_union, "of_hosts": of_hosts}
        way = self._way or cheapest_way(**sizes)
        self._note(way, sizes, told)
        if way == "exchange":
            return self._start_exchange(gradient, by_host, of_hosts, told)
        return self._start_all_reduce(gradient, union if way == "union" else None, told)

    def _note(self, way: Way, sizes: Mapping[str, Any], told: Tensor, *, bitmap: bool = True) -> None:
        """Notes what a sum sends, by rings and with every part filled up to equal shares of a host's ranks."""
        hosts, ranks = self._across.size(), self._inside.size()
        of_hosts = sizes.get("of_hosts", [0] * hosts)
        if way != "exchange":
            of_hosts = [sizes["every" if way == "dense" else "union"]] * hosts
        filled = [ranks * -(-(number + len(told)) // ranks) for number in of_hosts]
        bits = ranks * -(-self._num_rows // (_BITS * ranks)) if bitmap else 0
        told_bits = 2 * self._num_rows + hosts * bits if bitmap else 0
        is_exchange = way == "exchange"
        gathered = (hosts if is_exchange else 1) * sum(filled)
        self.taken = way
        self.sent = {
            "backward": (hosts - 1) * (4 * is_exchange * sum(filled) + hosts * bits),
            "dense": 4 * (not is_exchange) * 2 * (hosts - 1) * filled[0],
            "inside": (ranks - 1) * (4 * (sum(filled) + gathered) + hosts * told_bits),
        }

    def _tables(self, numbers: Tensor) -> list[Tensor]:
        """Views of numbers of all rows, [rows, columns] of each table."""
        parts = numbers.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _picked(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Numbers of some rows, bool [n]."""
        of_tables = rows.split(self._heights)
        return torch.cat([table[own].flatten() for table, own in zip(self._tables(numbers), of_tables, strict=True)])

    def _add(self, total: Tensor, rows: Tensor, picked: Tensor) -> None:
        """Adds what was picked of the same rows to numbers of all rows, in place."""
        first = 0
        for table, own in zip(self._tables(total), rows.split(self._heights), strict=True):
            places = own.nonzero().flatten()
            size = len(places) * table.shape[1]
            table.index_add_(0, places, picked[first : first + size].view(-1, table.shape[1]))
            first += size

    def _touched_by_host(self, gradient: Tensor) -> Tensor:
        """Rows that each host touched, bool [H, n]."""
        # NaN is not equal to zero either: it must not get lost.
        touched = torch.cat([table.ne(0).any(1) for table in self._tables(gradient)])
        touched = max_over_ranks(touched.to(torch.uint8), self._inside)
        ranks = self._inside.size()
        bits = nn.functional.pad(touched, (0, -len(touched) % (_BITS * ranks))).view(-1, _BITS)
        places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
        # Each rank of a host sends its part of the host's bits.
        packed = (bits << places).sum(1, dtype=torch.uint8).chunk(ranks)[self._inside.rank()]
        arrived = gather_parts(gather_parts(packed.contiguous(), self._across), self._inside)
        whole = arrived.view(ranks, self._across.size(), -1).transpose(0, 1).reshape(self._across.size(), -1, 1)
        return (whole >> places & 1).flatten(1)[:, : len(touched)].bool()

    def _start_all_reduce(
        self, gradient: Tensor, rows: Tensor | None, told: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        sent = gradient if rows is None else self._picked(gradient, rows)
        end_sum = start_sum_over_hosts(torch.cat([sent, told]), self._inside, self._across)

        def end() -> tuple[Tensor, Tensor]:
            summed, told_sum = end_sum().split([len(sent), len(told)])
            if rows is None:
                return summed, told_sum
            total = torch.zeros_like(gradient)
            self._add(total, rows, summed)
            return total, told_sum

        return end

    def _start_exchange(
        self, gradient: Tensor, by_host: Tensor, of_hosts: Sequence[int], told: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        own, ranks = self._across.rank(), self._inside.size()
        sizes = [number + len(told) for number in of_hosts]
        sent = torch.cat([self._picked(gradient, by_host[own]), told])
        part = scatter_sum(nn.functional.pad(sent, (0, -len(sent) % ranks)), self._inside)
        pending, arriving = start_exchange([part] * len(sizes), [-(-size // ranks) for size in sizes], self._across)

        def end() -> tuple[Tensor, Tensor]:
            pending.wait()
            total, told_sum = torch.zeros_like(gradient), torch.zeros_like(told)
            # In the order of the hosts, on all of them.
            for rows, piece, number in zip(by_host, arriving, of_hosts, strict=True):
                summed = gather_parts(piece, self._inside)
                self._add(total, rows, summed[:number])
                told_sum += summed[number : number + len(told)]
            return total, told_sum

        return end
