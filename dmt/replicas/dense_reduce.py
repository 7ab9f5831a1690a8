"""`HierarchicalDataParallel`: reduces gradients of the dense part inside each host first, then once between hosts.

For S bytes of dense gradients, DDP's single ring over all W ranks sends 2 S (W-1)/W bytes out of every host. If each of
H hosts reduces first, a host sends 2 S (H-1)/H, or half of that in BF16. n is the number of gradients in a DDP bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dmt._torchrec import add_dense_hook, at_end_of_backward
from dmt.collectives import check_agreement, profiler_range, start_sum_over_hosts
from dmt.errors import InputError, check_instance
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.precision import SyncPrecision

__all__ = ["HierarchicalDataParallel"]


class HierarchicalDataParallel(DefaultDataParallelWrapper):
    """Wrapper of the dense part for ``DistributedModelParallel``: TorchRec's DDP with a hierarchical all-reduce.

    ========= ============================================================================ ============================
    step      what                                                                         group
    ========= ============================================================================ ============================
    1         reduce-scatter of a bucket of gradients, [n] -> [n / ranks per host]         ranks of a host
    2         all-reduce of that part; in flight while the rest of the backward pass runs  same position on each host
    3         all-gather, at the end of the backward pass: [n / ranks per host] -> [n]     ranks of a host
    ========= ============================================================================ ============================

    The result is the mean over all W ranks, bitwise equal on each. Collective: it makes process groups.

    Args:
        mesh: the process groups of this job.
        precision: number format of step 2: ``"fp32"`` sends gradients unchanged, ``"bf16"`` keeps 8 significant bits.
        bucket_cap_mb: size of a bucket in MB; smaller than DDP's 25, so that the first bucket is sent early.
        options: other arguments of TorchRec's ``DefaultDataParallelWrapper``, except ``allreduce_comm_precision``.

    Raises:
        InputError: ``mesh`` is not a `TowerMesh`, ``precision`` is unknown, or arguments differ between ranks.

    Example::

        dense = HierarchicalDataParallel(mesh)
        model = DistributedModelParallel(task, plan=plan, sharders=sharders, data_parallel_wrapper=dense)
    """

    def __init__(
        self, mesh: TowerMesh, *, precision: SyncPrecision = "fp32", bucket_cap_mb: float = 1.0, **options: Any
    ) -> None:
        check_instance("mesh", mesh, TowerMesh)
        arguments = {"precision": precision, "bucket_cap_mb": bucket_cap_mb}
        check_agreement("HierarchicalDataParallel", {**arguments, **options}, mesh.global_group)
        if precision not in ("fp32", "bf16"):
            raise InputError(f"HierarchicalDataParallel: precision={precision!r} is unknown; use 'fp32' or 'bf16'.")
        super().__init__(bucket_cap_mb=bucket_cap_mb, **options)
        across = mesh.topology.across_host_groups()
        self._inside = mesh.new_group(mesh.topology.host_groups())
        # If these ranks are the peers, share the peers' connections: gradients of tower outputs then go first, and more
        # work waits for those. Not with NCCL, where all ranks must start the collectives of a group in the same order.
        are_peers = sorted(across) == sorted(mesh.topology.peer_groups())
        has_nccl = "nccl" in dist.get_backend_config(mesh.peer_group)
        self._across = mesh.peer_group if are_peers and not has_nccl else mesh.new_group(across)
        self._dtype = torch.bfloat16 if precision == "bf16" else None

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        """Wraps the dense part in DDP with this reduction; ``DistributedModelParallel`` calls it."""
        super().wrap(dmp, env, device)
        add_dense_hook(dmp, self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        with profiler_range("dense_reduce"):
            # Divided first, as DDP does: a sum of FP16 gradients may exceed the range of FP16.
            share = gradients / (self._inside.size() * self._across.size())
            end = start_sum_over_hosts(share, self._inside, self._across, dtype=self._dtype)
        at_end_of_backward(lambda: gradients.copy_(end()))
        # DDP may regard the bucket as done: gradients are views of it, and the means are written there.
        done = torch.futures.Future[Tensor](devices=[gradients.device] if gradients.is_cuda else [])
        done.set_result(gradients)
        return done
