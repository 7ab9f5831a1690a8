"""Base classes of the two tower sharders, `TowerSharder`, and of the modules they make, `TowerState`."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dmt._torchrec import PipelinedModule, fused_settings, place_globally
from dmt.collectives import check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError, did_you_mean
from dmt.sharding.optimizers import MomentScale, check_fused_params, check_moment_scale, moment_scale_of, moment_scaled
from dmt.sharding.schemes import (
    ID_ROUTES,
    SCHEMES,
    IdRoute,
    TablePlacement,
    check_columns,
    shards_in_tower,
    why_not,
)
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.options import refuse
from dmt.sptt.precision import ExchangePrecision
from dmt.sptt.rows import RowEncoder, wrap
from dmt.sptt.tower_lookup import GroupShardedEBC

__all__ = ["HomeTable", "SharderSettings", "TowerSharder", "TowerState"]

Module = TypeVar("Module", bound=nn.Module)


class SharderSettings(TypedDict, total=False):
    """Keyword arguments that every `TowerSharder` takes; see there."""

    fused_params: dict[str, Any] | None
    id_route: IdRoute
    peer_precision: ExchangePrecision | None
    moment_scale: MomentScale
    unique: bool


class TowerSharder(BaseEmbeddingSharder[Module], abc.ABC):
    """Shards one kind of module over the towers of a mesh; both tower sharders take these arguments.

    The sharder carries the mesh; leave DMP's ``env`` alone, it is for the dense parts. Tables get fresh weights from
    their ``init_fn``: load weights after constructing DMP.

    Args:
        mesh: the groups of this job.
        fused_params: settings of FBGEMM's fused optimizer, e.g. ``{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}``.
        id_route: how ids travel: ``"peer"`` or ``"global"`` (`dmt.sptt.id_routes`); the result is the same.
        peer_precision: number formats of the exchange of outputs between towers; None sends as is.
        moment_scale: factor c of AdaGrad's moments with replicas, in (0, R] (`dmt.sharding.optimizers`); by default
            their number. Learning rate and epsilon in ``fused_params`` stay the user's; the kernel gets scaled ones.
        unique: True: samples of a batch with equal inputs share what is sent, looked up and returned
            (`dmt.sptt.unique`).

    Raises:
        InputError: ``id_route`` is unknown, ``unique`` is no bool, they do not go together, or ``moment_scale`` is out
            of range.
    """

    sharded_type: Callable[[TowerSharder[Any], Any, Mapping[str, ParameterSharding], torch.device | None], TowerState]
    """The sharded module."""

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
        check_fused_params(fused_params or {})
        check_moment_scale(moment_scale, mesh.topology.num_replicas)
        if id_route not in ID_ROUTES:
            known = f"use one of {list(ID_ROUTES)}.{did_you_mean(str(id_route), ID_ROUTES)}"
            raise InputError(f"id_route={id_route!r} is unknown; {known}")
        if not isinstance(unique, bool):
            raise InputError(f"unique={unique!r} must be True or False.")
        refuse(unique=unique, id_route=id_route)
        if peer_precision is not None and not isinstance(peer_precision, ExchangePrecision):
            raise InputError(f"peer_precision={peer_precision!r} must be a dmt.ExchangePrecision, or None.")
        self.mesh = mesh
        self.id_route = id_route
        self.peer_precision = peer_precision or ExchangePrecision()
        self.moment_scale = moment_scale
        self.unique = unique

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Called by TorchRec's planner, where ``DistributedModelParallel`` is given no plan; `shard` refuses its plan.

        It asks on rank 0 only, where an error would leave the others waiting.
        """
        return ["table_row_wise"]  # the one that places the tables of a tower together

    @abc.abstractmethod
    def tables_by_tower(self, module: Module) -> list[list[Any]]:
        """Returns the table configs that each mesh tower holds."""

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
        looks at the tables of all towers, so that a fault in one raises everywhere and no rank is left waiting.

        Raises:
            InputError: ranks differ in towers, tables, plan, exchange or moment scale; a table has no sharding, an
                unsupported scheme, a rank outside the tower, shards that do not cover it, or a number format, optimizer
                or id route that its scheme does not have; its optimizer has no moment to scale.
        """
        tables_by_tower: list[list[Any]] = []
        # A rank whose own tower plan is wrong must not leave the others waiting.
        run_on_all_or_raise(lambda: tables_by_tower.extend(self.tables_by_tower(module)), self.mesh.global_group)
        self._check_agreement(module, tables_by_tower, params)
        weights, is_weighted = self.shardable_parameters(module), any(_weighted(module))
        for tower, of_tower in enumerate(tables_by_tower):
            for table in of_tower:
                self._check_table(
                    table, weights[table.name], params.get(table.name), tower=tower, is_weighted=is_weighted
                )
        made = self.sharded_type(self, module, params, device)
        if self.unique:
            wrap(made, shares_equal=True)
        return made

    def _check_agreement(
        self, module: Module, tables_by_tower: Sequence[Sequence[Any]], sharding: Mapping[str, ParameterSharding]
    ) -> None:
        weights = self.shardable_parameters(module)
        arguments = {
            "towers": {f"tower {i}": [table.name for table in tables] for i, tables in enumerate(tables_by_tower)},
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
                for tables in tables_by_tower
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
        tower: int,
        is_weighted: bool,
    ) -> None:
        """Raises `InputError` unless a table can be sharded so; every rank looks at all tables."""
        where, topology = f"Table {table.name!r} in tower {tower}", self.mesh.topology
        check_columns(table)
        if sharding is None:
            raise InputError(f"{where} is not in the sharding plan. Make the plan with TowerShardingPlanner.")
        scheme, kernel = sharding.sharding_type, sharding.compute_kernel
        settings = fused_settings(parameter, self.fused_params)
        reason = why_not(table, scheme, id_route=self.id_route, fused_params=settings)
        refusals = {
            f"is sharded {scheme!r}; inside a tower use one of {list(SCHEMES)}. Make the plan with "
            "TowerShardingPlanner(mesh.topology).plan(model, sharders).": scheme not in SCHEMES,
            # Nothing would update a dense table that is not data-parallel, and no ReplicaSync average it.
            f"is {scheme} with compute_kernel={kernel!r}; data_parallel tables have 'dense', others 'fused'. Make the "
            "plan with TowerShardingPlanner.": (kernel == "dense") != (scheme == "data_parallel"),
            "has mean pooling of weighted bags, which the unsharded module refuses too. Use PoolingType.SUM, and "
            "divide the weights.": is_weighted and table.pooling is PoolingType.MEAN,
            # TorchRec's sharded tables train nevertheless.
            "has requires_grad=False, but the optimizer of a sharded table updates it in every backward pass. Leave "
            "requires_grad alone and call apply_optimizer_in_backward(torch.optim.SGD, [weight], {'lr': 0.0}) before "
            "sharding; no schedule may set another rate.": not parameter.requires_grad,
            f"is {scheme}, but {reason}. Change the table, its optimizer or its scheme.": bool(reason),
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InputError(f"{where} {message}")
        self._scale(parameter, scheme)
        placement = TablePlacement(scheme=scheme, ranks=tuple(sharding.ranks or ()))
        expected = shards_in_tower(table, placement, num_ranks=topology.ranks_per_tower, tower=tower)
        shards = [(s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in _shards(sharding)]
        if scheme != "data_parallel" and shards != expected:
            raise InputError(
                f"{where} is {table.num_embeddings} x {table.embedding_dim}, but its shards {shards} (rank, first row, "
                f"first column, rows, columns) do not cover it as {[shard[:] for shard in expected]} do."
            )

    def kernel_settings(self, weight: Tensor, scheme: str) -> dict[str, Any]:
        """Returns the fused-optimizer settings of a table as the rank that updates it has them."""
        settings, scale = fused_settings(weight, self.fused_params), self._scale(weight, scheme)
        return settings if scale == 1.0 else moment_scaled(settings, scale)

    def _scale(self, weight: Tensor, scheme: str) -> float:
        """Returns factor c of a table's moments; gradients of data-parallel ones are averaged over all replicas."""
        if scheme == "data_parallel":
            return 1.0
        settings = fused_settings(weight, self.fused_params)
        return moment_scale_of(self.moment_scale, settings, self.mesh.topology.num_replicas)

    def shard_in_tower(
        self, collection: EmbeddingBagCollection, sharding: Mapping[str, ParameterSharding], device: torch.device | None
    ) -> GroupShardedEBC:
        """Shards an ``EmbeddingBagCollection`` over the ranks of this rank's tower (SPTT steps a, b, d); collective."""
        mesh, bags = self.mesh, collection.embedding_bags
        devices = gather_objects(str(device or "cpu"), mesh.tower_group)
        ranks = get_process_group_ranks(mesh.tower_group)
        names = [table.name for table in collection.embedding_bag_configs()]
        placed = {name: place_globally(sharding[name], ranks, devices) for name in names}
        return GroupShardedEBC(
            collection,
            placed,
            group=mesh.tower_group,
            # Data-parallel tables of all replicas must stay equal, like the tower's dense module.
            data_parallel_group=mesh.tower_module_group,
            moment_scales={name: self._scale(bags[name].weight, placed[name].sharding_type) for name in names},
            options={"fused_params": self.fused_params, "device": device},
        )


