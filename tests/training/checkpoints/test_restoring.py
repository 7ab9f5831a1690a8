"""What `restore` refuses and leaves as it was, and what else it brings back: generators, counts, scaled moments."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizer

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TablePlacement,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.errors import InputError
from dmt.training.build import build_optimizer
from dmt.training.checkpoints import (
    Checkpointer,
    Manifest,
    load,
    newest,
    read_manifest,
    restore,
    store,
)
from dmt.training.checkpoints.state import Shards, TensorReader, collect_state, write_tensors
from dmt.training.checkpoints.store import MANIFEST_NAME
from dmt.training.config import OptimizerConfig
from tests.parity import FlatModel, draw_batch, loss_of
from tests.ranks import run_ranks
from tests.training.small import alone

pytestmark = pytest.mark.ranks
ROWS = 30
FLAT = TowerPlan.from_lists([["f0", "f1"]])


def tables(data_type: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f"f{i}"], data_type=data_type
        )
        for i, name in enumerate("ab")
    ]


class Run:
    """Two tables on two ranks, and a dense part."""

    def __init__(
        self,
        scheme: str,
        configs: list[EmbeddingBagConfig],
        *,
        sparse: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        dense: str = "adamw",
        warmup_steps: int = 3,
    ) -> None:
        self.mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
        self.configs = configs
        sharder = SPTTEmbeddingBagCollectionSharder(
            self.mesh, FLAT, fused_params={"optimizer": sparse, "learning_rate": 0.05, "eps": 1e-6}
        )
        module = FlatModel(configs)
        pins = {}
        if scheme == "one rank":
            pins = {table.name: TablePlacement(scheme="table_wise", ranks=(0,)) for table in configs}
        planner = TowerShardingPlanner(
            self.mesh.topology,
            scheme="auto" if pins else scheme,
            pinned=pins,  # type: ignore[arg-type]
        )
        self.model = DistributedModelParallel(
            module, device=torch.device("cpu"), plan=planner.plan(module, [sharder]), sharders=[sharder]
        )
        settings: dict[str, Any] = {"dense": dense, "sparse_lr": 0.05, "warmup_steps": warmup_steps}
        config = OptimizerConfig(**settings)
        self.optimizer = build_optimizer(config, self.model)

    def train(self, steps: range) -> None:
        for step in steps:
            ids, labels = draw_batch(self.mesh.rank, step, self.configs, 6, max_bag=2)
            self.optimizer.zero_grad()
            loss_of(self.model(ids)[1], labels).backward()
            self.optimizer.step()

    def save(self, folder: Path, step: int) -> None:
        assert Checkpointer(folder, self.mesh).save(self.model, self.optimizer, step=step, progress={})

    def restore(self, folder: Path) -> Manifest | None:
        start = restore(folder, self.model, self.optimizer, mesh=self.mesh)
        self.optimizer.set_step(0 if start is None else start.step)
        return start

    def local(self) -> dict[str, Tensor]:
        """What this rank has of weights and states, copied."""
        found: dict[str, Tensor] = {}
        named = dict(self.model.state_dict())
        for key, states in self.optimizer.state_dict()["state"].items():
            named |= {f"{key}.{name}": value for name, value in states.items()}
        for name, value in named.items():
            parts = [part.tensor for part in value.local_shards()] if hasattr(value, "local_shards") else [value]
            found |= {f"{name}#{number}": part.detach().clone() for number, part in enumerate(parts)}
        return found


def assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(ours[name], value), name


def refusals_on_rank(rank: int, folder: str) -> None:
    saved = Path(folder) / "saved"
    run = Run("row_wise", tables())
    run.train(range(2))
    run.save(saved, 2)
    for other, message in [
        (Run("row_wise", tables(), dense="sgd"), r"optimizer: it has optimizer\.dense\.over_arch"),
        (
            Run("row_wise", tables(), sparse=EmbOptimType.EXACT_SGD),
            r"it has optimizer\.tables\.\S*t_a\.momentum1\S*, \S*t_b\.momentum1\S* in addition",
        ),
        (
            Run("row_wise", tables(), sparse=EmbOptimType.EXACT_ADAGRAD),
            r"it lacks optimizer\.\S*t_\w\.momentum1",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            restore(saved, other.model, other.optimizer, mesh=other.mesh)


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    run_ranks(refusals_on_rank, 2, str(tmp_path))


def damage_on_rank(rank: int, folder: str) -> None:
    saved = Path(folder)
    run = Run("row_wise", tables())
    run.train(range(1))
    run.save(saved, 1)
    first = run.local()
    run.train(range(1, 3))
    run.save(saved, 3)
    before = run.local()
    if rank == 1:
        file = saved / "step-00000003" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    with pytest.raises(InputError, match=r"step-00000003 is damaged: __1_0\.distcp was altered or cut off\."):
        restore(saved / "step-00000003", run.model, run.optimizer, mesh=run.mesh)
    assert_same(run.local(), before)
    found = newest(saved, run.mesh)
    assert found.name == "step-00000001"
    restored = load(found, run.model, run.optimizer, mesh=run.mesh)
    assert restored.step == 1
    assert_same(run.local(), first)
    if rank == 0:
        (found / MANIFEST_NAME).unlink()
    torch.distributed.barrier()
    with pytest.raises(InputError, match=r"holds no whole checkpoint: .*step-00000003 is damaged"):
        restore(saved, run.model, run.optimizer, mesh=run.mesh)
    assert restore(saved / "nowhere", run.model, run.optimizer, mesh=run.mesh) is None


def test_a_damaged_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(damage_on_rank, 2, str(tmp_path))


def others_on_rank(rank: int, folder: str) -> None:
    anew_before_the_first_step(Path(folder) / "begin")
    generators(Path(folder) / "random")
    scaled_moments(rank, Path(folder) / "scaled")
    for number, (saved, loaded, options) in enumerate(OTHER_STATES):
        other_states(Path(folder) / str(number), saved, loaded, options)


def anew_before_the_first_step(folder: Path) -> None:
    """Adam has no state before its first step; that there is none is brought back as well."""
    run = Run("row_wise", tables())
    run.save(folder, 0)
    run.train(range(2))
    wanted = run.local()
    other = Run("table_wise", tables())
    other.restore(folder)
    again = Run("row_wise", tables())
    again.restore(folder)
    again.train(range(2))
    assert_same(again.local(), wanted)


def generators(folder: Path) -> None:
    run = Run("row_wise", tables())
    torch.manual_seed(17 + run.mesh.rank)
    run.save(folder, 1)
    wanted = torch.rand(4)
    torch.manual_seed(0)
    other = Run("table_wise", tables())
    restore(folder, other.model, None, mesh=other.mesh)
    assert torch.equal(torch.rand(4), wanted)


def scaled_moments(rank: int, folder: str | Path) -> None:
    """v / c stays: t_a goes from c = 2 to 3, t_b from 4 to 1."""
    run = Run("column_wise", tables())
    run.train(range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "moment_scales", lambda _: {"t_a": 2.0, "t_b": 4.0} if rank == 0 else {})
        run.save(Path(folder), 2)
    assert read_manifest(Path(folder) / "step-00000002").moment_scales == {"t_a": 2.0, "t_b": 4.0}
    wanted = run.local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "moment_scales", lambda _: {"t_a": 3.0})
        restore(Path(folder), run.model, run.optimizer, mesh=run.mesh)
    for name, value in run.local().items():
        factor = {True: 1.5, False: 0.25}["t_a" in name] if ".momentum1" in name else 1.0
        assert torch.equal(value, wanted[name] * factor), name


OTHER_STATES: list[tuple[str, str, dict[str, Any]]] = [
    ("column_wise", "row_wise", {"sparse": EmbOptimType.EXACT_ADAGRAD, "dense": "adagrad"}),
    ("table_wise", "row_wise", {"sparse": EmbOptimType.EXACT_SGD, "dense": "sgd", "warmup_steps": 0}),
    ("data_parallel", "data_parallel", {"sparse": EmbOptimType.ADAM, "dense": "adam"}),
    ("one rank", "column_wise", {"configs": tables(data_type=DataType.FP16)}),
]


def other_states(folder: Path, saved: str, loaded: str, options: dict[str, Any]) -> None:
    """Saved, loaded under another scheme, saved again from there and loaded back: everything is as it was."""
    options = {"configs": tables(), **options}
    run = Run(saved, **options)
    run.train(range(2))
    run.save(folder / "1", 2)
    wanted = run.local()
    other = Run(loaded, **options)
    other.restore(folder / "1")
    other.save(folder / "2", 2)
    back = Run(saved, **options)
    back.restore(folder / "2")
    assert_same(back.local(), wanted)
    for one in (run, back):
        one.train(range(2, 3))
    if loaded == saved:
        assert_same(back.local(), run.local())


def test_what_else_is_brought_back(tmp_path: Path) -> None:
    run_ranks(others_on_rank, 2, str(tmp_path))


def test_a_count_kept_by_every_shard_is_saved_once() -> None:
    """FBGEMM's Adam, which the CPU does not have, counts its steps in each shard of a table."""

    def sharded(tensor: Tensor, *sizes: list[int]) -> ShardedTensor:
        starts = [0, sizes[0][-1]]
        shards = [
            ShardMetadata(shard_offsets=[*[0] * (len(size) - 1), start], shard_sizes=size, placement="rank:0/cpu")
            for start, size in zip(starts, sizes, strict=True)
        ]
        parts = tensor.split([size[-1] for size in sizes], dim=tensor.dim() - 1)
        whole = ShardedTensorMetadata(shards, tensor.size(), TensorProperties(dtype=tensor.dtype))
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(part.contiguous(), one) for part, one in zip(parts, shards, strict=True)], whole
        )

    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight = sharded(torch.zeros(ROWS, 8), [ROWS, 4], [ROWS, 4])
        states = {"t_a.momentum1": sharded(torch.arange(ROWS * 2.0), [ROWS], [ROWS])}
        states["t_a.iter"] = sharded(torch.tensor([7, 7]), [1], [1])
        optimizer = KeyedOptimizer({"x.embedding_bags.t_a.weight": weight}, {weight: states}, [])
        state = collect_state({}, optimizer)
    name = "optimizer.x.embedding_bags.t_a.weight.t_a."
    found = {
        one.removeprefix(name): (shards.whole, [(at, part.sum().item()) for at, part in shards.tensors.items()])
        for one, shards in state.items()
    }
    assert found == {
        "momentum1.columns_0_4": ((ROWS,), [((0,), 435.0)]),
        "momentum1.columns_4_8": ((ROWS,), [((0,), 1335.0)]),
        "iter.columns_0_4": ((), [((), 7)]),
        "iter.columns_4_8": ((), [((), 7)]),
    }
    state[f"{name}iter.columns_4_8"].tensors[()].fill_(9)
    assert [part.tensor.item() for part in states["t_a.iter"].local_shards()] == [7, 9], "it is not the live tensor"


