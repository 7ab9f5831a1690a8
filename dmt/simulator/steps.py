"""The operations of a training step in the order of the runtime (`step_operations`), and their times (`simulate`).

Neo's Equation 1 (appendix B) takes the maximum of what overlaps and the sum of what does not; it is the special case in
which nothing is shared. Here an operation may need several resources at once, as gloo's collectives need a core and
the uplink, and operations that need one resource at the same time have equal shares of it. Left out: that rows are not
read equally often, that ranks start a step at different times, and caches.

Legend: B samples per rank, T towers, K micro-batches, N columns of an embedding; P = T * B samples of all peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveKind

__all__ = [
    "Kind",
    "Load",
    "ModelWork",
    "Operation",
    "Operator",
    "PartWork",
    "Resource",
    "StepWork",
    "simulate",
    "step_operations",
]

Resource = Literal["core", "uplink", "host_link"]
"""The cores of a rank, the link of its host to others, and its link to ranks of its host."""
Kind = Literal["compute", "ids", "embeddings", "dense", "replicas", "program"]
"""Kinds that operations are booked under: computing; the collectives of ids, of embeddings and their gradients, of
dense gradients, of replicas; the program that starts all that."""

_REDUCED = ("dense", "replicas")
_DONE = 1e-12  # seconds; less is rounding
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

        def of(operators: tuple[Operator, ...]) -> float:
            flops, memory = cluster.matmul_flops, cluster.memory_bytes_per_s
            times = [
                max(o.flops * samples / flops, (o.sample_bytes * samples + o.pass_bytes) / memory) for o in operators
            ]
            return sum(times) + len(operators) * cluster.operator_s

        return of(self.forward), of(self.backward)


class ModelWork(NamedTuple):
    """Operators of a training step by part of the model, and its sizes; tables count nothing."""

    towers: tuple[PartWork, ...]
    """Operators of each tower module; none in a flat model."""
    dense_arch: PartWork
    """Operators of the bottom MLP, which needs no embeddings; nothing in a model that names no part so."""
    rest: PartWork
    widths: tuple[int, ...] = ()
    """Outputs of each tower module."""

    @property
    def tower_bytes(self) -> int:
        """Bytes of the weights of all tower modules."""
        return sum(part.weight_bytes for part in self.towers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights except tables."""
        return self.dense_arch.weight_bytes + self.rest.weight_bytes


class Load(NamedTuple):
    """Bytes of one collective."""

    uplink: float = 0.0
    """Bytes that the busiest host sends to others."""
    inside: float = 0.0
    """Bytes that the busiest rank sends to others of its host."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank in one step, the busiest one's where they differ."""

    model: ModelWork
    """Operators of the model."""
    topology: TowerTopology
    loads: Mapping[str, Load]
    """Bytes of each exchange, of the busiest host and rank."""
    sent: Mapping[str, Load] = field(default_factory=dict)
    """Bytes of each exchange, of all hosts and ranks together."""
    is_flat: bool = False
    """True for TorchRec's flat dataflow, in which all ranks of a replica exchange with all."""
    is_hierarchical: bool = False
    """True if dense gradients are summed inside hosts before they cross, and handed out again after."""
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
    converted_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that a rank reads and writes forward and backward because of number formats."""
    rank_bytes: tuple[float, float] = (0.0, 0.0)
    """Memory of the fullest rank for tables, optimizer state and what lookups return, and the last alone."""
    host_bytes: float = 0.0
    """The same memory of all ranks of the fullest host."""

    @property
    def uplink_bytes(self) -> float:
        """Bytes that the busiest host sends to others in a step; ``tower_outputs`` twice, as their gradients return."""
        return sum(load.uplink for load in (*self.loads.values(), self.loads["tower_outputs"]))


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that a rank does in a step."""

    name: str
    kind: Kind
    seconds: Mapping[Resource, float]
    """Seconds of each resource that it takes if it has it to itself, all beginning at once."""
    after: Sequence[str] = ()
    """Names of the operations that must have ended before it begins; they come before it in the step."""
    latency: float = 0.0
    """Seconds that it takes before, in which it needs no resource."""


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
    ) -> None:
        """Adds computing, after the computing before it; ``moved`` bytes are read, and written."""
        cluster = self.cluster
        seconds += 2 * moved / cluster.memory_bytes_per_s + looked_up / cluster.lookup_bytes_per_s
        self._add("core", after, Operation(name=name, kind="compute", seconds={"core": seconds}))

    def send(self, name: str, load: Load, kind: Kind, *, ranks: int, channel: str, at_once: bool = False) -> str:
        """Adds a collective over groups of ``ranks`` ranks; it begins once the program has come to it, or at once.

        Returns the operation to wait for, that before it where nothing is sent; an empty name where there is none.
        """
        before = self._last.get("core", "")
        if not any(load):
            return self._last.get(channel, before)
        collective: CollectiveKind = (
            "exchange" if channel == "peers" else "all_reduce" if kind in _REDUCED else "all_to_all"
        )
        rates = self.cluster.rates(collective)
        seconds: dict[Resource, float] = {
            "uplink": load.uplink / rates.uplink_rate(ranks),
            "host_link": load.inside / rates.host_rate(ranks),
            "core": (load.uplink / self.cluster.ranks_per_host + load.inside) * rates.core_s_per_byte,
        }
        operation = Operation(name=name, kind=kind, seconds=seconds, latency=rates.latency_s)
        return self._add(channel, () if at_once else (before,), operation)

    def _add(self, channel: str, after: Sequence[str], operation: Operation) -> str:
        before = {*after, self._last.get(channel, "")} - {""}
        self.operations.append(replace(operation, after=sorted(before)))
        self._last[channel] = operation.name
        return operation.name


