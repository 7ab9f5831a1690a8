"""The plain single-process module on the union of the ranks' batches: everything that the ranks must come to.

With replicas there is one plain module for each, on the batches of its ranks (`dmt.testing.PlainTraining`). Batches are
drawn from the tables: single ids, bags, empty bags, equal and unequal local batches. `Watch` reads from a model, plain
or sharded, the same things under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt.errors import InputError
from dmt.models.complexity import is_tower_module
from dmt.testing.plain import PlainTraining, is_table, rate_share, table_name
from dmt.testing.state import TableLayout
from dmt.training.build import DENSE_OPTIMIZERS, ClickTask, build_model, fused_params
from dmt.training.check.shrink import CheckedRun
from dmt.training.config import OptimizerConfig
from dmt.training.data.batch import ClickBatch

__all__ = [
    "SINGLE_IDS",
    "UNEVEN_BAGS",
    "Expected",
    "Seen",
    "Watch",
    "compute_expected",
    "draw_batch",
    "plain_task",
    "sparse_part",
    "table_of",
]

State = dict[str, Tensor]

SINGLE_IDS = 0
"""The batch in which every bag has one id, so that an embedding is a row of a table, bit by bit."""
UNEVEN_BAGS = 1
"""The batch in which ranks have unequal numbers of samples; from it on bags have 0 to 3 ids."""

_MAX_BAG = 3
# Half of all ids are among the first rows: ranks and samples share them, as they share the frequent ids of real data.
_FREQUENT_ROWS = 8


def draw_batch(run: CheckedRun, rank: int, index: int) -> ClickBatch:
    """Returns the batch of a global rank in a step (`SINGLE_IDS`, `UNEVEN_BAGS`, ...); equal in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * index + rank)
    size = run.limits.batch_size
    if index == UNEVEN_BAGS:
        size = max(1, size - rank % 3)
    lengths, values = [], []
    for table in run.tables:
        for _ in table.feature_names:
            if index == SINGLE_IDS:
                count = torch.ones(size, dtype=torch.int64)
            else:
                count = torch.randint(0, _MAX_BAG + 1, (size,), generator=generator)
            number, rows = int(count.sum()), table.num_embeddings
            anywhere = torch.randint(0, rows, (number,), generator=generator)
            frequent = torch.randint(0, min(rows, _FREQUENT_ROWS), (number,), generator=generator)
            lengths.append(count)
            values.append(torch.where(torch.rand(number, generator=generator) < 0.5, anywhere, frequent))
    ids = KeyedJaggedTensor(
        keys=[feature for table in run.tables for feature in table.feature_names],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride=size,
    )
    return ClickBatch(
        dense_features=torch.randn(size, run.job.num_dense, generator=generator),
        sparse_features=ids,
        labels=torch.rand(size, generator=generator).round(),
        weights=torch.ones(size),
    ).split_columns({} if run.job.towers is None else run.job.towers.column_splits)


class Seen(NamedTuple):
    """Values that passed through a model in one forward pass."""

    embeddings: dict[str, Tensor]
    """Embeddings by feature. With towers: the inputs of tower modules on this rank, samples of all its peers."""
    outputs: Tensor
    """Output of the sparse part, [B, columns]."""
    logits: Tensor
    """Logits, [B]."""


_NOTHING_SEEN = Seen({}, torch.empty(0), torch.empty(0))


class Watch:
    """Keeps the values that pass through a model, plain or sharded, in its latest forward pass.

    The output exchange is waited for where it begins, so nothing overlaps; no bit depends on that.

    Args:
        model: a `ClickTask`, or one that is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen = _NOTHING_SEEN
        """Values of the latest batch."""
        sparse = sparse_part(model)
        for module in _tower_modules(sparse):
            module.register_forward_pre_hook(lambda module, inputs: self._see_embeddings(inputs[0]))
        sparse.register_forward_hook(self._after_sparse_part)

    def run(self, batch: ClickBatch) -> Tensor:
        """Returns the loss of a batch and keeps all else."""
        self.seen = _NOTHING_SEEN
        loss, (logits, _, _) = self.model(batch)
        self.seen = self.seen._replace(logits=logits)
        return loss

    def run_and_see(self, batch: ClickBatch) -> Seen:
        """Returns the values of a batch, without gradients."""
        with torch.no_grad():
            self.run(batch)
        return self.seen

    def _see_embeddings(self, embeddings: KeyedTensor) -> None:
        # By name: the order of the keys changes with the sharding.
        own = {name: value.detach() for name, value in embeddings.to_dict().items()}
        self.seen = self.seen._replace(embeddings=self.seen.embeddings | own)

    def _after_sparse_part(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        result = output.wait() if isinstance(output, LazyAwaitable) else output
        if isinstance(result, KeyedTensor):
            self._see_embeddings(result)
        self.seen = self.seen._replace(outputs=result.values() if isinstance(result, KeyedTensor) else result)
        return result


def sparse_part(model: nn.Module) -> Any:
    """Returns TorchRec's collection in a `ClickTask`, or its sharded form."""
    task: Any = model.module if isinstance(model, DistributedModelParallel) else model
    kinds = (EmbeddingBagCollection, EmbeddingTowerCollection, ShardedModule)
    # The outermost comes first.
    return next(part for part in task.model.modules() if isinstance(part, kinds))


