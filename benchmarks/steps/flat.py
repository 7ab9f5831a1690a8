"""TorchRec's contenders: a flat DLRM, and DMT-DLRM in its ``EmbeddingTowerCollection``, with plans made by hand.

Tables are dealt to the hosts in turn, and on each host to its ranks in turn, so that hosts hold the same number. Small
tables may be data-parallel: DDP averages their gradients, and `SmallTables` trains them like the other tables.

TorchRec 1.8.0 cannot build its towers on a CPU: it passes ``device_ids=[cpu]`` to ``DistributedDataParallel``, which
raises an error. While a model is built, `startable_on_cpu` replaces that class in TorchRec's module by a function that
leaves the argument out. It changes nothing else, and nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embedding_tower_sharding
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType

from benchmarks.steps.contenders import EMBEDDING_DIM, Contender
from benchmarks.steps.inputs import benchmark_tables, distinct_rows
from benchmarks.steps.setting import Setting
from dmt import TowerPlan, TowerTopology
from dmt._torchrec import mark_updated_in_backward
from dmt.plan.tables import NUMBER_BYTES
from dmt.sharding.data_parallel import DataParallelOptimizer

__all__ = [
    *("SmallTables", "flat_plan", "flat_sharder", "most_data_parallel_rows", "startable_on_cpu"),
    *("tower_plan_by_hand", "tower_sharder"),
]

Generator = Callable[..., Any]
# An id and the length of its bag, as TorchRec sends them.
_ID_BYTES, _LENGTH_BYTES = 8, 4


def flat_sharder(contender: Contender, fused_params: dict[str, Any]) -> Any:
    """Returns TorchRec's sharder of flat collections."""
    return EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=_codecs(contender))


def flat_plan(contender: Contender, setting: Setting, model: nn.Module, sharder: Any) -> ShardingPlan:
    """Returns the sharding plan of a flat contender.

    Args:
        contender: a contender of the flat family.
        setting: sizes of the job.
        model: `ClickTask` of a DLRM.
        sharder: the sharder from `flat_sharder`.
    """
    collection: Any = model.model.sparse_arch  # type: ignore[union-attr]
    schemes = _flat_schemes(contender, setting, collection, sharder)
    return ShardingPlan(plan={"model.sparse_arch": _plan_by_hand(collection, schemes, setting, sharder)})


def _flat_schemes(
    contender: Contender, setting: Setting, collection: nn.Module, sharder: Any
) -> Mapping[str, Generator]:
    """Returns TorchRec's generator of the sharding of each table in a collection, by table name."""
    if contender.unique:
        schemes = _balanced(setting)
    elif contender.scheme == "planner":
        schemes = _as_torchrec_plans(collection, setting, sharder)
    else:
        most = contender.data_parallel_rows
        if most is None:
            most = most_data_parallel_rows(setting, NUMBER_BYTES[contender.precision])
        weights = sharder.shardable_parameters(collection)
        small = {name: data_parallel() for name, weight in weights.items() if len(weight) <= most}
        large = [name for name in weights if name not in small]
        schemes = small | {name: _scheme(contender.scheme, i, setting) for i, name in enumerate(large)}
    return schemes


def _balanced(setting: Setting) -> dict[str, Generator]:
    """Returns the sharding of each table, whole on a rank; ranks and hosts send about the same distinct inputs.

    Small tables too: TorchRec's data-parallel tables support no variable batch, and would save 0.04 % of the bytes.
    """
    ranks = TowerTopology(num_towers=setting.world_size, ranks_per_tower=1, ranks_per_host=setting.ranks_per_host)
    tables = benchmark_tables(setting)
    placed = TowerPlan.balanced(tables, ranks, rows=distinct_rows(setting)).tables_by_tower(tables)
    return {table.name: table_wise(rank=rank) for rank, held in enumerate(placed) for table in held}


def most_data_parallel_rows(setting: Setting, number_bytes: int = 4) -> int:
    """Returns the rows up to which a table sends fewer bytes across hosts if data-parallel; 0 if nothing crosses hosts.

    The cost of a table does not depend on other tables, so the choice is best for each. Both costs are for a step
    of all hosts together, with W ranks on H hosts: DDP's ring sends 2 (W - 1) / W times the FP32 gradient over each of
    H links; a table on one host gets an id and a length for each sample of the others, and exchanges its columns twice.

    Args:
        setting: sizes of the job.
        number_bytes: bytes of a number in outputs and their gradients, as they are sent.

    Example:
        >>> most_data_parallel_rows(Setting(hosts=2, ranks_per_host=2, batch_size=4096))
        5525
    """
    world = setting.world_size
    samples = setting.batch_size * (world - setting.ranks_per_host)
    sharded = samples * (_LENGTH_BYTES + _ID_BYTES + 2 * EMBEDDING_DIM * number_bytes)
    return int(sharded / (setting.hosts * 2 * (world - 1) / world * EMBEDDING_DIM * 4))


