"""Training on a GPU that is not there: every tensor is made on the device of those that it meets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dmt import TowerMesh
from dmt.training.job import open_job
from dmt.training.train import train_job
from tests import sptt_case
from tests.dmt.test_parity import CASES
from tests.pretended_gpu import GPU, MixedDevicesError, pretended_gpu
from tests.ranks import run_ranks
from tests.sptt_case import Case, Worst, cases_on_rank, check
from tests.training.small import small

ON_TWO = {f"{about}: {name}": case for about, cases in CASES.items() for name, case in cases.items() if case.world == 2}


def test_a_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with pretended_gpu():
        on_cpu = torch.arange(3)
        on_gpu = on_cpu.to("cuda")
        assert (on_gpu.device, on_cpu.device, (on_gpu + 1).device) == (GPU, torch.device("cpu"), GPU)
        assert torch.zeros(2, device=on_gpu.device).is_cuda
        assert on_gpu[on_cpu].is_cuda
        assert not on_gpu.cpu().is_cuda
        for mix in (lambda: on_gpu + on_cpu, lambda: on_cpu[on_gpu], lambda: on_gpu.index_select(0, on_cpu)):
            with pytest.raises(MixedDevicesError, match="mixes devices"):
                mix()
        with pytest.raises(MixedDevicesError, match="numpy of a tensor on a GPU"):
            on_gpu.numpy()
        with pytest.raises(MixedDevicesError, match="mixes devices"):
            torch.from_numpy(np.arange(3)) + on_gpu


@pytest.mark.parametrize("place", ["backward", "register_hook", "register_post_accumulate_grad_hook"])
def test_a_pretended_gpu_refuses_it_in_backward_passes(place: str) -> None:
    def mixed(gradient: torch.Tensor) -> None:
        assert gradient.is_cuda
        gradient + torch.zeros(3)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            if place == "backward":
                mixed(gradients[0])
            return gradients[0]

    with pretended_gpu():
        weight = torch.zeros(3, device="cuda", requires_grad=True)
        if place != "backward":
            getattr(weight, place)(mixed)
        with pytest.raises(MixedDevicesError, match="add mixes devices"):
            Same.apply(weight).sum().backward()


def on_pretended_gpu(rank: int, cases: Sequence[Case]) -> list[Worst]:
    with pretended_gpu(), patch.object(sptt_case, "DEVICE", GPU):
        return cases_on_rank(rank, cases)


@pytest.mark.ranks
def test_training_on_a_pretended_gpu_is_plain_training() -> None:
    for of_rank in run_ranks(on_pretended_gpu, 2, list(ON_TWO.values())):
        for case, worst in zip(ON_TWO.values(), of_rank, strict=True):
            check(case, worst)


RUNS: dict[str, Any] = {
    "towers": {"train": {"micro_batches": 2, "dense_reduce": "hierarchical", "async_save": True}},
    "hot rows": {"arch": "dlrm", "sharding": {"unique": True}, "hot_rows": {"extra_memory": 0.3, "refresh_every": 3}},
    "replicas": {"topology": {"num_replicas": 2}, "replicas": {"sync_every": 2, "optimizer_state": "delayed"}},
    "flat": {"arch": "dcn", "dataflow": "flat", "optimizer": {"sparse": "adagrad"}},
}


def run_twice(rank: int, device: str, folder: str) -> list[dict[str, Any]]:
    """Trains each run, and again from its last checkpoint to a later step."""
    results = []
    for name, run in RUNS.items():
        for steps in (5, 8):
            own = {"device": device, "output_dir": f"{folder}/{name}", "max_steps": steps, "eval_every": 4}
            topology = {"num_towers": 1 if name == "replicas" else 2, "ranks_per_tower": 1}
            sections = {"dataflow": "sptt", **run, "topology": topology | run.get("topology", {})}
            config = small(**sections | {"train": own | run.get("train", {})})
            result = train_job(open_job(config), TowerMesh(config.topology.build()))
            results.append({key: result[key] for key in ("steps", "eval_auc", "eval_loss", "bytes_per_sample")})
    return results


def run_twice_on_pretended_gpu(rank: int, folder: str) -> list[dict[str, Any]]:
    with pretended_gpu():
        return run_twice(rank, "cuda", folder)


@pytest.mark.ranks
def test_a_run_on_a_pretended_gpu_gives_what_one_on_the_cpu_gives(tmp_path: Path) -> None:
    on_gpu = run_ranks(run_twice_on_pretended_gpu, 2, str(tmp_path / "gpu"))
    assert on_gpu == run_ranks(run_twice, 2, "cpu", str(tmp_path / "cpu"))
    assert [result["steps"] for result in on_gpu[0]] == [5, 8] * len(RUNS)
