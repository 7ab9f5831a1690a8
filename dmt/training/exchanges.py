"""Bytes that a step of a job sends, exchange by exchange: `step_exchanges`.

Legend: B samples per rank, T towers, L ranks per tower, R replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from dmt.models.complexity import compression_ratio, dense_weight_bytes, tower_modules
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel
from dmt.traffic import Traffic
from dmt.training.config import TrainConfig
from dmt.training.distinct import InputGroup
from dmt.training.job import Job

__all__ = ["Exchange", "StepExchanges", "dense_bytes", "flat_exchanges", "step_exchanges"]

_ID_BYTES = 8  # an id, and a length


class Exchange(NamedTuple):
    """Bytes that all ranks together send in one collective of a step."""

    across: float
    """Between hosts."""
    inside: float
    """Between the ranks of a host."""


@dataclass(frozen=True, kw_only=True)
class StepExchanges:
    """The exchanges of one step with the tower dataflow, of all ranks together."""

    peer_ids: Exchange
    """Ids and lengths to the towers."""
    tower_ids: Exchange
    """Ids and lengths inside the towers."""
    tower_outputs: Exchange
    """Embeddings inside the towers; their gradients take as many bytes."""
    peer_outputs: Exchange
    """Embeddings or tower outputs to the samples."""
    peer_gradients: Exchange
    """Their gradients, the other way."""
    tower_weights: Exchange
    """Reduction of the gradients of tower modules and data-parallel tables."""
    dense_weights: Exchange
    """Reduction of the gradients of all other dense parts."""
    """Ids, embeddings and gradients of rows that the ranks of a host unite."""

    def traffic(self) -> Traffic:
        """Returns the sums by kind, as `TrafficMeter` counts them."""
        outputs, dense = self.tower_outputs.across, self.dense_weights.across + self.tower_weights.across
        inside = sum(exchange.inside for exchange in vars(self).values()) + self.tower_outputs.inside
        return Traffic(
            ids=round(self.peer_ids.across + self.tower_ids.across),
            forward=round(self.peer_outputs.across + outputs),
            backward=round(self.peer_gradients.across + outputs),
            dense=round(dense),
            inside=round(inside),
        )


def step_exchanges(job: Job, model: nn.Module, distinct: Sequence[InputGroup] | None = None) -> StepExchanges:
    """Returns the bytes of every exchange in one step of a job with the tower dataflow.

    Hosts are as `TowerTopology.host` says. Ids and lengths follow the pooling factors of the plan; embeddings or tower
    outputs and their gradients the formats of the config; data-parallel tables, tower modules and dense parts are
    reduced in rings. Not counted: the sizes that ranks tell each other before an exchange, rows that pad small number
    formats to full groups, that the rows of a row-wise table are not read equally often, and the sync of replicas.

    Args:
        job: the run.
        model: its model, unsharded; sizes are all that is read, so that the meta device will do.
        distinct: what `distinct_inputs_of` counted, where each distinct input is sent once; None: every sample.
    """
    sharding, own = job.sharding, job.config.sharding
    assert sharding is not None, "the flat dataflow has no sharding plan"
    topology = sharding.topology
    replicas = topology.num_replicas
    costs = CostModel(topology=topology, workload=sharding.workload, hardware=sharding.hardware)
    placements = sharding.placements
    loads = [(table, load) for table in job.split_tables for _, load in costs.shards(table, placements[table.name])]
    ids, local_ids = _id_bytes(job, costs, loads)
    outputs = replicas * sum(tower.peer_bytes for tower in sharding.towers) / compression_ratio(model)
    numbers = outputs / sharding.hardware.exchange_bytes
    tower_ids = replicas * sum(load.id_bytes for _, load in loads) + local_ids
    tower_outputs = replicas * sum(load.output_bytes for _, load in loads)
    if distinct is not None:
        ids, numbers, tower_ids, tower_outputs = _distinct_traffic(job, distinct, model)
    of_towers, of_all = dense_weight_bytes(model)
    tables_ring = replicas * sum(load.reduced_bytes for _, load in loads)
    tower_ring = 2 * (replicas * topology.ranks_per_tower - 1) * of_towers + tables_ring
    # Peers may share a host, and a tower may span several.
    peers = topology.share_across_hosts(topology.peer_groups())
    inner = topology.share_across_hosts(topology.tower_groups())
    return StepExchanges(
        peer_ids=_split(ids, peers),
        tower_ids=_split(tower_ids, inner),
        tower_outputs=_split(tower_outputs, inner),
        peer_outputs=_split(numbers * NUMBER_FORMATS[own.forward_precision].num_bytes, peers),
        peer_gradients=_split(numbers * NUMBER_FORMATS[own.backward_precision].num_bytes, peers),
        tower_weights=_split(tower_ring, topology.ring_share_across_hosts(topology.tower_module_groups()[:1])),
        dense_weights=Exchange(*dense_bytes(topology, job.config.train, of_all)),
    )


def _split(size: float, across: float) -> Exchange:
    return Exchange(across * size, (1 - across) * size)


def flat_exchanges(job: Job, model: nn.Module) -> tuple[StepExchanges, list[float]]:
    """Returns the bytes of one step of TorchRec's flat dataflow, and the columns of tables that each rank holds.

    Ids, outputs and gradients go to and from all ranks. Table-wise, whole tables are shared out by their columns,
    largest first; column-wise and by ``"auto"`` evenly, where the ids that more than one shard of a table needs are
    counted once. Arguments and what is left out are as of `step_exchanges`.
    """
    topology, own = job.topology, job.config.sharding
    ranks, batch = topology.world_size, job.config.train.batch_size
    world = topology.share_across_hosts([list(range(ranks))])
    sent = batch * (ranks - 1)  # samples, of all ranks, that a table's owner has from and for others
    held = [0.0] * ranks
    ids = numbers = 0.0
    for table in sorted(job.tables, key=lambda table: -table.embedding_dim * len(table.feature_names)):
        width = table.embedding_dim * len(table.feature_names)
        held[held.index(min(held))] += width
        numbers += sent * width
        ids += sent * sum(_ID_BYTES * (own.pooling_factors.get(name, 1.0) + 1) for name in table.feature_names)
    nothing = Exchange(0.0, 0.0)
    _, of_all = dense_weight_bytes(model)
    exchanges = StepExchanges(
        peer_ids=_split(ids, world),
        tower_ids=nothing,
        tower_outputs=nothing,
        peer_outputs=_split(numbers * NUMBER_FORMATS[own.forward_precision].num_bytes, world),
        peer_gradients=_split(numbers * NUMBER_FORMATS[own.backward_precision].num_bytes, world),
        tower_weights=nothing,
        dense_weights=Exchange(*dense_bytes(topology, job.config.train, of_all)),
    )
    return exchanges, held if own.scheme == "table_wise" else [sum(held) / ranks] * ranks


def _distinct_traffic(job: Job, distinct: Sequence[InputGroup], model: nn.Module) -> tuple[float, float, float, float]:
    """Between towers: bytes of ids, numbers of a forward pass. Inside: bytes of ids, of outputs. For the peer route."""
    sharding = job.sharding
    assert sharding is not None, "the flat dataflow has no sharding plan"
    topology = sharding.topology
    sent = numbers = 0.0
    # Inside a tower, groups with fewer rows than others are filled up with empty bags.
    rows: list[float] = [0.0] * topology.num_towers
    ids: dict[str, float] = {}
    tower_of: dict[str, int] = {}
    for group, width in zip(distinct, _widths(job, distinct, model), strict=True):
        found, tower = group.distinct, group.tower
        sent += found.rows * len(group.features) + sum(found.ids)
        numbers += found.rows * width
        rows[tower] = max(rows[tower], found.rows)
        ids.update(zip(group.features, found.ids, strict=True))
        tower_of.update(dict.fromkeys(group.features, tower))
    pooling = {name: max(number, 1e-9) / rows[tower_of[name]] for name, number in ids.items()}
    workload = replace(sharding.workload, pooling_factors=pooling)
    costs = CostModel(topology=topology, workload=workload, hardware=sharding.hardware)
    tower_ids = tower_outputs = 0.0
    placements = sharding.placements
    for table in job.split_tables:
        share = topology.num_replicas * rows[tower_of[table.feature_names[0]]] / workload.batch_size
        for _, load in costs.shards(table, placements[table.name]):
            tower_ids += share * load.id_bytes
            tower_outputs += share * load.output_bytes
    away = topology.world_size * (1 - 1 / topology.num_towers)
    return away * sent * _ID_BYTES, away * numbers, tower_ids, tower_outputs


def _widths(job: Job, distinct: Sequence[InputGroup], model: nn.Module) -> list[int]:
    """Columns that a tower returns for a row of each group."""
    if modules := tower_modules(model):
        return [modules[group.tower].out_features for group in distinct]
    columns = {name: table.embedding_dim for table in job.split_tables for name in table.feature_names}
    return [sum(columns[name] for name in group.features) for group in distinct]


def _id_bytes(job: Job, costs: CostModel, loads: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """Bytes of ids and lengths between towers, and what must be added to the plan's bytes inside them."""
    replicas, away = costs.topology.num_replicas, 1 - 1 / costs.topology.num_towers
    if job.config.sharding.id_route == "peer":
        numbers = sum(costs.pooling(table) + len(table.feature_names) for table in job.split_tables)
        return away * replicas * costs.global_batch * numbers * _ID_BYTES, 0.0
    ids = sum((load.lookups + costs.global_batch * len(table.feature_names)) * _ID_BYTES for table, load in loads)
    # In one hop, only a tower's own samples send it their ids inside it; the plan counts those of all samples there.
    return away * replicas * ids, -away * replicas * sum(load.id_bytes for _, load in loads)


def dense_bytes(topology: TowerTopology, train: TrainConfig, of_all: int) -> tuple[float, float]:
    """Returns the bytes that averaging the dense part's gradients sends between hosts, and inside them.

    ``of_all`` is the bytes of its weights.
    """
    if train.dense_reduce == "hierarchical":
        hosts, size = topology.num_hosts, topology.host_size
        # Every rank of a host has an equal part; all gradients are taken as one bucket.
        numbers = math.ceil(of_all / NUMBER_FORMATS["fp32"].num_bytes / size) * size
        across = 2 * (hosts - 1) * numbers * NUMBER_FORMATS[train.dense_reduce_precision].num_bytes
        # Each host sums its own gradients, and hands the means out again.
        return across, 2 * (size - 1) * hosts * numbers * NUMBER_FORMATS["fp32"].num_bytes
    ring = 2 * (topology.world_size - 1) * of_all
    across = ring * topology.ring_share_across_hosts([range(topology.world_size)])
    return across, ring - across
