"""Contenders of TorchRec's own: its ``EmbeddingTowerCollection`` with the tower modules of this library.

TorchRec 1.8.0 cannot start it on CPU: it hands ``device_ids=[cpu]`` to ``DistributedDataParallel``, which refuses.
While the model is built, `startable_on_cpu` puts a function in place of that class in TorchRec's module, which leaves
the argument out; nothing else changes, and nothing is changed on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embedding_tower_sharding
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, table_row_wise
from torchrec.distributed.types import ShardingPlan, ShardingType

from benchmarks.steps.contenders import Contender
from benchmarks.steps.flat import codecs, plan_by_hand
from benchmarks.steps.setting import Setting

__all__ = ["NOTES", "startable_on_cpu", "tower_plan_by_hand", "tower_sharders"]

NOTES = (
    "TorchRec's EmbeddingTowerCollectionSharder; while it was built, DistributedDataParallel in its module was called "
    "without device_ids, which it cannot take on CPU"
)


@contextmanager
def startable_on_cpu() -> Iterator[None]:
    """Within it, TorchRec's tower sharder builds its tower modules on CPU."""
    before = embedding_tower_sharding.DistributedDataParallel
    embedding_tower_sharding.DistributedDataParallel = _without_device_ids
    try:
        yield
    finally:
        embedding_tower_sharding.DistributedDataParallel = before


def _without_device_ids(*, device_ids: Any = None, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(**arguments)


def tower_sharders(contender: Contender, fused_params: dict[str, Any]) -> list[Any]:
    """TorchRec's sharder of towers."""
    return [EmbeddingTowerCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs(contender))]


def tower_plan_by_hand(contender: Contender, setting: Setting, model: nn.Module, sharder: Any) -> ShardingPlan:
    """Tower i on host i, its tables cut over the ranks of the host.

    Args:
        contender: of TorchRec's towers.
        setting: sizes of the job.
        model: a `ClickTask` around DMT-DLRM with as many towers as there are hosts.
        sharder: of the collection.
    """
    collection: Any = model.model.sparse_arch  # type: ignore[union-attr]
    schemes: dict[str, Callable[..., Any]] = {}
    for host, tower in enumerate(collection.towers):
        first = host * setting.ranks_per_host
        ranks = list(range(first, first + setting.ranks_per_host))
        for table in tower.embedding.embedding_bag_configs():
            by_rows = contender.scheme == "table_row_wise"
            schemes[table.name] = table_row_wise(host_index=host) if by_rows else column_wise(ranks=ranks)
    plan = plan_by_hand(collection, schemes, setting, sharder)
    if contender.scheme == "table_column_wise":
        for parameter in plan.values():
            parameter.sharding_type = ShardingType.TABLE_COLUMN_WISE.value
    return ShardingPlan(plan={"model.sparse_arch": plan})
