"""`TowerCollectionSharder`: runs TorchRec's ``EmbeddingTowerCollection`` as disaggregated towers on a `TowerMesh`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import broadcast_tensor, sum_over_ranks
from dmt.errors import InputError, check_instance
from dmt.plan.tables import feature_names
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.group_sharded import Embeddings, split_rows, table_configs, table_weights
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.options import refuse
from dmt.sptt.peer_exchange import Piece, Rows, TowerOutput
from dmt.sptt.sharder import SharderSettings, TowerSharder
from dmt.sptt.tower_lookup import in_order, output_keys

__all__ = ["ShardedTowerCollection", "TowerCollectionSharder", "clip_grad_norm"]


class ShardedTowerCollection(SPTTModule):
    """A rank's share of the logical towers of its mesh tower; made by `TowerCollectionSharder`.

    State is keyed ``towers.<logical index>.embedding.*`` and ``towers.<logical index>.interaction.*`` as in the
    unsharded module, for any placement of the towers. Gradients of tower modules are averaged over the ranks of their
    tower only, in all replicas.
    """

    def __init__(
        self,
        sharder: TowerCollectionSharder,
        module: EmbeddingTowerCollection,
        sharding: Mapping[str, ParameterSharding],
        device: torch.device | None = None,
    ) -> None:
        placement = sharder.mesh_towers(module)
        _check_towers(module, placement, is_unique=sharder.unique)
        super().__init__(
            sharder,
            input_groups=[
                [_features(tower) for tower, at in zip(module.towers, placement, strict=True) if at == mesh_tower]
                for mesh_tower in range(sharder.mesh.topology.num_towers)
            ],
            is_weighted=_is_weighted(module.towers[0]),
            device=device,
        )
        mine = [i for i, mesh_tower in enumerate(placement) if mesh_tower == self.mesh.tower]
        self.elsewhere = tuple(f"towers.{i}." for i in range(len(placement)) if i not in mine)
        self._keys = {str(i): output_keys(table_configs(module.towers[i].embedding)) for i in mine}
        self.embeddings = {str(i): sharder.shard_in_tower(module.towers[i].embedding, sharding, device) for i in mine}
        self.interactions = _TowerModules({i: module.towers[i].interaction for i in mine}, self.device)
        # This tree only gives the parts their names in the unsharded module.
        towers = {
            i: nn.ModuleDict({"embedding": embedding, "interaction": self.interactions.by_tower[i]})
            for i, embedding in self.embeddings.items()
        }
        self.local_parts.append(nn.ModuleDict({"towers": nn.ModuleDict(towers)}))
        self.build_route()
        self._data_parallel = _data_parallel(self.interactions, self.mesh)
        self._trained = [(parameter, parameter.requires_grad) for parameter in self.interactions.parameters()]

    def tower_output(self, embeddings_PN: Sequence[Embeddings], rows: Rows) -> TowerOutput:
        """Runs the modules of this rank's towers; returns their outputs side by side, in logical order: [P, O].

        Raises `InputError` if a tower module does not return a tensor [samples, columns], or ``requires_grad`` of one
        of its parameters was changed after sharding, unless all are frozen.
        """
        num_samples = rows.by_group if len(rows.by_group) > 1 else rows.by_group * len(self.embeddings)
        # Padding reaches no tower module: a batch norm would count it, and the norm of zeros has no gradient. Keys are
        # in the order of the tables, so that a tower module may also read embeddings by position.
        given = []
        for i, of_tower, number in zip(self.embeddings, embeddings_PN, num_samples, strict=True):
            is_full = number == rows.num_rows
            real = of_tower if is_full else split_rows(of_tower, [number, rows.num_rows - number])[0]
            given.append(in_order(real, self._keys[i]))
        now = [parameter.requires_grad for parameter, _ in self._trained]
        # Without any gradient there is none to average.
        if torch.is_grad_enabled() and any(now) and now != [trained for _, trained in self._trained]:
            raise InputError(
                "requires_grad of a tower module's parameter was changed after sharding, so gradients would not be "
                "averaged over the tower's ranks. Set it before sharding; later, freeze all parameters of the tower's "
                "modules on all its ranks, or some by a learning rate of 0."
            )
        outputs: list[Tensor] = self._data_parallel(given)
        for name, output, number in zip(self.embeddings, outputs, num_samples, strict=True):
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            if len(shape) != 2 or shape[0] != number:
                raise InputError(
                    f"The tower module of tower {name} returned {shape} for {number} samples; it must return a tensor "
                    "[samples, output columns]."
                )
        # Padding comes last in each piece, and is cut off before outputs are sent.
        filled = [F.pad(o, (0, 0, 0, rows.num_rows - len(o))) if len(o) < rows.num_rows else o for o in outputs]
        columns_PO = torch.cat(filled, dim=1) if len(outputs) > 1 else outputs[0]
        pieces = [(int(name), output.shape[1]) for name, output in zip(self.embeddings, outputs, strict=True)]
        # Logical towers that have features in common are one group.
        return TowerOutput(columns_PO, pieces, [i if len(rows.by_group) > 1 else 0 for i in range(len(pieces))])

    def result(self, columns_BS: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Returns the columns in the order of the logical towers: [B, S]."""
        arrived = [number for number, _ in pieces]
        # They arrive in the order of mesh towers, but the over arch reads them in the order of the model's towers.
        if arrived == sorted(arrived):
            return columns_BS
        outputs = dict(zip(arrived, columns_BS.split([width for _, width in pieces], dim=1), strict=True))
        return torch.cat([outputs[number] for number in sorted(outputs)], dim=1)


