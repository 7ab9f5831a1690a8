"""What a step sends and computes: bytes of every exchange (`step_bytes`), operators of a model (`count_operators`).

Legend: B samples per rank, T towers, L ranks per tower, R replicas, W = R T L ranks, G = T L B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dmt.errors import InputError
from dmt.models.complexity import MetaTables, meta_batch, tower_modules
from dmt.plan.tables import TableSpec, number_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, ShardLoad, replicated_bytes
from dmt.sharding.plan import TowerShardingPlan, imbalance_of
from dmt.simulator.steps import Load, ModelWork, Operator, PartWork, StepWork

__all__ = [
    "Workload",
    "count_operators",
    "operators_of",
    "step_bytes",
    "step_work",
]

_ID_BYTES = 8  # an id, and a length
_SIZES = (2, 4)  # samples, of which operators are counted


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step, as far as its bytes depend on it."""

    topology: TowerTopology
    tables: Sequence[TableSpec]
    """Every table; of tables in several towers, the cut ones."""
    towers: Sequence[Sequence[str]]
    """Features of each tower; one list of all for the flat dataflow."""
    sharding: TowerShardingPlan | None
    """Place of the tables; None for TorchRec's flat dataflow."""
    batch_size: int
    """B."""
    pooling: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample, by feature; 1.0 for the others."""
    number_bytes: tuple[float, float] = (4.0, 4.0)
    """Bytes of a number between towers, forward and backward."""
    is_table_wise: bool = False
    """True for a flat dataflow of whole tables; else columns are even on all ranks."""
    is_hierarchical: bool = False
    """True if dense gradients are summed inside hosts before they cross."""
    sync_every: int = 1
    """Steps from one average of replicas to the next."""

    def columns(self, features: Sequence[str]) -> int:
        """Columns of the embeddings of some features."""
        return sum(table.embedding_dim for table in self.tables for name in table.feature_names if name in features)


def step_bytes(step: Workload, model: ModelWork) -> dict[str, Load]:
    """Returns the bytes that all ranks together send in each exchange of a step, by its name in `StepWork`.

    ``uplink`` are those between hosts. Not counted: the sizes that ranks tell each other before an exchange, that the
    rows of a row-wise table are not read equally often, and the average of replicas. Data-parallel tables, tower
    modules and dense parts are reduced in rings.
    """
    topology, sharding, batch = step.topology, step.sharding, step.batch_size
    world, replicas = topology.world_size, topology.num_replicas
    # A flat dataflow is one whose peers are all ranks.
    peers = topology.num_towers if sharding else world
    groups = topology.peer_groups() if sharding else [list(range(world))]
    away = world * (1 - 1 / peers) * batch
    lookups = sum(step.pooling.get(name, 1.0) + 1 for names in step.towers for name in names)
    numbers = away * sum(_widths(step, model))
    shards = _shard_loads(step)
    reduced = replicas * sum(load.reduced_bytes for load in shards)
    of_towers = 2 * (replicas * topology.ranks_per_tower - 1) * model.tower_bytes + reduced
    peer, inner = topology.share_across_hosts(groups), topology.share_across_hosts(topology.tower_groups())
    return {
        "peer_ids": _split(away * _ID_BYTES * lookups, peer),
        "tower_ids": _split(replicas * sum(load.id_bytes for load in shards), inner),
        "tower_outputs": _split(replicas * sum(load.output_bytes for load in shards), inner),
        "peer_outputs": _split(numbers * step.number_bytes[0], peer),
        "peer_gradients": _split(numbers * step.number_bytes[1], peer),
        "tower_weights": _split(of_towers, topology.ring_share_across_hosts(topology.tower_module_groups()[:1])),
        "dense_weights": _dense_bytes(step, model.dense_bytes),
    }


def _split(size: float, across: float) -> Load:
    return Load(across * size, (1 - across) * size)


def _widths(step: Workload, model: ModelWork) -> list[int]:
    """Columns that each tower returns for a sample."""
    return list(model.widths) or [step.columns(names) for names in step.towers]


def _shard_loads(step: Workload) -> list[ShardLoad]:
    sharding = step.sharding
    if sharding is None:
        return []
    costs = CostModel(topology=step.topology, workload=sharding.workload, hardware=sharding.hardware)
    placements = sharding.placements
    return [load for table in step.tables for _, load in costs.shards(table, placements[table.name])]


def _dense_bytes(step: Workload, size: int) -> Load:
    """Bytes of averaging the gradients of dense parts of ``size`` bytes."""
    topology = step.topology
    if not step.is_hierarchical:
        ring = 2 * (topology.world_size - 1) * size
        return _split(ring, topology.ring_share_across_hosts([range(topology.world_size)]))
    # Every rank of a host has an equal part; all gradients are taken as one bucket.
    hosts, ranks = topology.num_hosts, topology.host_size
    padded = 4 * math.ceil(size / 4 / ranks) * ranks
    return Load(2 * (hosts - 1) * padded, 2 * (ranks - 1) * hosts * padded)


def step_work(step: Workload, model: ModelWork) -> StepWork:
    """Returns the work of one step, of the busiest rank or host where they differ by plan."""
    topology, sharding, batch = step.topology, step.sharding, step.batch_size
    outputs = batch * sum(_widths(step, model))
    row_bytes = {name: t.embedding_dim * number_bytes(t) for t in step.tables for name in t.feature_names}
    read = batch * sum(step.pooling.get(name, 1.0) * row_bytes[name] for names in step.towers for name in names)
    held = _held_columns(step)
    wide = imbalance_of(held)
    lookups = wide if sharding is None else sharding.imbalance
    hosts = imbalance_of([sum(held[rank] for rank in ranks) for ranks in topology.host_groups()])
    skews = dict.fromkeys(("peer_outputs", "peer_gradients"), (hosts, wide))
    if sharding is not None:
        skews["tower_outputs"] = (hosts, lookups)
    loads = {}
    for name, load in (step_bytes(step, model) | {"replicas": _replica_bytes(step)}).items():
        uplink, inside = skews.get(name, (1.0, 1.0))
        loads[name] = Load(load.uplink / topology.num_hosts * uplink, load.inside / topology.world_size * inside)
    # Numbers in another format are made from FP32 and made FP32 again.
    converted = [outputs * (0.0 if size == 4 else 2 * (4 + size)) for size in step.number_bytes]
    return StepWork(
        model=model,
        loads=loads,
        lookup_bytes=3 * lookups * read,
        embedding_bytes=4 * batch * sum(map(step.columns, step.towers)) * (wide if sharding else 1.0),
        output_bytes=4 * outputs,
        samples=batch,
        peer_samples=batch * topology.num_towers,
        converted_bytes=(converted[0], converted[1]),
    )


def _held_columns(step: Workload) -> list[float]:
    """Columns that each rank, or its tower, returns; of a flat dataflow greedily by whole tables."""
    topology = step.topology
    if step.sharding is not None:
        towers = [float(step.columns(names)) for names in step.towers]
        return [towers[topology.coordinates(rank).tower] for rank in range(topology.world_size)]
    held = [0.0] * topology.world_size
    for width in sorted((table.embedding_dim * len(table.feature_names) for table in step.tables), reverse=True):
        held[held.index(min(held))] += width
    return held if step.is_table_wise else [sum(held) / len(held)] * len(held)


def _replica_bytes(step: Workload) -> Load:
    """Bytes of all ranks in a step's share of the ring all-reduces that average the replicas."""
    topology, sharding = step.topology, step.sharding
    if sharding is None or topology.num_replicas == 1:
        return Load()
    sent = 2 * (topology.num_replicas - 1) * replicated_bytes(sharding, step.tables) / step.sync_every
    return _split(sent, topology.ring_share_across_hosts(topology.replica_groups()))