def _as_torchrec_plans(collection: nn.Module, setting: Setting, sharder: Any) -> dict[str, Generator]:
    """Returns the plan of TorchRec's planner for as many GPUs as ranks, whose speed it assumes by default."""
    topology = Topology(world_size=setting.world_size, local_world_size=setting.ranks_per_host, compute_device="cuda")
    nothing_else = FixedPercentageStorageReservation(percentage=0.0)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=setting.batch_size, storage_reservation=nothing_else
    )
    (plan,) = planner.plan(collection, [sharder]).plan.values()
    made: dict[str, Callable[[list[int]], Generator]] = {
        ShardingType.DATA_PARALLEL.value: lambda ranks: data_parallel(),
        ShardingType.TABLE_WISE.value: lambda ranks: table_wise(rank=ranks[0]),
        ShardingType.COLUMN_WISE.value: lambda ranks: column_wise(ranks=ranks),
        ShardingType.ROW_WISE.value: lambda ranks: row_wise(),
        ShardingType.TABLE_ROW_WISE.value: lambda ranks: table_row_wise(host_index=ranks[0] // setting.ranks_per_host),
    }
    return {name: made[chosen.sharding_type](chosen.ranks) for name, chosen in plan.items()}


class SmallTables:
    """Trains a flat model's data-parallel tables with the optimizer settings of all other tables.

    TorchRec leaves these tables to the dense optimizer, so they would train differently from the plain model's.

    Args:
        collection: the collection that TorchRec has sharded.
        fused_params: settings of the fused optimizer, as in the sharder.
    """

    def __init__(self, collection: Any, fused_params: dict[str, Any]) -> None:
        lookups = collection._lookups  # noqa: SLF001  # a list, which `modules` does not enter
        self._lookups = [lookup for lookup in lookups if isinstance(lookup, DistributedDataParallel)]
        weights = {name: weight for one in self._lookups for name, weight in one.module.named_parameters_by_table()}
        self._optimizer = DataParallelOptimizer(weights, dict.fromkeys(weights, fused_params))
        for weight in weights.values():
            mark_updated_in_backward(weight, self._optimizer)

    def step(self) -> None:
        """Updates the tables with the gradients that DDP has averaged, and clears the gradients."""
        self._optimizer.update()
        for lookup in self._lookups:
            lookup.zero_grad()


def _plan_by_hand(
    module: nn.Module, schemes: Mapping[str, Generator], setting: Setting, sharder: Any
) -> EmbeddingModuleShardingPlan:
    """Returns a plan from TorchRec's generators, with the fused kernel for every sharded table.

    By default TorchRec would use the dense kernel, whose tables the dense optimizer trains.
    """
    plan = construct_module_sharding_plan(
        module,
        dict(schemes),
        sharder,
        local_size=setting.ranks_per_host,
        world_size=setting.world_size,
        device_type="cpu",
    )
    for parameter in plan.values():
        if parameter.sharding_type != ShardingType.DATA_PARALLEL.value:
            parameter.compute_kernel = EmbeddingComputeKernel.FUSED.value
    return plan


def _codecs(contender: Contender) -> dict[str, Any] | None:
    """Returns TorchRec's codecs for FP16 exchanges in both directions; None for FP32."""
    if contender.precision == "fp32":
        return None
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    return get_qcomm_codecs_registry(config, device=torch.device("cpu"))


def _scheme(scheme: str, table: int, setting: Setting) -> Generator:
    """Returns the generator of the sharding of table number ``table``."""
    first = table % setting.hosts * setting.ranks_per_host
    slot = table // setting.hosts
    if scheme == "table_wise":
        return table_wise(rank=first + slot % setting.ranks_per_host)
    assert scheme == "column_wise", f"flat contenders are not {scheme}"
    return column_wise(ranks=_halves(table, setting))


def _halves(table: int, setting: Setting) -> Sequence[int]:
    """Returns two ranks for the column halves of a table, on one host if it has two ranks."""
    if setting.ranks_per_host == 1:
        return [table % setting.hosts, (table + 1) % setting.hosts]
    slot = 2 * (table // setting.hosts)
    first = (table % setting.hosts) * setting.ranks_per_host
    return [first + (slot + half) % setting.ranks_per_host for half in (0, 1)]


@contextmanager
def startable_on_cpu() -> Iterator[None]:
    """Context manager in which TorchRec's tower sharder can build its tower modules on a CPU."""
    before = embedding_tower_sharding.DistributedDataParallel
    embedding_tower_sharding.DistributedDataParallel = _without_device_ids
    try:
        yield
    finally:
        embedding_tower_sharding.DistributedDataParallel = before


def _without_device_ids(*, device_ids: Any = None, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(**arguments)


def tower_sharder(contender: Contender, fused_params: dict[str, Any]) -> Any:
    """Returns TorchRec's sharder of tower collections."""
    return EmbeddingTowerCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=_codecs(contender))


def tower_plan_by_hand(contender: Contender, setting: Setting, model: nn.Module, sharder: Any) -> ShardingPlan:
    """Returns a plan with tower i on host i, its tables cut by columns over the ranks of the host.

    Args:
        contender: a contender with TorchRec's towers.
        setting: sizes of the job.
        model: `ClickTask` of a DMT-DLRM with as many towers as hosts.
        sharder: TorchRec's sharder of tower collections.
    """
    collection: Any = model.model.sparse_arch  # type: ignore[union-attr]
    schemes: dict[str, Callable[..., Any]] = {}
    for host, tower in enumerate(collection.towers):
        first = host * setting.ranks_per_host
        ranks = list(range(first, first + setting.ranks_per_host))
        for table in tower.embedding.embedding_bag_configs():
            schemes[table.name] = column_wise(ranks=ranks)
    plan = _plan_by_hand(collection, schemes, setting, sharder)
    for parameter in plan.values():
        parameter.sharding_type = ShardingType.TABLE_COLUMN_WISE.value
    return ShardingPlan(plan={"model.sparse_arch": plan})
