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
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveKind

__all__ = [
    "Kind",
    "Load",
    "Operation",
    "Operator",
    "PartWork",
    "Resource",
    "StepWork",
    "Timeline",
    "simulate",
    "step_operations",
]

Resource = Literal["core", "uplink", "host_link"]
"""The cores of a rank, the link of its host to others, and its link to ranks of its host."""
Kind = Literal["compute", "ids", "embeddings", "dense", "replicas", "program"]
"""Kinds that operations are booked under: computing; the collectives of ids, of embeddings and their gradients, of
dense gradients, of replicas; the program that starts all that."""

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
    compared_ids: float = 0.0
    """Ids of a rank that are compared to find equal inputs (``unique``)."""
    parts: tuple[float, ...] = ()
    """For each micro-batch the share of the rows that no earlier one has; nothing where samples share no rows."""

    @property
    def uplink_bytes(self) -> float:
        """Bytes that the busiest host sends to others in a step."""
        loads = [value.uplink for value in vars(self).values() if isinstance(value, Load)]
        return sum(loads) + self.tower_outputs.uplink


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that a rank does in a step."""

    name: str
    kind: Kind
    seconds: Mapping[Resource, float]
    """Seconds of each resource that it takes if it has it to itself; all of them at once."""
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
    ) -> str:
        """Adds computing, after the computing before it; ``moved`` bytes are read, and written."""
        cluster = self.cluster
        seconds += 2 * moved / cluster.memory_bytes_per_s + looked_up / cluster.lookup_bytes_per_s
        return self._add(Operation(name=name, kind="compute", seconds={"core": seconds}, after=after), "core")

    def send(
        self, name: str, kind: Kind, collective: CollectiveKind, *, load: Load, ranks: int, channel: str, **how: float
    ) -> str:
        """Adds a collective over groups of ``ranks`` ranks.

        It carries ``share`` (1.0) of the load, and begins once the program has come to it, or ``at_once``.
        """
        rates, share = self.cluster.rates(collective), how.get("share", 1.0)
        uplink, inside = share * load.uplink, share * load.inside
        if not uplink and not inside:
            return self._last.get("core", "")
        operation = Operation(
            name=name,
            kind=kind,
            seconds={
                "uplink": uplink / (rates.uplink_bytes_per_s * self.cluster.share_of_uplink(ranks)),
                "host_link": inside / rates.host_bytes_per_s,
                "core": (uplink / self.cluster.ranks_per_host + inside) * rates.core_s_per_byte,
            },
            latency=rates.latency_s,
            after=() if how.get("at_once") else [self._last["core"]] if "core" in self._last else (),
        )
        return self._add(operation, channel)

    def _add(self, operation: Operation, channel: str) -> str:
        before = {*operation.after, self._last.get(channel, "")} - {""}
        known = Operation(**{**vars(operation), "after": sorted(before)})
        self.operations.append(known)
        self._last[channel] = known.name
        return known.name


def step_operations(
    work: StepWork,
    cluster: Cluster,
    topology: TowerTopology,
    *,
    flat: bool = False,
    micro_batches: int = 1,
    prefetch: bool = False,
    hierarchical: bool = False,
) -> list[Operation]:
    """Returns the operations of a step (DMT, section 3.1, `docs/towers.md`; flat: Neo, figure 18).

    Args:
        work: of the busiest rank.
        cluster: speed of its ranks and links.
        topology: of the job.
        flat: True for TorchRec's flat dataflow, in which all ranks exchange with all.
        micro_batches: K.
        prefetch: True if the ids of the next batch travel during the step.
        hierarchical: True if dense gradients are summed inside hosts before they cross, and handed out again after.
    """
    step, parts = _Program(cluster), range(micro_batches)
    inner, copies = topology.ranks_per_tower, topology.num_replicas
    peers = topology.world_size if flat else topology.num_towers
    exchange: CollectiveKind = "all_to_all" if flat else "exchange"
    shares = work.parts or [1 / micro_batches for _ in parts]
    assert len(shares) == micro_batches, f"shares of {len(shares)} micro-batches in a step of {micro_batches}"
    if work.compared_ids:
        step.compute("ids compared", work.compared_ids * cluster.told_apart_s)
    ids = [
        step.send(name, "ids", "all_to_all", load=load, ranks=ranks, channel="ids", at_once=prefetch)
        for name, load, ranks in (("ids", work.peer_ids, peers), ("ids in towers", work.tower_ids, inner))
    ]
    step.compute("lookup", looked_up=work.lookup_bytes / 3, after=[] if prefetch else ids)
    arrived = step.send("embeddings", "embeddings", "all_to_all", load=work.tower_outputs, ranks=inner, channel="tower")
    towers = [work.towers.seconds(work.peer_samples * share, cluster) for share in shares]
    over, over_back = work.dense.seconds(work.samples / micro_batches, cluster)
    early, early_back = work.early.seconds(work.samples / micro_batches, cluster)
    there, back_again = (work.added_bytes[way] / 2 / micro_batches for way in (0, 1))
    # Where samples share rows, a micro-batch joins its own to those before. Its gradient begins as zeros for all these
    # rows, and is added to those of other micro-batches.
    joined = [sum(shares[: k + 1]) * work.output_bytes if k and work.parts else 0.0 for k in parts]
    # Of each micro-batch but the first the gradients of weights are added to those that there are.
    sums = [0.0 if k == 0 else _SUM_PASSES / 2 for k in parts]

    def exchanged(name: str, load: Load, k: int) -> str:
        return step.send(name, "embeddings", exchange, load=load, ranks=peers, channel="peers", share=shares[k])

    sent: list[str] = []
    returned: dict[int, str] = {}
    for k in parts:
        step.compute(f"towers {k}", towers[k][0], moved=_COPIES * work.embedding_bytes * shares[k], after=[arrived])
        sent.append(exchanged(f"outputs {k}", work.peer_outputs, k))
    for k in parts:
        step.compute(f"dense arch {k}", early)
        moved = _COPIES * work.output_bytes / micro_batches + there + joined[k]
        step.compute(f"over {k}", over, moved=moved, after=[sent[k]])
    for k in reversed(parts):
        moved = _COPIES * work.output_bytes / micro_batches + sums[len(returned)] * work.dense.weight_bytes
        step.compute(f"over {k}, backward", over_back, moved=moved + (_SUM_PASSES + 1) / 2 * joined[k])
        # Complete, because those that share its rows, the later ones, have gone back before.
        returned[k] = exchanged(f"gradients {k}", work.peer_gradients, k)
        step.compute(f"dense arch {k}, backward", early_back)
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
    step.compute("update of tables", looked_up=work.lookup_bytes * 2 / 3, after=[back])
    step.compute("update", moved=_UPDATE_PASSES / 2 * work.dense_bytes, after=[reduced, weights])
    step.send("average of replicas", "replicas", "all_reduce", load=work.replicas, ranks=copies, channel="replicas")
    return step.operations


def _reduction(step: _Program, load: Load, topology: TowerTopology, *, hierarchical: bool) -> str:
    """Adds the reduction of dense gradients: a ring, or inside hosts, between them, and inside them again."""
    half, across = Load(0.0, load.inside / 2), Load(load.uplink, 0.0)
    ways = [("dense gradients", load, topology.world_size)]
    if hierarchical:
        size = topology.host_size
        ways = [("sum of a host", half, size), ("sum over hosts", across, topology.num_hosts)]
        ways.append(("sum handed out", half, size))
    for name, part, ranks in ways:
        last = step.send(name, "dense", "all_reduce", load=part, ranks=ranks, channel="dense")
    return last


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each operation of a step ran."""

    seconds: float
    """From the first beginning to the last end."""
    spans: dict[str, tuple[float, float]]
    """Beginning and end of each operation, seconds from the beginning of the step."""
    exposed: dict[Kind, float] = field(default_factory=dict)
    """Seconds by kind, which add up to all: computing whenever something computes, otherwise the collectives that run,
    in equal parts, and the program where nothing else does."""