def count_operators(model: nn.Module, dense_in_features: int) -> ModelWork:
    """Counts the parts of a model on the meta device whose tables are `MetaTables` or `MetaTowers`.

    It runs forward and backward at two batch sizes: what grows with the batch belongs to samples, the rest, above all
    weights and their gradients, to each pass.

    Raises:
        InputError: the number of its operators depends on the samples.

    Example:
        >>> from dmt.models import DLRM, ModelOptions
        >>> from dmt.models.complexity import criteo_1tb_tables
        >>> model = DLRM(tables=criteo_1tb_tables(8), dense_in_features=3, make_sparse_arch=MetaTables,
        ...     options=ModelOptions(dense_arch_layer_sizes=(6,), over_arch_layer_sizes=(4, 1), device="meta"))
        >>> work = count_operators(model, 3)
        >>> sum(one.flops for one in work.dense_arch.forward)  # 3 x 6 and 6 x 8 multiply-accumulates
        132.0
    """
    modules = tower_modules(model)
    parts = [*modules, getattr(model, "dense_arch", None) or nn.Module()]
    tables = [module for module in model.modules() if isinstance(module, MetaTables)]
    others = {id(parameter) for module in (*parts, *tables) for parameter in module.parameters()}
    weights = [[*part.parameters()] for part in parts] + [[p for p in model.parameters() if id(p) not in others]]
    few, more = (_count(model, parts, tables, meta_batch(dense_in_features, size)) for size in _SIZES)
    *towers, dense_arch, rest = (
        PartWork(_per_sample(small[0], large[0]), _per_sample(small[1], large[1]), sum(p.nbytes for p in own))
        for small, large, own in zip(few, more, weights, strict=True)
    )
    return ModelWork(tuple(towers), dense_arch, rest, tuple(module.out_features for module in modules))


