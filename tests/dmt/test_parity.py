"""Training on ranks equals plain training; each line is a case of `tests.sptt_case`.

The matrix has every scheme, pooling, dims, topology, id route and precision: `make test` runs a pairwise cover, in
which every value of a factor meets every value of each other one, `make parity` all of it. `CASES` has what needs other
factors, or more than two together. Twins are cases that must end with the same bits. Faults, put into the library, must
make a comparison fail.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dmt import ReplicaSync, TowerMesh
from dmt.hot_rows.copies import HotCopies
from dmt.hot_rows.touched_sum import TouchedRowsSum
from dmt.sptt import flat as sptt_flat
from dmt.sptt import rows, tower_lookup, unique
from dmt.sptt import towers as sptt_towers
from tests.ranks import run_ranks
from tests.sptt_case import MIXES, PRECISIONS, Case, cases_on_rank, check, train

pytestmark = pytest.mark.ranks
PLANS = {1: ((3, 1, 0, 2),), 2: ((0, 2), (3, 1)), 3: ((2,), (3, 0), (1,))}


def of(towers: int, ranks: int, **more: Any) -> Case:
    return Case(**{"towers": towers, "ranks": ranks, "plan": PLANS[towers], **more})


def flat(towers: int, ranks: int, **more: Any) -> Case:
    return of(towers, ranks, kind="flat", **more)


def outside(towers: int, ranks: int, **more: Any) -> Case:
    """Tables 1 and 4 of five are on every rank."""
    plan = {1: ((3, 0, 2),), 2: ((0, 2), (3,)), 3: ((2,), (0,), (3,))}[towers]
    defaults = {"kind": "flat", "dims": (8, 4, 8, 16, 12), "plan": plan, "outside": (4, 1), "scheme": "mixed"}
    return of(towers, ranks, **{**defaults, **more})


def sequences(towers: int, ranks: int, **more: Any) -> Case:
    """All towers but the first look up sequences of up to five items; one table has two features."""
    plan = {1: ((3, 1, 0, 2),), 2: ((0, 2), (3, 1)), 3: ((0,), (3, 2), (1,))}[towers]
    defaults = {
        "plan": plan,
        "sequences": tuple(range(towers > 1, towers)),
        "features": (("f0",), ("f1", "target")),
        "max_bag": 5,
    }
    return of(towers, ranks, **{**defaults, **more})


def several(towers: int, ranks: int, **more: Any) -> Case:
    """A flat model with two collections, each of which has tables in every tower."""
    return Case(
        **{"towers": towers, "ranks": ranks, "kind": "flat", "collections": 2, "plan": ((0, 1), (3, 2)), **more}
    )


def hot(towers: int, ranks: int, **more: Any) -> Case:
    return of(towers, ranks, kind="flat", hot=True, **more)


# Three towers of the model on two hosts.
ELSEWHERE = {"plan": ((0,), (3,), (1, 2)), "placement": (1, 0, 1)}
UNEVEN = {4: (9, 7, 8, 9), 6: (9, 7, 8, 9, 1, 6)}
SMALL_BUCKETS = (("bucket_cap_mb", 8e-5),)  # some 20 numbers each: several are in flight at once
SLOW = "slow: "  # prefix of cases that add little to the others
CASES: dict[str, dict[str, Case]] = {
    "towers": {
        "frozen": of(2, 2, kind="frozen"),
        "swapped": of(3, 2, kind="pass", placement=(2, 0, 1), dims=(8, 4, 12, 16)),
        "an idle rank, batches of one": of(2, 2, dims=(16, 8), plan=((1,), (0,)), sizes=(1, 1, 1, 1)),
        "unequal": flat(2, 2, plan=((4, 1, 3, 0), (2,)), scheme="mixed", dims=(8, 4, 8, 16, 8)),
        "two hosts each": of(2, 4, plan=((2, 0), (1, 3)), scheme="mixed", dims=(8, 8, 24, 8), ranks_per_host=2),
        "a feature of two tables": flat(2, 1, features=(("f0",), ("f0",)), plan=((0, 1), (2, 3)), max_bag=3),
        "a feature of two towers": of(
            2, 1, features=(("f0",), ("f0",)), plan=((0,), (1,), (2, 3)), placement=(0, 0, 1)
        ),
        "each its pooling": of(
            1, 3, pooling=("MEAN", "SUM", "MEAN", "MEAN", "SUM"), features=(("f0",),) * 2, max_bag=4, kind="pass",
            dims=(8, 8, 8, 4, 8), plan=((0, 1, 2, 3, 4),), scheme="row_wise", sizes=(9, 4, 7),
        ),
        "eight tables": flat(
            2, 2, plan=((0, 5, 2, 7), (4, 1, 6, 3)), scheme="mixed", max_bag=4, pooling="MEAN",
            dims=(4, 8, 12, 16, 8, 4, 20, 8), sizes=(3, 5, 1, 4),
        ),
        "three factors": flat(2, 3, scheme="column_wise", dims=(24, 8, 16, 4), id_dtype=torch.int32),
        "clipped": of(3, 1, clip=0.05),
        "clipped nowhere": of(2, 2, clip=1e6, **ELSEWHERE),
        "clipped, replicas": of(2, 1, replicas=2, clip=0.05),
    },
    "collections": {
        "mixed, uneven": several(2, 2, scheme="mixed", dims=(8, 4, 24, 16), max_bag=3, sizes=UNEVEN[4]),
        "three, unique": several(
            2, 1, collections=3, plan=((0, 1, 2), (5, 3, 4)), dims=(8,) * 6, unique=True, max_bag=3
        ),
        "weighted in parts": several(
            3, 2, plan=((0, 3), (1, 4), (2, 5)), dims=(8, 4, 12, 8, 16, 4), weighted=True, max_bag=3, micro_batches=3,
            sizes=UNEVEN[6],
        ),
        "unique in parts, pipelined": several(2, 2, unique=True, micro_batches=2, pipeline="detached"),
        "pipelined": several(2, 1, pipeline="on", clip=0.05),
        "replicas": several(2, 1, replicas=2, interval=2, steps=5, scheme="mixed"),
        "some outside": several(2, 2, outside=(4, 5), dims=(8, 4, 8, 16, 4, 8), max_bag=3, warmup=True),
        "global ids, BF16": several(2, 2, id_route="global", precision="bf16", optimizer="sgd"),
    },
    "tables": {
        **{
            f"FP16, {scheme}, {optimizer}": of(
                2, 2, kind=kind, scheme=scheme, optimizer=optimizer, fp16=(0, 1, 2, 3), dims=(8, 16, 8, 8), max_bag=3,
                sizes=(5, 3, 6, 4),
            )
            for kind, scheme, optimizer in (
                ("flat", "table_wise", "rowwise_adagrad"), ("pass", "row_wise", "adagrad"),
                ("pass", "column_wise", "sgd"),
            )
        },
        "FP16 and FP32": flat(2, 2, scheme="mixed", dims=(8, 16, 16, 8), fp16=(1, 2), max_bag=3),
        **{
            f"data-parallel, {optimizer}": flat(
                1, 2, scheme="data_parallel", optimizer=optimizer, warmup=True, max_bag=3, steps=4
            )
            for optimizer in ("adagrad", "sgd", "adam")
        },
        "rates that rise": flat(1, 2, warmup=True, max_bag=3, steps=4),
        "columns of unequal widths": flat(1, 3, scheme="column_wise", dims=(20, 8, 28, 4), max_bag=3),
        "host memory, row-wise": of(1, 3, scheme="row_wise", max_bag=2, kernel="fused_uvm"),
        "host memory, mixed": of(2, 2, scheme="mixed", max_bag=2, kernel="fused_uvm_caching"),
    },
    "global ids": {
        "shared, int32": of(
            2, 2, id_route="global", scheme="column_wise", features=(("f0", "a"), ("f1", "b"), ("f2", "a")),
            id_dtype=torch.int32,
        ),
        "replicas": of(2, 2, id_route="global", replicas=2, replica_placement="intra_host", sizes=(1, 2, 3, 4) * 2),
        "elsewhere": of(2, 2, id_route="global", **ELSEWHERE, weighted=True, max_bag=3, sizes=(3, 4, 1, 2)),
        "one rank": of(1, 1, id_route="global"),
        "an idle rank": of(2, 2, id_route="global", dims=(16, 8), plan=((1,), (0,)), max_bag=3),
    },
    "unique": {
        "row-wise": flat(2, 3, unique=True, scheme="row_wise", max_bag=3, sizes=UNEVEN[6]),
        "weighted in parts": flat(3, 2, unique=True, dims=(8, 16, 4, 12), max_bag=3, weighted=True, micro_batches=3),
        "in parts": flat(2, 2, unique=True, sizes=UNEVEN[4], micro_batches=3),
        "one tower in parts": flat(1, 2, unique=True, sizes=(9, 5), micro_batches=3),
        "elsewhere in parts": of(
            2, 2, unique=True, **ELSEWHERE, scheme="mixed", max_bag=3, dims=(8, 4, 24, 16), micro_batches=3
        ),
        "frozen": of(3, 2, unique=True, kind="frozen", sizes=(9, 7, 8, 9, 2, 5), micro_batches=2),
        "BF16": of(2, 2, unique=True, precision="bf16", optimizer="sgd", micro_batches=3),
    },
    "outside towers": {
        "uneven": outside(3, 2, sizes=UNEVEN[6], max_bag=3),
        "towers of a rank": outside(2, 1, max_bag=3, pooling="MEAN"),
        "weighted, adagrad": outside(2, 2, max_bag=3, weighted=True, optimizer="adagrad", warmup=True),
        "shared": outside(2, 1, features=(("f0",), ("f1", "a"), ("f2",), ("f3",), ("f1",)), max_bag=3),
        "sgd, BF16": outside(2, 2, optimizer="sgd", precision="bf16"),
        "unique in parts": outside(2, 2, unique=True, sizes=UNEVEN[4], micro_batches=3),
        "in parts": outside(2, 2, micro_batches=3, sizes=(1, 2, 3, 7)),
        "hot": outside(2, 2, hot=True, sizes=UNEVEN[4], unique=True, micro_batches=2),
        "replicas": outside(2, 1, replicas=2, max_bag=2, interval=2, steps=5),
        "replicas inside hosts": outside(2, 1, replicas=2, replica_placement="intra_host", unique=True, delayed=True),
        "global ids": outside(2, 2, id_route="global", scheme="column_wise", micro_batches=2),
        "modules": outside(2, 2, kind="modules", sizes=UNEVEN[4], max_bag=3, clip=0.05),
        "modules of three": outside(3, 2, kind="modules", sizes=UNEVEN[6], weighted=True, max_bag=3),
        "modules elsewhere, unique in parts": outside(
            2, 2, kind="modules", plan=((0,), (2,), (3,)), placement=(1, 0, 1), unique=True, max_bag=3, micro_batches=3
        ),
        "modules, adagrad": outside(2, 1, kind="modules", optimizer="adagrad", warmup=True, dense=SMALL_BUCKETS),
        "modules, replicas": outside(2, 1, kind="modules", replicas=2, interval=2, steps=5, micro_batches=2),
        "passing through": outside(2, 2, kind="pass", id_route="global", scheme="table_wise"),
    },
    "sequences": {
        "table-wise": sequences(2, 1),
        "uneven": sequences(2, 2, sizes=UNEVEN[4]),
        "row-wise, uneven": sequences(2, 2, scheme="row_wise", sizes=(4, 1, 6, 3)),
        "no samples on peers": sequences(2, 2, sizes=(0, 3, 0, 2)),
        "no samples on other peers": sequences(2, 2, sizes=(3, 0, 2, 0), sequences=(0, 1), scheme="row_wise"),
        "no samples, unique": sequences(2, 2, sizes=(0, 3, 0, 2), unique=True, max_bag=2, micro_batches=2),
        "no samples on a replica": sequences(2, 1, replicas=2, sizes=(0, 0, 1, 2), interval=2),
        "three towers": sequences(3, 1, sizes=(1, 5, 3)),
        "three towers, row-wise": sequences(3, 2, scheme="row_wise", sizes=UNEVEN[6]),
        "one tower": sequences(1, 2, sizes=(9, 5)),
        "one rank": sequences(1, 1),
        "one tower in host memory": sequences(
            1, 3, scheme="row_wise", sizes=(9, 4, 7), optimizer="adagrad", kernel="fused_uvm"
        ),
        # The attention to one item has no gradient but rounding.
        "single items, int32": sequences(2, 2, max_bag=1, scheme="row_wise", id_dtype=torch.int32),
        "all towers": sequences(2, 2, sequences=(0, 1), sizes=(1, 1, 1, 1)),
        "sgd, clipped": sequences(2, 1, optimizer="sgd", clip=0.05, warmup=True, steps=4),
        "FP16": sequences(2, 2, fp16=(0, 1, 2, 3), scheme="row_wise"),
        "BF16 between towers": sequences(2, 2, precision="bf16", optimizer="sgd"),
        "frozen, an idle rank": sequences(2, 2, kind="frozen", plan=((0, 2, 3), (1,))),
        "mixed": sequences(2, 3, scheme="mixed", plan=((0,), (3, 2, 1)), sizes=UNEVEN[6]),
        "a feature of two tables": sequences(2, 1, features=(("f0",), ("f1",), ("f2",), ("f1",))),
        "two on a host": sequences(
            2, 2, plan=((0,), (3, 2), (1,)), sequences=(1, 2), placement=(1, 0, 1), sizes=UNEVEN[4], dense=SMALL_BUCKETS
        ),
        "replicas": sequences(2, 2, replicas=2, sizes=(1, 2, 3, 4) * 2),
        "replicas, row-wise": sequences(1, 2, replicas=2, scheme="row_wise", interval=2, steps=5),
        "replicas inside hosts": sequences(2, 1, replicas=2, replica_placement="intra_host", delayed=True, steps=5),
        "unique, two on a host": sequences(
            2, 2, plan=((0,), (3, 2), (1,)), sequences=(1, 2), placement=(1, 0, 1), unique=True, max_bag=2
        ),
        "in parts": sequences(2, 2, micro_batches=3, sizes=(1, 2, 3, 7)),
        "unique in parts": sequences(
            2, 2, micro_batches=3, unique=True, max_bag=2, scheme="row_wise", sizes=UNEVEN[4]
        ),
    },
    "hot rows": {
        "uneven": hot(2, 2, sizes=UNEVEN[4]),
        "row-wise, weighted": hot(2, 3, scheme="row_wise", max_bag=3, weighted=True, sizes=UNEVEN[6]),
        SLOW + "three hosts": hot(3, 2, dims=(8, 16, 4, 12), max_bag=3, weighted=True),
        "a feature of two tables": hot(2, 1, features=(("f0",), ("f0",)), plan=((0, 1), (2, 3))),
        SLOW + "adagrad": hot(2, 2, scheme="mixed", dims=(8, 8, 24, 16), optimizer="adagrad", warmup=True),
        "mixed, unique": hot(2, 2, scheme="mixed", dims=(8, 8, 24, 16), max_bag=2, unique=True, warmup=True),
        "adam": hot(2, 2, scheme="data_parallel", optimizer="adam", warmup=True),
        SLOW + "one host": hot(1, 2, sizes=(9, 5)),
        "unique in parts": hot(2, 2, unique=True, max_bag=2, micro_batches=3),
        "BF16": hot(2, 2, precision="bf16", optimizer="sgd"),
    },
    "micro-batches": {
        "more than samples": of(2, 2, micro_batches=4, sizes=(1, 2, 3, 7)),
        SLOW + "pass-through": of(2, 2, kind="pass", micro_batches=3),
        "weighted": of(2, 2, max_bag=4, weighted=True, micro_batches=3),
        "row-wise means": of(
            2, 3, scheme="row_wise", pooling="MEAN", max_bag=4, sizes=(4, 5, 6, 7, 8, 9), micro_batches=4
        ),
        "elsewhere": of(2, 1, **ELSEWHERE, dims=(8, 4, 8, 12), micro_batches=2),
        "one tower": of(1, 2, micro_batches=2),
        SLOW + "FP16": of(2, 2, precision="fp16", optimizer="sgd", micro_batches=3),
    },
    "replicas": {
        "flat, c = 1.5": flat(2, 2, replicas=2, scheme="mixed", replica_placement="intra_host", moment_scale=1.5),
        "every third, c = 0.5": of(
            1, 2, replicas=2, scheme="mixed", interval=3, moment_scale=0.5, warmup=True, steps=7
        ),
        "every second, delayed": of(
            1, 2, replicas=2, scheme="mixed", interval=2, delayed=True, replica_placement="intra_host", steps=7
        ),
        "eight": of(1, 1, replicas=8, moment_scale=8, replica_placement="intra_host"),
        "delayed": of(2, 1, replicas=3, max_bag=3, pooling="MEAN", delayed=True, steps=5),
        "uneven": of(2, 1, replicas=2, sizes=(4, 4, 7, 7), plan=((0, 1, 2), (3,)), interval=2, steps=5),
        "adagrad": of(2, 1, replicas=2, optimizer="adagrad", moment_scale=2),
        "sgd": of(2, 1, replicas=2, optimizer="sgd", moment_scale=1),
        "unique": flat(2, 1, replicas=2, unique=True, max_bag=2),
        SLOW + "four, row-wise": of(1, 2, replicas=4, scheme="row_wise", interval=2, steps=5),
    },
    "gradients host by host": {
        "3 hosts": of(3, 1, dense=SMALL_BUCKETS),
        "2 hosts of 3": of(2, 3, dense=SMALL_BUCKETS),
        "replicas": of(2, 2, replicas=2, dense=()),
        SLOW + "replicas inside": of(2, 2, replicas=2, replica_placement="intra_host", dense=SMALL_BUCKETS),
        "2 towers on a host": of(2, 1, ranks_per_host=2, **ELSEWHERE, dense=SMALL_BUCKETS),
        "a tower on 3 hosts": of(1, 6, ranks_per_host=2, scheme="mixed", dense=SMALL_BUCKETS),
        "BF16": of(2, 2, optimizer="sgd", dense=(("precision", "bf16"),)),
    },
}  # fmt: skip
"""Cases by what they are about, and by name."""


def grouped() -> Iterator[Any]:
    """Groups cases that need the same number of ranks."""
    for about, cases in CASES.items():
        for world in sorted({case.world for case in cases.values()}):
            of_world = {name: case for name, case in cases.items() if case.world == world}
            for is_slow in (False, True):
                names = [name for name in of_world if name.startswith(SLOW) == is_slow]
                marks = [pytest.mark.slow] if is_slow else []
                if names:
                    yield pytest.param(about, names, marks=marks, id=f"{about}-{world}" + "-slow" * is_slow)


@pytest.mark.parametrize(("about", "names"), list(grouped()))
def test_training_on_ranks_is_plain_training(about: str, names: list[str]) -> None:
    cases = [CASES[about][name] for name in names]
    for of_rank in run_ranks(cases_on_rank, cases[0].world, cases):
        for name, case, worst in zip(names, cases, of_rank, strict=True):
            try:
                check(case, worst)
            except AssertionError as error:
                error.add_note(f"in {about}: {name}")
                raise


PIPED = of(2, 2, max_bag=3, sizes=(4, 6, 5, 3), steps=5)
COLUMNS = {"scheme": "column_wise", "dims": (8, 24, 8, 8), "max_bag": 3, "steps": 5}
TWINS: dict[str, tuple[Case, ...]] = {
    "train pipeline": (PIPED, replace(PIPED, pipeline="on"), replace(PIPED, pipeline="detached")),
    "pipeline, micro-batches": tuple(of(2, 1, micro_batches=2, max_bag=3, pipeline=p) for p in ("", "on")),
    "pipeline, unique": tuple(flat(2, 2, unique=True, max_bag=2, pipeline=p) for p in ("", "detached")),
    "pipeline, outside towers": tuple(outside(2, 2, max_bag=2, pipeline=p) for p in ("", "on", "detached")),
    "pipeline, outside towers of modules": tuple(
        outside(2, 1, kind="modules", max_bag=2, micro_batches=2, pipeline=p) for p in ("", "on")
    ),
    "pipeline, sequences": tuple(
        sequences(2, 2, scheme="row_wise", sizes=(4, 6, 5, 3), steps=5, pipeline=p) for p in ("", "on", "detached")
    ),
    "pipeline, hot rows that change": tuple(hot(2, 2, max_bag=2, pipeline=p) for p in ("", "on")),
    "id routes": tuple(of(2, 2, **COLUMNS, id_route=r, pipeline=p) for r in ("peer", "global") for p in ("", "on")),
    "id routes, uneven": tuple(
        flat(2, 3, scheme="column_wise", dims=(8, 16, 8, 12), sizes=(2, 5, 1, 4, 3, 6), id_route=r)
        for r in ("peer", "global")
    ),
}


def twins_on_rank(rank: int, twins: tuple[Case, ...]) -> list[str]:
    """Returns the names of weights that end with other bits."""
    mesh = TowerMesh(twins[0].topology)
    ends = []
    for case in twins:
        worst, after = train(rank, case, mesh)
        check(case, worst)
        ends.append(after)
    return [name for end in ends[1:] for name, value in end.items() if not torch.equal(value, ends[0][name])]


@pytest.mark.parametrize("name", TWINS)
def test_twins_end_with_the_same_bits(name: str) -> None:
    assert run_ranks(twins_on_rank, TWINS[name][0].world, TWINS[name]) == [[]] * TWINS[name][0].world


def rolled_inverse() -> AbstractContextManager[Any]:
    copied = rows.samples_of_rows

    def rolled(found: Any, sent: Any, widths: Any, inverses: Any) -> Any:
        return copied(found, sent, widths, [part.roll(1, 1) for part in inverses])

    return patch.object(rows, "samples_of_rows", rolled)


def rolled_items(arrived: Any, keys: Any) -> Any:
    """Gives each item of a sequence the embedding of the one before."""
    if not isinstance(arrived, dict):
        return tower_lookup.in_order(arrived, keys)
    return {key: JaggedTensor(arrived[key].values().roll(1, 0), lengths=arrived[key].lengths()) for key in keys}


def shifted_ids() -> AbstractContextManager[Any]:
    split = HotCopies.split

    def shifted(copies: HotCopies, ids: KeyedJaggedTensor) -> Any:
        cold, bags = split(copies, ids)
        return cold, bags if bags is None else bags._replace(ids=(bags.ids - 1).clamp(min=0))

    return patch.object(HotCopies, "split", shifted)


def forgotten_states() -> AbstractContextManager[Any]:
    read = HotCopies.read

    def without_states(copies: HotCopies) -> None:
        read(copies)
        for (_, part), tensor in copies._tensors.items():
            if part != "weight":
                tensor.zero_()

    return patch.object(HotCopies, "read", without_states)


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Case]] = {
    "samples get rows of others": (rolled_inverse, of(2, 1, unique=True, sizes=(9, 9))),
    "flat samples get rows of others": (rolled_inverse, flat(2, 1, unique=True, sizes=(9, 9))),
    "gradients of a row are not summed": (
        lambda: patch.object(unique, "add_rows", lambda total, own, added: total.index_copy_(0, own, added)),
        flat(2, 1, unique=True, sizes=(9, 9)),
    ),
    "hot gradients are not summed": (
        lambda: patch.object(TouchedRowsSum, "start", lambda _, gradient, told: lambda: told),
        hot(2, 1, sizes=(9, 7)),
    ),
    "copies begin without states": (forgotten_states, hot(2, 1, sizes=(9, 7))),
    "copies do not go back": (lambda: patch.object(HotCopies, "write_back", lambda copies: None), hot(2, 1)),
    "hot ids are shifted": (shifted_ids, hot(2, 1)),
    "columns outside towers are others'": (
        lambda: patch.object(sptt_flat, "_beside", lambda own, others: torch.cat([own.wait(), others.flip(0)], 1)),
        outside(2, 1),
    ),
    "gradients outside towers stay on their rank": (
        lambda: patch.object(tower_lookup, "_start_group_mean", lambda gradient, **groups: lambda: None),
        outside(2, 1, scheme="table_wise"),
    ),
    "items are others'": (lambda: patch.object(sptt_towers, "in_order", rolled_items), sequences(2, 1)),
    "replicas never sync": (lambda: patch.object(ReplicaSync, "step", lambda sync: None), of(1, 1, replicas=2)),
}


def faults_on_rank(rank: int) -> dict[str, str]:
    """Returns the type of the error that noticed each fault."""
    found = {}
    for name, (fault, case) in FAULTS.items():
        with fault():
            try:
                check(case, train(rank, case)[0])
            except Exception as error:
                found[name] = type(error).__name__
    return found


def test_a_fault_fails_the_comparison() -> None:
    of_ranks = run_ranks(faults_on_rank, 2)
    assert set().union(*of_ranks) == set(FAULTS), "a comparison does not see a fault"
    assert {kind for found in of_ranks for kind in found.values()} <= {"AssertionError", "ReplicaMismatchError"}


SCHEMES = ("table_wise", "row_wise", "column_wise", "data_parallel", *MIXES)
TOPOLOGIES = {
    (1, 2): ((0, 1, 2, 3),),
    (2, 1): ((3, 0), (1, 2)),
    (2, 2): ((0, 2), (1, 3)),
    (2, 3): ((3, 1, 0), (2,)),
    (3, 2): ((2,), (3, 0), (1,)),
    (2, 4): ((1, 0, 3), (2,)),
}


def is_carried(case: Case) -> bool:
    """Returns whether the case's id route supports its schemes."""
    schemes = MIXES.get(case.scheme, (case.scheme,)) if case.ranks > 1 else ("table_wise",)
    return case.id_route == "peer" or not {"data_parallel", "row_wise"} & set(schemes)


