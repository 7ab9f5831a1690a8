"""What a step sends and computes: bytes and memory (`step_work`), operators of a model (`count_operators`).

Legend: B samples per rank, T towers, L ranks per tower, R replicas, W = R T L ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dmt.errors import InputError
from dmt.models.complexity import MetaTables, meta_batch, tower_modules
from dmt.plan.tables import ID_BYTES, TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, ShardLoad, StepWorkload
from dmt.sharding.explanation import TowerShardingPlan
from dmt.simulator.steps import Load, ModelWork, Operator, PartWork, StepWork

__all__ = ["Workload", "count_operators", "operators_of", "step_work"]

_SIZES = (128, 256)  # batch sizes at which operators are counted; large, as a batch has whole items of sequences


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything about a training step that its bytes depend on."""

    topology: TowerTopology
    tables: Sequence[TableSpec]
    """All tables; a table that the tower plan cuts is replaced by its column shards."""
    towers: Sequence[Sequence[str]]
    """Features of each tower; for the flat dataflow, one list. Every rank holds the tables of features in no list."""
    sharding: TowerShardingPlan | None
    """Placement of the tables; None for TorchRec's flat dataflow."""
    lookups: StepWorkload
    """Batch size, ids per sample, and optimizer of the tables."""
    number_bytes: tuple[float, float] = (4.0, 4.0)
    """Bytes of a number that crosses between towers: forward, and backward."""
    is_table_wise: bool = False
    """True if the flat dataflow keeps tables whole; False if every rank has an equal share of the columns of each."""
    is_hierarchical: bool = False
    """True if dense gradients are summed inside each host before they cross."""
    rows: Mapping[str, float] = field(default_factory=dict)
    """Number of distinct inputs in a rank's batch, or an upper bound, by feature, with ``unique``; B where left out."""

    @property
    def outside(self) -> list[TableSpec]:
        """Tables outside towers."""
        inside = {name for names in self.towers for name in names}
        return [table for table in self.tables if inside.isdisjoint(table.feature_names)]

    def columns(self, features: Sequence[str]) -> float:
        """Returns how many numbers the embeddings of these features have per sample; sequences count every item."""
        names = set(features)
        return sum(self.lookups.numbers(table) for table in self.tables if not names.isdisjoint(table.feature_names))

    def rows_of(self, feature: str) -> float:
        """Returns how many rows of a feature a rank sends: its distinct inputs if ``rows`` has them, else B."""
        return self.rows.get(feature, self.lookups.batch_size)

    def padded_rows(self, features: Sequence[str]) -> float:
        """Returns the rows that each feature of a tower has for one rank, padded to the feature with the most rows."""
        return max(map(self.rows_of, features), default=0)


def step_work(step: Workload, model: ModelWork) -> StepWork:
    """Returns the work of one step: the bytes that all ranks send together, and the load of the busiest rank and host.

    Data-parallel tables, tower modules and replicas are reduced in rings; so are dense parts unless
    ``step.is_hierarchical``, and tables outside towers in the flat dataflow. Not counted: the sizes that ranks exchange
    before the data, and that some rows of a row-wise table are read more often than others.
    """
    topology, batch, held = step.topology, step.lookups.batch_size, _rank_loads(step)
    hosts = topology.num_hosts
    sent, loads = {}, {}
    for name, (sizes, across) in _exchanges(step, model, held).items():
        by_rank = np.broadcast_to(sizes, topology.world_size)
        total, host = by_rank.sum(), by_rank.reshape(hosts, -1).sum(axis=1).max()
        sent[name] = Load(across * float(total), (1 - across) * float(total))
        loads[name] = Load(across * float(host), (1 - across) * float(by_rank.max()))
    outputs = batch * sum(model.widths or map(step.columns, step.towers))
    crossing, peers = sum(_numbers(step, model)), topology.num_towers if step.sharding else 1
    beside = batch * sum(table.embedding_dim * len(table.feature_names) for table in step.outside)
    memory = held["memory"] + held["activations"]
    # Numbers are converted from FP32 to their format, and back after the exchange.
    forward, backward = (crossing * (0.0 if size == 4 else 2 * (4 + size)) for size in step.number_bytes)
    return StepWork(
        model=model,
        topology=topology,
        is_flat=step.sharding is None,
        is_hierarchical=step.is_hierarchical,
        sent=sent,
        loads=loads,
        lookup_bytes=3 * float(held["row_bytes"].max()),
        embedding_bytes=4 * peers * max(step.padded_rows(names) * step.columns(names) for names in step.towers),
        output_bytes=4 * (outputs + beside),
        samples=batch,
        converted_bytes=(forward, backward),
        rank_bytes=(float(memory.max()), float(held["activations"][memory.argmax()])),
    )


