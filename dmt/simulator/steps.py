"""The operations of a training step, in the order of the runtime: with towers (`tower_step`) and flat (`flat_step`).

Legend: B samples per rank, T towers, K micro-batches, N columns of an embedding; P = T * B samples of all peers.

What is left out: that rows are not read equally often, that ranks start a step at different times, and caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveKind
from dmt.simulator.timeline import Kind, Operation

__all__ = ["Load", "StepWork", "flat_step", "tower_step"]

# Of the FLOPs of a step a third are in its forward pass: the backward pass has a product for the input's gradient and
# one for the weight's.
_FORWARD = 1 / 3
# Times that embeddings or outputs are read and written between one collective and the next: packed, unpacked, stacked.
_COPIES = 3
# The optimizer of the dense parts reads weight and gradient and writes the weight; a moment is read and written too.
_UPDATE_PASSES = 5


class Load(NamedTuple):
    """Bytes of one collective."""

    uplink: float
    """Bytes that the busiest host sends to others."""
    inside: float
    """Bytes that the busiest rank sends to others of its host."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank in one step, the busiest one's where they differ."""

    lookup_bytes: float
    """Bytes of rows that are read, and read and written again by their update."""
    embedding_bytes: float
    """Bytes of the looked-up embeddings of a rank, FP32: [P, F_t N] in a tower, [B, F N] in a flat model."""
    output_bytes: float
    """Bytes of what a rank's samples get from the tables or towers, FP32: [B, sum of O_t]."""
    tower_flops: float
    """FLOPs of the tower modules, forward and backward."""
    early_flops: float
    """FLOPs of dense parts that need no embeddings (the bottom MLP), which run while the embeddings travel."""
    dense_flops: float
    """FLOPs of everything else, forward and backward."""
    dense_bytes: float
    """Bytes of the weights that are neither tables nor tower modules, FP32."""
    peer_ids: Load
    """Ids to the towers; of a flat model, to all ranks."""
    tower_ids: Load
    """Ids inside towers; of a flat model nothing."""
    tower_outputs: Load
    """Embeddings inside towers, each way."""
    peer_outputs: Load
    """Embeddings or tower outputs to the samples; of a flat model, from all ranks."""
    peer_gradients: Load
    """Their gradients back."""
    tower_weights: Load
    """Gradients of tower modules and of the data-parallel tables of towers."""
    dense_weights: Load
    """Gradients of all other dense parts."""
    replicas: Load
    """Tables that replicas average; a step's share, where they do it every few steps."""

    @property
    def uplink_bytes(self) -> float:
        """Bytes that the busiest host sends to others in a step."""
        loads = [value.uplink for value in vars(self).values() if isinstance(value, Load)]
        return sum(loads) + self.tower_outputs.uplink


