"""Checks that a run is sound: the same input on all ranks, finite numbers, equal copies of what several ranks hold."""

from __future__ import annotations

import socket
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.state import checksum
from dmt.training.build import build_model
from dmt.training.checkpoints.state import chunks, collect_state, is_finite
from dmt.training.data.dataset import file_text
from dmt.training.job import Job

__all__ = ["SoundnessCheck", "check_same_input"]

# Paths may differ between hosts; the files behind them may not.
_PATHS = (("data", "train_path"), ("data", "eval_path"), ("towers", "plan"), ("sharding", "plan"))
_NEVER = 2**62
_LOSS = "the loss"
_READ_AT_A_CHECK = 2**24  # numbers of the weights, in some 10 ms


def check_same_input(job: Job, group: dist.ProcessGroup) -> None:
    """Compares settings, tables, plans and files of data over the ranks; collective, before they depend on each other.

    Files are compared by name, bytes and CRC-32 of ends and samples, see `dmt.training.data.dataset.fingerprint`.

    Raises:
        InputError: a rank differs from the first; names setting or file, ranks and hosts; the same on every rank.
    """
    told: dict[str, Any] = job.config.model_dump(mode="json")
    for section, key in _PATHS:
        del told[section][key]
    told["device"] = job.device_type
    told["rows and columns"] = {table.name: (table.num_embeddings, table.embedding_dim) for table in job.split_tables}
    # Of a source, they follow from the first batch that this rank was given.
    data = job.data
    told["dense columns"], told["features"] = tuple(data.dense_names), tuple(data.feature_names)
    told["features of bags"] = tuple(sorted(data.multi_hot))
    if job.config.model.factory is not None:
        own = build_model(job, device="meta").named_parameters()
        told["parameters of the model"] = {name: tuple(parameter.shape) for name, parameter in own}
    told["tower"] = dict(enumerate(job.towers.to_lists())) if job.towers is not None else None
    told["placement"] = job.sharding.placements if job.sharding is not None else None
    for split in ("train", "eval"):
        for number, file in enumerate(job.data.files(split)):
            told[f"file {number} of data.{split}_path"] = file_text(*file)
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
    several ranks hold a copy of: dense layers, tower modules, data-parallel tables, hot rows. A number of a table that
    only one rank holds and that stays finite cannot be checked by anyone. One that is not finite is noticed when a
    sample reads it, when `check` reads it (16 Mi numbers of each rank at a time, in turns), and at the latest when it
    is to be saved (`dmt.training.checkpoints.Checkpointer`).

    Args:
        model: the sharded model.
        group: all ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._trained = {
            name: p for name, p in in_backward_optimizer_filter(model.named_parameters()) if p.requires_grad
        }
        self._copies = {
            name: value.detach() for name, value in model.state_dict().items() if not isinstance(value, ShardedTensor)
        }
        self._towers = [part for part in model.modules() if isinstance(part, SPTTModule)]
        state = collect_state(model.state_dict(), None)
        # A buffer may hold infinity: a mask, a running minimum.
        buffers = {f"model.{name}" for name, value in model.named_buffers() if type(value) is Tensor}
        self._parts = list(chunks({name: shards for name, shards in state.items() if name not in buffers}))
        self._turns = cycle(self._parts)
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
            InputError: training has diverged, or tables were changed in place.
            ReplicaMismatchError: copies of a parameter differ.
        """
        run_on_all_or_raise(self._write_back, self._group)
        copies = dict(self._copies)
        for module in self._towers:
            copies |= {} if module.hot is None else module.hot.tensors
        sums = {name: checksum(copy) for name, copy in copies.items()}
        ranks = gather_objects((int(self._since.min()), self._reads_finite(), sums), self._group)
        since = min(first for first, _, _ in ranks)
        if since != _NEVER or not all(finite for _, finite, _ in ranks):
            raise self._diverged(step, since)
        holders: dict[str, tuple[int, int]] = {}
        apart = []
        for rank, (_, _, theirs) in enumerate(ranks):
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

    def _write_back(self) -> None:
        for module in self._towers:
            module.write_back()

    def _reads_finite(self) -> bool:
        numbers = 0
        for _, part in islice(self._turns, len(self._parts)):
            numbers += part.numel()
            if not is_finite(part) or numbers >= _READ_AT_A_CHECK:
                return is_finite(part)
        return True

    def _diverged(self, step: int, since: int) -> InputError:
        names = [_LOSS, *(f"the gradient of {name}" for name in self._trained)]
        noted = [name for name, first in zip(names, self._since.tolist(), strict=True) if first == since != _NEVER]
        bad = sorted({name for name, part in self._parts if not is_finite(part)})
        ranks = gather_objects((noted, bad), self._group)
        # A bad loss makes all gradients bad, on all ranks.
        seen = list(dict.fromkeys(name for noted, _ in ranks for name in noted))
        first = [_LOSS] if _LOSS in seen else seen
        where = [str(rank) for rank, (noted, bad) in enumerate(ranks) if set(first or bad) & {*noted, *bad}]
        weights = shorten(sorted({name for _, names in ranks for name in names}), ", ") or "no weight"
        found = f"at step {since} in {shorten(first, ', ')}" if first else f"by step {step} in {weights}"
        return InputError(
            f"Training has diverged: NaN or infinity {found} of rank {shorten(where, ', ')}"
            f"{f', by now in {weights}' if first else ''}. Nothing of this state is "
            "saved. Lower optimizer.sparse_lr or optimizer.dense_lr, lengthen optimizer.warmup_steps, or look for huge "
            "values in the dense columns; run again, and training goes on from the last checkpoint."
        )
