"""The operations of a training step in the order of the runtime (`step_operations`), and their times (`simulate`).

Neo's Equation 1 (appendix B) adds the times of operations that follow one another, and takes the maximum of those that
overlap. Here an operation may need several resources at once (a gloo collective needs a core and the uplink), and
operations that need a resource at the same time share it equally; without sharing, this is Equation 1. Not modeled:
rows that are read more often than others, ranks that start a step late, and caches.

Legend: B samples per rank, T towers, K micro-batches, F features, N columns of each; P = T * B samples of all peers.
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
"""What an operation occupies: a rank's cores, its host's link to other hosts, or its link to ranks of its host."""
Kind = Literal["compute", "ids", "embeddings", "dense", "replicas", "program"]
"""Category of an operation's time: computation; a collective of ids, of embeddings and their gradients, of dense
gradients, or of replicas; or the program that launches the operations."""

_REDUCED = ("dense", "replicas")
_DONE = 1e-12  # seconds; any smaller remainder is a rounding error
# How often embeddings or outputs are copied between two collectives: unpacked, then packed. What the model reads and
# writes is counted on the model.
_COPIES = 2
# The dense optimizer reads weight, gradient and moment, and writes weight and moment.
_UPDATE_PASSES = 5
# A sum reads two tensors and writes one.
_SUM_PASSES = 3


class Operator(NamedTuple):
    """An operator of a model; it takes `Cluster.operator_s` plus the longer of the times of its FLOPs and its bytes."""

    flops: float
    """FLOPs for one sample."""
    sample_bytes: float
    """Bytes that it reads and writes for one sample."""
    pass_bytes: float
    """Bytes that it reads and writes once per pass, whatever the batch size: weights, or their gradients."""


class PartWork(NamedTuple):
    """Operators and weights of one part of a model, such as a tower module."""

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    weight_bytes: int = 0
    """Bytes of its weights."""

    @property
    def flops(self) -> float:
        """FLOPs of one sample, forward and backward."""
        return sum(operator.flops for operator in (*self.forward, *self.backward))

    def seconds(self, samples: float, cluster: Cluster) -> tuple[float, float]:
        """Returns the seconds of the forward and of the backward pass of ``samples`` samples on a rank of ``cluster``.

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
    """The parts of a model with their operators in a training step; tables are not counted."""

    towers: tuple[PartWork, ...]
    """The tower modules, tower by tower; empty for a flat model."""
    dense_arch: PartWork
    """The bottom MLP, which needs no embeddings: the module that the model calls ``dense_arch``; empty without one."""
    rest: PartWork
    """All other modules, such as the interaction and the over arch."""
    widths: tuple[int, ...] = ()
    """Columns that each tower module returns, O_t; empty for a flat model."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights that every rank holds: all but tables and tower modules."""
        return self.dense_arch.weight_bytes + self.rest.weight_bytes


class Load(NamedTuple):
    """Bytes of one collective: of the busiest host and rank, or of all (`StepWork.sent`)."""

    uplink: float = 0.0
    """Bytes that the host sends to other hosts, or receives from them where that is more."""
    inside: float = 0.0
    """Bytes that the rank sends to other ranks of its host, or receives from them where that is more."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one training step; where ranks differ, that of the busiest rank."""

    model: ModelWork
    """Operators of the model."""
    topology: TowerTopology
    loads: Mapping[str, Load]
    """Bytes of each exchange, of the busiest host and rank, by name: ``peer_ids``, ``tower_ids``, ``tower_outputs``,
    ``peer_outputs``, ``peer_gradients``, ``tower_weights``, ``outside_weights``, ``dense_weights``, ``replicas``."""
    sent: Mapping[str, Load] = field(default_factory=dict)
    """Bytes of each exchange, of all hosts and ranks together, by the same names."""
    is_flat: bool = False
    """True for TorchRec's flat dataflow, in which every rank of a replica exchanges with every other."""
    is_hierarchical: bool = False
    """True if dense gradients are summed inside each host, then between hosts, and the sum is sent inside each host."""
    lookup_bytes: float
    """Bytes of table rows that a rank reads in the lookup, and reads and writes in the update."""
    embedding_bytes: float
    """Bytes of a rank's looked-up embeddings, FP32: [P, F_t N] in a tower of F_t features, [B, F N] in a flat model."""
    output_bytes: float
    """Bytes that a rank's over arch reads, FP32: [B, sum of O_t] (flat: [B, F N]), and embeddings outside towers."""
    samples: float
    """B, samples of a rank."""
    converted_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes that a rank reads and writes to convert numbers to 16 bits and back: forward, and backward."""
    rank_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes on the fullest rank: tables, their state, embeddings and gradients; and embeddings and gradients alone."""

    @property
    def uplink_bytes(self) -> float:
        """Bytes of a step on the busiest host's uplink; ``tower_outputs`` count twice, as their gradients return."""
        return sum(load.uplink for load in (*self.loads.values(), self.loads["tower_outputs"]))


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a rank in a step: a computation or a collective."""

    name: str
    kind: Kind
    seconds: Mapping[Resource, float]
    """Seconds for which it occupies each resource if no other operation shares it; all resources begin together."""
    after: Sequence[str] = ()
    """Names of the operations that must have ended before it begins; they come before it in the step."""
    latency: float = 0.0
    """Seconds that pass before it occupies a resource."""


class _Program:
    """The operations of a step in the order in which the program of a rank launches them.

    A computation waits for the previous one and for the operations named in ``after``. A collective waits for the one
    before it on its channel and, unless it is launched ``at_once``, for the previous computation.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.operations = [Operation(name="program", kind="program", seconds={}, latency=cluster.step_s)]
        self._last: dict[str, str] = {}

    def compute(
        self, name: str, seconds: float = 0.0, *, moved: float = 0.0, looked_up: float = 0.0, after: Sequence[str] = ()
    ) -> None:
        """Adds a computation of ``seconds`` that also copies ``moved`` bytes and moves ``looked_up`` bytes of rows."""
        cluster = self.cluster
        seconds += 2 * moved / cluster.memory_bytes_per_s + looked_up / cluster.lookup_bytes_per_s
        self._add("core", after, Operation(name=name, kind="compute", seconds={"core": seconds}))

    def send(self, name: str, load: Load, kind: Kind, *, ranks: int, channel: str, at_once: bool = False) -> str:
        """Adds a collective over groups of ``ranks`` ranks, after the previous computation unless ``at_once``.

        Returns the name of the operation to wait for: this one, or if it sends nothing, the previous one of the channel
        or else the previous computation; an empty string if there is neither.
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
    """Returns the operations of a step in launch order (DMT, section 3.1, `docs/towers.md`; flat: Neo, figure 18).

    Args:
        work: work of the busiest rank.
        cluster: speed of its ranks and links.
        micro_batches: K, micro-batches of a batch.
        prefetch: True if the ids of the next batch are exchanged during the step.
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
    towers, towers_back = tower.seconds(work.samples * work.topology.num_towers * share, cluster)
    over, over_back = model.rest.seconds(work.samples / micro_batches, cluster)
    early, early_back = model.dense_arch.seconds(work.samples / micro_batches, cluster)
    there, back_again = (size / 2 * share for size in work.converted_bytes)
    # Every micro-batch but the first adds its gradients of weights to those before it.
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
    updated = model.dense_bytes + tower.weight_bytes
    step.compute("update", moved=_UPDATE_PASSES / 2 * updated, after=[reduced, weights, outside])
    step.send("average of replicas", loads["replicas"], "replicas", ranks=copies, channel="replicas")
    return step.operations


