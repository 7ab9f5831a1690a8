"""`Cluster`: how fast ranks compute and how fast their links are, measured or from a data sheet; ``cluster.toml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from dmt.errors import InputError, did_you_mean
from dmt.files import atomic_write, from_record, read_toml

__all__ = ["Cluster", "CollectiveKind", "CollectiveRates", "load_cluster", "save_cluster", "shipped_clusters"]

CollectiveKind = Literal["all_to_all", "exchange", "all_reduce"]
"""The kinds: TorchRec's all-to-all, `dmt.collectives.start_exchange` between towers, and an all-reduce."""

_FOLDER = Path(__file__).parent / "clusters"
_REMEDY = "Correct it, or write a new one with `dmt bench-comms`."


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """Speed of one kind of collective."""

    latency_s: float
    """Seconds of one that carries next to nothing."""
    uplink_bytes_per_s: float
    """Rate at which a host sends to others, all its ranks together, while it receives at the same rate."""
    host_bytes_per_s: float
    """Rate at which a rank sends to the others of its host."""
    core_s_per_byte: float = 0.0
    """Seconds that all cores of a rank work for each byte it sends, while all ranks work; 0 where a device does it."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Speed of the ranks and links of a cluster whose hosts are alike; rates are per rank while all ranks work.

    Raises:
        InputError: a number that is not positive (latencies and times may be 0), or a share of the hosts' rate above 1.
    """

    name: str
    hosts: int
    """Hosts of the cluster that was measured; a prediction may be for another number."""
    ranks_per_host: int
    matmul_flops: float
    """Floating-point operations per second in matrix products."""
    memory_bytes_per_s: float
    """Bytes read or written per second in element-wise operations and copies."""
    lookup_bytes_per_s: float
    """Bytes of rows read or written per second by lookups and updates of tables."""
    all_to_all: CollectiveRates
    exchange: CollectiveRates
    all_reduce: CollectiveRates
    operator_s: float = 0.0
    """Seconds that a rank takes to start one operator, however little it computes."""
    told_apart_s: float = 0.0
    """Seconds for each id of a batch whose inputs a rank tells apart (``sharding.unique``, hot rows)."""
    step_s: float = 0.0
    """Seconds that the program takes to start the work of a step on a device; no step is shorter."""
    uplink_by_ranks: Mapping[str, float] = field(default_factory=dict)
    """Share of the uplink's rate that a collective reaches, by its number of ranks (DMT, section 2.3.1); between two
    numbers on a line over their logarithm."""
    source: str = ""
    """The origin of the numbers."""

    def __post_init__(self) -> None:
        for name, value in _numbers(self):
            may_be_zero = name.endswith(("_s", "s_per_byte")) and not name.endswith("bytes_per_s")
            if not (0 < value < math.inf or (may_be_zero and value == 0)):
                rule = "zero or a positive number" if may_be_zero else "a positive number"
                raise InputError(f"Cluster {self.name!r}: {name}={value!r} must be {rule}.")
        for ranks, share in self.uplink_by_ranks.items():
            if not ranks.isdecimal() or int(ranks) < 1 or share > 1:
                raise InputError(
                    f"Cluster {self.name!r}: uplink_by_ranks.{ranks}={share!r} must have a number of ranks as its key "
                    "and a share of at most 1."
                )
        by_number: dict[int, str] = {}
        for ranks in self.uplink_by_ranks:
            if (other := by_number.setdefault(int(ranks), ranks)) != ranks:
                raise InputError(
                    f"Cluster {self.name!r}: uplink_by_ranks has {other!r} and {ranks!r}, which are the same number of "
                    "ranks. Leave out one of them."
                )

    def rates(self, kind: CollectiveKind) -> CollectiveRates:
        """The rates of a kind of collective."""
        found: CollectiveRates = getattr(self, kind)
        return found

    def with_uplink(self, gbit_per_s: float) -> Cluster:
        """Returns the cluster with another rate at which a host sends to others, 10^9 bits per second.

        Raises:
            InputError: it is not a positive number.
        """
        rate = gbit_per_s * 1e9 / 8
        rates: dict[str, Any] = {
            kind: replace(self.rates(kind), uplink_bytes_per_s=rate) for kind in get_args(CollectiveKind)
        }
        return replace(self, **rates)

    def share_of_uplink(self, ranks: int) -> float:
        """The share of the uplink's rate that a collective over this number of ranks reaches; 1 where none is given."""
        known = sorted((int(number), share) for number, share in self.uplink_by_ranks.items())
        if not known or ranks <= known[0][0]:
            return known[0][1] if known else 1.0
        for (few, left), (many, right) in pairwise(known):
            if ranks <= many:
                return left + (right - left) * math.log(ranks / few) / math.log(many / few)
        return known[-1][1]


def _numbers(cluster: Cluster) -> list[tuple[str, float]]:
    found = [(f"uplink_by_ranks.{ranks}", share) for ranks, share in cluster.uplink_by_ranks.items()]
    for entry in fields(cluster):
        value = getattr(cluster, entry.name)
        if isinstance(value, CollectiveRates):
            found += [(f"{entry.name}.{name}", rate) for name, rate in asdict(value).items()]
        elif isinstance(value, int | float):
            found.append((entry.name, value))
    return found


def shipped_clusters() -> list[str]:
    """Names of the clusters that come with the library."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_cluster(path: str | Path) -> Cluster:
    """Reads a ``cluster.toml``, or a shipped one by its name.

    Raises:
        InputError: there is no such file or name, or it is not a description of a cluster; the message has the field.

    Example:
        >>> load_cluster("a100").ranks_per_host
        8
    """
    file = _FOLDER / f"{path}.toml"
    if str(path) not in shipped_clusters():
        file = Path(path)
        if not file.exists():
            known = shipped_clusters()
            raise InputError(
                f"Cluster {path} is neither a file nor one that is shipped ({', '.join(known)})."
                f"{did_you_mean(str(path), known)} `dmt bench-comms` under torchrun writes one of your machines."
            )
    place = f"Cluster {path}"
    record = read_toml(file, place=place, remedy=_REMEDY)
    known_keys = [entry.name for entry in fields(Cluster)]
    for key in record:
        if key not in known_keys:
            raise InputError(f"{place}: key {key!r} is unknown.{did_you_mean(key, known_keys)} {_REMEDY}")
    return from_record(Cluster, record, place=place, remedy=_REMEDY)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a ``cluster.toml``."""
    with atomic_write(path) as part:
        part.write_text(tomli_w.dumps(asdict(cluster)))
