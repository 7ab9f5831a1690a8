"""What a step sends and computes: bytes of every exchange (`step_bytes`), operators of a model (`count_operators`).

Legend: B samples per rank, T towers, L ranks per tower, R replicas, W = R T L ranks, G = T L B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
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
    "Inputs",
    "Workload",
    "count_operators",
    "operators_of",
    "step_bytes",
    "step_work",
]

_ID_BYTES = 8  # an id, and a length
_SIZES = (2, 4)  # samples, of which operators are counted


class Inputs(NamedTuple):
    """What a rank asks a tower for in a step, for features whose inputs are compared together (or one alone)."""

    tower: int
    features: tuple[str, ...]
    rows: float
    """B, or the distinct inputs of its batch."""
    ids: tuple[float, ...]
    """Ids in them, by feature."""
    parts: tuple[float, ...] = ()
    """For each micro-batch the share of the distinct inputs that no earlier one has."""


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
    is_global_route: bool = False
    """True if ids go to their tables in one hop."""
    is_hierarchical: bool = False
    """True if dense gradients are summed inside hosts before they cross."""
    sync_every: int = 1
    """Steps from one average of replicas to the next."""
    inputs: Sequence[Inputs] = ()
    """Distinct inputs, each of which is sent once; empty: every sample is sent."""

    def plain_inputs(self) -> list[Inputs]:
        """Every sample of each tower."""
        batch = float(self.batch_size)
        ids = {name: batch * self.pooling.get(name, 1.0) for names in self.towers for name in names}
        return [
            Inputs(tower, tuple(names), batch, tuple(ids[name] for name in names))
            for tower, names in enumerate(self.towers)
        ]


def step_bytes(step: Workload, model: ModelWork) -> dict[str, Load]:
    """Returns the bytes that all ranks together send in each exchange of a step, by its name in `StepWork`.

    ``uplink`` are those between hosts. Not counted: the sizes that ranks tell each other before an exchange, that the
    rows of a row-wise table are not read equally often, and the average of replicas. Data-parallel tables, tower
    modules and dense parts are reduced in rings.
    """
    topology, sharding = step.topology, step.sharding
    world, replicas = topology.world_size, topology.num_replicas
    inputs = step.inputs or step.plain_inputs()
    # A flat dataflow is one whose peers are all ranks.
    peers = topology.num_towers if sharding else world
    groups = topology.peer_groups() if sharding else [list(range(world))]
    away = world * (1 - 1 / peers)
    ids = away * _ID_BYTES * sum(own.rows * len(own.features) + sum(own.ids) for own in inputs)
    numbers = away * sum(own.rows * width for own, width in zip(inputs, _widths(step, model, inputs), strict=True))
    shards = [] if sharding is None else _shards(step, sharding, inputs)
    tower_ids = replicas * sum(rows * load.id_bytes for rows, _, load in shards)
    tower_outputs = replicas * sum(rows * load.output_bytes for rows, _, load in shards)
    reduced = replicas * sum(load.reduced_bytes for _, _, load in shards)
    if step.is_global_route:
        # In one hop, ids of every shard cross, and only a tower's own samples send it their ids inside it.
        batch = topology.num_towers * topology.ranks_per_tower * step.batch_size
        crossing = sum(load.lookups + batch * len(table.feature_names) for _, table, load in shards)
        ids = (1 - 1 / peers) * replicas * _ID_BYTES * crossing
        tower_ids /= peers
    of_towers = 2 * (replicas * topology.ranks_per_tower - 1) * model.tower_bytes + reduced
    peer, inner = topology.share_across_hosts(groups), topology.share_across_hosts(topology.tower_groups())
    modules = topology.ring_share_across_hosts(topology.tower_module_groups()[:1])
    return {
        "peer_ids": _split(ids, peer),
        "tower_ids": _split(tower_ids, inner),
        "tower_outputs": _split(tower_outputs, inner),
        "peer_outputs": _split(numbers * step.number_bytes[0], peer),
        "peer_gradients": _split(numbers * step.number_bytes[1], peer),
        "tower_weights": _split(of_towers, modules),
        "dense_weights": _dense_bytes(step, model.dense_bytes),
    }


def _split(size: float, across: float) -> Load:
    return Load(across * size, (1 - across) * size)


def _widths(step: Workload, model: ModelWork, inputs: Sequence[Inputs]) -> list[int]:
    """Columns that towers return for a row of each group of features."""
    if model.widths:
        return [model.widths[own.tower] for own in inputs]
    columns = {name: table.embedding_dim for table in step.tables for name in table.feature_names}
    return [sum(columns[name] for name in own.features) for own in inputs]


def _shards(
    step: Workload, sharding: TowerShardingPlan, inputs: Sequence[Inputs]
) -> list[tuple[float, Any, ShardLoad]]:
    """The share of a tower's samples that it has rows of, the table, and the load of every shard."""
    # Inside a tower, groups of features with fewer rows than others are filled up with empty bags.
    rows = [max((own.rows for own in inputs if own.tower == tower), default=0.0) for tower in range(len(step.towers))]
    tower_of = {name: own.tower for own in inputs for name in own.features}
    ids = {name: number for own in inputs for name, number in zip(own.features, own.ids, strict=True)}
    pooling = {name: max(number, 1e-9) / rows[tower_of[name]] for name, number in ids.items()}
    workload = replace(sharding.workload, pooling_factors=pooling)
    costs = CostModel(topology=step.topology, workload=workload, hardware=sharding.hardware)
    placements = sharding.placements
    return [
        (rows[tower_of[table.feature_names[0]]] / step.batch_size, table, load)
        for table in step.tables
        for _, load in costs.shards(table, placements[table.name])
    ]


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
    inputs = step.inputs or step.plain_inputs()
    columns = {name: table.embedding_dim for table in step.tables for name in table.feature_names}
    row_bytes = {name: t.embedding_dim * number_bytes(t) for t in step.tables for name in t.feature_names}
    sent = [own.rows * sum(columns[name] for name in own.features) for own in inputs]
    outputs = sum(own.rows * width for own, width in zip(inputs, _widths(step, model, inputs), strict=True))
    read = sum(n * row_bytes[name] for own in inputs for name, n in zip(own.features, own.ids, strict=True))
    held = _held_columns(step, inputs, sent)
    wide = imbalance_of(held)
    lookups = wide if sharding is None else sharding.imbalance
    hosts = imbalance_of([sum(held[rank] for rank in ranks) for ranks in topology.host_groups()])
    skews = dict.fromkeys(("peer_outputs", "peer_gradients"), (hosts, wide))
    if sharding is not None:
        skews["tower_outputs"] = (hosts, lookups)
    loads = {}
    for name, load in (step_bytes(step, model) | {"replicas": _replicas(step)}).items():
        uplink, inside = skews.get(name, (1.0, 1.0))
        loads[name] = Load(load.uplink / topology.num_hosts * uplink, load.inside / topology.world_size * inside)
    # Rows are copied to their samples, and the gradients of samples summed into those of their rows. Numbers in another
    # format are made from FP32 and made FP32 again.
    shared = 4 * (outputs + batch * sum(_widths(step, model, step.plain_inputs()))) if step.inputs else 0.0
    added = [outputs * (0.0 if size == 4 else 2 * (4 + size)) + shared for size in step.number_bytes]
    parts: tuple[float, ...] = ()
    if any(own.rows < batch for own in step.inputs):
        parts = tuple((np.array(sent) @ np.array([own.parts for own in inputs]) / sum(sent)).tolist())
    return StepWork(
        model=model,
        loads=loads,
        lookup_bytes=3 * lookups * read,
        embedding_bytes=4 * sum(sent) * (wide if sharding else 1.0),
        output_bytes=4 * outputs,
        samples=batch,
        peer_samples=max(own.rows for own in inputs) * topology.num_towers,
        added_bytes=(added[0], added[1]),
        compared_ids=batch * len(columns) if step.inputs else 0.0,
        parts=parts,
    )


def _held_columns(step: Workload, inputs: Sequence[Inputs], sent: Sequence[float]) -> list[float]:
    """Numbers that each rank, or its tower, returns for a sample; of a flat dataflow greedily by whole tables."""
    topology = step.topology
    if step.sharding is not None:
        towers = [0.0] * topology.num_towers
        for own, numbers in zip(inputs, sent, strict=True):
            towers[own.tower] += numbers
        return [towers[topology.coordinates(rank).tower] for rank in range(topology.world_size)]
    held = [0.0] * topology.world_size
    for width in sorted((table.embedding_dim * len(table.feature_names) for table in step.tables), reverse=True):
        held[held.index(min(held))] += width
    return held if step.is_table_wise else [sum(held) / len(held)] * len(held)


def _replicas(step: Workload) -> Load:
    """Bytes of all ranks in a step's share of the ring all-reduces that average the replicas."""
    topology, sharding = step.topology, step.sharding
    if sharding is None or topology.num_replicas == 1:
        return Load(0.0, 0.0)
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