def simulate(operations: Sequence[Operation]) -> Timeline:
    """Runs operations, each as soon as those before it have ended; resources are shared equally.

    They come in an order in which each is after those that it waits for.

    Example:
        Two exchanges share the uplink while the rank computes.

        >>> compute = Operation(name="mlp", kind="compute", seconds={"core": 2.0})
        >>> sends = [Operation(name=name, kind="embeddings", seconds={"uplink": 1.5}) for name in "ab"]
        >>> found = simulate([compute, *sends])
        >>> found.seconds, found.exposed["embeddings"]
        (3.0, 1.0)
    """
    # Latency comes before the rest; an operation that has it uses nothing else.
    stages: dict[str, list[dict[str, float]]] = {
        operation.name: [{"latency": operation.latency}, dict(operation.seconds.items())] for operation in operations
    }
    waiting = {operation.name: set(operation.after) for operation in operations}
    kinds = {operation.name: operation.kind for operation in operations}
    begun: dict[str, float] = {}
    spans: dict[str, tuple[float, float]] = {}
    exposed: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
    now = 0.0
    while waiting or begun:
        for name in [name for name, others in waiting.items() if not others]:
            del waiting[name]
            begun[name] = now
        assert begun, "an operation waits for one that is not there"
        left = {name: _left(stages[name]) for name in begun}
        ended = [name for name, seconds in left.items() if not seconds]
        for name in ended:
            spans[name] = (begun.pop(name), now)
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
        seen = computing or [name for name in begun if kinds[name] != "program"] or list(begun)
        for name in seen:
            exposed[kinds[name]] += step / len(seen)
        now += step
    return Timeline(seconds=now, spans=spans, exposed=exposed)


def _left(stages: list[dict[str, float]]) -> dict[str, float]:
    """The stage that an operation is in, without what it has had of it; empty when it has ended."""
    while stages:
        for resource in [resource for resource, seconds in stages[0].items() if seconds <= _DONE]:
            del stages[0][resource]
        if stages[0]:
            return stages[0]
        stages.pop(0)
    return {}
