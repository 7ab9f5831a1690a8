"""`HierarchicalDataParallel`: gradients of the dense part reduced inside each host first, then once between hosts.

DDP's one ring over all ranks sends 2 (W-1)/W of the dense gradients out of every host; reduced inside the H hosts
first, 2 (H-1)/H suffice: at 2 hosts of 2 ranks a third less. Only that hop may also travel in BF16.

Legend: W ranks, H hosts, n numbers of a DDP bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dmt._torchrec import add_dense_hook, at_end_of_backward
from dmt.collectives import gather_parts, scatter_sum, start_sum
from dmt.errors import InputError
from dmt.mesh import TowerMesh
from dmt.precision import SyncPrecision

__all__ = ["HierarchicalDataParallel"]

_BUCKET_MB = 1.0


class HierarchicalDataParallel(DefaultDataParallelWrapper):
    """What ``DistributedModelParallel`` wraps the dense part in: TorchRec's DDP with another all-reduce.

    ========= ============================================================================ ===========================
    step      what                                                                         group
    ========= ============================================================================ ===========================
    1         reduce-scatter of a bucket of gradients, [n] -> [n / ranks per host]         ranks of a host
    2         all-reduce of that part; under way while the rest of the backward pass runs  same part on all hosts
    3         all-gather, at the end of the backward pass, [n]                             ranks of a host
    ========= ============================================================================ ===========================

    The result is the mean over all W ranks, the same bits on each. A host is here what `TowerTopology.host` says: the
    ranks of a tower, with ``"intra_host"`` replicas those of all its replicas.

    Collective: every rank makes one at the same point, for the process groups.

    Args:
        mesh: of the job.
        precision: of step 2; ``"bf16"`` halves its bytes and rounds gradients to 8 bits.
        ranks_per_host: where hosts are larger or smaller than that: so many neighbouring ranks are a host.
        bucket_cap_mb: how much is reduced at once; smaller than DDP's 25, so that the first is on its way early.
        options: of TorchRec's ``DefaultDataParallelWrapper``, such as ``bucket_cap_mb``.

    Raises:
        InputError: an unknown precision, or hosts that do not divide the ranks.

    Example::

        dense = HierarchicalDataParallel(mesh)
        model = DistributedModelParallel(task, plan=plan, sharders=sharders, data_parallel_wrapper=dense)
    """

    def __init__(
        self,
        mesh: TowerMesh,
        *,
        precision: SyncPrecision = "fp32",
        ranks_per_host: int | None = None,
        bucket_cap_mb: float = _BUCKET_MB,
        **options: Any,
    ) -> None:
        if precision not in ("fp32", "bf16"):
            raise InputError(f"HierarchicalDataParallel: precision={precision!r} is unknown; use 'fp32' or 'bf16'.")
        super().__init__(bucket_cap_mb=bucket_cap_mb, **options)
        topology = mesh.topology
        hosts = topology.host_groups() if ranks_per_host is None else _blocks(topology.world_size, ranks_per_host)
        self._inside = mesh.new_group(hosts)
        # On the peers' own connections, where they are the same ranks: what is sent there goes in order, so the
        # gradients of tower outputs, which more depends on, come first.
        across = [list(ranks) for ranks in zip(*hosts, strict=True)]
        same = sorted(across) == sorted(sorted(group) for group in topology.peer_groups())
        self._across = mesh.peer_group if same else mesh.new_group(across)
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._pending: list[_Bucket] = []

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        """Called by DMP."""
        super().wrap(dmp, env, device)
        add_dense_hook(dmp, self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        if bucket.index() == 0:
            self._pending = []  # what a backward pass left that did not come to its end, because something raised
        with torch.profiler.record_function("## dmt:dense_reduce ##"):
            size = self._inside.size()
            padded = nn.functional.pad(gradients, (0, -gradients.numel() % size)) if size > 1 else gradients
            part = scatter_sum(padded, self._inside).to(self._dtype)
            self._pending.append(_Bucket(gradients, part, start_sum(part, self._across)))
        at_end_of_backward(self._finish)
        # DDP is told that all is done: gradients are views of the bucket, and `_finish` writes there.
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    def _finish(self) -> None:
        for bucket in self._pending:
            bucket.work.wait()
            mean = bucket.part.to(bucket.gradients.dtype) / (self._inside.size() * self._across.size())
            bucket.gradients.copy_(gather_parts(mean, self._inside)[: bucket.gradients.numel()])
        self._pending = []


def _blocks(world_size: int, ranks_per_host: int) -> list[list[int]]:
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise InputError(
            f"HierarchicalDataParallel: ranks_per_host={ranks_per_host} does not divide the {world_size} ranks of the "
            "job; give the ranks of one host."
        )
    return [list(range(first, first + ranks_per_host)) for first in range(0, world_size, ranks_per_host)]


@dataclass(frozen=True)
class _Bucket:
    gradients: Tensor
    part: Tensor
    work: Any
