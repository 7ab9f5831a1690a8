"""``dmt breakdown``: computing, exposed and hidden exchanges of a trace, against traces whose answer is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from dmt.errors import InputError
from dmt.training.breakdown import read_trace
from dmt.training.commands import main
from tests.ranks import run_ranks


def event(name: str, begin: float, took: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    """An event with times in milliseconds."""
    return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * begin, "dur": 1e3 * took, "pid": 1, "tid": tid}


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_cpu_trace_is_broken_down_to_its_known_parts(tmp_path: Path) -> None:
    events = [
        event("PyTorch Profiler (0)", 0, 100, cat="Trace"),
        event("aten::linear", 10, 20),
        event("aten::addmm", 11, 18),  # inside of it
        event("_ArriveBackward", 30, 60),  # waits
        event("c10d::allreduce_", 30, 5),
        event("aten::mm", 40, 10),
        event("gloo:all_reduce", 20, 25, cat="user_annotation", tid=2),
        event("gloo:recv", 60, 20, cat="user_annotation", tid=3),
        event("gloo:all_to_all", 70, 20, cat="user_annotation", tid=4),
        {"ph": "i", "name": "mark", "ts": 0},
    ]
    found = read_trace(written(tmp_path / "t.json.gz", events))
    assert 1e3 * found.computing == pytest.approx(20 + 10)
    # The all-reduce: 10 behind the linear layer and 5 behind the product; 70 to 80 belongs to both others.
    assert {name: 1e3 * s for name, s in found.exposed.items()} == pytest.approx(
        {"all-reduce": 10, "exchange": 10 + 5, "all-to-all": 5 + 10}
    )
    assert {name: 1e3 * s for name, s in found.hidden.items()} == pytest.approx({"all-reduce": 15})
    assert 1e3 * found.rest == pytest.approx(10 + 10 + 10)


def test_a_gpu_trace_counts_its_kernels_and_the_mean_of_its_steps(tmp_path: Path) -> None:
    events = [
        event(f"ProfilerStep#{i}", 50 * i, 50, cat=cat) for i in (0, 1) for cat in ("user_annotation", "gpu_annotation")
    ]
    events += [
        event("aten::mm", 0, 100),  # only launches
        event("gemm", 0, 30, cat="kernel"),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 20, 40, cat="kernel", tid=2),
        event("Memcpy DtoH", 70, 10, cat="gpu_memcpy"),
    ]
    found = read_trace(written(tmp_path / "t.json.gz", events))
    assert (found.steps, 1e3 * found.seconds, 1e3 * found.computing) == pytest.approx((2, 50, 20))
    assert (1e3 * found.exposed["exchange"], 1e3 * found.hidden["exchange"]) == pytest.approx((15, 5))
    assert 1e3 * found.rest == pytest.approx(15)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no trace", "is no trace of torch.profiler"),
        (b"[]", "is no trace of torch.profiler"),
        (b"[" * 100_000, r"no trace of torch.profiler \(RecursionError"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1, "cat": "kernel"}]}', r"no trace of torch.profiler \(KeyError: 'ts'"),
        (b'{"traceEvents": [{"ph": "X", "ts": 0, "dur": "long"}]}', r"no trace of torch.profiler \(ValueError"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1}]}', "an event has no finite ts and dur"),
        (b'{"traceEvents": [{"ph": "X", "ts": 0, "dur": 0, "cat": "kernel"}]}', "0 events, none of which computes"),
        (json.dumps({"traceEvents": [event("gloo:recv", 0, 1)]}).encode(), "1 events, none of which computes"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_trace(tmp_path / "t.json")
    found = CliRunner().invoke(main, ["breakdown", str(tmp_path / "none.json")])
    assert found.exit_code == 2
    assert "is no trace of torch.profiler (FileNotFoundError" in found.output


def profiled_on_rank(rank: int, folder: str) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        value = torch.randn(300, 300)
        for _ in range(5):
            (value @ value).sum()
            dist.all_reduce(value.clone())
    path = Path(folder) / f"{rank}.json"
    profile.export_chrome_trace(str(path))
    (whole,) = [e["dur"] for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "Trace"]
    return 1e-6 * float(whole)


@pytest.mark.ranks
def test_the_parts_of_a_real_trace_add_up_to_it(tmp_path: Path) -> None:
    seconds = run_ranks(profiled_on_rank, 2, str(tmp_path))[0]
    found = json.loads(CliRunner().invoke(main, ["breakdown", str(tmp_path / "0.json"), "--json"]).output)
    assert found["computing"] + sum(found["exposed"].values()) + found["rest"] == pytest.approx(seconds, rel=0.02)
    assert found["computing"] > 0
    assert set(found["exposed"]) | set(found["hidden"]) == {"all-reduce"}