def _reduction(step: _Program, work: StepWork, name: str, *, over_hosts: bool) -> str:
    """Adds an all-reduce over all ranks (a ring, or inside, between and inside hosts); returns its last operation."""
    topology, load = work.topology, work.loads[name]
    half, across, size = Load(inside=load.inside / 2), Load(uplink=load.uplink), topology.host_size
    parts = [("ring", load, topology.world_size)]
    if over_hosts:
        parts = [("in hosts", half, size), ("over hosts", across, topology.num_hosts), ("handed out", half, size)]
    return [step.send(f"{name} {part}", sent, "dense", ranks=n, channel=name) for part, sent, n in parts][-1]


def simulate(operations: Sequence[Operation]) -> dict[Kind, float]:
    """Simulates operations: each begins when those that it waits for have ended; they share resources equally.

    Args:
        operations: the operations, each after those that it waits for.

    Returns:
        Seconds by kind; their sum is the duration of the step. Time counts as ``"compute"`` while anything computes;
        else it is divided equally among the collectives in progress; without any, it counts as ``"program"``.

    Example:
        Two exchanges share the uplink while the rank computes.

        >>> compute = Operation(name="mlp", kind="compute", seconds={"core": 2.0})
        >>> sends = [Operation(name=name, kind="embeddings", seconds={"uplink": 1.5}) for name in "ab"]
        >>> seconds = simulate([compute, *sends])
        >>> seconds["compute"], seconds["embeddings"]
        (2.0, 1.0)
    """
    left: dict[str, dict[str, float]] = {
        o.name: {"latency": o.latency, **dict[str, float](o.seconds.items())} for o in operations
    }
    waiting = {operation.name: set(operation.after) for operation in operations}
    kinds = {operation.name: operation.kind for operation in operations}
    begun: list[str] = []
    exposed: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
    while waiting or begun:
        begun += [name for name, others in waiting.items() if not others]
        waiting = {name: others for name, others in waiting.items() if others}
        assert begun, "an operation waits for another that is not in the list"
        for name in begun:
            left[name] = {resource: seconds for resource, seconds in left[name].items() if seconds > _DONE}
        ended = [name for name in begun if not left[name]]
        for name in ended:
            begun.remove(name)
            for others in waiting.values():
                others.discard(name)
        if ended:
            continue
        # An operation begins with its latency, in which it occupies no resource.
        in_use = [(left[name], ["latency"] if "latency" in left[name] else [*left[name]]) for name in begun]
        users = Counter(resource for _, resources in in_use for resource in resources if resource != "latency")
        # Advance to the moment at which an operation is done with a resource.
        step = min(seconds[r] * users.get(r, 1) for seconds, resources in in_use for r in resources)
        for seconds, resources in in_use:
            for resource in resources:
                seconds[resource] -= step / users.get(resource, 1)
        computing = [name for name in begun if kinds[name] == "compute"]
        seen = computing or [name for name in begun if kinds[name] != "program"] or begun
        for name in seen:
            exposed[kinds[name]] += step / len(seen)
    return exposed
