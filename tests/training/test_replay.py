"""``dmt bench-comms --replay``: what is recorded of a step is played back, call by call and byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmt import TrafficMeter
from dmt.collectives import gather_parts, scatter_sum, start_exchange, start_mean, start_sum
from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import build_optimizer, shard_model
from dmt.training.commands.bench_comms import print_replayed, run_bench_comms
from dmt.training.job import open_job
from dmt.training.loop import Trainer
from dmt.training.replay import check_step, read_step, replay
from tests.ranks import run_ranks
from tests.training.small import small
from tests.training.test_planned import Silent

CPU = torch.device("cpu")


def host_of(rank: int) -> int:
    return rank // 2


def all_sorts(rank: int) -> None:
    """Every collective that a step may have, in the default group and others, with uneven and empty splits."""
    world = dist.group.WORLD
    pair = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    sent = [other * (rank + 1) for other in range(4)]
    expected = [rank * (other + 1) for other in range(4)]
    dist.all_to_all_single(torch.empty(sum(expected), 3), torch.ones(sum(sent), 3), expected, sent)
    pending = dist.all_to_all_single(torch.empty(8, dtype=torch.long), torch.ones(8, dtype=torch.long), async_op=True)
    parts = [torch.ones(sizes, dtype=torch.uint8) for sizes in sent]
    exchange, _ = start_exchange(parts, expected, world, tag=7)
    start_sum(torch.ones(5, dtype=torch.bfloat16), pair).wait()
    start_mean([torch.ones(3), torch.ones(2, 2)], world).wait()
    dist.all_reduce(torch.ones(2, dtype=torch.long))
    gather_parts(scatter_sum(torch.ones(8), world), pair)
    dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2), group=pair)
    dist.broadcast(torch.ones(6), 3)
    dist.barrier()
    exchange.wait()
    pending.wait()


def a_step(arch: str, folder: Path, **sections: Any) -> None:
    """A step of a run, recorded as the trainer does."""
    config = small(arch, **sections)
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    model = shard_model(job, mesh)
    silent: Any = Silent()
    Trainer(
        config=config.train,
        data=job.data,
        mesh=mesh,
        model=model,
        optimizer=build_optimizer(config.optimizer, model),
        record=silent,
        replicas=None,
    ).measure_traffic(folder / "first.json")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "towers": ("dmt-dlrm", {"train": {"micro_batches": 2}}),
    "flat": ("dcn", {"sharding": {"dataflow": "flat"}}),
    "unique": ("dlrm", {"sharding": {"dataflow": "sptt", "unique": "rank", "forward_precision": "fp16"}}),
}


def on_rank(rank: int, folder: Path) -> list[Any]:
    """Of each case the bytes by kind that this rank sent, when recorded and when played back."""
    found = []
    for name in ("all sorts", *CASES):
        own = folder / name
        if name == "all sorts":
            meter = TrafficMeter(host_of=host_of, records=True)
            with meter:
                all_sorts(rank)
            meter.save(own / "first.json", dist.group.WORLD)
        else:
            arch, sections = CASES[name]
            a_step(arch, own, **sections)
        dist.barrier()
        step = read_step(own / "first.json")
        again = TrafficMeter(host_of=host_of, records=True)
        played = replay(step, CPU, repeats=2, meter=again)
        again.save(own / "second.json", dist.group.WORLD)
        recorded = meter.booked() if name == "all sorts" else None
        found.append((played, recorded, again.booked()))
    return found


@pytest.mark.ranks
def test_a_step_is_played_back_call_by_call(tmp_path: Path) -> None:
    for name in ("all sorts", *CASES):
        (tmp_path / name).mkdir()
    results = run_ranks(on_rank, 4, tmp_path)
    for number, name in enumerate(("all sorts", *CASES)):
        first, second = (json.loads((tmp_path / name / f"{which}.json").read_text()) for which in ("first", "second"))
        assert first["hosts"] == [0, 0, 1, 1]
        # Calls, sizes, splits, groups and kinds, of every rank: so every link has equal bytes.
        for call in (call for step in (first, second) for calls in step["ranks"] for call in calls):
            call.pop("is_waited_for")  # the replay waits by itself
        assert first == second, name
        played = [own[number][0] for own in results]
        assert all(own == played[0] for own in played)
        whole, *kinds = played[0]
        assert whole.kind == "all"
        assert sum(one.calls for one in kinds) == whole.calls == len(first["ranks"][0])
        assert sum(one.across for one in kinds) == whole.across > 0
        assert sum(one.inside for one in kinds) == whole.inside > 0
        assert all(one.least <= one.seconds <= one.most for one in played[0])
    # What a meter sees of each rank in the step and when it is played back, exactly.
    assert all(recorded == again for _, recorded, again in (own[0] for own in results))
    sorts = json.loads((tmp_path / "all sorts" / "first.json").read_text())["ranks"]
    assert len({call["name"] for calls in sorts for call in calls}) == 9


def recorded(**changes: Any) -> dict[str, Any]:
    call = {
        "name": "allreduce_",
        "kind": "dense",
        "group": 0,
        "tensors": [[{"shape": [3], "dtype": "float32"}]],
        "splits": [],
        "peer": 0,
        "tag": 0,
        "is_waited_for": True,
    }
    record = {"format": 1, "hosts": [0, 0], "groups": [[0, 1]], "ranks": [[call], [call]]}
    whole = {key: value for key, value in changes.items() if key in record}
    return record | {"ranks": [[call | {k: v for k, v in changes.items() if k not in record}], [call]]} | whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "has format 2; this version reads format 1. Record a step again"),
        ({"name": "scatter_"}, r"ranks\.0\.0\.name: Input should be 'alltoall_base_'"),
        ({"group": 1}, "call 0 of rank 0 is over group 1, which it is not in"),
        ({"groups": [[0, 2]]}, r"group \[0, 2\] is no group of 2 ranks"),
        ({"hosts": [0]}, "it has 1 hosts of ranks, but calls of 2 ranks"),
        ({"splits": [[1, 2, 3]]}, "call 0 of rank 0 does not fit its group of 2 ranks"),
        ({"tensors": [{"shape": [-3], "dtype": "float32"}]}, "negative size"),
    ],
)
def test_a_damaged_record_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(recorded(**changes)))
    with pytest.raises(InputError, match=rf"Recorded step .*step\.json.*{words}"):
        read_step(tmp_path / "step.json")


def test_a_job_of_other_ranks_or_hosts_is_refused_before_it_begins(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(recorded()))
    with pytest.raises(InputError, match=r"is a step of ranks on hosts \[0, 0\], but those of the job are on \[0, 1\]"):
        check_step(read_step(file), file, 2, 1)
    check_step(read_step(file), file, 2, 2)
    for key, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    out = tmp_path / "cluster.toml"
    with pytest.raises(InputError, match=r"--replay .*step\.json is a step of 2 ranks, but the job has 4\. Start as"):
        run_bench_comms(out, name="x", device="cpu", megabytes=(), recorded=file)
    assert not out.exists()


def play_one(rank: int, file: Path) -> list[Any]:
    return replay(read_step(file), CPU, repeats=1)


@pytest.mark.ranks
def test_what_was_played_back_is_printed(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(recorded()))
    print_replayed(run_ranks(play_one, 2, file)[0])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    # A ring of two sends three numbers of four bytes, from each.
    assert "dense 1 0 bytes 24 bytes" in words
