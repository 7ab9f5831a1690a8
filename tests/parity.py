"""Models, batches and plain training of the parity tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from dmt.testing import PlainTraining, gather_plain_state, load_plain_state
from dmt.testing.plain import is_table

LR = 0.05
# Larger than rounding errors, so that no optimizer takes a large step where a gradient cancels.
EPS = 1e-3
OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,  # of data-parallel tables: FBGEMM has no kernel for it on a CPU
}
FUSED = {"optimizer": OPTIMIZERS["rowwise_adagrad"], "learning_rate": LR, "eps": EPS}


def draw_batch(
    rank: int,
    step: int,
    tables: list[EmbeddingBagConfig],
    size: int,
    *,
    max_bag: int = 1,
    weighted: bool = False,
    repeated: bool = False,
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Draws ids and labels of a rank's batch; ``repeated`` samples often have some or all bags of the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows_of: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows_of[feature] = min(table.num_embeddings, rows_of.get(feature, table.num_embeddings))
    lengths, values = [], []
    # The batch's feature order differs from every plan's on purpose.
    features = list(rows_of.items())[::-1]
    for _, rows in features:
        count = torch.ones(size, dtype=torch.int64)
        if max_bag != 1:
            count = torch.randint(0, max_bag + 1, (size,), generator=generator)
        lengths.append(count)
        values.append(torch.randint(0, rows, (int(count.sum()),), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    kjt = KeyedJaggedTensor(keys=[f for f, _ in features], values=ids, lengths=torch.cat(lengths), weights=weights)
    if repeated:
        kjt = _repeat(kjt, generator)
    return kjt, torch.rand(size, generator=generator).round()


def _repeat(ids: KeyedJaggedTensor, generator: torch.Generator) -> KeyedJaggedTensor:
    bags = torch.arange(ids.lengths().numel(), dtype=torch.int32).view(len(ids.keys()), -1)
    repeats = torch.rand(bags.shape, generator=generator) < 0.25
    repeats |= torch.rand(bags.shape[1], generator=generator) < 0.5
    for sample in range(1, bags.shape[1]):
        bags[:, sample] = torch.where(repeats[:, sample], bags[:, sample - 1], bags[:, sample])
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
        bags.flatten(), ids.lengths(), ids.values(), ids.weights_or_none()
    )
    return KeyedJaggedTensor(keys=ids.keys(), values=values, lengths=lengths, weights=weights)


class SumTowerModule(nn.Module):
    """A tower module that reads by key: a linear layer over the columns, times 1 plus their mean."""

    def __init__(self, features: list[str], dims: list[int], out_features: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(sum(dims), out_features)

    def forward(self, embeddings: Any) -> Tensor:
        x = torch.cat([embeddings[f] for f in self.features], dim=1)
        return self.linear(x) * (1 + x.mean(dim=1, keepdim=True))


class AttentionTowerModule(nn.Module):
    """A tower module of sequences: the last item of the first feature attends to the items of all features.

    Every item and its place in its sequence matter. A sample without an item of the first feature has a query of zeros.
    """

    def __init__(self, features: list[str], dim: int, out_features: int) -> None:
        super().__init__()
        self.features = features
        self.query = nn.Linear(dim, dim)
        self.linear = nn.Linear(len(features) * dim, out_features)

    def forward(self, embeddings: dict[str, JaggedTensor]) -> Tensor:
        first = embeddings[self.features[0]]
        starts = first.lengths().cumsum(0) - first.lengths()
        last = (starts + first.lengths() - 1).clamp(min=0)
        has_item = (first.lengths() > 0).unsqueeze(1)
        device = starts.device
        values = torch.cat([first.values(), first.values().new_zeros(1, first.values().shape[1])])
        query = self.query(torch.where(has_item, values[last], 0.0))
        pooled = []
        for feature in self.features:
            sequence, number = embeddings[feature], len(query)
            sample = torch.arange(number, device=device).repeat_interleave(sequence.lengths())
            starts = sequence.lengths().cumsum(0) - sequence.lengths()
            place = torch.arange(len(sample), device=device) - starts[sample]
            score = ((query[sample] * sequence.values()).sum(dim=1) - 0.1 * place).exp()
            total = torch.zeros(number, device=device).index_add(0, sample, score)
            weighted = (score / total[sample]).unsqueeze(1) * sequence.values()
            pooled.append(torch.zeros_like(query).index_add(0, sample, weighted))
        return self.linear(torch.cat(pooled, dim=1))


def sequence_config(table: EmbeddingBagConfig) -> EmbeddingConfig:
    """Returns the same table as a table of sequences."""
    return EmbeddingConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=table.feature_names,
        data_type=table.data_type,
    )


class PassThrough(nn.Module):
    def __init__(self, features: list[str]) -> None:
        super().__init__()
        self.features = features

    def forward(self, embeddings: Any) -> Tensor:
        return torch.cat([embeddings[f] for f in self.features], dim=1)


class TowerModel(nn.Module):
    def __init__(self, towers: list[EmbeddingTower], width: int, outside: EmbeddingBagCollection | None = None) -> None:
        super().__init__()
        self.sparse_arch = EmbeddingTowerCollection(towers)
        self.outside = outside
        self.over_arch = nn.Linear(width, 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        columns = (
            self.sparse_arch(weighted_features=ids) if ids.weights_or_none() is not None else self.sparse_arch(ids)
        )
        if self.outside is not None:
            beside = self.outside(ids)
            columns = torch.cat([columns, beside.values()], dim=1)
        return columns, self.over_arch(columns).squeeze(1)


class FlatModel(nn.Module):
    """Table i is in collection i mod ``collections``."""

    def __init__(self, tables: list[EmbeddingBagConfig], weighted: bool = False, collections: int = 1) -> None:
        super().__init__()
        every = [EmbeddingBagCollection(tables[i::collections], is_weighted=weighted) for i in range(collections)]
        self.sparse_arch = every[0] if collections == 1 else nn.ModuleList(every)
        self.over_arch = nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Any, Tensor]:
        several = isinstance(self.sparse_arch, nn.ModuleList)
        embeddings = join_columns([part(ids) for part in self.sparse_arch]) if several else self.sparse_arch(ids)
        return embeddings, self.over_arch(embeddings.values()).squeeze(1)


@torch.fx.wrap
def join_columns(parts: list[KeyedTensor]) -> KeyedTensor:
    keys = [key for part in parts for key in part.keys()]  # noqa: SIM118, not a dict
    widths = [width for part in parts for width in part.length_per_key()]
    return KeyedTensor(keys, widths, torch.cat([part.values() for part in parts], dim=1))


def make_tables(dims: list[int], *, pooling: str = "SUM", rows: int = 40) -> list[EmbeddingBagConfig]:
    """One table per dim, feature ``f<i>`` in table ``t<i>``; row counts differ."""
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=rows + 3 * i,
            embedding_dim=dim,
            feature_names=[f"f{i}"],
            pooling=PoolingType[pooling],
        )
        for i, dim in enumerate(dims)
    ]


def load_ramps(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Sets every parameter of a sharded model to evenly spaced numbers from -1 to 1; returns them by name."""
    shapes = {name: value.shape for name, value in gather_plain_state(model).items()}
    state = {name: torch.linspace(-1, 1, shape.numel()).view(shape) for name, shape in shapes.items()}
    load_plain_state(model, state)
    return state


