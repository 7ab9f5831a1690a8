"""Bytes between hosts of a flat model over SPTT with hot rows, measured on gloo ranks, beside the prediction.

    python -m benchmarks.hot_rows

Two hosts of two ranks, 4,096 samples a rank, 26 tables of 128 columns, ids with Criteo-Kaggle's skew
(`benchmarks.steps.criteo_ids`). Tables are cut to 100,000 rows: rarer ids share the upper half of theirs, where they
seldom pay. Rows are chosen from 100 steps of other ids; the prediction is that of `dmt.hot_rows.costs.table_bytes` for
these counts. 5 % of the rows of the uncut tables are all that were read. Bytes are means of two steps, forward,
backward and update.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.report import commit, markdown_table, processor
from benchmarks.steps.criteo_ids import criteo_skews
from dmt import SPTTEmbeddingBagCollectionSharder, TowerMesh, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.files import atomic_write
from dmt.hot_rows.costs import table_bytes
from dmt.hot_rows.profile import AccessProfile
from dmt.hot_rows.runtime import HotRows
from dmt.sptt.unique import Unique
from dmt.testing.ranks import RankPool
from dmt.traffic import TrafficMeter

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_TOPOLOGY = TowerTopology(num_towers=2, ranks_per_tower=2)
_MOST_ROWS, _DIM, _BATCH = 100_000, 128, 4096
_PROFILE_STEPS, _STEPS, _DRIFT_STEPS = 100, 2, 12
# By the popular ids' new places: as if other items had become popular over night.
_DRIFT = 20_000
_PREDICTED = ("plain", "unique", "unique_host", "hot", "unique_hot")
_WAYS = ("cost rule", "OPER's rule", "0.1 % of rows", "1 % of rows", "5 % of rows")


def tables() -> list[EmbeddingBagConfig]:
    """The 26 tables, cut."""
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=min(skew.rows, _MOST_ROWS),
            embedding_dim=_DIM,
            feature_names=[f"f{i}"],
        )
        for i, skew in enumerate(criteo_skews())
    ]


def draw(seed: int, size: int, *, drift: int = 0) -> list[Tensor]:
    """Ids of each feature, [size] int64."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for skew in criteo_skews():
        rows, half = min(skew.rows, _MOST_ROWS), _MOST_ROWS // 2
        place = skew.draw(size, generator)
        found.append((torch.where(place < half, place, half + place % half) % rows + drift) % rows)
    return found


def profile_of(steps: int) -> AccessProfile:
    """Accesses of the whole job in some steps, of ids that are not trained on."""
    profile, size = AccessProfile(tables()), _BATCH * _TOPOLOGY.world_size
    for step in range(steps):
        ids = draw(10_000 + step, size)
        profile.add({f"f{i}": values.numpy() for i, values in enumerate(ids)}, num_samples=size)
    return profile


def chosen_rows(profile: AccessProfile, way: str) -> dict[str, NDArray[np.int64]]:
    """Rows by a rule that is not `HotRows`' own."""
    counts = [profile[table.name] for table in profile.tables]
    uses = np.concatenate([_BATCH * one.counts / one.total for one in counts])
    if way == "OPER's rule":
        least = 1.0
    else:
        share = {"0.1 % of rows": 0.001, "1 % of rows": 0.01, "5 % of rows": 0.05}[way]
        kept = round(share * sum(skew.rows for skew in criteo_skews()))
        least = float(np.sort(uses)[-min(kept, len(uses))])
    return {
        table.name: one.rows[_BATCH * one.counts / one.total >= least]
        for table, one in zip(profile.tables, counts, strict=True)
    }


