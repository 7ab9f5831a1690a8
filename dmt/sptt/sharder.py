"""`TowerSharder`: the base class of the tower sharders; checks modules and plans, and shards inside a tower."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dmt._torchrec import fused_settings, on_weight_gradient
from dmt.collectives import check_agreement, run_on_all_or_raise
from dmt.errors import InputError, check_instance, did_you_mean
from dmt.sharding.optimizers import MomentScale, check_moment_scale, kernel_obstacle, moment_scale_of, moment_scaled
from dmt.sharding.schemes import ID_ROUTES, SCHEMES, IdRoute, TablePlacement, check_columns, shards_in_tower, why_not
from dmt.sptt.group_sharded import GroupShardedEC, place_in_group, table_configs, table_weights
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.options import refuse
from dmt.sptt.precision import ExchangePrecision
from dmt.sptt.rows import wrap
from dmt.sptt.state import TowerState
from dmt.sptt.tower_lookup import DataParallelTables, GroupShardedEBC, refuse_gradient

__all__ = ["HomeTable", "SharderSettings", "TowerSharder"]

Module = TypeVar("Module", bound=nn.Module)

# `sharding_types` offers this scheme to TorchRec's planner only, so that `shard` can recognize and refuse its plans.
_WITHOUT_PLAN = "table_row_wise"


class SharderSettings(TypedDict, total=False):
    """Keyword arguments of `TowerSharder`; see there."""

    fused_params: dict[str, Any] | None
    id_route: IdRoute
    peer_precision: ExchangePrecision | None
    moment_scale: MomentScale
    unique: bool


class TowerSharder(BaseEmbeddingSharder[Module], abc.ABC):
    """Shards one type of module over the towers of a mesh: base class and arguments of the tower sharders.

    The sharder carries the mesh; do not set ``env`` of ``DistributedModelParallel`` (DMP), which is for dense parts.
    Sharding initializes the tables again with their ``init_fn``: load weights after constructing DMP.

    Args:
        mesh: the process groups of this job.
        fused_params: settings of FBGEMM's fused optimizer, e.g. ``{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}``.
        id_route: route of the ids, ``"peer"`` or ``"global"`` (`dmt.sptt.id_routes`); results are the same.
        peer_precision: number formats of the exchange of outputs between towers; None sends numbers unchanged.
        moment_scale: factor c of AdaGrad's moments (`dmt.sharding.optimizers`), up to the number of replicas (default).
            Pass learning rate and epsilon unscaled in ``fused_params``: the sharder scales those of the kernels.
        unique: True: samples with equal inputs share what is sent, looked up and returned (`dmt.sptt.unique`).

    Raises:
        InputError: an argument has the wrong type, FBGEMM has no setting of a name in ``fused_params``, ``id_route`` is
            unknown, ``unique`` is set with the global route, or ``moment_scale`` is out of range.
    """

    sharded_type: Callable[[TowerSharder[Any], Any, Mapping[str, ParameterSharding], torch.device | None], TowerState]
    """Makes the sharded module from the sharder, the module, the sharding of each table, and the device."""

    def __init__(
        self,
        mesh: TowerMesh,
        *,
        fused_params: dict[str, Any] | None = None,
        id_route: IdRoute = "peer",
        peer_precision: ExchangePrecision | None = None,
        moment_scale: MomentScale = "num_replicas",
        unique: bool = False,
    ) -> None:
        super().__init__(fused_params=fused_params)
        check_instance("mesh", mesh, TowerMesh)
        check_instance("fused_params", fused_params or {}, dict)
        if obstacle := kernel_obstacle(fused_params or {}, names_only=True):
            raise InputError(f"fused_params: {obstacle}. Remove or correct this setting.")
        check_moment_scale(moment_scale, mesh.topology.num_replicas)
        if id_route not in ID_ROUTES:
            known = f"use one of {list(ID_ROUTES)}.{did_you_mean(str(id_route), ID_ROUTES)}"
            raise InputError(f"id_route={id_route!r} is unknown; {known}")
        if not isinstance(unique, bool):
            raise InputError(f"unique={unique!r} must be True or False.")
        refuse(unique=unique, id_route=id_route)
        check_instance("peer_precision", peer_precision or ExchangePrecision(), ExchangePrecision)
        self.mesh = mesh
        self.id_route = id_route
        self.peer_precision = peer_precision or ExchangePrecision()
        self.moment_scale = moment_scale
        self.unique = unique

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns a marker for TorchRec's planner, which DMP runs if it gets no plan; `shard` refuses plans with it.

        The planner runs on rank 0 only: an error here would leave the other ranks waiting.
        """
        return [_WITHOUT_PLAN]

    @abc.abstractmethod
    def tables_by_tower(self, module: Module) -> list[list[Any]]:
        """Returns the table configs that each mesh tower holds."""

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Returns the table weights, by table name."""
        return table_weights(module)

    def outside_tables(self, module: Module) -> list[Any]:
        """Returns the configs of the tables outside towers, which every rank holds whole; here none."""
        return []

    def shard(
        self,
        module: Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TowerState:
        """Checks that ranks agree, and shards the module; called by DMP, whose ``env`` is ignored. Collective.

        ``params`` is the sharding of each table, with ranks and placements local to its tower (0..L-1). Every rank
        checks the tables of all towers, so that a fault in one raises everywhere and no rank is left waiting.

        Raises `InputError` if TorchRec's planner made the plan; towers do not fit the mesh; ranks differ in towers,
        tables, settings or plan; a table has no sharding, an unsupported scheme, a rank outside the tower, other shards
        than those of its scheme, or an ``output_dtype``; its scheme or kernel excludes its dtype, settings or id route;
        it requires no gradient, averages weighted bags, has no moments to scale, or `check_columns` refuses it.
        """
        if any(sharding.sharding_type == _WITHOUT_PLAN for sharding in params.values()):
            raise InputError(
                f"{type(self).__name__} needs a plan of TowerShardingPlanner; TorchRec's planner cannot plan towers. "
                "Call DistributedModelParallel(model, plan=TowerShardingPlanner(mesh.topology).plan(model, sharders), "
                "sharders=sharders)."
            )
        by_tower: dict[int | None, list[Any]] = {}  # None: tables outside towers
        # A rank with a wrong tower plan must not leave the others waiting.
        run_on_all_or_raise(lambda: by_tower.update(enumerate(self.tables_by_tower(module))), self.mesh.global_group)
        by_tower[None] = self.outside_tables(module)
        self._check_agreement(module, by_tower, params)
        weights = self.shardable_parameters(module)
        check = partial(self._check_table, is_weighted=any(_weighted(module)), on_cpu=str(device or "cpu") == "cpu")
        for tower, tables in by_tower.items():
            for table in tables:
                check(table, weights[table.name], params.get(table.name), tower=tower)
        # From here on each rank handles its own tower only.
        sharded = self.sharded_type(self, module, params, device)
        if self.unique:
            wrap(sharded, shares_equal=True)
        return sharded

    def _check_agreement(
        self, module: Module, by_tower: Mapping[int | None, Sequence[Any]], sharding: Mapping[str, ParameterSharding]
    ) -> None:
        weights = self.shardable_parameters(module)
        arguments = {
            "towers": {_place(tower): [table.name for table in tables] for tower, tables in by_tower.items()},
            "is_weighted": _weighted(module),
            **{name: getattr(self, name) for name in ("id_route", "unique", "peer_precision", "moment_scale")},
            "table": {
                table.name: {
                    "config": _text(table),
                    "requires_grad": weights[table.name].requires_grad,
                    "sharding": _text(sharding.get(table.name)),
                    "fused_params": {
                        key: _text(value)
                        for key, value in fused_settings(weights[table.name], self.fused_params).items()
                    },
                }
                for tables in by_tower.values()
                for table in tables
            },
        }
        check_agreement(type(self).__name__, arguments, self.mesh.global_group)

    def _check_table(
        self,
        table: Any,
        parameter: nn.Parameter,
        sharding: ParameterSharding | None,
        *,
        tower: int | None,
        is_weighted: bool,
        on_cpu: bool,
    ) -> None:
        """Raises `InputError` unless the table can have this sharding; every rank checks all tables."""
        where, topology = f"Table {table.name!r} {'in ' * (tower is not None)}{_place(tower)}", self.mesh.topology
        check_columns(table)
        if sharding is None:
            raise InputError(f"{where} is not in the sharding plan. Make the plan with TowerShardingPlanner.")
        scheme, kernel = sharding.sharding_type, sharding.compute_kernel
        settings, is_fused = fused_settings(parameter, self.fused_params), scheme != "data_parallel"
        route = "peer" if tower is None else self.id_route
        reason = why_not(table, scheme, id_route=route, fused_params=settings)
        if is_fused:
            reason = reason or kernel_obstacle(settings, cpu_table=table if on_cpu else None)
        refusals = {
            f"has the sharding type {scheme!r}; inside a tower use one of {list(SCHEMES)}. Make the plan with "
            "TowerShardingPlanner(mesh.topology).plan(model, sharders).": scheme not in SCHEMES,
            # Nothing would update a dense table that is not data-parallel, and no ReplicaSync would average it.
            f"is {scheme} with compute_kernel={kernel!r}; data_parallel tables need 'dense', others a fused kernel. "
            "Make the plan with TowerShardingPlanner.": not kernel.startswith("fused" if is_fused else "dense"),
            "has mean pooling of weighted bags, which the unsharded module refuses too. Use PoolingType.SUM, and "
            "divide the weights.": is_weighted and getattr(table, "pooling", None) is PoolingType.MEAN,
            # TorchRec would train it nevertheless.
            "has requires_grad=False, but the optimizer of a sharded table updates it in every backward pass. To "
            "freeze it, leave requires_grad=True, call apply_optimizer_in_backward(torch.optim.SGD, [weight], "
            "{'lr': 0.0}) before sharding, and let no schedule change its rate.": not parameter.requires_grad,
            f"is {scheme}, but {reason}. Change the table, its optimizer or its scheme.": bool(reason),
            # All tables travel in one exchange.
            f"has output_dtype={sharding.output_dtype} in the plan, but all tables need the same: set it in the "
            "sharder's fused_params instead.": sharding.output_dtype is not None,
            f"is {scheme}, but tables outside towers must be data_parallel, as every rank holds them. Make the plan "
            "with TowerShardingPlanner.": tower is None and is_fused,
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InputError(f"{where} {message}")
        if tower is None:
            return
        self._scale(parameter, scheme)  # raises where there is no moment to scale
        # Parts of a table that no shard covers would keep their first values without an error.
        placement = TablePlacement(scheme=scheme, ranks=tuple(sharding.ranks or ()))
        expected = shards_in_tower(table, placement, num_ranks=topology.ranks_per_tower, tower=tower)
        planned = getattr(sharding.sharding_spec, "shards", None) or ()
        shards = [(s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in planned]
        if is_fused and shards != expected:
            raise InputError(
                f"{where} is {table.num_embeddings} x {table.embedding_dim}. The plan gives it the shards {shards}, "
                f"but it needs {[shard[:] for shard in expected]}; each is (rank, first row, first column, rows, "
                "columns). Make the plan with TowerShardingPlanner."
            )

    def kernel_settings(self, weight: Tensor, scheme: str) -> dict[str, Any]:
        """Returns the fused-optimizer settings of a table's kernel, with the moment scale applied."""
        return moment_scaled(fused_settings(weight, self.fused_params), self._scale(weight, scheme))

    def _scale(self, weight: Tensor, scheme: str) -> float:
        """Returns the factor c of a table's moments; 1 for data-parallel tables."""
        # Algorithm 1 corrects for gradients of one replica's batch; here they are means over all replicas' batches.
        if scheme == "data_parallel":
            return 1.0
        settings = fused_settings(weight, self.fused_params)
        return moment_scale_of(self.moment_scale, settings, self.mesh.topology.num_replicas)

    def shard_in_tower(
        self,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        sharding: Mapping[str, ParameterSharding],
        device: torch.device | None,
        mesh: TowerMesh | None = None,
    ) -> GroupShardedEBC | GroupShardedEC:
        """Shards a collection over the ranks of this rank's tower in a mesh, by default the job's; collective."""
        mesh, weights = mesh or self.mesh, table_weights(collection)
        names = [table.name for table in table_configs(collection)]
        # Plans are local to a tower, so that one plan serves any mesh with towers of this size.
        placed = place_in_group({name: sharding[name] for name in names}, mesh.tower_group, device)
        arguments: dict[str, Any] = {
            "group": mesh.tower_group,
            "moment_scales": {name: self._scale(weights[name], placed[name].sharding_type) for name in names},
            "options": {"fused_params": self.fused_params, "device": device},
        }
        if isinstance(collection, EmbeddingCollection):
            sharded: GroupShardedEBC | GroupShardedEC = GroupShardedEC(collection, placed, **arguments)
        else:
            # Data-parallel tables must stay equal in all replicas, like the tower's dense module.
            arguments |= {"data_parallel_group": mesh.tower_module_group, "over_hosts": mesh.over_hosts}
            sharded = GroupShardedEBC(collection, placed, **arguments)
        for lookup in sharded.lookups:
            if not isinstance(lookup, DataParallelTables):
                on_weight_gradient(lookup, refuse_gradient)
        return sharded


@dataclass(frozen=True, kw_only=True)
class HomeTable:
    """Describes a table; every rank has the descriptions of all tables, so that `dmt.HotRows` can copy their rows."""

    config: Any
    """TorchRec's ``EmbeddingBagConfig``."""
    scheme: str
    settings: Mapping[str, Any]
    """Settings of the table's fused optimizer, as `TowerSharder.kernel_settings` returns them."""
    is_outside: bool = False
    """Whether the table is outside towers, so that every rank holds it."""


def _place(tower: int | None) -> str:
    return "outside towers" if tower is None else f"tower {tower}"


def _weighted(module: nn.Module) -> list[bool]:
    return [part.is_weighted() for part in module.modules() if isinstance(part, EmbeddingBagCollection)]


def _text(value: Any) -> str:
    """Returns a setting as text without memory addresses: TorchRec allows settings that cannot be compared."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
