"""Steps of a train pipeline: no step waits more often than a flat one.

On a CPU nothing waits, but the calls are the same: numbers that are read into Python, sizes that depend on numbers, and
tensors made from Python's numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dmt import TowerMesh
from dmt.sptt.dataflow import SPTTContext, SPTTModule
from dmt.training.build import build_optimizer, in_micro_batches, replica_sync, shard_model
from dmt.training.job import open_job
from tests.ranks import run_ranks
from tests.training.small import small

# Operators whose result has a size that depends on numbers, or that return a number.
_DISPATCHED = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}
MADE = "made of numbers"
_READS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}


class Waits(TorchDispatchMode):
    """Counts, while it is active, what makes a GPU and its host wait for each other, but for the optimizer's part.

    Its counts and rates live on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._is_paused = False
        self._reads = _Reads(self)

    @property
    def reads(self) -> int:
        """How often numbers of a device are read into Python, or decide a size."""
        return self.found.total() - self.found[MADE]

    def __enter__(self) -> Waits:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def count(self, name: str) -> None:
        if not self._is_paused:
            self.found[name] += 1

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, in which nothing is counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = False

        return run

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeats = func.__name__ == "repeat_interleave.Tensor" and (kwargs or {}).get("output_size") is None
        if name in _DISPATCHED or masks or repeats:
            self.count(f"{name} by a mask" if masks else name)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._waits.count(_READS[func])
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            self._waits.count(MADE)
        return func(*args, **(kwargs or {}))


OVERLAPPED = {"micro_batches": 2, "dense_reduce": "hierarchical"}
COPIES = {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2}
# name -> arch, dataflow, further settings
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flat": ("dlrm", "flat", {}),
    "sptt": ("dlrm", "sptt", {}),
    "dmt": ("dmt-dlrm", "sptt", {}),
    "dmt overlapped": ("dmt-dlrm", "sptt", {"train": OVERLAPPED}),
    "dmt replicas": ("dmt-dlrm", "sptt", {"topology": COPIES}),
    "dmt mixed schemes": ("dmt-dlrm", "sptt", {"sharding": {"scheme": "auto"}}),
    "dmt unique": ("dmt-dlrm", "sptt", {"sharding": {"unique": True}}),
    "dmt unique overlapped": ("dmt-dlrm", "sptt", {"sharding": {"unique": True}, "train": OVERLAPPED}),
}
STEPS = 4  # the first ones make what later ones have


def step_on_rank(rank: int, name: str) -> tuple[int, int]:
    """Takes a step of a full pipeline; returns how often it reads numbers of a device, and makes tensors of numbers."""
    arch, dataflow, settings = RUNS[name]
    sharding = {"scheme": "table_wise", "dataflow": dataflow} | settings.get("sharding", {})
    config = small(arch, **settings | {"sharding": sharding})
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    model = shard_model(job, mesh)
    in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
    batches = itertools.islice(job.data.batches("train", rank=rank, world_size=4, batch_size=16), STEPS + 2)
    waits = Waits()

    def progress() -> None:
        pipeline.progress(batches)
        if replicas is not None:
            replicas.step()

    for _ in range(STEPS - 1):
        progress()
    optimizer.step = waits.left_out(optimizer.step)  # type: ignore[method-assign]
    with waits:
        progress()
    return waits.reads, waits.found[MADE]


def all_on_rank(rank: int) -> dict[str, tuple[int, int]]:
    return {name: step_on_rank(rank, name) for name in RUNS}


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[int, int]]:
    return run_ranks(all_on_rank, 4)[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in RUNS if name != "flat" and "unique" not in name])
def test_a_step_waits_no_more_often_than_that_of_the_flat_model(name: str, steps: dict[str, tuple[int, int]]) -> None:
    (reads, made), (most, most_made) = steps[name], steps["flat"]
    assert 0 < reads <= most
    # TorchRec makes tensors of the sizes that a hop sends; there is a second hop.
    assert made <= 2 * most_made


@pytest.mark.ranks
def test_finding_distinct_inputs_reads_their_numbers(steps: dict[str, tuple[int, int]]) -> None:
    # To find the rows, to send other numbers of them for each group of features, and to arrange those that arrive.
    assert steps["dmt unique"][0] <= steps["dmt"][0] + 16
    # All micro-batches at once.
    assert steps["dmt unique overlapped"][0] <= steps["dmt unique"][0]


class OnAStream:
    """Records which streams still use it."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_memory_of_a_pipeline_s_stream_is_read_before_it_is_reused() -> None:
    """Where a pipeline has not waited, since it was detached and attached again."""
    made = Mock(encoder=None, before_lookup=None, after_lookup=None, **{"_route.look_up.return_value": []})
    with patch.object(torch.cuda, "is_initialized", lambda: True), patch.object(torch.cuda, "current_stream") as stream:
        stream.return_value.synchronize.side_effect = lambda: made.request.wait.return_value.wait.assert_called_once()
        SPTTModule.look_up(made, SPTTContext(request=made.request))
    stream.return_value.synchronize.assert_called_once()


def test_a_stream_is_told_of_the_ids_of_both_hops_and_of_the_rows() -> None:
    made: list[Any] = [OnAStream() for _ in range(5)]
    context = SPTTContext(in_tower=[(made[0], made[1]), (made[2], made[3])], code=made[4])
    stream: Any = "the current one"
    context.record_stream(stream)
    assert [part.streams for part in made] == [[stream]] * 5
