"""The bytes that a step should send by the sharding plan, to be laid beside those that `TrafficMeter` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dmt.models.complexity import compression_ratio
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel
from dmt.traffic import Traffic
from dmt.training.build import build_model
from dmt.training.config import TrainConfig
from dmt.training.job import Job

__all__ = ["expected_traffic"]

_ID_BYTES = 8  # an id, and a length


def expected_traffic(job: Job) -> Traffic:
    """Returns the bytes that all ranks together should send in one training step, booked as `TrafficMeter` books them.

    Hosts are as `TowerTopology.host` says. Ids and lengths follow the pooling factors of the plan; embeddings or tower
    outputs and their gradients the formats of the config; data-parallel tables, tower modules and dense parts are
    reduced in rings. Not counted: the sizes that ranks tell each other before an exchange, rows that pad small number
    formats to full groups, that the rows of a row-wise table are not read equally often, and the sync of replicas,
    which is no part of a step.

    Args:
        job: the run, with the tower dataflow.
    """
    sharding, own = job.sharding, job.config.sharding
    assert sharding is not None, "the flat dataflow has no sharding plan"
    topology = sharding.topology
    replicas = topology.num_replicas
    costs = CostModel(topology=topology, workload=sharding.workload, hardware=sharding.hardware)
    loads = [
        (table, load) for table in job.split_tables for _, load in costs.shards(table, sharding.placements[table.name])
    ]
    ids, local_ids = _id_bytes(job, costs, loads)
    model = build_model(job, device="meta", without_tables=True)
    outputs = replicas * sum(tower.peer_bytes for tower in sharding.towers) / compression_ratio(model)
    numbers = outputs / sharding.hardware.exchange_bytes
    of_all, of_towers = _replicated_bytes(model)
    tables_ring = replicas * sum(load.reduced_bytes for _, load in loads)
    all_across, all_inside = _dense_bytes(topology, job.config.train, of_all)
    tower_ring = 2 * (replicas * topology.ranks_per_tower - 1) * of_towers + tables_ring
    tower_across = tower_ring * _share_across(topology, topology.tower_module_groups()[0])
    # The plan's bytes hold the rings of data-parallel tables.
    inside = replicas * sum(rank.bytes_sent for rank in sharding.ranks) - tables_ring + local_ids
    return Traffic(
        ids=round(ids),
        forward=round(numbers * NUMBER_FORMATS[own.forward_precision].num_bytes),
        backward=round(numbers * NUMBER_FORMATS[own.backward_precision].num_bytes),
        dense=round(all_across + tower_across),
        inside=round(inside + all_inside + tower_ring - tower_across),
    )


def _id_bytes(job: Job, costs: CostModel, loads: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """Bytes of ids and lengths between towers, and what must be added to the plan's bytes inside them."""
    replicas, away = costs.topology.num_replicas, 1 - 1 / costs.topology.num_towers
    if job.config.sharding.id_route == "peer":
        numbers = sum(costs.pooling(table) + len(table.feature_names) for table in job.split_tables)
        return away * replicas * costs.global_batch * numbers * _ID_BYTES, 0.0
    ids = sum((load.lookups + costs.global_batch * len(table.feature_names)) * _ID_BYTES for table, load in loads)
    # In one hop, only a tower's own samples send it their ids inside it; the plan counts those of all samples there.
    return away * replicas * ids, -away * replicas * sum(load.id_bytes for _, load in loads)


def _dense_bytes(topology: TowerTopology, train: TrainConfig, of_all: int) -> tuple[float, float]:
    """Bytes that averaging the dense part's gradients sends between hosts, and inside them."""
    if train.dense_reduce == "hierarchical":
        hosts = topology.host_groups()
        numbers = of_all / NUMBER_FORMATS["fp32"].num_bytes
        across = 2 * (len(hosts) - 1) * numbers * NUMBER_FORMATS[train.dense_reduce_precision].num_bytes
        # Each host sums its own gradients, and hands the means out again.
        return across, 2 * (len(hosts[0]) - 1) * len(hosts) * of_all
    ring = 2 * (topology.world_size - 1) * of_all
    across = ring * _share_across(topology, range(topology.world_size))
    return across, ring - across


def _share_across(topology: TowerTopology, ranks: Sequence[int]) -> float:
    """The share of the links of a ring in host order that lead to another host: one from each host to the next.

    Example:
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=2)
        >>> _share_across(topology, [0, 1, 4, 5]), _share_across(topology, [0, 1])
        (0.5, 0.0)
    """
    hosts = len({topology.host(rank) for rank in ranks})
    return hosts / len(ranks) if hosts > 1 else 0.0


def _replicated_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the dense parts, and of the tower modules of all towers together."""
    sizes = {"dense": 0, "towers": 0}
    for name, parameter in model.named_parameters():
        if not name.startswith("sparse_arch."):
            sizes["dense"] += parameter.nbytes
        elif ".interaction." in name:
            sizes["towers"] += parameter.nbytes
    return sizes["dense"], sizes["towers"]
