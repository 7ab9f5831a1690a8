"""`CONTENDERS`: the setups that the step benchmark compares. Needs neither PyTorch nor TorchRec.

The records use their names: ``flat-tw-dp15000+prefetch`` is DLRM sharded table-wise by TorchRec, with tables of up to
15,000 rows on every rank and ids exchanged one batch ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Literal

from dmt.errors import InputError, did_you_mean

__all__ = ["CONTENDERS", "EMBEDDING_DIM", "Contender", "Family", "named", "select"]

Family = Literal["flat", "etc", "sptt", "dmt", "products"]
"""TorchRec's flat model or its ``EmbeddingTowerCollection``; this library's flat model over towers, or its tower model
with the paper's projections, or with modules that keep inner products."""
EMBEDDING_DIM = 128
"""N, columns of every table."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One setup: a model, its sharding, and options."""

    name: str
    family: Family
    scheme: str = "planner"
    """Sharding scheme of the tables, by TorchRec's name; ``"planner"``: TorchRec's planner (flat) or this library's."""
    data_parallel_rows: int | None = 0
    """Flat: tables of at most this many rows are on every rank; None: those that then send fewer bytes across hosts."""
    compression: int = 1
    """Numbers per sample that enter the towers, divided by those that leave them."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Number format of outputs and gradients sent between ranks (TorchRec) or between towers (this library)."""
    prefetch: bool = False
    """True if ids are exchanged one batch ahead (TorchRec's ``TrainPipelineSparseDist``)."""
    micro_batches: int = 1
    """K of `dmt.run_in_micro_batches`."""
    dense_reduce: Literal["ring", "fp32", "bf16"] = "ring"
    """Reduction of dense gradients: DDP's ring, or `dmt.HierarchicalDataParallel` with this format between hosts."""
    rank_towers: bool = False
    """True: each rank is a tower; False: each host."""
    unique: bool = False
    """True if each distinct input of a rank's batch crosses hosts once; flat: by TorchRec's variable batches."""
    hot_rows: bool = False
    """True if the most-read rows, chosen by a profile, are on every rank."""
    outside: bool = False
    """True if tables are on every rank, outside towers, where that sends fewer bytes across hosts."""
    num_replicas: int = 1
    """R, copies of the tables, averaged after every step."""
    replica_placement: Literal["inter_host", "intra_host"] = "inter_host"
    """``"inter_host"``: a replica has whole hosts; ``"intra_host"``: it has an equal part of every host."""

    @property
    def has_towers(self) -> bool:
        """True if the model is DMT-DLRM."""
        return self.family in ("etc", "dmt", "products")

    @property
    def plain_model(self) -> str:
        """Name of the unsharded model; contenders with the same plain model give the same results."""
        if not self.has_towers:
            return "DLRM"
        towers = f"a tower for each {'rank' if self.rank_towers else 'host'}{', small tables outside' * self.outside}"
        replicas = f", {self.num_replicas} replicas ({self.replica_placement})" * (self.num_replicas > 1)
        modules = " with products" if self.family == "products" else ""
        return f"DMT-DLRM{modules}, ratio {self.compression}, {towers}{replicas}"