class TowerCollectionSharder(TowerSharder[EmbeddingTowerCollection]):
    """Shards ``EmbeddingTowerCollection`` for ``DistributedModelParallel`` (DMT sections 3.1 and 3.2).

    The tables and the tower module of a tower live on the ranks of one mesh tower; besides ids, only the tower's output
    crosses between towers. The result [B, S] has the columns of the unsharded module, in the same order.

    If a tower looks up an ``EmbeddingBagCollection``, its module takes a ``KeyedTensor`` [P, columns]; if it looks up
    an ``EmbeddingCollection``, its module takes a dict with the ``JaggedTensor`` of each feature, [P] lengths and [sum
    of lengths, columns] values. The module returns [P, O] for P samples of all peers.

    Sharding raises `InputError` if towers have tables of one name, weighted and unweighted bags, or a parameter in
    common across mesh towers; or, with ``unique``, if a tower module has batch norm or dropout.

    Args:
        mesh: the process groups of this job.
        placement: mesh tower of each logical tower of the collection; by default tower i on mesh tower i. Several
            logical towers may share a mesh tower; no mesh tower may be empty.
        settings: ``fused_params``, ``id_route``, ``peer_precision``, ``moment_scale`` and ``unique``; for their meaning
            and the errors raised, see `dmt.sptt.sharder.TowerSharder`.

    Example::

        mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
        sharders = [TowerCollectionSharder(mesh)]
        plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    module_type: type[EmbeddingTowerCollection] = EmbeddingTowerCollection
    """The unsharded module type."""
    sharded_type = ShardedTowerCollection

    def __init__(
        self, mesh: TowerMesh, *, placement: Sequence[int] | None = None, **settings: Unpack[SharderSettings]
    ) -> None:
        super().__init__(mesh, **settings)
        self.placement = None if placement is None else tuple(placement)

    def mesh_towers(self, module: EmbeddingTowerCollection) -> tuple[int, ...]:
        """Returns the mesh tower of each logical tower.

        Raises `InputError` unless each logical tower is placed on a mesh tower, and each mesh tower has at least one.
        """
        num_towers = self.mesh.topology.num_towers
        placement = tuple(range(num_towers)) if self.placement is None else self.placement
        if len(placement) != len(module.towers) or set(placement) != set(range(num_towers)):
            raise InputError(
                f"The model has {len(module.towers)} towers, but the topology has num_towers={num_towers}, and "
                f"placement={self.placement}. A placement names a mesh tower of 0..{num_towers - 1} for each tower of "
                "the model, and each mesh tower at least once; with placement=None the two numbers must be equal."
            )
        return placement

    def tables_by_tower(self, module: EmbeddingTowerCollection) -> list[list[Any]]:
        """Returns the table configs of each mesh tower.

        Raises:
            InputError: as in `mesh_towers`; a tower is not of a supported type, or has sequences with the global route.
        """
        tables: list[list[Any]] = [[] for _ in range(self.mesh.topology.num_towers)]
        for i, (tower, mesh_tower) in enumerate(zip(module.towers, self.mesh_towers(module), strict=True)):
            collection = getattr(tower, "embedding", tower)
            is_plain = type(tower).forward is EmbeddingTower.forward
            forwards = (EmbeddingBagCollection.forward, EmbeddingCollection.forward)
            if not is_plain or type(collection).forward not in forwards:
                raise InputError(
                    f"Tower {i} has the type {type(tower).__name__}, its collection {type(collection).__name__}. It "
                    "must be an EmbeddingTower that holds one EmbeddingBagCollection or EmbeddingCollection, both with "
                    "forward unchanged. For bags beside sequences, place two towers on one mesh tower (placement=), "
                    "or look up everything in one EmbeddingCollection and sum in the tower module."
                )
            refuse(sequences=isinstance(collection, EmbeddingCollection), id_route=self.id_route)
            tables[mesh_tower].extend(table_configs(tower.embedding))
        return tables

    def shardable_parameters(self, module: EmbeddingTowerCollection) -> dict[str, nn.Parameter]:
        """Returns the table weights of all towers, by table name."""
        return {name: weight for tower in module.towers for name, weight in table_weights(tower.embedding).items()}


class _TowerModules(nn.Module):
    """The tower modules of one mesh tower behind one call, so that one data-parallel reducer covers them."""

    def __init__(self, modules: Mapping[int, nn.Module], device: torch.device) -> None:
        super().__init__()
        self.by_tower = nn.ModuleDict({str(i): _materialize(module, device) for i, module in modules.items()})

    def forward(self, embeddings: list[Any]) -> list[Tensor]:
        return [module(e) for module, e in zip(self.by_tower.values(), embeddings, strict=True)]


def _check_towers(module: EmbeddingTowerCollection, placement: Sequence[int], *, is_unique: bool) -> None:
    holder: dict[int, int] = {}
    for i, tower in enumerate(module.towers):
        if _is_weighted(tower) != _is_weighted(module.towers[0]):
            raise InputError(
                f"Tower {i} and tower 0 differ in is_weighted. Make all towers of a collection weighted, or none; "
                "an EmbeddingCollection has no weights."
            )
        for part in tower.interaction.modules():
            if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
                raise InputError(
                    f"The tower module of tower {i} holds a SyncBatchNorm, which would mix its statistics with those "
                    "of other towers. Use LayerNorm, or give it process_group=mesh.tower_module_group."
                )
            drops = isinstance(part, _DropoutNd) and part.p > 0
            drops |= isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0
            if is_unique and (isinstance(part, _BatchNorm) or drops):
                raise InputError(
                    f"unique=True, but the tower module of tower {i} holds a {type(part).__name__}, whose dropout "
                    "or statistics would treat samples that share a row as one. Set dropout to 0, or use unique=False."
                )
        for name, parameter in tower.named_parameters():
            other = holder.setdefault(id(parameter), i)
            if placement[other] != placement[i]:
                raise InputError(
                    f"Towers {other} and {i} share the parameter {name!r}, but live on different mesh towers, where "
                    "their copies would drift apart. Do not share it, or place both towers on one mesh tower."
                )
    names = Counter(table.name for tower in module.towers for table in table_configs(tower.embedding))
    if doubled := [name for name, count in names.items() if count > 1]:
        raise InputError(f"Table {doubled[0]!r} occurs in more than one tower; give tables unique names.")


def _materialize(module: nn.Module, device: torch.device) -> nn.Module:
    """Moves a tower module to the device; parts built on meta get memory and initial values."""
    for part in module.modules():
        tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if any(tensor.is_meta for tensor in tensors):
            if not hasattr(part, "reset_parameters"):
                raise InputError(
                    f"A tower module holds a {type(part).__name__} that was built on the meta device and has no method "
                    "reset_parameters(). Build the tower modules on a real device, or add the method to the class."
                )
            # Not recursively: other parts, perhaps inside this one, keep their values.
            part.to_empty(device=device, recurse=False)
            part.reset_parameters()  # type: ignore[operator]
    return module.to(device)


def _data_parallel(modules: _TowerModules, mesh: TowerMesh) -> nn.Module:
    """Wraps tower modules in DDP over their tower, which averages gradients (DMT section 3.2, "System Perspective")."""
    if any(p.requires_grad for p in modules.parameters()):
        # Each rank keeps its own buffers, as in the dense part under TorchRec. The group has the ranks of the tower
        # only: no gradient of a tower module crosses between towers (section 3.2).
        return DistributedDataParallel(
            modules, process_group=mesh.tower_module_group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
    # DDP refuses a module without trainable parameters, but its copies must be equal nevertheless.
    for tensor in (*modules.parameters(), *modules.buffers()):
        broadcast_tensor(tensor.detach(), mesh.tower_module_group)
    return modules


def _features(tower: EmbeddingTower) -> list[str]:
    return list(dict.fromkeys(feature_names(table_configs(tower.embedding))))


def _is_weighted(tower: EmbeddingTower) -> bool:
    return isinstance(tower.embedding, EmbeddingBagCollection) and tower.embedding.is_weighted()


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients so that their norm over the dense part and *all* towers is at most ``max_norm``; collective.

    ``torch.nn.utils.clip_grad_norm_`` computes a different norm on each tower, whose ranks have only their own tower's
    parameters, so copies of the dense part would drift apart. Call this on every rank between the backward pass and the
    optimizer's step. It excludes tables: their fused optimizers have updated them in the backward pass.

    Args:
        model: the sharded model; without towers, the norm is that of its dense part.
        max_norm: largest norm of the gradients after clipping, above 0.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.

    Raises:
        InputError: ``max_norm`` is not above 0, or ``model`` is not a module.

    Example::

        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
    """
    check_instance("model", model, nn.Module)
    if not max_norm > 0:
        raise InputError(f"clip_grad_norm: max_norm={max_norm!r} must be above 0.")
    collections = [part for part in model.modules() if isinstance(part, ShardedTowerCollection)]
    of_towers = {id(parameter) for part in collections for parameter in part.interactions.parameters()}
    trained = [parameter for parameter in _dense_parameters(model) if parameter.grad is not None]
    # The same kind on all peers, also where a tower has no gradient: they would sum over other links.
    device = ([part.device for part in collections] or [p.device for p in trained] or [torch.device("cpu")])[0]
    # The dense part is the same on every rank, so it counts once.
    total = _square((p for p in trained if id(p) not in of_towers), device)
    if collections:
        square = _square((p for p in trained if id(p) in of_towers), device)
        # The peers of a rank hold one copy of each tower.
        total += sum_over_ranks(square, collections[0].mesh.peer_group)
    norm = total.sqrt()
    clip_grads_with_norm_(trained, max_norm, norm)
    return norm


def _square(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Returns the squared norm of the gradients, a float64 scalar, so that the sum over ranks rounds little."""
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.to(device, torch.float64).square()


def _dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that PyTorch's optimizers train; reads no tables, because that writes hot rows back."""
    seen: set[int] = set()
    for part in model.modules():
        owner: nn.Module = part.interactions if isinstance(part, ShardedTowerCollection) else part
        named = nn.Module.named_parameters(owner, recurse=owner is not part)
        for _, parameter in in_backward_optimizer_filter(named):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
