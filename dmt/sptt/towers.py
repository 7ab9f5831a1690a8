"""`TowerCollectionSharder`: runs TorchRec's ``EmbeddingTowerCollection`` as disaggregated towers on a `TowerMesh`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt._torchrec import key_mismatch
from dmt.collectives import broadcast_module
from dmt.errors import InputError
from dmt.plan.tables import feature_names
from dmt.sharding.optimizers import MomentScale, TableOptimizer, check_moment_scale
from dmt.sharding.schemes import IdRoute
from dmt.sptt.checks import check_agreement
from dmt.sptt.dataflow import Piece, SPTTModule, model_parallel_tables, shard_in_tower
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.precision import ExchangePrecision
from dmt.sptt.results import LazyKeyedTensor
from dmt.sptt.sharder import Exchange

__all__ = ["ShardedTowerCollection", "TowerCollectionSharder"]


class TowerCollectionSharder(BaseEmbeddingSharder[EmbeddingTowerCollection]):
    """Shards ``EmbeddingTowerCollection`` for ``DistributedModelParallel`` (DMT sections 3.1 and 3.2).

    Each tower's tables and tower module live on the ranks of one mesh tower; only the tower's output crosses
    between towers. The result has the columns of the unsharded module, in its order.

    The sharder carries the mesh; leave DMP's ``env`` alone, it is for the dense parts. Tables get fresh weights from
    their ``init_fn``: load weights after constructing DMP.

    Args:
        mesh: the groups of this job.
        placement: for each logical tower of the collection its mesh tower; by default tower i on mesh tower i. Several
            logical towers may share one mesh tower, none may stay empty.
        fused_params: of FBGEMM's fused optimizer, e.g. ``{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}``.
        qcomm_codecs_registry: TorchRec's quantised communication, for the exchanges inside a tower.
        id_route: how ids travel: ``"peer"`` or ``"global"`` (`dmt.sptt.input_dist`); the result is the same.
        peer_precision: number formats of the exchange of outputs between towers; None sends as is.
        moment_scale: factor c of AdaGrad's moments with replicas, in (0, R] (`dmt.sharding.optimizers`); by default their
            number. Settings in ``fused_params`` stay the user's: learning rate and epsilon are scaled for the kernel.

    Example::

        mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
        sharders = [TowerCollectionSharder(mesh)]
        plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    def __init__(
        self,
        mesh: TowerMesh,
        *,
        placement: Sequence[int] | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        id_route: IdRoute = "peer",
        peer_precision: ExchangePrecision | None = None,
        moment_scale: MomentScale = "num_replicas",
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        check_moment_scale(moment_scale, mesh.topology.num_replicas)
        self.mesh = mesh
        self.placement = None if placement is None else tuple(placement)
        self.exchange = Exchange(id_route=id_route, precision=peer_precision or ExchangePrecision())
        self.optimizer = TableOptimizer(fused_params=fused_params, moment_scale=moment_scale)

    def shard(
        self,
        module: EmbeddingTowerCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTowerCollection:
        """Called by DMP; ``env`` is ignored, the mesh says where things go."""
        check_agreement(self, module, params)
        return ShardedTowerCollection(
            module,
            params,
            mesh=self.mesh,
            placement=self.mesh_towers(module),
            optimizer=self.optimizer,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            exchange=self.exchange,
        )

    def mesh_towers(self, module: EmbeddingTowerCollection) -> tuple[int, ...]:
        """The mesh tower of each logical tower.

        Raises:
            InputError: the placement has another length than the collection, names an unknown mesh tower, or leaves a
                mesh tower empty.
        """
        num_logical, num_mesh = len(module.towers), self.mesh.topology.num_towers
        if self.placement is None and num_logical != num_mesh:
            raise InputError(
                f"The model has {num_logical} towers but the topology num_towers={num_mesh}. Make them equal, or pass "
                "placement= to put several towers of the model on one tower of the mesh."
            )
        placement = tuple(range(num_mesh)) if self.placement is None else self.placement
        if len(placement) != num_logical or any(not 0 <= t < num_mesh for t in placement):
            raise InputError(
                f"placement={list(placement)} must give one mesh tower of 0..{num_mesh - 1} for each of the "
                f"{num_logical} towers of the model."
            )
        empty = sorted(set(range(num_mesh)) - set(placement))
        if empty:
            raise InputError(
                f"Mesh tower {empty[0]} has no tower of the model (placement={list(placement)}); its ranks would idle. "
                f"Use at most {num_logical} mesh towers."
            )
        return placement

    def tables_by_tower(self, module: EmbeddingTowerCollection) -> list[list[Any]]:
        """The table configs that each mesh tower holds."""
        tables: list[list[Any]] = [[] for _ in range(self.mesh.topology.num_towers)]
        for tower, mesh_tower in zip(module.towers, self.mesh_towers(module), strict=True):
            tables[mesh_tower].extend(_tables(tower))
        return tables

    def shardable_parameters(self, module: EmbeddingTowerCollection) -> dict[str, nn.Parameter]:
        """The table weights of all towers, by table name."""
        return {
            name.split(".")[-2]: parameter
            for tower in module.towers
            for name, parameter in tower.embedding.embedding_bags.named_parameters()
        }

    @property
    def module_type(self) -> type[EmbeddingTowerCollection]:
        """What this sharder shards."""
        return EmbeddingTowerCollection


class ShardedTowerCollection(SPTTModule):
    """The towers of one mesh tower on one of its ranks; made by `TowerCollectionSharder`.

    State is keyed ``towers.<logical index>.embedding.*`` and ``towers.<logical index>.interaction.*`` as in the
    unsharded module, wherever the towers are placed. Tower modules are synchronised inside their tower only.
    """

    def __init__(
        self,
        module: EmbeddingTowerCollection,
        sharding: Mapping[str, ParameterSharding],
        *,
        mesh: TowerMesh,
        exchange: Exchange,
        placement: Sequence[int],
        optimizer: TableOptimizer,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        _check_towers(module, placement)
        by_mesh_tower = [
            [i for i, t in enumerate(placement) if t == mesh_tower] for mesh_tower in range(mesh.topology.num_towers)
        ]
        super().__init__(
            mesh=mesh,
            tables_by_tower=[[t for i in logical for t in _tables(module.towers[i])] for logical in by_mesh_tower],
            is_weighted=module.towers[0].embedding.is_weighted(),
            exchange=exchange,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )
        mine = by_mesh_tower[mesh.tower]
        self._features = {str(i): feature_names(_tables(module.towers[i])) for i in mine}
        self.embeddings = nn.ModuleDict(
            {
                str(i): shard_in_tower(
                    module.towers[i].embedding,
                    sharding,
                    mesh,
                    optimizer=optimizer,
                    device=device,
                    qcomm_codecs_registry=qcomm_codecs_registry,
                )
                for i in mine
            }
        )
        self.sharded_tables = model_parallel_tables(sharding)
        self.build_input_dist(self.embeddings.values())  # type: ignore[arg-type]
        self.interactions = _TowerModules({i: module.towers[i].interaction for i in mine}, self._target_device)
        self._data_parallel = _data_parallel(self.interactions, mesh)

    def tower_output(self, embeddings: Sequence[KeyedTensor], num_samples: int) -> tuple[Tensor, list[Piece]]:
        """Outputs of this rank's towers side by side, in logical order: [samples, O_t]."""
        # In the order of the tables, so that a tower module may also read embeddings by position.
        ordered = [
            LazyKeyedTensor(of_one, self._features[i]) for i, of_one in zip(self.embeddings, embeddings, strict=True)
        ]
        with torch.profiler.record_function("## dmt:tower_modules ##"):
            outputs: list[Tensor] = self._data_parallel(ordered)
        for name, output in zip(self.embeddings, outputs, strict=True):
            if output.dim() != 2 or output.shape[0] != num_samples:
                raise InputError(
                    f"The tower module of tower {name} returned shape {list(output.shape)} for {num_samples} samples; "
                    "it must return [samples, output dim]."
                )
        columns = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        return columns, [(int(i), output.shape[1]) for i, output in zip(self.embeddings, outputs, strict=True)]

    def result(self, columns: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The towers' columns in logical order: [B, sum of O_t]."""
        arrived = [number for number, _ in pieces]
        if arrived == sorted(arrived):
            return columns
        outputs = dict(zip(arrived, columns.split([width for _, width in pieces], dim=1), strict=True))
        return torch.cat([outputs[number] for number in sorted(outputs)], dim=1)

    def _parts(self, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for i, embedding in self.embeddings.items():
            yield append_prefix(prefix, f"towers.{i}.embedding"), embedding
        for i, interaction in self.interactions.by_tower.items():
            yield append_prefix(prefix, f"towers.{i}.interaction"), interaction

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Tables as sharded tensors and tower modules, of this rank's towers."""
        self.wait_for_replicas()
        state: Any = OrderedDict() if destination is None else destination
        for name, part in self._parts(prefix.removesuffix(".")):
            part.state_dict(destination=state, prefix=f"{name}.", keep_vars=keep_vars)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's towers from a state dict with the keys of `state_dict`."""
        self.wait_for_replicas()
        missing: list[str] = []
        unexpected = set(state_dict)
        for name, part in self._parts(""):
            own = {
                key.removeprefix(f"{name}."): value for key, value in state_dict.items() if key.startswith(f"{name}.")
            }
            unexpected -= {f"{name}.{key}" for key in own}
            result = part.load_state_dict(OrderedDict(own), strict=strict)
            missing += [f"{name}.{key}" for key in result.missing_keys]
            unexpected |= {f"{name}.{key}" for key in result.unexpected_keys}
        if strict and unexpected:
            raise InputError(f"State of tower {self.mesh.tower} has unknown keys {sorted(unexpected)[:3]}.")
        return key_mismatch(missing, sorted(unexpected))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the unsharded module's names."""
        for name, part in self._parts(prefix):
            yield from part.named_parameters(name, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the unsharded module's names."""
        for name, part in self._parts(prefix):
            yield from part.named_buffers(name, recurse)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Everything DMP's data parallel must leave alone: tables and tower modules."""
        for name, part in self._parts(prefix):
            if isinstance(part, ShardedEmbeddingBagCollection):
                yield from part.sharded_parameter_names(name)
            else:
                yield from (key for key, _ in part.named_parameters(name))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        return CombinedOptimizer(
            [(f"towers.{i}.embedding", embedding.fused_optimizer) for i, embedding in self.embeddings.items()]
        )

    @property
    def unsharded_module_type(self) -> type[EmbeddingTowerCollection]:
        """What this module was before sharding."""
        return EmbeddingTowerCollection


class _TowerModules(nn.Module):
    """The tower modules of one mesh tower behind one call, so that one data-parallel reducer covers them."""

    def __init__(self, modules: Mapping[int, nn.Module], device: torch.device) -> None:
        super().__init__()
        self.by_tower = nn.ModuleDict({str(i): _materialise(module, device) for i, module in modules.items()})

    def forward(self, embeddings: list[Any]) -> list[Tensor]:
        return [module(e) for module, e in zip(self.by_tower.values(), embeddings, strict=True)]


def _check_towers(module: EmbeddingTowerCollection, placement: Sequence[int]) -> None:
    holder: dict[int, int] = {}
    for i, tower in enumerate(module.towers):
        if not isinstance(tower, EmbeddingTower) or not isinstance(tower.embedding, EmbeddingBagCollection):
            raise InputError(
                f"Tower {i} holds a {type(getattr(tower, 'embedding', tower)).__name__}; towers of pooled "
                "EmbeddingBagCollection are supported."
            )
        if tower.embedding.is_weighted() != module.towers[0].embedding.is_weighted():
            raise InputError(
                f"Tower {i} and tower 0 differ in is_weighted; make all towers of a collection weighted or none."
            )
        for name, parameter in tower.named_parameters():
            other = holder.setdefault(id(parameter), i)
            if placement[other] != placement[i]:
                raise InputError(
                    f"Towers {other} and {i} share the parameter {name!r}, but live on different mesh towers, where "
                    "their copies would drift apart. Give each its own, or place both on one mesh tower."
                )
    names = Counter(table.name for tower in module.towers for table in _tables(tower))
    doubled = [name for name, count in names.items() if count > 1]
    if doubled:
        raise InputError(f"Table {doubled[0]!r} occurs in more than one tower; give tables unique names.")


def _materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """Moves a tower module to the device; parts built on meta get memory and their own initial values."""
    if device.type == "meta":
        return module
    for part in module.modules():
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"A tower module holds a {type(part).__name__} built on the meta device without reset_parameters(); "
                "build the tower modules on a real device or give it that method."
            )
        part.to_empty(device=device, recurse=False)
        reset()
    return module.to(device)


def _data_parallel(modules: _TowerModules, mesh: TowerMesh) -> nn.Module:
    """Averages tower-module gradients inside the tower (DMT section 3.2, "System Perspective")."""
    if any(p.requires_grad for p in modules.parameters()):
        return DistributedDataParallel(
            modules, process_group=mesh.tower_module_group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
    # DDP refuses a module without trainable parameters, but its ranks must start equal all the same.
    broadcast_module(modules, mesh.tower_module_group)
    return modules


def _tables(tower: EmbeddingTower) -> list[Any]:
    return list(tower.embedding.embedding_bag_configs())