def _flat() -> Iterator[Contender]:
    """Yields what any TorchRec user can have: two schemes, small tables on every rank, distinct ids, the planner."""
    schemes: list[tuple[str, str, int | None]] = [
        *((f"flat-{short}", scheme, 0) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        *((f"flat-{short}-dp", scheme, None) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        *((f"flat-{short}-dp15000", scheme, 15_000) for short, scheme in (("tw", "table_wise"), ("cw", "column_wise"))),
        ("flat-tw+vbe", "table_wise", 0),
        ("flat-planner", "planner", 0),
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
    """Yields setups of the flat model over towers."""
    yield Contender(name="sptt", family="sptt")
    yield Contender(name="sptt+unique", family="sptt", unique=True)
    yield Contender(name="sptt+hier+hot", family="sptt", dense_reduce="fp32", hot_rows=True)
    best = {"prefetch": True, "unique": True}
    for micro_batches, outside in ((4, False), (4, True), (16, False)):
        yield Contender(
            name=f"sptt+prefetch+hier+mb{micro_batches}+unique+rank-towers{'+outside' * outside}",
            family="sptt",
            dense_reduce="fp32",
            micro_batches=micro_batches,
            rank_towers=True,
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
    """Yields DMT-DLRM with single options; with all, also in FP16, with rank towers and with small tables outside.

    Modules that keep inner products are only in the fastest of these: with all options, a tower on each rank.
    """
    for ratio in (2, 4, 8, 16):
        yield Contender(name=f"dmt-cr{ratio}", family="dmt", compression=ratio)
    yield Contender(name="dmt-cr2+fp16", family="dmt", compression=2, precision="fp16")
    yield Contender(name="dmt-cr2+unique", family="dmt", compression=2, unique=True)
    yield Contender(name="dmt-cr2+outside", family="dmt", compression=2, outside=True)
    families: tuple[Family, ...] = ("dmt", "products")
    for family, ratio, half in product(families, (2, 4, 8, 16), (False, True)):
        ways = ((False, False), (True, False), (False, True), (True, True))
        for rank_towers, outside in ways if family == "dmt" else ways[1::2]:
            options = f"{'+fp16' * half}+all{'+rank-towers' * rank_towers}{'+outside' * outside}"
            yield Contender(
                name=f"{family}-cr{ratio}{options}",
                family=family,
                compression=ratio,
                precision="fp16" if half else "fp32",
                prefetch=True,
                # Micro-batches cost a little, and small tables outside leave less to overlap.
                micro_batches=(4 if outside else 8) if ratio <= 4 else (1 if outside else 2),
                dense_reduce="fp32",
                rank_towers=rank_towers,
                outside=outside,
            )


def _replicas() -> Iterator[Contender]:
    """Yields the flat model over towers and DMT-DLRM with R copies of the tables."""
    for number, placement in ((2, "inter_host"), (2, "intra_host"), (4, "inter_host"), (4, "intra_host")):
        replicas, name = {"num_replicas": number, "replica_placement": placement}, f"+r{number}-{placement[:5]}"
        yield Contender(name=f"sptt{name}", family="sptt", **replicas)  # type: ignore[arg-type]
        yield Contender(name=f"dmt-cr2{name}", family="dmt", compression=2, **replicas)  # type: ignore[arg-type]


_PARTS = (_flat, _torchrec_towers, _same_model, _tower_models, _replicas)
CONTENDERS: Mapping[str, Contender] = {contender.name: contender for part in _PARTS for contender in part()}
"""All contenders by name, in the order of the result tables."""


def named(name: str) -> Contender:
    """Returns the contender with this name.

    Raises:
        InputError: there is no such contender.

    Example:
        >>> named("dmt-cr4+all").compression, named("flat-tw-dp15000+prefetch").data_parallel_rows
        (4, 15000)
        >>> named("flat-rv")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Contender 'flat-rv' is unknown. Did you mean 'flat-tw'? See train_step --list.
    """
    if name not in CONTENDERS:
        raise InputError(f"Contender {name!r} is unknown.{did_you_mean(name, list(CONTENDERS))} See train_step --list.")
    return CONTENDERS[name]


def select(patterns: Sequence[str]) -> tuple[Contender, ...]:
    """Returns the contenders that names or patterns match, each once, in the order of `CONTENDERS`.

    Raises:
        InputError: a name or pattern matches no contender.

    Example:
        >>> [contender.name for contender in select(["etc-*", "sptt"])]
        ['etc-cr2', 'etc-cr2+prefetch', 'etc-cr4', 'etc-cr4+prefetch', 'sptt']
    """
    for pattern in patterns:
        if not any(sign in pattern for sign in "*?["):
            named(pattern)
        elif not any(fnmatchcase(name, pattern) for name in CONTENDERS):
            raise InputError(f"No contender matches {pattern!r}. Give, for example, 'dmt-*' or 'flat-tw'.")
    return tuple(found for name, found in CONTENDERS.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
