"""Random mixtures of four and more options train as the plain module does, or are refused with the right message.

A seed draws a model, its ranks and options, and now and then a second layout, which loads a checkpoint of the first and
goes on. Both are cases of `tests.sptt_case`, whose oracle is plain training in one process on the same batches. Other
seeds: ``MIXTURES_SEED=1000 pytest tests/dmt/test_mixtures.py``.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer

from dmt import InputError, TowerMesh
from dmt.sharding.schemes import SCHEMES, TablePlacement, why_not
from dmt.sptt.options import refusals
from dmt.testing import PlainTraining, gather_plain_state
from dmt.training.checkpoints import store
from tests.dmt.test_parity import SMALL_BUCKETS
from tests.parity import sequence_config, share
from tests.ranks import run_ranks
from tests.sptt_case import OWN, Case, Oracle, Training, Worst, check, train_beside

FIRST = int(os.environ.get("MIXTURES_SEED", "0"))
NUMBER, FAST = 200, 18


@dataclass(frozen=True, kw_only=True)
class Mixture(Case):
    rows: tuple[int, ...]  # of each table
    placed: tuple[tuple[str, TablePlacement], ...]  # tables in towers
    then: Mixture | None = None  # goes on from a checkpoint of this one

    def tables(self) -> list[EmbeddingBagConfig]:
        tables = super().tables()
        for table, rows in zip(tables, self.rows, strict=True):
            table.num_embeddings = rows
        return tables

    def pins(self) -> dict[str, TablePlacement]:
        return dict(self.placed)

    @property
    def schemes(self) -> set[str]:
        return {placement.scheme for _, placement in self.placed}

    @property
    def options(self) -> set[str]:
        on = {
            "unique": self.unique,
            "hot rows": self.hot,
            "micro-batches": self.micro_batches > 1,
            "tables in parts": len(self.schemes) > 1,
            "global ids": self.id_route == "global",
            "16 bits": self.precision != "fp32",
            "tables outside towers": bool(self.outside),
            "gradients host by host": self.dense is not None,
            "train pipeline": bool(self.pipeline),
            "replicas": self.replicas > 1,
            "optimizers of tables": bool(self.own),
            "sequences": bool(self.sequences),
            "tower modules": self.kind in ("modules", "frozen"),
            "another layout": self.then is not None,
        }
        return {name for name, is_on in on.items() if is_on}

    @property
    def refused(self) -> list[str]:
        """Words of which the refusal must contain one; none if the mixture must train."""
        options = {"id_route": self.id_route, "unique": self.unique, "hot_rows": self.hot}
        more = {"has_towers": self.kind != "flat", "sequences": bool(self.sequences), "num_replicas": self.replicas}
        words = refusals(**options, **more)
        words += ["mean pooling of weighted bags"] * (self.weighted and "MEAN" in self.pooling)
        is_everywhere = self.id_route == "global" and bool(self.schemes & {"row_wise", "data_parallel"})
        return words + ["id_route='global' would send all ids to every rank of the tower"] * is_everywhere


Tied = tuple[int, int]  # two tables that look up a feature in common; (-1, -1) without


def dealt(draw: random.Random, tables: list[int], towers: int, tied: Tied) -> tuple[tuple[int, ...], ...]:
    order = draw.sample([i for i in tables if i != tied[1]], len(tables) - (tied[1] in tables))
    plan = [[i] for i in order[:towers]]
    for i in order[towers:]:
        draw.choice(plan).append(i)
    return tuple((*members, *[tied[1]] * (tied[0] in members)) for members in plan)


def drawn_model(draw: random.Random, world: int) -> tuple[dict[str, Any], Tied]:
    """Draws what all layouts share. Table 0 may have hot rows: it is in a tower, summed, with its own feature."""
    number, kind = draw.randint(4, 7), draw.choice(("flat", "flat", "modules", "modules", "frozen", "pass"))
    outside = draw.sample(range(1, number), draw.choice((0, 0, 1, number - 3)))
    inside = [i for i in range(number) if i not in outside]
    tied = (inside[-2], inside[-1]) if draw.random() < 0.3 else (-1, -1)
    plan = dealt(draw, inside, draw.randint(1, len(inside) - 1), tied)
    is_weighted, precision = draw.random() < 0.25, draw.choice(("fp32", "fp32", "fp32", "fp16", "bf16"))
    attends = kind in ("modules", "frozen") and not is_weighted and draw.random() < 0.5
    sequences = sorted(draw.sample(range(len(plan)), draw.randint(1, len(plan)))) if attends else []
    dims = [draw.choice((4, 8, 12, 16, 24)) for _ in range(number)]
    for tower in sequences:
        for i in plan[tower]:
            dims[i] = dims[plan[tower][0]]  # items of all features attend to one another
    features = [(f"f{i}", *[f"g{i}"] * (i > 0 and draw.random() < 0.2)) for i in range(number)]
    if tied[1] in inside:
        features[tied[1]] += (f"f{tied[0]}",)
    is_mean = [i > 0 and draw.random() < (0.02 if is_weighted else 0.3) for i in range(number)]
    optimizer = draw.choice(("rowwise_adagrad", "rowwise_adagrad", "adagrad", "sgd"))
    owners = draw.sample(range(number), draw.choice((0, 0, 1, 2)))
    own = [(i, draw.choice((*OWN, "frozen")), draw.choice((0.02, 0.1))) for i in owners]
    own = [(i, "sgd", 0.0) if name == "frozen" else (i, name, rate) for i, name, rate in own]
    if precision != "fp32":  # AdaGrad may make a step of what is rounding only: see `Bounds`
        optimizer, own = "sgd", [(i, "sgd", rate) for i, _, rate in own]
    sizes = [max(int(rank == 0), draw.randint(-1, 9)) for rank in range(world)]
    return {
        "kind": kind,
        "scheme": "mixed",
        "outside": tuple(outside),
        "plan": plan,
        "dims": tuple(dims),
        "rows": tuple(draw.choice((9, 40, 93)) for _ in range(number)),
        "features": tuple(features),
        "pooling": tuple("MEAN" if mean else "SUM" for mean in is_mean),
        "weighted": is_weighted,
        "sequences": tuple(sequences),
        "max_bag": draw.choice((2, 5, 20) if sequences else (1, 1, 3, 3, 20)),
        "sizes": tuple(sizes) if draw.random() < 0.7 else (),
        "id_dtype": draw.choice((torch.int64, torch.int64, torch.int32)),
        "optimizer": optimizer,
        "own": tuple(own),
        "precision": precision,
    }, tied


def drawn_placement(draw: random.Random, case: Case, i: int) -> TablePlacement:
    table = case.tables()[i]
    table = sequence_config(table) if any(i in case.plan[tower] for tower in case.sequences) else table
    route = case.id_route if draw.random() < 0.98 else "peer"  # what the global route does not carry is refused
    possible = [s for s in SCHEMES if not why_not(table, s, num_ranks=case.ranks, id_route=route)]
    scheme = "table_wise" if case.hot and i == 0 else draw.choice(possible)
    most = {"table_wise": 1, "column_wise": min(case.ranks, table.embedding_dim // 4)}.get(scheme)
    ranks = range(case.ranks) if most is None else draw.sample(range(case.ranks), draw.randint(min(2, most), most))
    return TablePlacement(scheme=scheme, ranks=tuple(ranks))


def drawn_layout(draw: random.Random, world: int, model: dict[str, Any], tied: Tied) -> Mixture:
    def by_chance(share: float) -> bool:
        return draw.random() < share

    is_flat, is_half, plan = model["kind"] == "flat", model["precision"] != "fp32", model["plan"]
    inside = sorted(i for members in plan for i in members)
    most = len(inside) - 1 if is_flat else len(plan)
    meshes = [(t, n) for t in range(1, most + 1) for n in range(1, world + 1) if world % (t * n) == 0]
    hot = by_chance(0.4 if is_flat else 0.01)
    if hot and by_chance(0.95):  # others are refused
        meshes = [(t, n) for t, n in meshes if t * n == world]
    towers, ranks = draw.choice(meshes)
    replicas = world // (towers * ranks)
    where = draw.choice(("inter_host", "intra_host"))
    of_tower = ranks * (replicas if where == "intra_host" else 1)
    hosts = [n for n in range(1, world + 1) if world % n == 0 and (n % of_tower == 0 or of_tower % n == 0)]
    more = [] if is_flat else draw.choices(range(towers), k=len(plan) - towers)
    has_sgd = "sgd" in (model["optimizer"], *(name for _, name, _ in model["own"]))  # which has no moments
    interval, delayed = draw.choice((1, 1, 2, 3)), by_chance(0.3)
    layout = {
        "towers": towers,
        "ranks": ranks,
        "replicas": replicas,
        "replica_placement": where,
        "ranks_per_host": draw.choice((None, draw.choice(hosts))),
        "plan": dealt(draw, inside, towers, tied) if is_flat else plan,
        "placement": None if is_flat else tuple(draw.sample([*range(towers), *more], len(plan))),
        "id_route": draw.choice(("peer", "peer", "peer" if hot else "global")),
        "unique": by_chance(0.4),
        "hot": hot,
        "micro_batches": draw.choice((1, 1, 2, 3, 4)),
        "pipeline": draw.choice(("", "", "on", "detached")),
        "dense": draw.choice((None, None, SMALL_BUCKETS, (("precision", "bf16"),) if is_half else ())),
        "kernel": "fused" if model["outside"] else draw.choice(("fused", "fused", "fused_uvm")),
        "clip": None if is_half else draw.choice((None, None, 0.05)),
        "warmup": not model["own"] and by_chance(0.3),
        "moment_scale": draw.choice(("num_replicas", 1, *[0.5] * (not has_sgd))),
        "interval": interval,
        "delayed": delayed,
        "steps": 5 if replicas > 1 and (interval > 1 or delayed) else 3,
    }
    mixture = Mixture(**{**model, **layout}, placed=())
    return replace(mixture, placed=tuple((f"t{i}", drawn_placement(draw, mixture, i)) for i in inside))


def drawn(seed: int) -> Mixture:
    draw = random.Random(seed)
    while True:
        world = draw.choice((1, 2, 2, 3, 4, 4, 4, 6, 6, 8))
        model, tied = drawn_model(draw, world)
        mixture, then = (drawn_layout(draw, world, model, tied) for _ in range(2))
        if draw.random() < 0.3 and not mixture.refused and not then.refused:
            mixture = replace(mixture, then=then)
        if len(mixture.options) >= 4 and (not mixture.refused or draw.random() < 0.05):
            return mixture


def optimizer_of(ours: Training) -> CombinedOptimizer:
    return CombinedOptimizer([("dense", ours.optimizers.parts[0]), ("tables", ours.model.fused_optimizer)])


def take_over(ours: PlainTraining, theirs: PlainTraining, weights: dict[str, Tensor]) -> None:
    """Gives plain training what a checkpoint brings to another layout: scaled moments, averaged over the columns."""
    for optimizer in ours.dense_optimizers:
        optimizer.load_state_dict(copy.deepcopy(theirs.dense_optimizers[0].state_dict()))
    for module, tables in zip(ours.modules, ours.tables, strict=True):
        module.load_state_dict(weights)
        for name, table in tables.items():
            before = theirs.tables[0][name]
            for state, moments in zip(table.states, before.states, strict=True):
                if table._optimizer == "rowwise_adagrad":
                    by_column = moments.repeat_interleave(torch.tensor(before.widths), dim=1)
                    parts = [part.mean(dim=1) for part in by_column.split(table.widths, dim=1)]
                    moments = torch.stack(parts, dim=1)
                state.copy_(moments * table._scale / before._scale)


def train_on_rank(rank: int, mixture: Mixture, folder: Path, fault: str) -> list[Worst] | str:
    """Returns the worst differences in each layout, or the message of a refusal or of the check that saw a fault."""
    with CONTROLS[fault][0]() if fault else nullcontext():
        try:
            ours = Training(rank, mixture, TowerMesh(mixture.topology))
        except InputError as error:
            return str(error)
        try:
            return train_from(ours, mixture.then, folder)
        except Exception as error:
            if not fault:
                raise
            return str(error)


def train_from(ours: Training, then: Mixture | None, folder: Path) -> list[Worst]:
    oracle = Oracle(ours)
    saved = train_beside(ours, oracle)
    if then is None:
        return [oracle.worst]
    with closing(store.Checkpointer(folder, ours.mesh)) as saver:
        assert saver.save(ours.model, optimizer_of(ours), step=1, progress={})
    loaded = Training(ours.rank, then, TowerMesh(then.topology))
    store.restore(folder, loaded.model, optimizer_of(loaded), mesh=loaded.mesh)
    if loaded.sync is not None:
        loaded.sync.restart()
    found = gather_plain_state(loaded.model)
    assert all(torch.equal(value, found[name]) for name, value in saved.items()), "loading changes weights"
    after = Oracle(loaded)
    take_over(after.training, oracle.training, saved)
    share(after.training)
    after.compare_tables()
    train_beside(loaded, after)
    return [oracle.worst, after.worst]


def compare(mixture: Mixture, folder: Path, fault: str = "") -> None:
    for found in run_ranks(train_on_rank, mixture.world, mixture, folder, fault, timeout_s=200):
        if mixture.refused:
            assert any(words in found for words in mixture.refused), found
        else:
            assert not isinstance(found, str), found
            for case, worst in zip((mixture, mixture.then), found, strict=False):
                check(case, worst)


@pytest.mark.parametrize(
    "seed", [pytest.param(FIRST + i, marks=[pytest.mark.slow] * (i >= FAST)) for i in range(NUMBER)]
)
def test_a_mixture_trains_as_the_plain_module_or_is_refused(seed: int, tmp_path: Path) -> None:
    compare(drawn(seed), tmp_path)


# Faults besides those of `tests.dmt.test_parity`, which uses the same loop, and the mixtures that each must spoil.
CONTROLS: dict[str, tuple[Callable[[], Any], Callable[[Mixture], bool]]] = {
    "a table forgets its own optimizer": (
        lambda: patch("tests.sptt_case.apply_optimizer_in_backward"),
        lambda m: bool(m.own),
    ),
    "moments keep the scale of another layout": (
        lambda: patch.object(store, "_scale_moments"),
        lambda m: m.world == 2 and m.then and m.optimizer != "sgd" and m.replicas > m.then.replicas
        and m.moment_scale == m.then.moment_scale == "num_replicas",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_fault_in_a_mixture_is_noticed(fault: str, tmp_path: Path) -> None:
    mixtures = (drawn(seed) for seed in count())
    mixture = next(m for m in mixtures if not m.refused and CONTROLS[fault][1](m))
    with pytest.raises(AssertionError):
        compare(mixture, tmp_path, fault)


def test_mixtures_meet_every_pair_of_options() -> None:
    mixtures = [drawn(seed) for seed in range(NUMBER)]
    met = {pair for m in mixtures if not m.refused for pair in combinations(sorted(m.options), 2)}
    names = sorted({name for pair in met for name in pair})
    never = {frozenset(pair) for pair in combinations(names, 2) if pair not in met}
    assert len(names) == 14
    assert never == {
        *(frozenset({"hot rows", other}) for other in ("global ids", "replicas", "sequences", "tower modules")),
        *(frozenset({"global ids", other}) for other in ("unique", "sequences")),
    }
    assert 5 <= sum(bool(m.refused) for m in mixtures) <= 40
