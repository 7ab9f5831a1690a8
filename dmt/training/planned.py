"""The bytes that a step should send by the sharding plan, to be laid beside those that `TrafficMeter` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dmt.models.complexity import compression_ratio
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel
from dmt.sharding.plan import TowerShardingPlan
from dmt.traffic import Traffic
from dmt.training.config import TrainingConfig
from dmt.training.job import build_model, tower_plan

__all__ = ["planned_traffic", "traffic_warning"]

_ID_BYTES = 8  # an id, and a length
# Planned and measured bytes per sample that differ by more than this share, and by a byte, are worth a word.
_TOLERANCE = 0.1


def planned_traffic(
    config: TrainingConfig, tables: Sequence[TableSpec], num_dense: int, sharding: TowerShardingPlan
) -> Traffic:
    """What all ranks together should send in one training step, booked as `TrafficMeter` books it.

    Hosts are as `TowerTopology.host` says. Ids and lengths by the pooling factors of the plan; embeddings or tower
    outputs and their gradients in the formats of the config; rings of all-reduces for data-parallel tables, tower modules
    and dense parts. Not counted: the sizes that ranks tell each other before an exchange, rows that pad small number
    formats to whole groups, that the rows of a row-wise table are not read equally often, and the sync of replicas,
    which is no part of a step.

    Args:
        config: the run, with the tower dataflow.
        tables: of the data source, whole.
        num_dense: dense columns of the data source.
        sharding: the run's plan.
    """
    topology, own = sharding.topology, config.sharding
    replicas = topology.num_replicas
    ids, local_ids = _id_bytes(config, tables, sharding)
    model = build_model(config, tables, num_dense, device="meta", without_tables=True)
    outputs = replicas * sum(tower.peer_bytes for tower in sharding.towers) / compression_ratio(model)
    numbers = outputs / sharding.hardware.exchange_bytes
    of_all, of_towers = _replicated_bytes(model)
    tables_ring = replicas * _data_parallel_bytes(config, tables, sharding)
    all_across, all_inside = _dense_bytes(config, of_all)
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


def traffic_warning(planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """A text that says so when a step sends more or less than planned; else an empty string.

    Args:
        planned: bytes per sample by the names of `Traffic`.
        measured: the same.

    Example:
        >>> traffic_warning({"ids": 208.0, "inside": 3000.0}, {"ids": 624.0, "inside": 3010.0})[:65]
        'The sharding plan expected other bytes per sample: ids 208, measu'
        >>> traffic_warning({"ids": 208.0}, {"ids": 209.0})
        ''
    """
    apart = [
        f"{name} {number:,.0f}, measured {measured[name]:,.0f}"
        for name, number in planned.items()
        if abs(measured[name] - number) > max(_TOLERANCE * number, 1.0)
    ]
    if not apart:
        return ""
    return (
        f"The sharding plan expected other bytes per sample: {'; '.join(apart)}. Features with more or fewer ids than "
        "one per sample need sharding.pooling_factors, or the planner weighs them wrongly."
    )


def _id_bytes(config: TrainingConfig, tables: Sequence[TableSpec], sharding: TowerShardingPlan) -> tuple[float, float]:
    """Bytes of ids and lengths between towers, and what must be added to the plan's bytes inside them."""
    model = CostModel(topology=sharding.topology, workload=sharding.workload, hardware=sharding.hardware)
    samples = sharding.topology.num_replicas * model.global_batch
    away = 1 - 1 / sharding.topology.num_towers
    split = tower_plan(config, tables).split_tables(tables)
    if config.sharding.id_route == "peer":
        numbers = sum(model.pooling(table) + len(table.feature_names) for table in split)
        return away * samples * numbers * _ID_BYTES, 0.0
    ids = counted = 0.0
    for table in split:
        for _, load in model.shards(table, sharding.placements[table.name]):
            ids += (load.lookups + model.global_batch * len(table.feature_names)) * _ID_BYTES
            counted += load.id_bytes
    # In one hop, only a tower's own samples send it their ids inside it; the plan counts those of all samples there.
    replicas = sharding.topology.num_replicas
    return away * replicas * ids, -away * replicas * counted


def _dense_bytes(config: TrainingConfig, of_all: int) -> tuple[float, float]:
    """What averaging the dense part's gradients sends between hosts, and inside them."""
    topology, train = config.topology.build(), config.train
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


def _data_parallel_bytes(config: TrainingConfig, tables: Sequence[TableSpec], sharding: TowerShardingPlan) -> float:
    """What the plan expects one replica to send for the all-reduces of its data-parallel tables."""
    model = CostModel(topology=sharding.topology, workload=sharding.workload, hardware=sharding.hardware)
    split = tower_plan(config, tables).split_tables(tables)
    return sum(
        load.reduced_bytes for table in split for _, load in model.shards(table, sharding.placements[table.name])
    )


def _replicated_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the dense parts, and of the tower modules of all towers together."""
    sizes = {"dense": 0, "towers": 0}
    for name, parameter in model.named_parameters():
        if not name.startswith("sparse_arch."):
            sizes["dense"] += parameter.nbytes
        elif ".interaction." in name:
            sizes["towers"] += parameter.nbytes
    return sizes["dense"], sizes["towers"]