def _tower_modules(sparse: Any) -> list[nn.Module]:
    if hasattr(sparse, "towers"):
        return [tower.interaction for tower in sparse.towers]
    if hasattr(sparse, "interactions"):
        return list(sparse.interactions.by_tower.values())
    return []


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Everything that the ranks compare with."""

    start: State
    """The first weights, that every model starts from."""
    seen: dict[int, list[Seen]]
    """Values by batch (`SINGLE_IDS`, `UNEVEN_BAGS`) and rank; embeddings [B, N]."""
    gradients: list[State]
    """By replica, for `UNEVEN_BAGS`: means over ranks of the gradients of their mean losses. The ranks are those of the
    replica for tables that it trains by itself, and all for the rest."""
    losses: list[list[float]]
    """By step and rank; one step more than is trained."""
    weights: State
    """After training, and the averaging of replicas at its end."""


def plain_task(run: CheckedRun) -> ClickTask:
    """Returns the unsharded model, with FP32 tables."""
    tables = tuple(replace(table, data_type="FP32") for table in run.tables)
    return ClickTask(build_model(replace(run.job, tables=tables)))


def compute_expected(run: CheckedRun, layout: TableLayout) -> Expected:
    """Runs the plain module, whose table optimizers follow the layout of the sharded tables.

    Raises:
        InputError: a loss is not finite.
    """
    torch.manual_seed(run.config.train.seed)
    tasks = [plain_task(run) for _ in range(run.topology.num_replicas)]
    with torch.no_grad():
        for name, weight in tasks[0].named_parameters():
            if run.config.sharding.table_precision == "fp16" and is_table(name):
                weight.copy_(weight.half())  # a start that FP16 tables can hold
    start = _copy_of(tasks[0])
    for task in tasks[1:]:
        task.load_state_dict(start)
    watches = [Watch(task) for task in tasks]
    seen = {
        index: [watches[0].run_and_see(batch) for batch in _batches(run, index)] for index in (SINGLE_IDS, UNEVEN_BAGS)
    }
    training = _plain_training(run, tasks, layout)
    _backward(run, watches, UNEVEN_BAGS)
    training.average_gradients()
    gradients = [{name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None} for task in tasks]
    losses = []
    for step in range(run.limits.steps):
        losses.append(_backward(run, watches, step))
        _set_rates(training, run.config.optimizer, step)
        training.step()
    training.sync()
    with torch.no_grad():
        losses.append([float(watches[0].run(batch)) for batch in _batches(run, run.limits.steps)])
    for step, by_rank in enumerate(losses):
        if not all(map(math.isfinite, by_rank)):
            names = ("dense_lr", "tower_lr", "sparse_lr")
            rates = ", ".join(f"{name}={getattr(run.config.optimizer, name)}" for name in names)
            raise InputError(
                f"[optimizer] {rates}: the plain module diverges (a loss at step {step} is not finite), so there is "
                "nothing to compare with. Lower the rates."
            )
    return Expected(
        start=start,
        seen=seen,
        gradients=gradients,
        losses=losses,
        weights=_copy_of(tasks[0]),
    )


def _copy_of(task: ClickTask) -> State:
    return {name: value.clone() for name, value in task.state_dict().items()}


def _plain_training(run: CheckedRun, tasks: Sequence[ClickTask], layout: TableLayout) -> PlainTraining:
    optimizer, replicas = run.config.optimizer, run.config.replicas
    return PlainTraining(
        tasks,
        fused_params=fused_params(optimizer),
        make_optimizer=lambda parameters: _dense_optimizer(optimizer, parameters),
        layout=layout,
        moment_scale=replicas.moment_scale,
        interval=replicas.sync_every,
        optimizer_state=replicas.optimizer_state,
        has_half_tables=run.config.sharding.table_precision == "fp16",
    )


def _dense_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = []
    for of_towers, rate in ((True, config.tower_lr), (False, config.dense_lr)):
        rate = config.dense_lr if rate is None else rate
        members = [p for name, p in parameters.items() if is_tower_module(name) is of_towers]
        groups += [{"params": members, "lr": rate, "initial_lr": rate}] if members else []
    return DENSE_OPTIMIZERS[config.dense](groups)


def _set_rates(training: PlainTraining, config: OptimizerConfig, step: int) -> None:
    share = rate_share(step, config.warmup_steps, decay_start=config.decay_start, decay_steps=config.decay_steps)
    training.learning_rate = config.sparse_lr * share
    for optimizer in training.dense_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share


def table_of(name: str) -> str:
    """Returns the name of a parameter in the report: a table's own name, others in full."""
    return f"table {table_name(name)}" if is_table(name) else name.removeprefix("model.")


def _batches(run: CheckedRun, index: int) -> list[ClickBatch]:
    return [draw_batch(run, rank, index) for rank in range(run.topology.world_size)]


def _backward(run: CheckedRun, watches: Sequence[Watch], index: int) -> list[float]:
    """Leaves in every replica the gradients of its ranks' mean loss; returns the losses by rank."""
    batches, losses = _batches(run, index), [0.0] * run.topology.world_size
    for watch, ranks in zip(watches, run.topology.sharding_groups(), strict=True):
        watch.model.zero_grad()
        for rank in ranks:
            loss = watch.run(batches[rank])
            (loss / len(ranks)).backward()
            losses[rank] = float(loss.detach())
    return losses