def _numbers(step: Workload, model: ModelWork) -> list[float]:
    """Returns how many numbers each tower returns for the batch of a rank."""
    if model.widths:
        return [step.lookups.batch_size * width for width in model.widths]
    of_row = {name: step.lookups.numbers(t) / len(t.feature_names) for t in step.tables for name in t.feature_names}
    return [sum(step.rows_of(name) * of_row[name] for name in names) for names in step.towers]


def _rank_loads(step: Workload) -> dict[str, NDArray[np.float64]]:
    """Returns the loads of all ranks, float64 [W], by field of `ShardLoad`."""
    topology, sharding = step.topology, step.sharding
    ranks = topology.num_towers * topology.ranks_per_tower
    loads = np.zeros((ranks, len(ShardLoad._fields)))
    if sharding is not None:
        costs = CostModel(topology=topology, workload=sharding.workload, hardware=sharding.hardware)
        rows = [math.ceil(step.padded_rows(names)) for names in step.towers]
        by_tower = [replace(costs, workload=replace(sharding.workload, batch_size=number)) for number in rows]
        tables = {table.name: table for table in step.tables}
        for entry in sharding.tables:
            if entry.tower is not None:
                for local, load in by_tower[entry.tower].shards(tables[entry.name], entry.placement):
                    loads[entry.tower * topology.ranks_per_tower + local] += load
    else:
        # The flat dataflow is one tower of all ranks of a replica.
        whole = TowerTopology(num_towers=1, ranks_per_tower=ranks, num_replicas=topology.num_replicas)
        costs = CostModel(topology=whole, workload=step.lookups)
        outside = {table.name for table in step.outside}
        sharded = [table for table in step.tables if table.name not in outside]
        shards = [costs.shard(t, "table_wise", t.num_embeddings, t.embedding_dim) for t in sharded]
        for load in sorted(shards, key=attrgetter("seconds"), reverse=True):
            if step.is_table_wise:
                loads[loads[:, 0].argmin()] += load
            else:
                loads += np.array(load) / ranks
    alone = replace(costs, topology=topology.outside_towers)
    for t in step.outside:
        # Their gradients are reduced over all ranks (`outside_weights`), not over those of a tower.
        load = alone.shard(t, "data_parallel", t.num_embeddings, t.embedding_dim)
        loads += np.array(load._replace(reduced_bytes=0.0))
    return dict(zip(ShardLoad._fields, topology.on_all_replicas(loads).T, strict=True))


