"""The operations of a training step, in the order of the runtime: with towers (`tower_step`) and flat (`flat_step`).

Legend: B samples per rank, T towers, K micro-batches, N columns of an embedding; P = T * B samples of all peers.

How long an operation computes says `PartWork` (the roofline), when it runs `dmt.simulator.timeline` (of which
Neo's Equation 1 is a special case). What is left out: that rows are not read equally often, that ranks start a step at
different times, and caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveKind
from dmt.simulator.timeline import Kind, Operation

__all__ = ["Load", "Operator", "PartWork", "StepWork", "flat_step", "tower_step"]

# Times that embeddings or outputs are read and written between one collective and the next: packed, unpacked. What
# the model does with them is counted on the model.
_COPIES = 2
# The optimizer of the dense parts reads weight and gradient and writes the weight; a moment is read and written too.
_UPDATE_PASSES = 5
# A sum reads two tensors and writes one.
_SUM_PASSES = 3


class Operator(NamedTuple):
    """One operator of a model; it takes as long as its FLOPs or as the bytes it moves, whichever is longer."""

    flops: float
    """FLOPs for one sample."""
    sample_bytes: float
    """Bytes that it reads and writes for one sample."""
    pass_bytes: float
    """Bytes that it reads and writes whatever the batch: weights, or their gradients."""


class PartWork(NamedTuple):
    """Operators of a part of a model."""

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    weight_bytes: int = 0
    """Bytes of its weights."""

    @property
    def flops(self) -> float:
        """FLOPs of a training step for one sample."""
        return sum(operator.flops for operator in (*self.forward, *self.backward))

    def seconds(self, samples: float, cluster: Cluster) -> tuple[float, float]:
        """Returns the seconds forward and backward for some samples in one pass.

        Example:
            >>> from dataclasses import replace
            >>> from dmt.simulator.cluster import load_cluster
            >>> cluster = replace(load_cluster("a100"), matmul_flops=10.0, memory_bytes_per_s=2.0)
            >>> part = PartWork(forward=(Operator(30.0, 1.0, 0.0), Operator(0.0, 2.0, 1.0)))
            >>> part.seconds(2.0, cluster)
            (8.5, 0.0)
        """
        forward, backward = (_seconds(operators, samples, cluster) for operators in (self.forward, self.backward))
        return forward, backward


def _seconds(operators: tuple[Operator, ...], samples: float, cluster: Cluster) -> float:
    flops, memory = cluster.matmul_flops, cluster.memory_bytes_per_s
    busy = sum(max(o.flops * samples / flops, (o.sample_bytes * samples + o.pass_bytes) / memory) for o in operators)
    return busy + len(operators) * cluster.operator_s


class Load(NamedTuple):
    """Bytes of one collective."""

    uplink: float
    """Bytes that the busiest host sends to others."""
    inside: float
    """Bytes that the busiest rank sends to others of its host."""


_NOTHING = Load(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank in one step, the busiest one's where they differ."""

    lookup_bytes: float
    """Bytes of rows that are read, and read and written again by their update."""
    embedding_bytes: float
    """Bytes of the looked-up embeddings of a rank, FP32: [P, F_t N] in a tower, [B, F N] in a flat model."""
    output_bytes: float
    """Bytes of what a rank's samples get from the tables or towers, FP32: [B, sum of O_t]."""
    samples: float
    """B."""
    peer_samples: float
    """P, that a rank's tower computes."""
    towers: PartWork
    """The tower module of most FLOPs; nothing in a flat model."""
    early: PartWork
    """Dense parts that need no embeddings (the bottom MLP), which run while the embeddings travel."""
    dense: PartWork
    """Everything else but tables."""
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
    added_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that a rank reads and writes forward and backward because of number formats and of rows that samples
    share."""
    told_apart: float = 0.0
    """Ids of a rank whose inputs are told apart."""
    parts: tuple[float, ...] = ()
    """For each micro-batch the share of the rows that no earlier one has; nothing where samples share no rows."""
    hot_weights: Load = _NOTHING
    """Gradients of the copies of hot rows."""
    hot_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that a rank reads and writes to look up its copies, and to sum their gradients and update them."""

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
        self, name: str, seconds: float = 0.0, *, moved: float = 0.0, looked_up: float = 0.0, after: Sequence[str] = ()
    ) -> str:
        """Adds computing, after the computing before it; ``moved`` bytes are read, and written."""
        cluster = self.cluster
        seconds += 2 * moved / cluster.memory_bytes_per_s + looked_up / cluster.lookup_bytes_per_s
        return self._add(Operation(name=name, kind="compute", seconds={"core": seconds}, after=after), "core")

    def send(
        self,
        name: str,
        kind: Kind,
        collective: CollectiveKind,
        *,
        load: Load,
        ranks: int,
        share: float = 1.0,
        channel: str,
        at_once: bool = False,
    ) -> str:
        """Adds a collective over groups of ``ranks`` ranks, with a share of a load.

        It begins once the program has come to it, or ``at_once``.
        """
        rates = self.cluster.rates(collective)
        uplink, inside = share * load.uplink, share * load.inside
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
        cluster: speed of its ranks and links.
        topology: of the job.
        micro_batches: K.
        prefetch: True if the ids of the next batch travel during the step.
        hierarchical: True if dense gradients are summed inside hosts before they cross, and handed out again after.
    """
    step, parts = _Program(cluster), range(micro_batches)
    if work.told_apart:
        step.compute("ids told apart", work.told_apart * cluster.told_apart_s)
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
    shares = work.parts or [1 / micro_batches for _ in parts]
    assert len(shares) == micro_batches, f"shares of {len(shares)} micro-batches in a step of {micro_batches}"
    towers = [work.towers.seconds(work.peer_samples * share, cluster) for share in shares]
    over, over_back = work.dense.seconds(work.samples / micro_batches, cluster)
    early, early_back = work.early.seconds(work.samples / micro_batches, cluster)
    there, back_again = (work.added_bytes[way] / 2 / micro_batches for way in (0, 1))
    # Where samples share rows, a micro-batch joins its own to those before. Its gradient begins as zeros for all these
    # rows, and is added to those of other micro-batches.
    joined = [sum(shares[: k + 1]) * work.output_bytes if k and work.parts else 0.0 for k in parts]
    # Of each micro-batch but the first the gradients of weights are added to those that there are.
    sums = [0.0 if k == 0 else _SUM_PASSES / 2 for k in parts]
    sent = []
    for k in parts:
        moved = _COPIES * work.embedding_bytes * shares[k]
        step.compute(f"towers {k}", towers[k][0], moved=moved, after=[arrived])
        arriving = _part(step, f"outputs {k}", work.peer_outputs, peers, shares[k])
        sent.append([arriving])
    if work.hot_bytes[0]:
        step.compute("hot rows", moved=work.hot_bytes[0] / 2)
    returned: dict[int, str] = {}

    def go_back(k: int) -> None:
        moved = _COPIES * work.output_bytes / micro_batches + sums[len(returned)] * work.dense.weight_bytes
        step.compute(f"over {k}, backward", over_back, moved=moved + (_SUM_PASSES + 1) / 2 * joined[k])
        # Complete, because those that share its rows, the later ones, have gone back before.
        returned[k] = _part(step, f"gradients {k}", work.peer_gradients, peers, shares[k])
        step.compute(f"dense arch {k}, backward", early_back)

    for k in parts:
        step.compute(f"dense arch {k}", early)
        moved = _COPIES * work.output_bytes / micro_batches + there + joined[k]
        step.compute(f"over {k}", over, moved=moved, after=sent[k])
    for k in reversed(parts):
        go_back(k)
    reduced = _reduction(step, work.dense_weights, topology, hierarchical=hierarchical)
    for k in reversed(parts):
        moved = _COPIES * work.embedding_bytes * shares[k] + back_again + sums[k] * work.towers.weight_bytes
        step.compute(f"towers {k}, backward", towers[k][1], moved=moved, after=[returned[k]])
    weights = step.send(
        "tower gradients", "dense", "all_reduce", load=work.tower_weights, ranks=inner * copies, channel="tower weights"
    )
    back = step.send(
        "gradients of embeddings", "embeddings", "all_to_all", load=work.tower_outputs, ranks=inner, channel="tower"
    )
    hosts = topology.num_hosts
    hot = step.send("hot gradients", "dense", "all_reduce", load=work.hot_weights, ranks=hosts, channel="hot")
    step.compute("update of tables", looked_up=work.lookup_bytes * 2 / 3, after=[back])
    if work.hot_bytes[1]:
        step.compute("update of hot rows", moved=work.hot_bytes[1] / 2, after=[hot])
    step.compute("update", moved=_UPDATE_PASSES / 2 * work.dense_bytes, after=[reduced, weights])
    step.send("average of replicas", "replicas", "all_reduce", load=work.replicas, ranks=copies, channel="replicas")
    return step.operations


def _part(step: _Program, name: str, load: Load, peers: int, share: float) -> str:
    return step.send(name, "embeddings", "exchange", load=load, ranks=peers, share=share, channel="peers")


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
    over, over_back = work.dense.seconds(work.samples, cluster)
    early, early_back = work.early.seconds(work.samples, cluster)
    there, back_again = (moved / 2 for moved in work.added_bytes)
    ids = step.send("ids", "ids", "all_to_all", load=work.peer_ids, ranks=world, channel="ids", at_once=prefetch)
    step.compute(
        "lookup",
        looked_up=work.lookup_bytes / 3,
        moved=_COPIES * work.embedding_bytes,
        after=[] if prefetch else [ids],
    )
    sent = step.send("embeddings", "embeddings", "all_to_all", load=work.peer_outputs, ranks=world, channel="world")
    step.compute("dense arch", early)
    step.compute("over", over, moved=_COPIES * work.output_bytes + there, after=[sent])
    step.compute("over, backward", over_back, moved=_COPIES * work.output_bytes)
    back = step.send(
        "gradients of embeddings", "embeddings", "all_to_all", load=work.peer_gradients, ranks=world, channel="world"
    )
    step.compute("dense arch, backward", early_back)
    reduced = step.send("dense gradients", "dense", "all_reduce", load=work.dense_weights, ranks=world, channel="dense")
    moved = _COPIES * work.output_bytes + back_again
    step.compute("update of tables", looked_up=work.lookup_bytes * 2 / 3, moved=moved, after=[back])
    step.compute("update", moved=_UPDATE_PASSES / 2 * work.dense_bytes, after=[reduced])
    return step.operations