class _Program:
    """Operations in the order in which the rank's program starts them.

    Computing comes one after the other; so do the collectives of one channel, each once the program has come to it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.operations = [Operation(name="program", kind="program", seconds={}, latency=cluster.step_s)]
        self._last: dict[str, str] = {}

    def compute(
        self, name: str, *, flops: float = 0.0, moved: float = 0.0, looked_up: float = 0.0, after: Sequence[str] = ()
    ) -> str:
        """Adds computing, after the computing before it; ``moved`` bytes are read, and written."""
        cluster = self.cluster
        seconds = flops / cluster.matmul_flops + 2 * moved / cluster.memory_bytes_per_s
        seconds += looked_up / cluster.lookup_bytes_per_s
        return self._add(Operation(name=name, kind="compute", seconds={"core": seconds}, after=after), "core")

    def send(
        self,
        name: str,
        kind: Kind,
        collective: CollectiveKind,
        *,
        load: Load,
        ranks: int,
        parts: int = 1,
        channel: str,
        at_once: bool = False,
    ) -> str:
        """Adds a collective over groups of ``ranks`` ranks, with one of ``parts`` equal parts of a load.

        It begins once the program has come to it, or ``at_once``.
        """
        rates = self.cluster.rates(collective)
        uplink, inside = load.uplink / parts, load.inside / parts
        if not uplink and not inside:
            return self._last.get("core", "")
        operation = Operation(
            name=name,
            kind=kind,
            seconds={
                "uplink": uplink / (rates.uplink_bytes_per_s * self.cluster.share_of_uplink(ranks)),
                "host_link": inside / rates.host_bytes_per_s,
                # What a host sends, its ranks send in equal parts.
                "core": (uplink / self.cluster.ranks_per_host + inside) * rates.core_s_per_byte,
            },
            latency=rates.latency_s,
            after=() if at_once else [self._last["core"]] if "core" in self._last else (),
        )
        return self._add(operation, channel)

    def _add(self, operation: Operation, channel: str) -> str:
        before = {*operation.after, self._last.get(channel, "")} - {""}
        known = Operation(**{**vars(operation), "after": sorted(before)})
        self.operations.append(known)
        self._last[channel] = known.name
        return known.name


def tower_step(
    work: StepWork,
    cluster: Cluster,
    topology: TowerTopology,
    *,
    micro_batches: int = 1,
    prefetch: bool = False,
    hierarchical: bool = False,
) -> list[Operation]:
    """Returns the operations of a step with the tower dataflow (DMT, section 3.1; `docs/sptt.md`).

    Args:
        work: of the busiest rank.
        cluster: where it runs.
        topology: of the job.
        micro_batches: K.
        prefetch: True if the ids of the next batch travel during the step.
        hierarchical: True if dense gradients are summed inside hosts before they cross, and handed out again after.
    """
    step, parts = _Program(cluster), range(micro_batches)
    peers, inner = topology.num_towers, topology.ranks_per_tower
    copies = topology.num_replicas
    ids = step.send(
        "ids to towers", "ids", "all_to_all", load=work.peer_ids, ranks=peers, channel="ids", at_once=prefetch
    )
    local = step.send(
        "ids in towers", "ids", "all_to_all", load=work.tower_ids, ranks=inner, channel="ids", at_once=prefetch
    )
    step.compute("lookup", looked_up=work.lookup_bytes / 3, after=[] if prefetch else [ids, local])
    arrived = step.send("embeddings", "embeddings", "all_to_all", load=work.tower_outputs, ranks=inner, channel="tower")
    sent = []
    for k in parts:
        step.compute(
            f"towers {k}",
            flops=_FORWARD * work.tower_flops / micro_batches,
            moved=_COPIES * work.embedding_bytes / micro_batches,
            after=[arrived],
        )
        sent.append(_part(step, f"outputs {k}", work.peer_outputs, peers, micro_batches))
    step.compute("dense arch", flops=_FORWARD * work.early_flops)
    for k in parts:
        step.compute(
            f"over {k}",
            flops=_FORWARD * work.dense_flops / micro_batches,
            moved=_COPIES * work.output_bytes / micro_batches,
            after=[sent[k]],
        )
    returned = []
    for k in parts:
        step.compute(
            f"over {k}, backward",
            flops=(1 - _FORWARD) * work.dense_flops / micro_batches,
            moved=_COPIES * work.output_bytes / micro_batches,
        )
        returned.append(_part(step, f"gradients {k}", work.peer_gradients, peers, micro_batches))
    step.compute("dense arch, backward", flops=(1 - _FORWARD) * work.early_flops)
    reduced = _reduction(step, work.dense_weights, topology, hierarchical=hierarchical)
    for k in parts:
        step.compute(
            f"towers {k}, backward",
            flops=(1 - _FORWARD) * work.tower_flops / micro_batches,
            moved=_COPIES * work.embedding_bytes / micro_batches,
            after=[returned[k]],
        )
    weights = step.send(
        "tower gradients", "dense", "all_reduce", load=work.tower_weights, ranks=inner * copies, channel="tower weights"
    )
    back = step.send(
        "gradients of embeddings", "embeddings", "all_to_all", load=work.tower_outputs, ranks=inner, channel="tower"
    )
    step.compute("update of tables", looked_up=work.lookup_bytes * 2 / 3, after=[back])
    step.compute("update", moved=_UPDATE_PASSES / 2 * work.dense_bytes, after=[reduced, weights])
    step.send("average of replicas", "replicas", "all_reduce", load=work.replicas, ranks=copies, channel="replicas")
    return step.operations


def _part(step: _Program, name: str, load: Load, peers: int, parts: int) -> str:
    return step.send(name, "embeddings", "exchange", load=load, ranks=peers, parts=parts, channel="peers")


def _reduction(step: _Program, load: Load, topology: TowerTopology, *, hierarchical: bool) -> str:
    """Adds the reduction of dense gradients: a ring, or inside hosts, between them, and inside them again."""
    if not hierarchical:
        ring = "dense gradients"
        return step.send(ring, "dense", "all_reduce", load=load, ranks=topology.world_size, channel="dense")
    half = Load(0.0, load.inside / 2)
    size, hosts = topology.host_size, topology.num_hosts
    step.send("sum of a host", "dense", "all_reduce", load=half, ranks=size, channel="dense")
    across = Load(load.uplink, 0.0)
    step.send("sum over hosts", "dense", "all_reduce", load=across, ranks=hosts, channel="dense")
    return step.send("sum handed out", "dense", "all_reduce", load=half, ranks=size, channel="dense")


def flat_step(work: StepWork, cluster: Cluster, topology: TowerTopology, *, prefetch: bool = False) -> list[Operation]:
    """Returns the operations of a step of TorchRec's flat dataflow (Neo, figure 18); arguments as of `tower_step`."""
    step, world = _Program(cluster), topology.world_size
    ids = step.send("ids", "ids", "all_to_all", load=work.peer_ids, ranks=world, channel="ids", at_once=prefetch)
    step.compute(
        "lookup",
        looked_up=work.lookup_bytes / 3,
        moved=_COPIES * work.embedding_bytes,
        after=[] if prefetch else [ids],
    )
    sent = step.send("embeddings", "embeddings", "all_to_all", load=work.peer_outputs, ranks=world, channel="world")
    step.compute("dense arch", flops=_FORWARD * work.early_flops)
    step.compute(
        "over",
        flops=_FORWARD * work.dense_flops,
        moved=_COPIES * work.output_bytes,
        after=[sent],
    )
    step.compute("over, backward", flops=(1 - _FORWARD) * work.dense_flops, moved=_COPIES * work.output_bytes)
    back = step.send(
        "gradients of embeddings", "embeddings", "all_to_all", load=work.peer_gradients, ranks=world, channel="world"
    )
    step.compute("dense arch, backward", flops=(1 - _FORWARD) * work.early_flops)
    reduced = step.send("dense gradients", "dense", "all_reduce", load=work.dense_weights, ranks=world, channel="dense")
    step.compute(
        "update of tables", looked_up=work.lookup_bytes * 2 / 3, moved=_COPIES * work.output_bytes, after=[back]
    )
    step.compute("update", moved=_UPDATE_PASSES / 2 * work.dense_bytes, after=[reduced])
    return step.operations