def _exchanges(
    step: Workload, model: ModelWork, held: Mapping[str, NDArray[np.float64]]
) -> dict[str, tuple[float | NDArray[np.float64], float]]:
    """Returns the bytes of each rank in each exchange, [W] or one number for all, and the share that crosses hosts.

    Ids, outputs and their gradients are charged to the ranks that hold the tables, which are the busy end: ranks of
    the largest tower receive more ids and gradients, and send more outputs, than other ranks send or receive.
    """
    topology, is_flat, towers = step.topology, step.sharding is None, step.topology.num_towers

    def by_rank(of_towers: Sequence[float]) -> NDArray[np.float64]:
        return topology.on_all_replicas(np.repeat(of_towers, topology.ranks_per_tower))

    # The peers of a flat dataflow are all ranks of a replica, and nothing is left to exchange inside a tower.
    groups = topology.sharding_groups() if is_flat else topology.peer_groups()
    ids, outputs = held["id_bytes"] * (not is_flat), held["output_bytes"] * (not is_flat)
    peer_ids, numbers = held["id_bytes"], held["output_bytes"] / 4
    if not is_flat:
        # A rank serves the batches of its peers, one in each other tower.
        lookups, rows = step.lookups.pooling_factors, step.rows_of
        ids_of = [sum(rows(name) * (lookups.get(name, 1.0) + 1) for name in names) for names in step.towers]
        peer_ids = ID_BYTES * (towers - 1) * by_rank(ids_of)
        numbers = (towers - 1) * by_rank(_numbers(step, model))
    outside = sum(4 * table.num_embeddings * table.embedding_dim for table in step.outside)
    copies = topology.num_replicas * topology.ranks_per_tower
    modules = by_rank([part.weight_bytes for part in model.towers] or [0.0] * towers)
    peer, inner = topology.share_across_hosts(groups), topology.share_across_hosts(topology.tower_groups())
    return {
        "peer_ids": (peer_ids, peer),
        "tower_ids": (ids, inner),
        "tower_outputs": (outputs, inner),
        "peer_outputs": (numbers * step.number_bytes[0], peer),
        "peer_gradients": (numbers * step.number_bytes[1], peer),
        "tower_weights": (
            2 * (copies - 1) / copies * modules + held["reduced_bytes"],
            topology.ring_share_across_hosts(topology.tower_module_groups()),
        ),
        "outside_weights": (_ring if is_flat else _sum_over_hosts)(topology, outside),
        "dense_weights": (_sum_over_hosts if step.is_hierarchical else _ring)(topology, model.dense_bytes),
        "replicas": (held["averaged_bytes"], topology.ring_share_across_hosts(topology.replica_groups())),
    }


def _sum_over_hosts(topology: TowerTopology, size: int) -> tuple[float, float]:
    """Returns the bytes that a rank sends to sum ``size`` bytes in hosts, then across, and the share that crosses."""
    # Every rank of a host sums an equal part, as if all gradients were one bucket.
    world, hosts, ranks = topology.world_size, topology.num_hosts, topology.host_size
    padded = 4 * math.ceil(size / 4 / ranks) * ranks
    across, inside = 2 * (hosts - 1) * padded, 2 * (ranks - 1) * hosts * padded
    return (across + inside) / world, across / max(across + inside, 1)


def _ring(topology: TowerTopology, size: int) -> tuple[float, float]:
    """Returns the bytes that each rank sends in a ring all-reduce of ``size`` bytes, and the share across hosts."""
    world = topology.world_size
    return 2 * (world - 1) * size / world, topology.ring_share_across_hosts([range(world)])


def count_operators(model: nn.Module, dense_in_features: int) -> ModelWork:
    """Returns the FLOPs and bytes of the operators of each part of a model on the meta device.

    The model has `MetaTables` or `MetaTowers` as tables and takes ``dense_in_features`` dense features. It runs forward
    and backward at two batch sizes: bytes that grow with the batch are counted per sample, all others per pass.

    Raises:
        InputError: the number of operators depends on the number of samples.

    Example:
        >>> from dmt.models import DLRM, ModelOptions
        >>> from dmt.models.complexity import criteo_1tb_tables
        >>> model = DLRM(tables=criteo_1tb_tables(8), dense_in_features=3, make_sparse_arch=MetaTables,
        ...     options=ModelOptions(dense_arch_layer_sizes=(6,), over_arch_layer_sizes=(4, 1), device="meta"))
        >>> work = count_operators(model, 3)
        >>> sum(operator.flops for operator in work.dense_arch.forward)  # 3 x 6 and 6 x 8 multiply-accumulates
        132.0
    """
    modules = tower_modules(model)
    parts = [*modules, getattr(model, "dense_arch", None) or nn.Module()]
    tables = [module for module in model.modules() if isinstance(module, MetaTables)]
    others = {id(parameter) for module in (*parts, *tables) for parameter in module.parameters()}
    weights = [[*part.parameters()] for part in parts] + [[p for p in model.parameters() if id(p) not in others]]
    few, more = (_count(model, parts, tables, meta_batch(dense_in_features, size)) for size in _SIZES)
    *towers, dense_arch, rest = (
        PartWork(_per_sample(small[0], large[0]), _per_sample(small[1], large[1]), sum(p.nbytes for p in parameters))
        for small, large, parameters in zip(few, more, weights, strict=True)
    )
    return ModelWork(tuple(towers), dense_arch, rest, tuple(module.out_features for module in modules))


