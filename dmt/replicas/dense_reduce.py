"""`HierarchicalDataParallel`: gradients of the dense part reduced inside each host first, then once between hosts.

DDP's one ring over all ranks sends 2 (W-1)/W of the dense gradients out of every host; reduced inside the H hosts
first, 2 (H-1)/H suffice: at 2 hosts of 2 ranks a third less. Only that hop may also travel in BF16.

Legend: W ranks, H hosts, n numbers of a DDP bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dmt._torchrec import add_dense_hook, at_end_of_backward
from dmt.collectives import check_agreement, start_sum_over_hosts
from dmt.errors import InputError
from dmt.number_formats import SyncPrecision
from dmt.sptt.mesh import TowerMesh

__all__ = ["HierarchicalDataParallel"]

_BUCKET_MB = 1.0
_PATIENCE = timedelta(minutes=1)  # ranks that have a mesh come soon after each other, or never


class HierarchicalDataParallel(DefaultDataParallelWrapper):
    """Wrapper of the dense part for ``DistributedModelParallel``: TorchRec's DDP with a hierarchical all-reduce.

    ========= ============================================================================ ===========================
    step      what                                                                         group
    ========= ============================================================================ ===========================
    1         reduce-scatter of a bucket of gradients, [n] -> [n / ranks per host]         ranks of a host
    2         all-reduce of that part; in flight while the rest of the backward pass runs  same part on all hosts
    3         all-gather, at the end of the backward pass, [n]                             ranks of a host
    ========= ============================================================================ ===========================

    The result is the mean over all W ranks, bitwise equal on each. A host is that of `TowerTopology.host`.

    Collective: every rank makes one at the same point, for the process groups.

    Args:
        mesh: groups of the job.
        precision: number format of step 2; ``"fp32"`` sends gradients as they are, ``"bf16"`` rounds them to 8 bits.
        bucket_cap_mb: MB reduced at once; smaller than DDP's 25, so that the first bucket is sent early.
            DDP's own first bucket has 1 MB at least.
        options: further arguments of TorchRec's ``DefaultDataParallelWrapper``, such as ``static_graph``.

    Raises:
        InputError: an unknown precision, TorchRec's ``allreduce_comm_precision``, ranks that were given other
            arguments, or ranks that make none within a minute.

    Example::

        dense = HierarchicalDataParallel(mesh)
        model = DistributedModelParallel(task, plan=plan, sharders=sharders, data_parallel_wrapper=dense)
    """

    def __init__(
        self,
        mesh: TowerMesh,
        *,
        precision: SyncPrecision = "fp32",
        bucket_cap_mb: float = _BUCKET_MB,
        **options: Any,
    ) -> None:
        arguments = {"precision": precision, "bucket_cap_mb": bucket_cap_mb}
        check_agreement("HierarchicalDataParallel", {**arguments, **options}, mesh.global_group, patience=_PATIENCE)
        if precision not in ("fp32", "bf16"):
            raise InputError(f"HierarchicalDataParallel: precision={precision!r} is unknown; use 'fp32' or 'bf16'.")
        if options.get("allreduce_comm_precision") is not None:
            raise InputError(
                f"HierarchicalDataParallel: allreduce_comm_precision={options['allreduce_comm_precision']!r} is for "
                "TorchRec's own all-reduce, which this one replaces; use precision='bf16'."
            )
        super().__init__(bucket_cap_mb=bucket_cap_mb, **options)
        topology = mesh.topology
        hosts = topology.host_groups()
        self._inside = mesh.new_group(hosts)
        # On the peers' own connections, where they are the same ranks: what is sent there goes in order, so the
        # gradients of tower outputs, which more depends on, come first.
        across = [list(ranks) for ranks in zip(*hosts, strict=True)]
        same = sorted(across) == sorted(sorted(group) for group in topology.peer_groups())
        # With NCCL they are kept apart: all ranks must start what one of its groups carries in one order.
        has_nccl = "nccl" in dist.get_backend_config(mesh.peer_group)
        self._across = mesh.peer_group if same and not has_nccl else mesh.new_group(across)
        self._in_bf16 = precision == "bf16"

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        """Called by DMP."""
        super().wrap(dmp, env, device)
        add_dense_hook(dmp, _HierarchicalReduce(self._inside, self._across, in_bf16=self._in_bf16))


class _HierarchicalReduce:
    """The communication hook of one DDP."""

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup, *, in_bf16: bool) -> None:
        self._inside = inside
        self._across = across
        self._in_bf16 = in_bf16
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []
        """The gradients of a bucket, and what waits for their mean."""

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        with torch.profiler.record_function("## dmt:dense_reduce ##"):
            # Divided first, as DDP does: a sum of FP16 gradients may be beyond what FP16 holds.
            share = gradients / (self._inside.size() * self._across.size())
            dtype = torch.bfloat16 if self._in_bf16 else None
            self._pending.append((gradients, start_sum_over_hosts(share, self._inside, self._across, dtype=dtype)))
        at_end_of_backward(self._finish)
        # DDP is told that all is done: gradients are views of the bucket, and `_finish` writes there.
        devices: Any = [] if gradients.device.type == "cpu" else [gradients.device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        done.set_result(gradients)
        return done

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for gradients, end in pending:
            gradients.copy_(end())