def step_operations(
    work: StepWork, cluster: Cluster, *, micro_batches: int = 1, prefetch: bool = False
) -> list[Operation]:
    """Returns the operations of a step (DMT, section 3.1, `docs/towers.md`; flat: Neo, figure 18).

    Args:
        work: of the busiest rank.
        cluster: speed of its ranks and links.
        micro_batches: K.
        prefetch: True if the ids of the next batch travel during the step.
    """
    step, model, loads, parts = _Program(cluster), work.model, work.loads, range(micro_batches)
    inner, copies, peers = work.topology.ranks_per_tower, work.topology.num_replicas, work.topology.num_towers
    if work.is_flat:
        peers *= inner
    tower = max(model.towers, key=lambda part: part.flops, default=PartWork())
    share = 1 / micro_batches
    ids = [
        step.send("ids", loads["peer_ids"], "ids", ranks=peers, channel="ids", at_once=prefetch),
        step.send("ids in towers", loads["tower_ids"], "ids", ranks=inner, channel="ids", at_once=prefetch),
    ]
    step.compute("lookup", looked_up=work.lookup_bytes / 3, after=[] if prefetch else ids)
    arrived = step.send("embeddings", loads["tower_outputs"], "embeddings", ranks=inner, channel="tower")
    towers, towers_back = tower.seconds(work.peer_samples * share, cluster)
    over, over_back = model.rest.seconds(work.samples / micro_batches, cluster)
    early, early_back = model.dense_arch.seconds(work.samples / micro_batches, cluster)
    there, back_again = (size / 2 * share for size in work.converted_bytes)
    # Of each micro-batch but the first the gradients of weights are added to those that there are.
    sums = [0.0 if k == 0 else _SUM_PASSES / 2 for k in parts]

    def exchanged(name: str, load: Load, k: int) -> str:
        part = Load(share * load.uplink, share * load.inside)
        return step.send(f"{name} {k}", part, "embeddings", ranks=peers, channel="all" if work.is_flat else "peers")

    sent: list[str] = []
    returned: dict[int, str] = {}
    for k in parts:
        step.compute(f"towers {k}", towers, moved=_COPIES * work.embedding_bytes * share, after=[arrived])
        sent.append(exchanged("outputs", loads["peer_outputs"], k))
    for k in parts:
        step.compute(f"dense arch {k}", early)
        moved = _COPIES * work.output_bytes / micro_batches + there
        step.compute(f"over {k}", over, moved=moved, after=[sent[k]])
    for k in reversed(parts):
        moved = _COPIES * work.output_bytes / micro_batches + sums[len(returned)] * model.rest.weight_bytes
        step.compute(f"over {k}, backward", over_back, moved=moved)
        returned[k] = exchanged("gradients", loads["peer_gradients"], k)
        step.compute(f"dense arch {k}, backward", early_back)
    reduced = _reduction(step, work, "dense_weights", over_hosts=work.is_hierarchical)
    for k in reversed(parts):
        moved = _COPIES * work.embedding_bytes * share + back_again + sums[k] * tower.weight_bytes
        step.compute(f"towers {k}, backward", towers_back, moved=moved, after=[returned[k]])
    outside = _reduction(step, work, "outside_weights", over_hosts=not work.is_flat)
    weights = step.send(
        "tower gradients", loads["tower_weights"], "dense", ranks=inner * copies, channel="tower weights"
    )
    back = step.send("gradients of embeddings", loads["tower_outputs"], "embeddings", ranks=inner, channel="tower")
    step.compute("update of tables", looked_up=work.lookup_bytes * 2 / 3, after=[back])
    step.compute("update", moved=_UPDATE_PASSES / 2 * model.dense_bytes, after=[reduced, weights, outside])
    step.send("average of replicas", loads["replicas"], "replicas", ranks=copies, channel="replicas")
    return step.operations