def operators_of(run: Callable[[], Any]) -> int:
    """Calls ``run`` and returns how many operators computed or copied something."""
    with _Counter() as counter:
        run()
    return len(counter.operators)


_Counted = list[tuple[float, float]]  # FLOPs and bytes of each operator


def _count(
    model: nn.Module, parts: Sequence[nn.Module], tables: Sequence[nn.Module], batch: tuple[Tensor, Tensor]
) -> list[tuple[_Counted, _Counted]]:
    """Returns the operators of each part, forward and backward, then of the rest; gradients stop at other parts."""
    leaves: list[Tensor] = list(model.parameters())
    forward: dict[nn.Module, _Counted] = {module: [] for module in (*parts, *tables)}
    outputs: dict[nn.Module, list[Any]] = {module: [] for module in forward}
    around: list[_Counted] = []

    def cut(value: Any) -> Any:
        """Returns the same values with new leaf tensors, at which gradients stop."""
        value = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)
        leaves.extend(tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor))
        return value

    def before(module: nn.Module, args: Any) -> Any:
        around.append(counter.operators)
        counter.operators = forward[module]
        return cut(args)

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        outputs[module].append(output)
        counter.operators = around.pop()
        return cut(output)

    handles = [module.register_forward_pre_hook(before) for module in forward]
    handles += [module.register_forward_hook(after) for module in forward]
    with _Counter() as counter:
        result = model(*batch)
    for handle in handles:
        handle.remove()
    counted = [(forward[part], _backward(outputs[part], leaves)) for part in parts]
    return [*counted, (counter.operators, _backward([result], leaves))]


def _backward(outputs: list[Any], leaves: list[Tensor]) -> _Counted:
    """Returns the operators that compute the gradients of the leaves from those of the outputs."""
    ends = [tensor for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with _Counter() as counter:
        if ends and wanted:
            # Not backward(): it would add to .grad and set off optimizers that are fused into the backward pass.
            torch.autograd.grad(ends, wanted, [torch.empty_like(tensor) for tensor in ends], allow_unused=True)
    return counter.operators


class _Counter(TorchDispatchMode):
    """Records FLOPs and bytes of every operator that computes or copies something."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: _Counted = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and records it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if not func.is_view and "empty" not in packet.__name__:
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.operators.append((float(flops), float(sum(tensor.nbytes for tensor in tensors))))
        return result


def _per_sample(few: _Counted, more: _Counted) -> tuple[Operator, ...]:
    if len(few) != len(more):
        raise InputError(
            f"The model runs {len(few)} operators for {_SIZES[0]} samples and {len(more)} for {_SIZES[1]}, so the cost "
            "of a step cannot be counted. Write its forward (model.factory) without a loop over the samples."
        )
    small, large = _SIZES
    operators = []
    for (flops, size), (_, larger) in zip(few, more, strict=True):
        slope = (larger - size) / (large - small)
        operators.append(Operator(flops / small, slope, max(size - small * slope, 0.0)))
    return tuple(operators)