def dense_optimizer(optimizer: str, eps: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a function that makes the optimizer of a dense part: SGD if the tables use SGD, otherwise Adam."""
    return partial(torch.optim.SGD, lr=LR) if optimizer == "sgd" else partial(torch.optim.Adam, lr=LR, eps=eps)


def plain_training(
    model: nn.Module, *, replicas: int = 1, optimizer: str = "rowwise_adagrad", eps: float = EPS, **options: Any
) -> PlainTraining:
    """Returns the plain training of copies of a model, with `dense_optimizer` for their dense parts."""
    make = dense_optimizer(optimizer, eps)
    options.setdefault("make_optimizer", lambda named: make(list(named.values())))
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": LR, "eps": eps}
    return PlainTraining([copy.deepcopy(model) for _ in range(replicas)], fused_params=fused, **options)


def train_plainly(training: PlainTraining, *batches: list[PipelinedBatch], clip: float | None = None) -> float:
    """Trains `Trained` modules for a step, each on the mean over its replica's ranks of their mean losses.

    Returns the norm of the dense gradients, which are clipped to ``clip``.
    """
    norm = 0.0
    for module, of_replica in zip(training.modules, batches, strict=True):
        module.zero_grad()
        losses = [loss_of(plain_outputs(module.model, batch.ids)[1], batch.labels) for batch in of_replica]
        torch.stack(losses).mean().backward()
    training.average_gradients()
    for module in training.modules if clip is not None else ():
        dense = [p for name, p in module.named_parameters() if not is_table(name)]
        norm = float(nn.utils.clip_grad_norm_(dense, clip or 0.0))
    training.step()
    return norm


def plain_outputs(model: Any, ids: KeyedJaggedTensor) -> tuple[Any, Tensor]:
    """Returns what a plain model returns. TorchRec's collections fail without samples, so they get one without ids."""
    size, keys = ids.stride(), ids.keys()
    if not size:
        ids = KeyedJaggedTensor(keys, ids.values(), ids.weights_or_none(), ids.lengths().new_zeros(len(keys)))
    columns, logits = model(ids)
    if size:
        return columns, logits
    if isinstance(columns, KeyedTensor):
        return KeyedTensor(columns.keys(), columns.length_per_key(), columns.values()[:0]), logits[:0]
    return columns[:0], logits[:0]


def share(oracle: PlainTraining) -> None:
    """Sends weights, gradients and states of the oracle from rank 0, where alone it is trained, to every rank."""
    parameters = [parameter for module in oracle.modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    numbers = [number for parameter in parameters for number in (parameter.data, parameter.grad)]
    for table in (table for tables in oracle.tables for table in tables.values()):
        numbers += table.states
    together = torch.cat([number.flatten() for number in numbers])
    dist.broadcast(together, src=0)
    for number, part in zip(numbers, together.split([number.numel() for number in numbers]), strict=True):
        number.copy_(part.view_as(number))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    number = torch.ones_like(labels).sum().clamp(min=1)  # pipelines trace it; without samples the loss is 0
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / number


def fail(_: Tensor) -> None:
    """A hook."""
    raise ZeroDivisionError


@dataclass
class PipelinedBatch(Pipelineable):
    """A batch as TorchRec's train pipeline wants it."""

    ids: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelinedBatch:
        return PipelinedBatch(self.ids.to(device), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass


class Trained(nn.Module):
    """A model with its loss, as TorchRec's train pipeline wants it; returns the loss and what the model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PipelinedBatch) -> tuple[Tensor, tuple[Any, Tensor]]:
        columns, logits = self.model(batch.ids)
        return loss_of(logits, batch.labels), (columns, logits)
