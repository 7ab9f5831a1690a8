"""The oracle of the parity tests: the plain module in one process, on the union of all ranks' batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

LR, EPS = 0.05, 1e-6
DENSE = (torch.optim.Adam, torch.optim.SGD)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How to draw a rank's batch."""

    sizes: tuple[int, ...]
    max_bag: int = 1
    weighted: bool = False

    def draw(self, rank: int, step: int, tables: list[EmbeddingBagConfig]) -> tuple[KeyedJaggedTensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        size = self.sizes[rank]
        lengths, values = [], []
        # The batch's feature order differs from every plan's on purpose.
        features = [(f, t.num_embeddings) for t in tables for f in t.feature_names][::-1]
        for _, rows in features:
            if self.max_bag == 1:
                count = torch.ones(size, dtype=torch.int64)
            else:
                count = torch.randint(0, self.max_bag + 1, (size,), generator=generator)
            lengths.append(count)
            values.append(torch.randint(0, rows, (int(count.sum()),), generator=generator))
        ids = torch.cat(values)
        weights = torch.rand(ids.numel(), generator=generator) if self.weighted else None
        kjt = KeyedJaggedTensor(keys=[f for f, _ in features], values=ids, lengths=torch.cat(lengths), weights=weights)
        return kjt, torch.rand(size, generator=generator).round()


class SumTowerModule(nn.Module):
    """A tower module that reads by key: linear over the concatenation, plus a product of two features."""

    def __init__(self, features: list[str], dims: list[int], out_features: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(sum(dims), out_features)

    def forward(self, embeddings: Any) -> Tensor:
        x = torch.cat([embeddings[f] for f in self.features], dim=1)
        return self.linear(x) * (1 + x.mean(dim=1, keepdim=True))


class PassThrough(nn.Module):
    def __init__(self, features: list[str]) -> None:
        super().__init__()
        self.features = features

    def forward(self, embeddings: Any) -> Tensor:
        return torch.cat([embeddings[f] for f in self.features], dim=1)


class TowerModel(nn.Module):
    def __init__(self, towers: list[EmbeddingTower], width: int) -> None:
        super().__init__()
        self.sparse_arch = EmbeddingTowerCollection(towers)
        self.over_arch = nn.Linear(width, 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        columns = (
            self.sparse_arch(weighted_features=ids) if ids.weights_or_none() is not None else self.sparse_arch(ids)
        )
        return columns, self.over_arch(columns).squeeze(1)


class FlatModel(nn.Module):
    def __init__(self, tables: list[EmbeddingBagConfig], weighted: bool = False) -> None:
        super().__init__()
        self.sparse_arch = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
        self.over_arch = nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Any, Tensor]:
        embeddings = self.sparse_arch(ids)
        return embeddings, self.over_arch(embeddings.values()).squeeze(1)


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


def full_state(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Gathers a sharded model's state to plain tensors on every rank."""
    pieces: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            shards = [(s.metadata.shard_offsets, s.tensor.detach().clone()) for s in value.local_shards()]
            pieces[name] = (tuple(value.size()), shards)
        else:
            pieces[name] = value.detach().clone()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    whole: dict[str, Tensor] = {}
    covered: dict[str, int] = {}
    for part in everyone:
        for name, value in part.items():
            if isinstance(value, Tensor):
                whole[name] = value
                continue
            size, shards = value
            target = whole.setdefault(name, torch.full(size, float("nan")))
            for offsets, shard in shards:
                where = tuple(slice(o, o + n) for o, n in zip(offsets, shard.shape, strict=True))
                target[where] = shard
                covered[name] = covered.get(name, 0) + shard.numel()
    for name, count in covered.items():
        assert count == whole[name].numel(), f"{name}: shards hold {count} of {whole[name].numel()} numbers"
    return whole


def load_full(model: DistributedModelParallel, state: dict[str, Tensor]) -> None:
    """Copies plain tensors into a sharded model, shard by shard."""
    seen = 0
    with torch.no_grad():
        for name, value in model.state_dict().items():
            seen += 1
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    where = tuple(
                        slice(o, o + n)
                        for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                    )
                    shard.tensor.copy_(state[name][where])
            else:
                value.copy_(state[name])
    assert seen, "the sharded model has no state"


class Oracle:
    """Trains the plain model on every rank's batch at once: the mean over ranks of the local mean losses.

    Tables take row-wise AdaGrad as FBGEMM does (state = mean of squared gradients over the columns of a shard),
    AdaGrad or SGD; dense parts take Adam, and SGD where tables do.
    """

    def __init__(
        self,
        model: nn.Module,
        column_cuts: dict[str, list[int]] | None = None,
        optimizer: str = "rowwise_adagrad",
    ) -> None:
        self.model = copy.deepcopy(model)
        self.tables = {n: p for n, p in self.model.named_parameters() if "embedding_bags" in n}
        self.dense = {n: p for n, p in self.model.named_parameters() if n not in self.tables}
        trainable = [p for p in self.dense.values() if p.requires_grad]
        self.optimizer = DENSE[optimizer == "sgd"](trainable, lr=LR) if trainable else None
        self.cuts = column_cuts or {}
        self.table_optimizer = optimizer
        self.state: dict[str, list[Tensor]] = {}

    def step(self, batches: list[tuple[KeyedJaggedTensor, Tensor]]) -> None:
        self.model.zero_grad()
        losses = [loss_of(self.model(ids)[1], labels) for ids, labels in batches]
        torch.stack(losses).mean().backward()
        if self.optimizer is not None:
            self.optimizer.step()
        with torch.no_grad():
            for name, table in self.tables.items():
                cuts = self.cuts.get(name.split(".")[-2], [table.shape[1]])
                states = self.state.setdefault(name, [torch.zeros(()) for _ in cuts])
                for i, (weight, grad) in enumerate(zip(table.split(cuts, 1), table.grad.split(cuts, 1), strict=True)):
                    if self.table_optimizer == "sgd":
                        weight -= LR * grad
                        continue
                    square = grad.pow(2)
                    if self.table_optimizer == "rowwise_adagrad":
                        square = square.mean(dim=1, keepdim=True)
                    states[i] = states[i] + square
                    weight -= LR * grad / (states[i].sqrt() + EPS)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)
