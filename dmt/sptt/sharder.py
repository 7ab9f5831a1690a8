"""Base classes of the two tower sharders, `TowerSharder`, and of the modules they make, `TowerState`."""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dmt._torchrec import PipelinedModule, fused_settings, key_mismatch, place_globally
from dmt.collectives import gather_objects
from dmt.errors import InputError, did_you_mean
from dmt.sharding.group_ebc import GroupShardedEBC
from dmt.sharding.optimizers import MomentScale, TableOptimizer, check_moment_scale, moment_scale_of
from dmt.sharding.schemes import ID_ROUTES, IdRoute
from dmt.sptt.checks import check_agreement
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.precision import ExchangePrecision

__all__ = ["Exchange", "SharderSettings", "TowerSharder", "TowerState"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Route of the ids and number formats of the outputs; equal on every rank.

    Raises:
        InputError: ``id_route`` is unknown.

    Example:
        >>> Exchange(id_route="globl")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: id_route='globl' is unknown; use one of ['peer', 'global']. Did you mean 'global'?
    """

    id_route: IdRoute = "peer"
    """Ids by way of the own peer in each tower, or straight to the holders of the tables (`dmt.sptt.input_dist`)."""
    precision: ExchangePrecision = field(default_factory=ExchangePrecision)
    """Number formats of tower outputs and of their gradients."""

    def __post_init__(self) -> None:
        if self.id_route not in ID_ROUTES:
            raise InputError(
                f"id_route={self.id_route!r} is unknown; use one of {list(ID_ROUTES)}."
                f"{did_you_mean(self.id_route, ID_ROUTES)}"
            )


class SharderSettings(TypedDict, total=False):
    """Keyword arguments that every `TowerSharder` takes; see there."""

    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None
    id_route: IdRoute
    peer_precision: ExchangePrecision | None
    moment_scale: MomentScale


class TowerSharder(BaseEmbeddingSharder[Module], abc.ABC):
    """Shards one kind of module over the towers of a mesh; both tower sharders take these arguments.

    The sharder carries the mesh; leave DMP's ``env`` alone, it is for the dense parts. Tables get fresh weights from
    their ``init_fn``: load weights after constructing DMP.

    Args:
        mesh: the groups of this job.
        fused_params: settings of FBGEMM's fused optimizer, e.g. ``{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}``.
        qcomm_codecs_registry: TorchRec's quantised communication, for the exchanges inside a tower.
        id_route: how ids travel: ``"peer"`` or ``"global"`` (`dmt.sptt.input_dist`); the result is the same.
        peer_precision: number formats of the exchange of outputs between towers; None sends as is.
        moment_scale: factor c of AdaGrad's moments with replicas, in (0, R] (`dmt.sharding.optimizers`); by default
            their number. Learning rate and epsilon in ``fused_params`` stay the user's; the kernel gets scaled ones.

    Raises:
        InputError: ``id_route`` is unknown, or ``moment_scale`` is out of range.
    """

    def __init__(
        self,
        mesh: TowerMesh,
        *,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        id_route: IdRoute = "peer",
        peer_precision: ExchangePrecision | None = None,
        moment_scale: MomentScale = "num_replicas",
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        check_moment_scale(moment_scale, mesh.topology.num_replicas)
        self.mesh = mesh
        self.exchange = Exchange(id_route=id_route, precision=peer_precision or ExchangePrecision())
        self.optimizer = TableOptimizer(fused_params=fused_params, moment_scale=moment_scale)

    @abc.abstractmethod
    def tables_by_tower(self, module: Module) -> list[list[Any]]:
        """Returns the table configs that each mesh tower holds."""

    @abc.abstractmethod
    def sharded(
        self, module: Module, sharding: Mapping[str, ParameterSharding], device: torch.device | None
    ) -> TowerState:
        """Makes the sharded module once arguments are checked; collective."""

    def shard(
        self,
        module: Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TowerState:
        """Checks that ranks agree, and shards the module; called by DMP, whose ``env`` is ignored."""
        check_agreement(self, module, params)
        return self.sharded(module, params, device)

    def shard_in_tower(
        self, collection: EmbeddingBagCollection, sharding: Mapping[str, ParameterSharding], device: torch.device | None
    ) -> GroupShardedEBC:
        """Shards an ``EmbeddingBagCollection`` over the ranks of this rank's tower (SPTT steps a, b, d); collective.

        Args:
            collection: the collection.
            sharding: for each table its scheme, with ranks and placements local to the tower (0..L-1); see
                `dmt.sptt.checks.check_agreement`.
            device: this rank's device.
        """
        mesh, bags = self.mesh, collection.embedding_bags
        devices = gather_objects(str(device or "cpu"), mesh.tower_group)
        names = [table.name for table in collection.embedding_bag_configs()]
        placed = {name: place_globally(sharding[name], mesh.tower_ranks(), devices) for name in names}
        scale, replicas = self.optimizer.moment_scale, mesh.topology.num_replicas
        return GroupShardedEBC(
            collection,
            placed,
            group=mesh.tower_group,
            # Data-parallel tables of all replicas must stay equal, like the tower's dense module.
            data_parallel_group=mesh.tower_module_group,
            moment_scales={
                name: moment_scale_of(scale, fused_settings(bags[name].weight, self.fused_params), replicas)
                for name in model_parallel_tables(placed)
            },
            options={
                "fused_params": self.fused_params,
                "device": device,
                "qcomm_codecs_registry": self.qcomm_codecs_registry,
            },
        )


class TowerState(PipelinedModule, FusedOptimizerModule):
    """Parameters, state and optimizers of one mesh tower's part of a module, under the unsharded module's names.

    Args:
        sharder: the sharder that makes the module.
        sharding: of each table of all towers.
    """

    def __init__(self, sharder: TowerSharder[Any], sharding: Mapping[str, ParameterSharding]) -> None:
        super().__init__(qcomm_codecs_registry=sharder.qcomm_codecs_registry)
        self._unsharded_module_type = sharder.module_type
        self.mesh = sharder.mesh
        self.collections: list[GroupShardedEBC] = []
        """The sharded collections of this rank's tower."""
        self.sharded_tables = model_parallel_tables(sharding)
        """Names of all towers' tables that are not data-parallel."""
        self._replicas_ready: Callable[[bool], None] | None = None

    @abc.abstractmethod
    def parts(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yields this rank's sharded collections and tower modules with their names in the unsharded module."""

    def set_replica_hook(self, ready: Callable[[bool], None]) -> None:
        """Sets the function that waits until tables may be read; made by `dmt.ReplicaSync`.

        Args:
            ready: called before tables are read, with True if a training pass reads them.
        """
        self._replicas_ready = ready

    def wait_for_replicas(self, *, is_training_pass: bool = False) -> None:
        """Waits until this rank's tables may be read."""
        if self._replicas_ready is not None:
            self._replicas_ready(is_training_pass)

    def check_replicas(self) -> None:
        """Raises `InputError` if there are replicas and no `ReplicaSync` keeps them equal."""
        if self._replicas_ready is None and self.mesh.topology.num_replicas > 1:
            raise InputError(
                f"num_replicas={self.mesh.topology.num_replicas}, but nothing keeps the replicas equal: they would "
                "drift apart. Make dmt.ReplicaSync(model, mesh) after loading weights, and call its step() after every "
                "training step."
            )

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns tables as sharded tensors, and tower modules, of this rank's towers."""
        self.wait_for_replicas()
        state: Any = OrderedDict() if destination is None else destination
        for name, part in self.parts(prefix.removesuffix(".")):
            part.state_dict(destination=state, prefix=f"{name}." if name else "", keep_vars=keep_vars)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's towers from a state dict with the keys of `state_dict`."""
        self.wait_for_replicas()
        missing: list[str] = []
        unexpected = set(state_dict)
        for name, part in self.parts():
            start = f"{name}." if name else ""
            own = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
            unexpected -= {f"{start}{key}" for key in own}
            result = part.load_state_dict(OrderedDict(own), strict=strict)
            missing += [f"{start}{key}" for key in result.missing_keys]
            unexpected |= {f"{start}{key}" for key in result.unexpected_keys}
        if strict and unexpected:
            raise InputError(f"State of tower {self.mesh.tower} has unknown keys {sorted(unexpected)[:3]}.")
        return key_mismatch(missing, sorted(unexpected))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters under the unsharded module's names."""
        for name, part in self.parts(prefix):
            yield from part.named_parameters(name, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers under the unsharded module's names."""
        for name, part in self.parts(prefix):
            yield from part.named_buffers(name, recurse)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields everything that DMP's data parallel must leave alone: tables and tower modules."""
        for name, part in self.parts(prefix):
            if isinstance(part, ShardedEmbeddingBagCollection):
                yield from part.sharded_parameter_names(name)
            else:
                yield from (key for key, _ in part.named_parameters(name))

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The unsharded module type."""
        return self._unsharded_module_type

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        parts = [(name, part) for name, part in self.parts() if isinstance(part, GroupShardedEBC)]
        return CombinedOptimizer([(name, part.fused_optimizer) for name, part in parts])


def model_parallel_tables(sharding: Mapping[str, ParameterSharding]) -> list[str]:
    """Returns the names of the tables of which each rank of a tower holds a part, or nothing."""
    return [name for name, of_table in sharding.items() if of_table.sharding_type != "data_parallel"]
