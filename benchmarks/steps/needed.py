"""Bytes that a step must send across hosts, by arithmetic: `needed_bytes`. Pure.

Legend: H hosts, L ranks on each, W = H L ranks, B samples per rank. What one host sends away goes to B (W - L) samples,
or, where each input is sent once, to the distinct ones among them.

======== ==============================================================================================================
kind     counted, all hosts together
======== ==============================================================================================================
ids      to every host that holds a part of a table: 4 bytes per sample of the other hosts (a length), and 8 (an id) for
         the share of the table's rows that the host holds
forward  from every host, for each sample of the others: the columns of which it holds a part (partial sums of a host
         are added before they leave it), or the columns of its towers' outputs
backward as forward, the other way
dense    a reduction inside hosts first, then a ring between them: 2 (H - 1) times the gradients
======== ==============================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.steps.setting import Setting

__all__ = ["ID_BYTES", "LENGTH_BYTES", "HostShare", "needed_bytes"]

ID_BYTES, LENGTH_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """Part of one table that one host holds, each number of it counted once."""

    host: int
    columns: int
    """Columns of which it holds some rows."""
    rows: float
    """Rows of which it holds some columns, as a share of all."""
    inputs: int | None = None
    """Inputs that the ranks of other hosts send to it; None for all samples."""


def needed_bytes(
    setting: Setting,
    shares: Sequence[HostShare],
    *,
    dense_bytes: int,
    number_bytes: int,
    compression: int = 1,
) -> dict[str, int]:
    """Bytes that all hosts together must send to others in one step.

    Args:
        setting: sizes of the job.
        shares: of every table and host that holds some of it.
        dense_bytes: gradients of the parameters that all ranks hold, as they are sent.
        number_bytes: of a number of an output or its gradient as it is sent.
        compression: columns of a table over those of a tower's output for it.

    Example:
        Two hosts of two ranks, each with a table of 8 columns; 10 samples a rank.

        >>> shares = [HostShare(host=0, columns=8, rows=1.0), HostShare(host=1, columns=8, rows=1.0)]
        >>> needed_bytes(Setting(batch_size=10), shares, dense_bytes=100, number_bytes=4)
        {'ids': 480, 'forward': 1280, 'backward': 1280, 'dense': 200}
    """
    samples = setting.batch_size * (setting.world_size - setting.ranks_per_host)
    inputs = [samples if share.inputs is None else share.inputs for share in shares]
    ids = sum(n * (LENGTH_BYTES + ID_BYTES * share.rows) for n, share in zip(inputs, shares, strict=True))
    columns = sum(n * (share.columns // compression) for n, share in zip(inputs, shares, strict=True))
    outputs = columns * number_bytes
    return {
        "ids": round(ids),
        "forward": outputs,
        "backward": outputs,
        "dense": 2 * (setting.hosts - 1) * dense_bytes,
    }
