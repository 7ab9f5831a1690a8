"""`TrafficMeter`: counts the bytes that the collectives of a step send, and how many of them leave the host.

It counts where PyTorch passes a collective to the backend, so it sees the exchanges of TorchRec, the gradient reduction
of DDP and the collectives of this library alike, flat or with towers.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dmt._torchrec import in_backward_pass, tree_flatten
from dmt.collectives import gather_objects

__all__ = ["Traffic", "TrafficMeter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that all ranks of a group sent while the meter was active, usually for one step."""

    ids: int = 0
    """Bytes sent across hosts in integer tensors other than ``uint8``: sparse ids, lengths and sizes."""
    forward: int = 0
    """Bytes sent across hosts in floating-point and ``uint8`` tensors outside backward passes: embeddings, tower
    outputs, and the weights of weighted bags."""
    backward: int = 0
    """Bytes sent across hosts in floating-point and ``uint8`` tensors in backward passes: gradients."""
    dense: int = 0
    """Bytes sent across hosts in floating-point all-reduces (gradients of replicated parameters), counted only here."""
    inside: int = 0
    """All bytes sent between ranks of the same host."""

    @property
    def across(self) -> int:
        """All bytes sent across hosts."""
        return self.ids + self.forward + self.backward + self.dense

    def per_sample(self, rows: int) -> dict[str, float]:
        """Returns the bytes per sample by name, ``across`` first; ``rows`` is the number of samples of the step."""
        return {name: number / rows for name, number in {"across": self.across, **asdict(self)}.items()}


class TrafficMeter(TorchDispatchMode):
    """Context manager that counts the bytes that this rank sends inside the block.

    An all-to-all or a send counts the bytes addressed to each rank. An all-reduce of S bytes over n ranks on h hosts
    counts what a ring in host order sends: 2 S (n - 1) / n per rank; if h > 1, h of the n ring links cross hosts. A
    broadcast or all-gather of S bytes counts S to every other rank, as if no rank relayed, and a reduce-scatter S / n.
    Any other collective that sends tensors is not counted; the meter logs a warning the first time.

    Args:
        host_of: maps a global rank to the index of its host; several hosts can be simulated on one machine.

    Example::

        meter = TrafficMeter(host_of=lambda rank: rank // ranks_per_host)
        with meter:
            model(batch).backward()
        traffic = meter.total(mesh.global_group)
    """

    def __init__(self, host_of: Callable[[int], int]) -> None:
        super().__init__()
        self._host_of = host_of
        self._bytes: dict[str, float] = defaultdict(float)
        self._rank = dist.get_rank()
        self._unknown: set[str] = set()

    def total(self, group: dist.ProcessGroup) -> Traffic:
        """Returns the sum of the bytes over all ranks of the group; collective."""
        booked: Counter[str] = Counter()
        for part in gather_objects(dict(self._bytes), group):
            booked.update(part)
        return Traffic(**{kind: round(number) for kind, number in booked.items()})

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name not in ("barrier", "recv_"):
            self._count(name, args)
        elif func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self._warn(f"_c10d_functional.{name}")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        # Collectives take the group as their first script object; a second one is the reduction.
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed is None:
            return
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
        if name == "alltoall_base_":
            tensor, rows = args[1], list(args[4]) or [args[1].shape[0] // len(ranks)] * len(ranks)
            row_bytes = tensor.nbytes / max(1, tensor.shape[0])
            self._send(tensor, {rank: n * row_bytes for rank, n in zip(ranks, rows, strict=True)})
        elif name == "alltoall_":
            self._send(args[1], {rank: tensor.nbytes for rank, tensor in zip(ranks, args[1], strict=True)})
        elif name == "send":
            self._send(args[0], {ranks[args[2]]: _nbytes(args[0])})
        elif name.startswith("allreduce"):
            order = sorted(ranks, key=lambda rank: (self._host_of(rank), rank))
            to = order[(order.index(self._rank) + 1) % len(order)]
            size = 2 * _nbytes(args[0]) * (len(ranks) - 1) / len(ranks)
            self._send(args[0], {to: size}, kind="dense" if _dtype(args[0]).is_floating_point else "ids")
        elif name.startswith("broadcast"):
            if ranks[args[2]] == self._rank:
                self._send(args[0], dict.fromkeys(ranks, _nbytes(args[0])))
        elif "allgather" in name:
            self._send(args[1], dict.fromkeys(ranks, _nbytes(args[1])))
        elif "reduce_scatter" in name:
            self._send(args[1], dict.fromkeys(ranks, _nbytes(args[1]) / len(ranks)))
        else:
            self._warn(f"c10d.{name}")

    def _warn(self, name: str) -> None:
        if name not in self._unknown:
            self._unknown.add(name)
            logger.warning("TrafficMeter has no rule for the collective %s, so its totals leave it out.", name)

    def _send(self, tensors: Any, to: dict[int, float], kind: str = "") -> None:
        dtype = _dtype(tensors)
        # Quantized numbers are sent as bytes; ids and lengths are wider.
        is_numbers = dtype.is_floating_point or dtype == torch.uint8
        kind = kind or ("ids" if not is_numbers else "backward" if in_backward_pass() else "forward")
        for rank, size in to.items():
            if rank != self._rank:
                across = self._host_of(rank) != self._host_of(self._rank)
                self._bytes[kind if across else "inside"] += size


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_flatten(tensors)[0])


def _dtype(tensors: Any) -> torch.dtype:
    dtype: torch.dtype = tree_flatten(tensors)[0][0].dtype
    return dtype