def cases_of(towers: int, ranks: int) -> list[Case]:
    """Returns all cases of a topology, with even and uneven batches and all optimizers in turn."""
    factors = product(
        ("modules", "flat"),
        SCHEMES,
        (("SUM", False, 1), ("SUM", False, 3), ("MEAN", False, 3), ("SUM", True, 3)),
        ((8, 8, 8, 8), (8, 16, 4, 12)),
        ("peer", "global"),
        PRECISIONS,
    )
    cases = [
        Case(
            towers=towers,
            ranks=ranks,
            plan=TOPOLOGIES[towers, ranks],
            kind=kind,
            scheme=scheme,
            pooling=pooling,
            weighted=weighted,
            max_bag=max_bag,
            dims=dims,
            id_route=route,
            precision=precision,
            optimizer=("rowwise_adagrad", "adagrad", "sgd")[i // 3 % 3] if precision == "fp32" else "sgd",
            sizes=tuple(3 + (rank * 2) % 5 for rank in range(towers * ranks)) if i % 5 % 2 else (),
            unique=route == "peer" and i % 7 % 2 == 1,
        )
        for i, (kind, scheme, (pooling, weighted, max_bag), dims, route, precision) in enumerate(factors)
    ]
    return [case for case in cases if is_carried(case)]


# The value of each factor in a case.
FACTORS: dict[str, Callable[[Case], Hashable]] = {
    "topology": lambda case: (case.towers, case.ranks),
    "kind": lambda case: case.kind,
    "scheme": lambda case: case.scheme,
    "bags": lambda case: (case.pooling, case.weighted, case.max_bag),
    "dims": lambda case: case.dims,
    "route": lambda case: case.id_route,
    "unique": lambda case: case.unique,
    "precision": lambda case: case.precision,
    "optimizer": lambda case: case.optimizer,
    "even": lambda case: not case.sizes,
}


def pairs(case: Case) -> set[tuple[tuple[str, Hashable], ...]]:
    """Returns every pair of factors with their values in the case."""
    return set(combinations(((name, value(case)) for name, value in FACTORS.items()), 2))


@cache
def pairwise_cover() -> list[Case]:
    """Chooses cases of the matrix that together have every pair of values; greedy, small worlds first."""
    left = {case: pairs(case) for topology in TOPOLOGIES for case in cases_of(*topology)}
    missing, cover = set().union(*left.values()), []
    while missing:
        best = max(left, key=lambda case: (len(left[case] & missing), -case.world))
        missing -= left.pop(best)
        cover.append(best)
    return cover


def run_matrix(cases: list[Case], **options: Any) -> None:
    for of_rank in run_ranks(cases_on_rank, cases[0].world, cases, **options):
        for case, worst in zip(cases, of_rank, strict=True):
            check(case, worst)


@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_a_pairwise_cover_of_the_matrix(towers: int, ranks: int) -> None:
    run_matrix([case for case in pairwise_cover() if (case.towers, case.ranks) == (towers, ranks)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("towers", "ranks"), TOPOLOGIES)
def test_the_whole_matrix(towers: int, ranks: int, part: int) -> None:
    run_matrix(cases_of(towers, ranks)[part::8], timeout_s=1200)