def operators_of(run: Callable[[], Any]) -> int:
    """The number of operators that compute or copy something in a call."""
    with _Counter() as counter:
        run()
    return len(counter.found)


_Counted = list[tuple[float, float]]  # FLOPs and bytes of each operator


def _count(
    model: nn.Module, parts: Sequence[nn.Module], tables: Sequence[nn.Module], batch: tuple[Tensor, Tensor]
) -> list[tuple[_Counted, _Counted]]:
    """Operators forward and backward of each part, and of the rest, whose gradients end where another part begins."""
    leaves: list[Tensor] = list(model.parameters())
    forward: dict[nn.Module, _Counted] = {module: [] for module in (*parts, *tables)}
    outputs: dict[nn.Module, list[Any]] = {module: [] for module in forward}
    around: list[_Counted] = []

    def cut(value: Any) -> Any:
        """The same values, from which gradients go no further back."""
        value = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)
        leaves.extend(tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor) and tensor.requires_grad)
        return value

    def before(module: nn.Module, args: Any) -> Any:
        around.append(counter.found)
        counter.found = forward[module]
        return cut(args)

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        outputs[module].append(output)
        counter.found = around.pop()
        return cut(output)

    handles = [module.register_forward_pre_hook(before) for module in forward]
    handles += [module.register_forward_hook(after) for module in forward]
    with _Counter() as counter:
        result = model(*batch)
    for handle in handles:
        handle.remove()
    counted = [(forward[part], _backward(outputs[part], leaves)) for part in parts]
    return [*counted, (counter.found, _backward([result], leaves))]


def _backward(outputs: list[Any], leaves: list[Tensor]) -> _Counted:
    """The operators that compute the gradients of all that outputs were made of."""
    ends = [tensor for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with _Counter() as counter:
        if ends and wanted:
            # Not backward(): it would add to .grad and set off optimizers that are fused into the backward pass.
            torch.autograd.grad(ends, wanted, [torch.empty_like(tensor) for tensor in ends], allow_unused=True)
    return counter.found


class _Counter(TorchDispatchMode):
    """Takes down every operator that computes or copies something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: _Counted = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and takes it down."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if not func.is_view and "empty" not in packet.__name__:
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.found.append((float(flops), float(sum(tensor.nbytes for tensor in tensors))))
        return result


def _per_sample(few: _Counted, more: _Counted) -> tuple[Operator, ...]:
    if len(few) != len(more):
        raise InputError(
            f"The model runs {len(few)} operators for {_SIZES[0]} samples and {len(more)} for {_SIZES[1]}, so that a "
            "step cannot be counted. Write its forward (model.factory) without a loop over the samples."
        )
    small, large = _SIZES
    found = []
    for (flops, size), (_, larger) in zip(few, more, strict=True):
        slope = (larger - size) / (large - small)
        found.append(Operator(flops / small, slope, max(size - small * slope, 0.0)))
    return tuple(found)
