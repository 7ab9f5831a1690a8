"""The dense arch computes while the peer exchange is under way, forward and backward, and no bit depends on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torchrec.distributed.types import LazyAwaitable

from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import PeerExchange
from dmt.sptt.results import CachedAwaitable
from dmt.testing import gather_plain_state
from dmt.training.build import build_optimizer, shard_model
from dmt.training.job import open_job
from tests.ranks import run_ranks
from tests.training.small import small

ARCHS = ["dlrm", "dcn", "dmt-dlrm", "dmt-dcn"]


def watch(model: torch.nn.Module, events: list[str]) -> None:
    """Logs when the exchange is begun and waited for and when the dense arch runs, and the same of their gradients."""
    exchange, wait = PeerExchange.forward, CachedAwaitable._wait_impl

    def begin(self: PeerExchange, outputs: torch.Tensor, *args: Any) -> Any:
        events.append("exchange begun")
        # A hook of a tensor runs when its gradient is there.
        outputs.register_hook(lambda _: events.append("gradients arrived"))
        return exchange(self, outputs, *args)

    def end(self: CachedAwaitable) -> Any:
        if self._value is not None:
            return wait(self)
        events.append("exchange waited for")
        result = wait(self)
        columns = result if isinstance(result, torch.Tensor) else result.values()
        columns.register_hook(lambda _: events.append("gradients to be sent"))
        return result

    def dense(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        events.append("dense arch")
        output.register_hook(lambda _: events.append("dense arch, backward"))

    PeerExchange.forward, CachedAwaitable._wait_impl = begin, end  # type: ignore[method-assign]
    model.module.model.dense_arch.register_forward_hook(dense)  # type: ignore[union-attr]


def train(rank: int, arch: str, *, at_once: bool, events: list[str] | None = None) -> dict[str, torch.Tensor]:
    """The weights after three steps; ``at_once``: the exchange is waited for before the dense arch runs."""
    config = small(arch, "sptt", topology={"ranks_per_tower": 1}, train={"seed": 3})
    job = open_job(config)
    data = job.data
    model = shard_model(job, TowerMesh(config.topology.build()))
    optimizer = build_optimizer(config.optimizer, model)
    if at_once:

        def wait(module: Any, inputs: Any, output: LazyAwaitable[Any]) -> Any:
            return output.wait()

        model.module.model.sparse_arch.register_forward_hook(wait)
    if events is not None:
        watch(model, events)
    for batch in itertools.islice(data.batches("train", rank=rank, world_size=2, batch_size=16), 3):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return gather_plain_state(model)


def on_rank(rank: int) -> dict[str, tuple[Any, Any, list[str]]]:
    found = {}
    forward, wait = PeerExchange.forward, CachedAwaitable._wait_impl
    for arch in ARCHS:
        events: list[str] = []
        late = train(rank, arch, at_once=False, events=events)
        PeerExchange.forward, CachedAwaitable._wait_impl = forward, wait  # type: ignore[method-assign]
        found[arch] = (late, train(rank, arch, at_once=True), events)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[Any, Any, list[str]]]]:
    return run_ranks(on_rank, 2)


@pytest.mark.ranks
def test_the_dense_arch_runs_between_beginning_and_end_of_the_exchange(found: list[Any]) -> None:
    forward = ["exchange begun", "dense arch", "exchange waited for"]
    backward = ["gradients to be sent", "dense arch, backward", "gradients arrived"]
    for rank, arch in itertools.product(range(2), ARCHS):
        assert found[rank][arch][2] == 3 * [*forward, *backward], f"rank {rank}, {arch}"


@pytest.mark.ranks
def test_when_the_exchange_is_waited_for_changes_no_bit(found: list[Any]) -> None:
    for arch in ARCHS:
        late, at_once, _ = found[0][arch]
        assert late.keys() == at_once.keys()
        for name, value in at_once.items():
            assert torch.equal(late[name], value), f"{arch}: {name}"
