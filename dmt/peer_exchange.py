"""`PeerExchange`: the output exchange of SPTT step f in the number format that an `ExchangePrecision` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable

from dmt._torchrec import LazyResult
from dmt.collectives import OutputsToPeers
from dmt.errors import InputError
from dmt.precision import ExchangePrecision

__all__ = ["PeerExchange"]


class PeerExchange(nn.Module):
    """`OutputsToPeers` with codecs, padded where a format needs whole groups of numbers; differentiable.

    Shapes, gradients and the dtype of the result are those of `OutputsToPeers` without codecs.

    Args:
        group: the peer group.
        output_sizes: O_t for each tower (rank of the group).
        dtype: of every tower's outputs.
        device: of the outputs.
        precision: the formats; None sends as is.

    Raises:
        InputError: the device cannot do a format.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        output_sizes: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        precision: ExchangePrecision | None = None,
    ) -> None:
        super().__init__()
        self._precision = precision or ExchangePrecision()
        self._output_sizes = list(output_sizes)
        self._dtype = dtype
        self._rank = group.rank()
        codecs = self._precision.codecs(device or torch.device("cpu"), dtype)
        self._exchange = OutputsToPeers(group, output_sizes, device, codecs)

    def forward(self, outputs: Tensor, batch_sizes: Sequence[int]) -> Awaitable[Tensor]:
        """Starts the exchange.

        Args:
            outputs: [sum(batch_sizes), O_t].
            batch_sizes: B of every peer, in group order; they may differ.

        Raises:
            InputError: the outputs have another dtype than agreed on.
        """
        if outputs.dtype != self._dtype:
            raise InputError(
                f"The exchange between towers was made for {self._dtype}, but tower {self._rank} hands it "
                f"{outputs.dtype}; convert its outputs."
            )
        padded = self._precision.padded_batch_sizes(batch_sizes, output_sizes=self._output_sizes)
        if padded == list(batch_sizes):
            return self._exchange(outputs, padded)
        blocks = zip(outputs.split(list(batch_sizes)), padded, strict=True)
        filled = [nn.functional.pad(block, (0, 0, 0, rows - block.shape[0])) for block, rows in blocks]
        rows = batch_sizes[self._rank]
        return LazyResult(self._exchange(torch.cat(filled), padded), lambda columns: columns[:rows])
