"""`Cluster`: the speed of a cluster's ranks and links, measured or from data sheets; saved as ``cluster.toml``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import tomli_w
from annotated_types import Ge, Gt, Le

from dmt.errors import InputError, did_you_mean
from dmt.files import from_record, read_file, write_or_raise

__all__ = ["Cluster", "CollectiveKind", "CollectiveRates", "load_cluster", "save_cluster", "shipped_clusters"]

CollectiveKind = Literal["all_to_all", "exchange", "all_reduce"]
"""An all-to-all of TorchRec, an exchange between towers (`dmt.collectives.start_exchange`), or an all-reduce."""

Rate = Annotated[float, Gt(0)]
Seconds = Annotated[float, Ge(0)]
Count = Annotated[int, Gt(0)]
Shares = Mapping[Count, Annotated[float, Gt(0), Le(1)]]

_FOLDER = Path(__file__).parent / "clusters"
_REMEDY = "Correct the file, or write a new one with `dmt bench-comms`."
# Pydantic refuses files with unknown keys and numbers that are not finite.
_CHECKS = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """Speed of one kind of collective."""

    __pydantic_config__ = _CHECKS

    latency_s: Seconds
    """Seconds that a collective takes before it sends any byte."""
    uplink_bytes_per_s: Rate
    """Bytes per second that a host sends to other hosts while it receives as many, in groups of the fastest size."""
    host_bytes_per_s: Rate
    """Bytes per second that a rank sends to the other ranks of its host, in groups of the fastest size."""
    core_s_per_byte: Seconds = 0.0
    """Seconds for which all cores of a rank are busy for each byte that it sends; 0 where a device does this work."""
    uplink_by_ranks: Shares = field(default_factory=dict)
    """Share of `uplink_bytes_per_s` that groups reach, by their number of ranks (DMT, section 2.3.1). For other numbers
    it is interpolated over their logarithm; beyond either end it is the nearest share. If empty, it is always 1."""
    host_by_ranks: Shares = field(default_factory=dict)
    """The same for `host_bytes_per_s`."""

    def uplink_rate(self, ranks: int) -> float:
        """Returns the bytes per second that a host sends to other hosts while all groups of ``ranks`` ranks send."""
        return self.uplink_bytes_per_s * _share(self.uplink_by_ranks, ranks)

    def host_rate(self, ranks: int) -> float:
        """Returns the bytes per second that a rank sends inside its host while all groups of ``ranks`` ranks send.

        Example:
            >>> rates = CollectiveRates(
            ...     latency_s=0.0, uplink_bytes_per_s=4.0, host_bytes_per_s=8.0, host_by_ranks={8: 0.5, 2: 1.0}
            ... )
            >>> rates.host_rate(4)
            6.0
        """
        return self.host_bytes_per_s * _share(self.host_by_ranks, ranks)


def _share(shares: Mapping[int, float], ranks: int) -> float:
    numbers, values = zip(*(sorted(shares.items()) or [(1, 1.0)]), strict=True)
    return float(np.interp(math.log(ranks), np.log(numbers), values))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Speed of a cluster of equal hosts; rates outside `CollectiveRates` are those of one rank while all ranks work."""

    __pydantic_config__ = _CHECKS

    name: str
    hosts: Count
    """Hosts that were measured; a prediction may be for another number of hosts."""
    ranks_per_host: Count
    matmul_flops: Rate
    """Floating-point operations per second in matrix products."""
    memory_bytes_per_s: Rate
    """Bytes read or written per second in element-wise operations and copies."""
    lookup_bytes_per_s: Rate
    """Bytes of rows read or written per second by lookups and updates of tables."""
    all_to_all: CollectiveRates
    exchange: CollectiveRates
    all_reduce: CollectiveRates
    operator_s: Seconds = 0.0
    """Seconds that a rank takes to start one operator, however little it computes."""
    step_s: Seconds = 0.0
    """Seconds that the program takes to launch the work of a step on a device; no step is shorter."""
    source: str = ""
    """The origin of the numbers, as text."""

    def rates(self, kind: CollectiveKind) -> CollectiveRates:
        """Returns the rates of a kind of collective."""
        rates: CollectiveRates = getattr(self, kind)
        return rates

    def with_uplink(self, gbit_per_s: float) -> Cluster:
        """Returns a copy of the cluster whose hosts send to others at ``gbit_per_s`` * 10^9 bits per second.

        Raises:
            InputError: ``gbit_per_s`` is not a finite number above 0.
        """
        if not 0 < gbit_per_s < math.inf:
            raise InputError(f"gbit_per_s={gbit_per_s:g} (--uplink-gbit-per-s) must be a finite number above 0.")
        rates: dict[str, Any] = {
            kind: replace(self.rates(kind), uplink_bytes_per_s=gbit_per_s * 1e9 / 8)
            for kind in get_args(CollectiveKind)
        }
        return replace(self, **rates)


def shipped_clusters() -> list[str]:
    """Returns the names of the clusters that come with the library."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_cluster(path: str | Path) -> Cluster:
    """Reads a ``cluster.toml`` file, or a cluster that comes with the library, given by name.

    Raises:
        InputError: no file or shipped cluster has this name, or the file does not describe a cluster (a key is missing
            or unknown, a rate is not positive, a share is above 1); the message names the key.

    Example:
        >>> load_cluster("a100").ranks_per_host
        8
    """
    known = shipped_clusters()
    file = _FOLDER / f"{path}.toml" if str(path) in known else Path(path)
    if not file.exists():
        raise InputError(
            f"Cluster {path} is neither a file nor a shipped cluster "
            f"({', '.join(known)}).{did_you_mean(str(path), known)} To measure your machines and write such a file, "
            "start `dmt bench-comms` with torchrun."
        )
    place = f"Cluster {path}"
    record = read_file(file, "TOML", place=place, remedy=_REMEDY)
    return from_record(Cluster, record, place=place, remedy=_REMEDY)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a ``cluster.toml`` that `load_cluster` reads; raises `InputError` if it cannot be written."""
    record = json.loads(json.dumps(asdict(cluster)))  # JSON makes ranks strings, as TOML keys must be
    with write_or_raise(path, "Cluster file") as part:
        part.write_text(tomli_w.dumps(record), encoding="utf-8")