@dataclass(frozen=True, kw_only=True)
class HomeTable:
    """A table of any tower, as every rank knows it."""

    config: Any
    """TorchRec's ``EmbeddingBagConfig``."""
    scheme: str
    settings: Mapping[str, Any]
    """Settings of its fused optimizer, as its kernel has them."""


class TowerState(PipelinedModule, FusedOptimizerModule):
    """Parameters, state and optimizers of one mesh tower's part of a module, under the unsharded module's names."""

    def __init__(self, sharder: TowerSharder[Any], sharding: Mapping[str, ParameterSharding]) -> None:
        super().__init__()
        self._unsharded_module_type = sharder.module_type
        self.mesh = sharder.mesh
        self.local_part: nn.Module
        """This rank's tables and tower modules, below the names that they have in the unsharded module."""
        self.before_lookup: Callable[[Any, bool], None] | None = None
        """Called before each lookup with the ids of the batch, and True by a training pass. Who watches a training sets
        it: `dmt.ReplicaSync` or `dmt.HotRows`."""
        self.after_lookup: Callable[[list[Any]], None] | None = None
        """Called with the embeddings of each lookup. `dmt.ReplicaSync` sets it."""
        if self.mesh.topology.num_replicas > 1:
            self.before_lookup = self._refuse_lookup
        self.hot: Any = None
        """Copies of rows, `dmt.hot_rows.copies.HotCopies`, which train in the place of their tables' own."""
        self.encoder: RowEncoder | None = None
        """Sends rows in the place of samples. Another one holds from the next batch on; those on their way are sent
        again."""
        self.replicas_drifted = False
        """True once replicas have trained since they were last averaged. `dmt.ReplicaSync` sets it."""

    @property
    def collections(self) -> list[GroupShardedEBC]:
        """The sharded collections of this rank's tower."""
        return [part for part in self.local_part.modules() if isinstance(part, GroupShardedEBC)]

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns tables as sharded tensors, and tower modules, of this rank's towers."""
        self.write_back()
        return self.local_part.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's towers from a state dict with the keys of `state_dict`.

        Raises:
            RuntimeError: keys are missing or unknown.
            InputError: ``assign=True``: kernels hold the tables' own memory.
        """
        if assign:
            raise InputError("load_state_dict(assign=True) cannot replace the memory of sharded tables; leave it out.")
        self.write_back()
        keys = self.local_part.load_state_dict(state_dict, strict=strict)
        self.read_again()
        return keys

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters under the unsharded module's names."""
        self.write_back()
        yield from self.local_part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers under the unsharded module's names."""
        yield from self.local_part.named_buffers(*args, **kwargs)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields everything that DMP's data parallel must leave alone: tables and tower modules."""
        yield from (name for name, _ in self.local_part.named_parameters(prefix))

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The unsharded module type."""
        return self._unsharded_module_type

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        named = self.local_part.named_modules()
        return _TowerOptimizer(
            [(n, part.fused_optimizer) for n, part in named if isinstance(part, GroupShardedEBC)], self
        )

    def write_back(self) -> None:
        """Brings the tables up to date with the copies of their hot rows, before anyone is given their tensors."""
        if self.hot is not None:
            self.hot.write_back()

    def read_again(self) -> None:
        """Tells that tables were loaded: copies of their hot rows are read again before they are used next."""
        if self.hot is not None:
            self.hot.read_again()

    def _refuse_lookup(self, ids: Any, is_training_pass: bool) -> None:
        raise InputError(
            f"num_replicas={self.mesh.topology.num_replicas}, but nothing keeps the replicas equal: they would drift "
            "apart. Make dmt.ReplicaSync(model, mesh) after loading weights, and call its step() after every training "
            "step."
        )


class _TowerOptimizer(CombinedOptimizer):
    """Optimizers of a tower's tables; weights and states are brought up to date before anyone is given them."""

    def __init__(self, optimizers: list[Any], owner: TowerState) -> None:
        self._owner = owner
        super().__init__(optimizers)

    @property
    def params(self) -> Mapping[str, Any]:
        """The tables' weights, by name."""
        self._owner.write_back()
        return super().params

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The tables' optimizer states, by weight."""
        self._owner.write_back()
        return super().state

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:
        """The tables' weights with their settings."""
        self._owner.write_back()
        return super().param_groups

    def post_load_state_dict(self) -> None:
        """Called by TorchRec once states were loaded."""
        super().post_load_state_dict()
        self._owner.read_again()


def _weighted(module: nn.Module) -> list[bool]:
    return [part.is_weighted() for part in module.modules() if isinstance(part, EmbeddingBagCollection)]


def _shards(sharding: ParameterSharding) -> list[Any]:
    return list(getattr(sharding.sharding_spec, "shards", None) or [])


def _text(value: Any) -> str:
    """Returns settings as text, without addresses; what they may be is TorchRec's affair: they need not compare."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
