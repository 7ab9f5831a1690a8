"""Checks that a run is sound: the same input on all ranks, finite numbers, equal copies of what several ranks hold."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import check_agreement, gather_objects
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.replicas.state import checksum
from dmt.training.checkpoints.state import collect_state, non_finite
from dmt.training.job import Job

__all__ = ["SoundnessCheck", "check_same_input"]

# Paths may differ between hosts; the files behind them may not.
_PATHS = (("data", "train_path"), ("data", "eval_path"), ("towers", "plan"), ("sharding", "plan"))
_NEVER = 2**62
_LOSS = "the loss"


def check_same_input(job: Job, group: dist.ProcessGroup) -> None:
    """Compares settings, tables, plans and files of data over the ranks; collective, before they depend on each other.

    Files are compared by name, bytes and the CRC-32 of their ends, see `dmt.training.data.dataset.fingerprint`.

    Raises:
        InputError: a rank differs from the first; names setting or file, ranks and hosts; the same on every rank.
    """
    told: dict[str, Any] = job.config.model_dump(mode="json")
    for section, key in _PATHS:
        del told[section][key]
    told["rows and columns"] = {table.name: (table.num_embeddings, table.embedding_dim) for table in job.split_tables}
    told["tower"] = dict(enumerate(job.towers.to_lists())) if job.towers is not None else None
    told["placement"] = job.sharding.placements if job.sharding is not None else None
    for split in ("train", "eval"):
        for number, (name, size, crc) in enumerate(job.data.files(split)):
            told[f"file {number} of data.{split}_path"] = f"{name} of {size:,} bytes (CRC-32 {crc:08x})"
    try:
        check_agreement("Training", told, group)
    except InputError as error:
        hosts = gather_objects(socket.gethostname(), group)
        places = [f"{host} (rank {hosts.index(host)} on)" for host in dict.fromkeys(hosts)]
        raise InputError(f"{error} The ranks are on host {shorten(places, ', ', most=8)}.") from error


class SoundnessCheck:
    """Notices in training that numbers are no longer finite, or that copies of one parameter differ between ranks.

    `note` looks at the loss and at the gradients of what is trained by PyTorch's optimizers, in every step, on the
    device and without a wait. `check` brings the notes of all ranks together. It also compares fingerprints of what
    several ranks hold a copy of: dense layers, tower modules, data-parallel tables. A number of a table that only one
    rank holds and that stays finite cannot be checked by anyone; one that is not finite is noticed when a sample reads
    it, and at the latest when it is to be saved (`dmt.training.checkpoints.Checkpointer`).

    Args:
        model: the sharded model.
        group: all ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._trained = {
            name: p for name, p in in_backward_optimizer_filter(model.named_parameters()) if p.requires_grad
        }
        self._copies = {
            name: value.detach() for name, value in model.state_dict().items() if not isinstance(value, ShardedTensor)
        }
        # The first step at which the loss, and the gradient of each parameter, was not finite.
        self._since = torch.full((1 + len(self._trained),), _NEVER)

    @torch.no_grad()
    def note(self, step: int, logits: Tensor) -> None:
        """Notes whether the logits [B] of a step and its gradients are finite; not collective."""
        zero = logits.new_zeros(())
        gradients = [zero if p.grad is None else p.grad.norm() for p in self._trained.values()]
        finite = torch.stack([logits.sum(), *gradients]).isfinite()
        self._since = self._since.to(finite.device).where(finite, self._since.clamp(max=step))

    def check(self, step: int) -> None:
        """Raises the same error on every rank if something was noted or copies differ; collective over the group.

        Raises:
            InputError: training has diverged.
            ReplicaMismatchError: copies of a parameter differ.
        """
        sums = {name: checksum(copy) for name, copy in self._copies.items()}
        ranks = gather_objects((int(self._since.min()), sums), self._group)
        if (since := min(first for first, _ in ranks)) != _NEVER:
            raise self._diverged(since)
        holders: dict[str, tuple[int, int]] = {}
        apart = []
        for rank, (_, theirs) in enumerate(ranks):
            for name, value in theirs.items():
                first, expected = holders.setdefault(name, (rank, value))
                if value != expected:
                    apart.append(f"{name} of rank {rank} differs from that of rank {first}")
        if apart:
            raise ReplicaMismatchError(
                f"Copies that must be equal are not, seen at step {step}: {shorten(apart)}. Nothing of this state is "
                "saved. Look for a fault of the memory or the network of these ranks; run again, and training goes on "
                "from the last checkpoint."
            )

    def _diverged(self, since: int) -> InputError:
        names = [_LOSS, *(f"the gradient of {name}" for name in self._trained)]
        noted = [name for name, first in zip(names, self._since.tolist(), strict=True) if first == since]
        ranks = gather_objects((noted, non_finite(collect_state(self._model.state_dict(), None).pieces)), self._group)
        # A bad loss makes all gradients bad, on all ranks.
        seen = list(dict.fromkeys(name for noted, _ in ranks for name in noted))
        first = [_LOSS] if _LOSS in seen else seen
        where = [str(rank) for rank, (noted, _) in enumerate(ranks) if set(first) & set(noted)]
        weights = sorted({name for _, names in ranks for name in names})
        return InputError(
            f"Training has diverged: NaN or infinity at step {since} in {shorten(first, ', ')} of rank "
            f"{shorten(where, ', ')}, by now in {shorten(weights, ', ') or 'no weight'}. Nothing of this state is "
            "saved. Lower optimizer.sparse_lr or optimizer.dense_lr, lengthen optimizer.warmup_steps, or look for huge "
            "values in the dense columns; run again, and training goes on from the last checkpoint."
        )