def _reduction(step: _Program, work: StepWork, name: str, *, over_hosts: bool) -> str:
    """Adds the reduction of gradients over all ranks: a ring, or inside hosts, between them, and inside them again."""
    topology, load = work.topology, work.loads[name]
    half, across, size = Load(inside=load.inside / 2), Load(uplink=load.uplink), topology.host_size
    parts = [("ring", load, topology.world_size)]
    if over_hosts:
        parts = [("in hosts", half, size), ("over hosts", across, topology.num_hosts), ("handed out", half, size)]
    return [step.send(f"{name} {part}", sent, "dense", ranks=n, channel=name) for part, sent, n in parts][-1]


def simulate(operations: Sequence[Operation]) -> dict[Kind, float]:
    """Runs operations, each as soon as those before it have ended; resources are shared equally.

    Args:
        operations: in an order in which each is after those that it waits for.

    Returns:
        Seconds by kind, which add up to those of the step: computing whenever something computes, otherwise the
        collectives that run, in equal parts, and the program where nothing else does.

    Example:
        Two exchanges share the uplink while the rank computes.

        >>> compute = Operation(name="mlp", kind="compute", seconds={"core": 2.0})
        >>> sends = [Operation(name=name, kind="embeddings", seconds={"uplink": 1.5}) for name in "ab"]
        >>> seconds = simulate([compute, *sends])
        >>> seconds["compute"], seconds["embeddings"]
        (2.0, 1.0)
    """
    # Latency comes before the rest; an operation that has it uses nothing else.
    stages: dict[str, list[dict[str, float]]] = {
        operation.name: [{"latency": operation.latency}, dict(operation.seconds.items())] for operation in operations
    }
    waiting = {operation.name: set(operation.after) for operation in operations}
    kinds = {operation.name: operation.kind for operation in operations}
    begun: list[str] = []
    exposed: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
    while waiting or begun:
        begun += [name for name, others in waiting.items() if not others]
        waiting = {name: others for name, others in waiting.items() if others}
        assert begun, "an operation waits for one that is not there"
        left = {name: _left(stages[name]) for name in begun}
        ended = [name for name, seconds in left.items() if not seconds]
        for name in ended:
            begun.remove(name)
            for others in waiting.values():
                others.discard(name)
        if ended:
            continue
        users = Counter(resource for seconds in left.values() for resource in seconds if resource != "latency")
        # Until the next resource is free of an operation.
        step = min(s * users.get(resource, 1) for seconds in left.values() for resource, s in seconds.items())
        for seconds in left.values():
            for resource in seconds:
                seconds[resource] -= step / users.get(resource, 1)
        computing = [name for name in begun if kinds[name] == "compute"]
        seen = computing or [name for name in begun if kinds[name] != "program"] or begun
        for name in seen:
            exposed[kinds[name]] += step / len(seen)
    return exposed


def _left(stages: list[dict[str, float]]) -> dict[str, float]:
    """The stage that an operation is in, without what it has had of it; empty when it has ended."""
    while stages:
        for resource in [resource for resource, seconds in stages[0].items() if seconds <= _DONE]:
            del stages[0][resource]
        if stages[0]:
            return stages[0]
        stages.pop(0)
    return {}
