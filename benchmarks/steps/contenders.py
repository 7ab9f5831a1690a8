"""`Contender`: what the step benchmark compares, by name. Pure: reading names needs neither PyTorch nor TorchRec.

======================  ==============================================================================================
name                    what it is
======================  ==============================================================================================
``flat-tw``             DLRM, sharded by TorchRec table-wise; ``-cw``, ``-rw``, ``-twrw``, ``-grid`` likewise
``flat-tw-dp``          the same with small tables data-parallel: those for which it means fewer bytes across hosts
``flat-tw-dp1000``      the same with tables of at most 1,000 rows data-parallel
``flat-planner``        DLRM, sharded as TorchRec's planner does on GPUs, where it takes some tables data-parallel
``etc-cr2``             DMT-DLRM, sharded by TorchRec's ``EmbeddingTowerCollectionSharder``, column-wise inside towers
``etc-cr2-twrw``        the same, row-wise inside towers
``sptt``                DLRM in this library's tower dataflow, nothing else changed
``dmt-cr2``             DMT-DLRM in this library's towers; towers send 1/2 of the numbers (1/4, ... with cr4, ...)
``sptt-tw``             all tables table-wise inside towers; elsewhere as this library's planner has it; ``dmt-cr2-tw``
``sptt-2d``             two replicas of the tables inside each host (2D sparse parallelism); ``dmt-cr2-2d`` likewise
``...+fp16``            outputs and their gradients travel as FP16
``...+prefetch``        TorchRec's ``TrainPipelineSparseDist``: ids travel one batch ahead
``...+hier``            dense gradients reduced host by host (`dmt.HierarchicalDataParallel`)
``...+bf16-dense``      the same with BF16 between hosts; goes with ``+fp16``
``...+mb8``             8 micro-batches (`dmt.run_in_micro_batches`); ``+mb2``, ``+mb4`` likewise
``...+rank-towers``     a tower on each rank instead of each host
``...+all``             ``+prefetch``, ``+hier`` and micro-batches, as many as do the most at this ratio
``...+unique``          each distinct input of a rank crosses hosts once (part of ``+all``, where enough repeat)
``...+unique-host``     each distinct input of a host crosses once; without ``+hot``
``...+hot``             hot rows on every rank, by a profile (`dmt.hot_rows.runtime`); for ``sptt``
``...+global``          ids take the global route (`dmt.sptt.id_routes`)
======================  ==============================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dmt.errors import InputError, did_you_mean

__all__ = ["EMBEDDING_DIM", "FLAT_SCHEMES", "OWN_OPTIONS", "Contender", "all_contenders", "parse_contender", "select"]

Family = Literal["flat", "etc", "sptt", "dmt"]

EMBEDDING_DIM = 128
"""N, columns of every table."""
FLAT_SCHEMES = {
    "tw": "table_wise",
    "cw": "column_wise",
    "rw": "row_wise",
    "twrw": "table_row_wise",
    "grid": "grid_shard",
    "planner": "planner",
}
_PARTS = ("mb2", "mb4", "mb8")
_SHARING = ("unique", "unique-host", "hot")
OWN_OPTIONS = ("all", "hier", "bf16-dense", *_PARTS, "rank-towers", *_SHARING, "global")
"""Options that only this library's contenders have; see `benchmarks.steps.towers`."""
_RATIOS = (2, 4, 8, 16)
_NAME = re.compile(
    r"(?P<family>flat|etc|sptt|dmt)(-cr(?P<ratio>\d+))?(-(?P<scheme>tw|cw|rw|twrw|grid|planner))?"
    r"(?P<small>-dp(?P<rows>\d+)?)?(?P<replicas>-2d)?"
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train; made by `parse_contender`."""

    name: str
    family: Family
    scheme: str
    """Sharding of the tables: TorchRec's name for flat models and its towers; ``"planner"`` for TorchRec's or ours."""
    data_parallel_rows: int | None = 0
    """Tables of at most this many rows are data-parallel; None for those that then send fewer bytes across hosts."""
    compression: int = 1
    """Numbers of a sample that enter the towers over those that leave them."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Number format of outputs and gradients between ranks (flat, TorchRec's towers) or between towers (ours)."""
    prefetch: bool = False
    """True if ids are exchanged one batch ahead."""
    num_replicas: int = 1
    """R, copies of the tables, all inside a host."""
    options: tuple[str, ...] = ()
    """Options, from `OWN_OPTIONS`."""

    @property
    def has_towers(self) -> bool:
        """True if the model is DMT-DLRM."""
        return self.family in ("etc", "dmt")

    @property
    def plain_model(self) -> str:
        """Contenders of one plain model compute the same."""
        towers = "rank" if self.has_rank_towers else "host"
        return (
            f"DMT-DLRM D={EMBEDDING_DIM // self.compression}, a tower for each {towers}" if self.has_towers else "DLRM"
        )

    @property
    def has_rank_towers(self) -> bool:
        """True if each rank is a tower of its own."""
        return "rank-towers" in self.options

    @property
    def num_micro_batches(self) -> int:
        """K."""
        if "all" in self.options:
            # They cost a little: fewer where there is less to hide.
            return 8 if self.compression <= 4 else 4
        return max((int(option[2:]) for option in self.options if option.startswith("mb")), default=1)

    @property
    def has_hierarchical_reduce(self) -> bool:
        """True if dense gradients are reduced host by host."""
        return not {"hier", "bf16-dense", "all"}.isdisjoint(self.options)

    @property
    def is_unique(self) -> bool:
        """True if equal inputs of a rank cross hosts once."""
        # Of whole tower inputs of 13 features hardly any repeat, so that "auto" leaves them alone.
        return self.is_united or "unique" in self.options or ("all" in self.options and self.family == "sptt")

    @property
    def is_united(self) -> bool:
        """True if equal inputs of all ranks of a host cross hosts once."""
        return "unique-host" in self.options

    @property
    def has_hot_rows(self) -> bool:
        """True if rows that are read most are on every rank."""
        return "hot" in self.options

    @property
    def dense_precision(self) -> Literal["fp32", "bf16"]:
        """Number format of dense gradients between hosts."""
        return "bf16" if "bf16-dense" in self.options else "fp32"


def parse_contender(name: str) -> Contender:
    """Reads a contender's name; the parts after ``+`` come in any order.

    Raises:
        InputError: the name says nothing, or something that its family cannot have.

    Example:
        >>> parse_contender("dmt-cr4+fp16").compression, parse_contender("flat-grid+prefetch+fp16").name
        (4, 'flat-grid+fp16+prefetch')
        >>> parse_contender("flat-rv")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Contender 'flat-rv' is unknown. Did you mean 'flat-rw'?
    """
    base, *extras = name.split("+")
    found = _NAME.fullmatch(base)
    if found is None:
        raise InputError(f"Contender {name!r} is unknown.{did_you_mean(name, [c.name for c in all_contenders()])}")
    family, ratio = found["family"], found["ratio"]
    is_ours = family in ("sptt", "dmt")
    known = ["fp16", "prefetch", *(OWN_OPTIONS if is_ours else ())]
    wrong = next((extra for extra in extras if extra not in known or extras.count(extra) > 1), None)
    if wrong is not None:
        raise InputError(f"Contender {name!r}: +{wrong} is unknown or doubled; {family} takes each of {known} once.")
    if (ratio is not None) != (family in ("etc", "dmt")):
        raise InputError(f"Contender {name!r}: -cr is for etc and dmt, which need it, and for no other.")
    if ratio is not None and (EMBEDDING_DIM % int(ratio) or int(ratio) < 2):
        raise InputError(f"Contender {name!r}: the ratio must divide {EMBEDDING_DIM} and be at least 2.")
    if "bf16-dense" in extras and "fp16" not in extras:
        # It would appear among contenders whose numbers travel as they are.
        raise InputError(f"Contender {name!r}: +bf16-dense goes with +fp16 only.")
    if "hot" in extras and family != "sptt":
        raise InputError(f"Contender {name!r}: +hot is for sptt only; with tower modules copies save nothing.")
    if "unique-host" in extras and {"unique", "hot", "global", "rank-towers"} & set(extras):
        raise InputError(f"Contender {name!r}: +unique-host goes with a tower on each host, and not with +hot.")
    if found["small"] and (family != "flat" or found["scheme"] == "planner"):
        raise InputError(f"Contender {name!r}: -dp is for flat only, and its planner chooses by itself.")
    if found["replicas"] and not is_ours:
        raise InputError(f"Contender {name!r}: -2d is for sptt and dmt only.")
    return Contender(
        name="+".join([base, *(extra for extra in known if extra in extras)]),
        family=family,
        scheme=_scheme(name, family, found["scheme"]),
        data_parallel_rows=int(found["rows"]) if found["rows"] else None if found["small"] else 0,
        compression=int(ratio or 1),
        precision="fp16" if "fp16" in extras else "fp32",
        prefetch="prefetch" in extras or "all" in extras,
        num_replicas=2 if found["replicas"] else 1,
        options=tuple(extra for extra in OWN_OPTIONS if extra in extras),
    )


def _scheme(name: str, family: str, scheme: str | None) -> str:
    if family == "flat" and scheme is not None:
        return FLAT_SCHEMES[scheme]
    if family == "etc" and scheme in (None, "twrw"):
        return "table_column_wise" if scheme is None else "table_row_wise"
    if family in ("sptt", "dmt") and scheme in (None, "tw"):
        return "planner" if scheme is None else "table_wise"
    raise InputError(
        f"Contender {name!r}: flat needs one of {list(FLAT_SCHEMES)} after the name, etc takes twrw or nothing, sptt "
        "and dmt take tw or nothing."
    )


def all_contenders() -> tuple[Contender, ...]:
    """Everything that a full run compares, in the order of its tables."""
    extras = ("", "+fp16", "+prefetch", "+fp16+prefetch")
    # Cut by rows or into a grid they are slower than the others, by far.
    names = [f"flat-{scheme}{extra}" for scheme in ("rw", "grid") for extra in extras[:2]]
    names += [f"flat-{way}{extra}" for way in ("tw", "cw", "twrw", "tw-dp", "cw-dp", "planner") for extra in extras]
    names += [
        f"etc-cr{ratio}{inside}{extra}" for ratio in (2, 4) for inside in ("", "-twrw") for extra in ("", "+prefetch")
    ]
    names += ["sptt", "sptt+fp16", "sptt+all", "sptt+fp16+all"]
    names += [f"dmt-cr2{extra}" for extra in (*extras, "+hier", "+mb8")]
    names += [f"dmt-cr{ratio}" for ratio in _RATIOS[1:]]
    names += [f"dmt-cr{ratio}{extra}" for ratio in _RATIOS for extra in ("+all", "+fp16+all", "+all+rank-towers")]
    names += ["dmt-cr16+fp16+all+rank-towers", "sptt-2d+all", "dmt-cr2-2d+all"]
    return tuple(parse_contender(name) for name in names)


def select(patterns: Sequence[str]) -> tuple[Contender, ...]:
    """Contenders by name or pattern, each once: those of `all_contenders` that match, or one that is spelled out.

    Raises:
        InputError: a pattern matches nothing.

    Example:
        >>> [contender.name for contender in select(["flat-?w", "dmt-cr32"])]
        ['flat-tw', 'flat-cw', 'flat-rw', 'dmt-cr32']
    """
    chosen: dict[str, Contender] = {}
    for pattern in patterns:
        matching = [contender for contender in all_contenders() if fnmatchcase(contender.name, pattern)]
        if not matching and any(sign in pattern for sign in "*?["):
            raise InputError(f"No contender matches {pattern!r}. Write e.g. 'dmt-*' or 'flat-tw'.")
        for contender in matching or [parse_contender(pattern)]:
            chosen[contender.name] = contender
    return tuple(chosen.values())