def test_row_wise_state_is_cut_anew(tmp_path: Path) -> None:
    """Each column range takes the mean over its own columns, also 3 -> 2 and 3 -> 1."""

    def shards(values: dict[tuple[int, int], float]) -> dict[str, Shards]:
        return {
            f"optimizer.t.weight.t.momentum1.columns_{first}_{end}": Shards(
                whole=(3,), table="t", tensors={(0,): torch.full((3,), value)}
            )
            for (first, end), value in values.items()
        }

    with alone() as mesh:
        files = write_tensors(shards({(0, 4): 1.0, (4, 8): 10.0, (8, 12): 4.0}), tmp_path, mesh.global_group)
    for wanted in (
        {(0, 12): 5.0},
        {(0, 8): 5.5, (8, 12): 4.0},
        {(0, 6): 4.0, (6, 12): 6.0},
        {(0, 5): 14 / 5, (5, 12): 46 / 7},
        {(0, 2): 1.0, (2, 4): 1.0, (4, 12): 7.0},
    ):
        state = shards(dict.fromkeys(wanted, 0.0))
        TensorReader(tmp_path, files).fill(state)
        for name, shard in shards(wanted).items():
            assert torch.allclose(state[name].tensors[(0,)], shard.tensors[(0,)], rtol=1e-6), name
