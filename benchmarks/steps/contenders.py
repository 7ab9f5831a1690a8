"""`CONTENDERS`: what the step benchmark compares, as a table. Pure: needs neither PyTorch nor TorchRec.

Names are those of the records: ``flat-tw-dp15000+prefetch`` is DLRM sharded table-wise by TorchRec, with tables of up
to 15,000 rows on every rank and ids exchanged one batch ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dmt.errors import InputError, did_you_mean

__all__ = ["CONTENDERS", "EMBEDDING_DIM", "Contender", "Family", "named", "select"]

Family = Literal["flat", "etc", "sptt", "dmt"]
"""TorchRec's flat model, its ``EmbeddingTowerCollection``, this library's flat model over towers, its tower models."""
EMBEDDING_DIM = 128
"""N, columns of every table."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train."""

    name: str
    family: Family
    scheme: str = "planner"
    """Sharding of the tables: TorchRec's name, or ``"planner"`` for TorchRec's planner (flat) or this library's."""
    data_parallel_rows: int | None = 0
    """Tables of at most this many rows are on every rank; None for those that then send fewer bytes across hosts."""
    compression: int = 1
    """Numbers of a sample that enter the towers over those that leave them."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Number format of outputs and gradients between ranks (TorchRec's) or between towers (ours)."""
    prefetch: bool = False
    """True if ids are exchanged one batch ahead (TorchRec's ``TrainPipelineSparseDist``)."""
    micro_batches: int = 1
    """K of `dmt.run_in_micro_batches`."""
    dense_reduce: Literal["ring", "fp32", "bf16"] = "ring"
    """Reduction of dense gradients: DDP's, or `dmt.HierarchicalDataParallel` with this format between hosts."""
    rank_towers: bool = False
    """True for a tower on each rank instead of each host."""
    unique: bool = False
    """True if each distinct input of a rank's batch crosses hosts once; in ``flat`` by TorchRec's variable batches."""
    hot_rows: bool = False
    """True if rows that are read most are on every rank, chosen by a profile."""
    outside: bool = False
    """True if the tables that then send fewer bytes across hosts are on every rank, outside towers."""
    num_replicas: int = 1
    """R, copies of the tables, averaged after every step."""
    replica_placement: Literal["inter_host", "intra_host"] = "inter_host"
    """``"inter_host"``: a replica has whole hosts; ``"intra_host"``: an equal part of every host."""

    @property
    def has_towers(self) -> bool:
        """True if the model is DMT-DLRM."""
        return self.family in ("etc", "dmt")

    @property
    def plain_model(self) -> str:
        """Name of the unsharded model; contenders of one plain model compute the same."""
        if not self.has_towers:
            return "DLRM"
        towers = f"a tower for each {'rank' if self.rank_towers else 'host'}{', small tables outside' * self.outside}"
        replicas = f", {self.num_replicas} replicas ({self.replica_placement})" * (self.num_replicas > 1)
        return f"DMT-DLRM D={EMBEDDING_DIM // self.compression}, {towers}{replicas}"


