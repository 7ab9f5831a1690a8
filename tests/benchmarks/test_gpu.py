"""`make gpu` refuses politely without a GPU, and its CPU form agrees with the plain module and writes its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu import CONTENDERS, main, measure, profile_step
from tests.ranks import run_program, run_ranks


def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --device='cuda', but torch sees no GPU")
    assert "or set --device='cpu'" in result.stderr


def measured_on_rank(rank: int) -> dict[str, Any]:
    return {name: measure(name, "cpu", quick=True) for name in CONTENDERS}


@pytest.mark.ranks
def test_every_contender_agrees_with_the_plain_module_and_is_profiled() -> None:
    (runs,) = run_ranks(measured_on_rank, 1)
    for run in runs.values():
        assert max(run["parity"]["logits"], run["parity"]["dense_gradients"]) <= 1e-4
        own = run["profile"]
        seconds = [one["seconds"] for one in own["operators"]]
        assert seconds == sorted(seconds, reverse=True)
        assert 0 < sum(seconds) <= own["seconds"]


def test_a_profile_counts_the_operators_of_one_step() -> None:
    factor = torch.ones(8, 8)
    found = profile_step(lambda: (factor @ factor) @ factor, on_gpu=False)
    assert {one["name"]: one["calls"] for one in found["operators"]}["aten::mm"] == 2


@pytest.mark.ranks
@pytest.mark.slow
def test_the_record_of_a_cpu_has_every_contender(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    finished = run_program(["-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--out", str(out)], 1)
    assert finished.returncode == 0, finished.stderr[-3000:]
    record = json.loads(out.read_text())
    assert (record["quick"], record["agrees"]) == (True, True)
    assert record["about"]["packages"]["torch"].startswith("2.")
    assert list(record["contenders"]) == list(CONTENDERS)
    for run in record["contenders"].values():
        assert run["parity"]["tensors"] >= 8
        assert run["step_seconds"]["least"] <= run["step_seconds"]["median"] <= run["step_seconds"]["most"]
        assert run["peak_bytes"] > 0
