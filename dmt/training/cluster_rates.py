"""A cluster file's rates for those that place tables: this library's planner, and TorchRec's `Topology`."""

from __future__ import annotations

from typing import Any

from dmt.errors import InputError
from dmt.simulator.cluster import Cluster

__all__ = ["planner_rates", "torchrec_topology"]


def planner_rates(cluster: Cluster) -> list[str]:
    """Returns the overrides of ``[sharding]`` by which the planner weighs lookups against sending inside a tower.

    A tower is taken to be on one host.

    Example:
        >>> from dmt.simulator.cluster import load_cluster
        >>> planner_rates(load_cluster("a100"))
        ['sharding.memory_gb_per_s=1300', 'sharding.intra_tower_gb_per_s=252', 'sharding.collective_latency_us=30']
    """
    rates = cluster.all_to_all
    return [
        f"sharding.memory_gb_per_s={cluster.lookup_bytes_per_s / 1e9:.6g}",
        f"sharding.intra_tower_gb_per_s={rates.host_bytes_per_s / 1e9:.6g}",
        f"sharding.collective_latency_us={1e6 * rates.latency_s:.6g}",
    ]


def torchrec_topology(cluster: Cluster, *, hosts: int | None = None, device: str = "cuda", **sizes: Any) -> Any:
    """Returns TorchRec's ``planner.Topology`` of a cluster, for an ``EmbeddingShardingPlanner``.

    Args:
        cluster: its rates; of each host's uplink a rank has an equal part, as TorchRec counts.
        hosts: hosts of the job; by default those of the cluster.
        device: ``"cuda"`` or ``"cpu"``.
        sizes: other arguments of ``Topology``, such as ``hbm_cap`` in bytes.

    Raises:
        InputError: the cluster was measured on one host and ``hosts`` are more.

    Example:
        >>> from dmt.simulator.cluster import load_cluster
        >>> topology = torchrec_topology(load_cluster("a100"), hosts=2, hbm_cap=40 * 2**30)
        >>> topology.world_size, topology.local_world_size, topology.inter_host_bw  # bytes per millisecond
        (16, 8, 21000000.0)
    """
    from torchrec.distributed.planner import Topology

    if cluster.hosts == 1 < (hosts or 1):
        raise InputError(
            f"Cluster {cluster.name!r} was measured on one host, which tells nothing of links between hosts={hosts}. "
            "Measure two hosts or more with `dmt bench-comms`."
        )
    ranks, rates = cluster.ranks_per_host, cluster.all_to_all
    lookups = cluster.lookup_bytes_per_s / 1e3
    memory = {"hbm_mem_bw": lookups} if device == "cuda" else {"ddr_mem_bw": lookups}
    return Topology(
        world_size=(hosts or cluster.hosts) * ranks,
        local_world_size=ranks,
        compute_device=device,
        intra_host_bw=rates.host_bytes_per_s / 1e3,
        inter_host_bw=rates.uplink_bytes_per_s / ranks / 1e3,
        **memory,
        **sizes,
    )