def _flat() -> Iterator[Contender]:
    """What any TorchRec user can have: two schemes, small tables on every rank, distinct ids only, its planner."""
    schemes: list[tuple[str, str, int | None]] = [
        *((f"flat-{short}", scheme, 0) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        *((f"flat-{short}-dp", scheme, None) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        *((f"flat-{short}-dp15000", scheme, 15_000) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        ("flat-tw+vbe", "table_wise", 0),
        ("flat-planner", "planner", 0),
        ("flat-rw", "row_wise", 0),
    ]
    for base, scheme, rows in schemes:
        for precision, half in (("fp32", ""), ("fp16", "+fp16")):
            for prefetch in (False, True):
                yield Contender(
                    name=f"{base}{half}{'+prefetch' * prefetch}",
                    family="flat",
                    scheme=scheme,
                    data_parallel_rows=rows,
                    precision=precision,  # type: ignore[arg-type]
                    prefetch=prefetch,
                    unique="+vbe" in base,
                )


def _torchrec_towers() -> Iterator[Contender]:
    for ratio in (2, 4):
        for prefetch in (False, True):
            yield Contender(
                name=f"etc-cr{ratio}{'+prefetch' * prefetch}",
                family="etc",
                scheme="table_column_wise",
                compression=ratio,
                prefetch=prefetch,
            )


def _same_model() -> Iterator[Contender]:
    """The flat model over towers."""
    yield Contender(name="sptt", family="sptt")
    yield Contender(name="sptt+fp16", family="sptt", precision="fp16")
    yield Contender(name="sptt+unique", family="sptt", unique=True)
    yield Contender(name="sptt+hot", family="sptt", hot_rows=True)
    yield Contender(name="sptt+unique+hot", family="sptt", unique=True, hot_rows=True)
    yield Contender(name="sptt+hier+hot", family="sptt", dense_reduce="fp32", hot_rows=True)
    best = {"prefetch": True, "unique": True}
    yield Contender(name="sptt+prefetch+unique+rank-towers", family="sptt", rank_towers=True, **best)
    ways = [(4, False, False), (4, True, False), (4, True, True), (16, True, False)]
    for micro_batches, rank_towers, outside in ways:
        options = "+rank-towers" * rank_towers + "+outside" * outside
        yield Contender(
            name=f"sptt+prefetch+hier+mb{micro_batches}+unique{options}",
            family="sptt",
            dense_reduce="fp32",
            micro_batches=micro_batches,
            rank_towers=rank_towers,
            outside=outside,
            **best,
        )
    for micro_batches, rank_towers in ((4, False), (8, True)):
        yield Contender(
            name=f"sptt+fp16+prefetch+bf16-dense+mb{micro_batches}+unique{'+rank-towers' * rank_towers}",
            family="sptt",
            precision="fp16",
            dense_reduce="bf16",
            micro_batches=micro_batches,
            rank_towers=rank_towers,
            **best,
        )


def _tower_models() -> Iterator[Contender]:
    """DMT-DLRM; with all options in both precisions, a tower on each rank, and small tables outside towers."""
    for ratio in (2, 4, 8, 16):
        yield Contender(name=f"dmt-cr{ratio}", family="dmt", compression=ratio)
    yield Contender(name="dmt-cr2+fp16", family="dmt", compression=2, precision="fp16")
    yield Contender(name="dmt-cr2+unique", family="dmt", compression=2, unique=True)
    yield Contender(name="dmt-cr2+outside", family="dmt", compression=2, outside=True)
    yield Contender(name="dmt-cr2+hier", family="dmt", compression=2, dense_reduce="fp32")
    yield Contender(name="dmt-cr2+mb8", family="dmt", compression=2, micro_batches=8)
    for ratio in (2, 4, 8, 16):
        for half in (False, True):
            for rank_towers, outside in ((False, False), (True, False), (False, True), (True, True)):
                yield Contender(
                    name=f"dmt-cr{ratio}{'+fp16' * half}+all{'+rank-towers' * rank_towers}{'+outside' * outside}",
                    family="dmt",
                    compression=ratio,
                    precision="fp16" if half else "fp32",
                    prefetch=True,
                    # Micro-batches cost a little: none where there is little to hide.
                    micro_batches=8 if ratio <= 4 else 1,
                    dense_reduce="fp32",
                    rank_towers=rank_towers,
                    outside=outside,
                )


def _replicas() -> Iterator[Contender]:
    """The flat model over towers and DMT-DLRM, with R copies of the tables."""
    for number, placement in ((2, "inter_host"), (2, "intra_host"), (4, "inter_host"), (4, "intra_host")):
        replicas, name = {"num_replicas": number, "replica_placement": placement}, f"+r{number}-{placement[:5]}"
        yield Contender(name=f"sptt{name}", family="sptt", **replicas)  # type: ignore[arg-type]
        yield Contender(name=f"dmt-cr2{name}", family="dmt", compression=2, **replicas)  # type: ignore[arg-type]


_PARTS = (_flat, _torchrec_towers, _same_model, _tower_models, _replicas)
CONTENDERS: Mapping[str, Contender] = {contender.name: contender for part in _PARTS for contender in part()}
"""All contenders by name, in the order of the tables."""


def named(name: str) -> Contender:
    """The contender of a name.

    Raises:
        InputError: there is none.

    Example:
        >>> named("dmt-cr4+all").compression, named("flat-tw-dp15000+prefetch").data_parallel_rows
        (4, 15000)
        >>> named("flat-rv")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Contender 'flat-rv' is unknown. Did you mean 'flat-tw'?
    """
    if name not in CONTENDERS:
        raise InputError(f"Contender {name!r} is unknown.{did_you_mean(name, list(CONTENDERS))}")
    return CONTENDERS[name]


def select(patterns: Sequence[str]) -> tuple[Contender, ...]:
    """Contenders by name or pattern, each once, in the order of the table.

    Raises:
        InputError: a pattern matches none.

    Example:
        >>> [contender.name for contender in select(["etc-*", "sptt"])]
        ['etc-cr2', 'etc-cr2+prefetch', 'etc-cr4', 'etc-cr4+prefetch', 'sptt']
    """
    for pattern in patterns:
        if not any(sign in pattern for sign in "*?["):
            named(pattern)
        elif not any(fnmatchcase(name, pattern) for name in CONTENDERS):
            raise InputError(f"No contender matches {pattern!r}. Write e.g. 'dmt-*' or 'flat-tw'.")
    return tuple(found for name, found in CONTENDERS.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