class _Sum(nn.Module):
    """A model of tables only, so that the bytes are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables(), device=torch.device("meta"))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.bags(ids).values().square().mean()


class _Job:
    def __init__(self, rank: int, unique: Unique) -> None:
        self.mesh, self.rank = TowerMesh(_TOPOLOGY), rank
        plan = TowerPlan.strided([f"f{i}" for i in range(len(tables()))], _TOPOLOGY.num_towers)
        settings = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
        sharder = SPTTEmbeddingBagCollectionSharder(self.mesh, plan, fused_params=settings, unique=unique)
        model = _Sum()
        placed = TowerShardingPlanner(_TOPOLOGY, scheme="table_wise").plan(model, [sharder])
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=placed, sharders=[sharder])

    def step(self, number: int, *, drift: int = 0) -> int:
        """Bytes between hosts of a step, of all ranks."""
        ids = draw(1000 * number + self.rank, _BATCH, drift=drift)
        batch = KeyedJaggedTensor([f"f{i}" for i in range(len(ids))], torch.cat(ids), lengths=_ones(len(ids)))
        with TrafficMeter(host_of=_TOPOLOGY.host) as meter:
            loss = self.model(batch)
            loss.backward()
        return meter.total(self.mesh.global_group).across

    def mean(self, first: int, *, drift: int = 0) -> float:
        """Mean bytes of some steps, after one in which ranks agree on what they send."""
        return float(np.mean([self.step(first + i, drift=drift) for i in range(_STEPS + 1)][1:]))


def _ones(num_features: int) -> Tensor:
    return torch.ones(num_features * _BATCH, dtype=torch.int64)


def measure(rank: int, profile: AccessProfile, unique: Unique) -> dict[str, Any]:
    """Bytes without hot rows, with those of each rule, and where other rows become popular."""
    job = _Job(rank, unique)
    found: dict[str, Any] = {"none": {"rows": 0, "bytes": job.mean(0)}}
    if unique == "host":
        return found
    # Choices are made here, not by the number of steps.
    hot = HotRows(job.model, job.mesh, extra_memory=1.0, refresh_every=10**9, profile=profile)
    job.step(9)
    hot.step()
    own = hot.rows
    for way in _WAYS if unique == "off" else _WAYS[:1]:
        hot.replicate(own if way == "cost rule" else chosen_rows(profile, way))
        found[way] = {"rows": sum(map(len, hot.rows.values())), "bytes": job.mean(10)}
    if unique == "off":
        hot.replicate(own)
        # Counts begin with the moved ids.
        hot.refresh()
        hot.replicate(own)
        steps = [job.step(20 + i, drift=_DRIFT) for i in range(_DRIFT_STEPS)]
        hot.refresh()
        found["drift"] = {"before": found["cost rule"]["bytes"], "moved": float(np.mean(steps[1:]))}
        found["drift"]["refreshed"] = job.mean(40, drift=_DRIFT)
    return found


def predicted(profile: AccessProfile) -> dict[str, float]:
    """Bytes between hosts of a step, by `table_bytes`."""
    of_tables = table_bytes(profile, _TOPOLOGY, batch_size=_BATCH)
    return {way: sum(getattr(one, way) for one in of_tables) for way in _PREDICTED}


def write_page(record: dict[str, Any], path: Path) -> None:
    """The record as a page."""
    plain = record["off"]["none"]["bytes"]
    names = {("off", "none"): "plain", ("rank", "none"): "unique", ("off", "cost rule"): "hot"}
    names |= {("rank", "cost rule"): "unique_hot", ("host", "none"): "unique_host"}
    rows = []
    for unique, words in (("off", ""), ("rank", "unique ids, "), ("host", "unique ids per host, ")):
        for way, one in record[unique].items():
            if way == "drift":
                continue
            expected = record["predicted"].get(names.get((unique, way), ""))
            rows.append(
                [
                    words + ("no hot rows" if way == "none" else way),
                    f"{one['rows']:,}",
                    f"{one['bytes'] / 1e6:.1f}",
                    f"{plain / one['bytes']:.2f}",
                    "-" if expected is None else f"{expected / 1e6:.1f}",
                    "-" if expected is None else f"{one['bytes'] / expected - 1:+.1%}",
                ]
            )
    drift = record["off"]["drift"]
    regained = (plain - drift["refreshed"]) / (plain - drift["before"])
    parts = [
        "# Hot rows: bytes between hosts",
        __doc__.strip().split("\n\n", 2)[2],
        record["provenance"],
        markdown_table(["way", "rows copied", "MB a step", "times fewer", "predicted MB", "off by"], rows),
        f"Other rows become popular: {drift['moved'] / 1e6:.1f} MB a step. After one refresh, by the counts of "
        f"{_DRIFT_STEPS} steps, {drift['refreshed'] / 1e6:.1f} MB: {regained:.1%} of the saving is regained.",
    ]
    with atomic_write(path) as scratch:
        scratch.write_text("\n\n".join(parts) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, help="Folder of the record.")
def main(*, out: Path) -> None:
    """Writes hot_rows.json and hot_rows.md."""
    profile = profile_of(_PROFILE_STEPS)
    record: dict[str, Any] = {
        "provenance": f"{processor()}, torch {torch.__version__}, commit {commit()}.",
        "predicted": predicted(profile),
    }
    with RankPool() as pool:
        run = partial(pool.run, measure, _TOPOLOGY.world_size, profile, timeout_s=3600)
        record |= {unique: run(unique)[0] for unique in ("off", "rank", "host")}
    with atomic_write(out / "hot_rows.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, out / "hot_rows.md")


if __name__ == "__main__":
    main()
