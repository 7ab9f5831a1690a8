"""Runs with sequences (`data.sequences`): against the plain module, and from raw rows to predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt.errors import InputError
from dmt.models import DINTowerModule, PassThroughTowerModule
from dmt.models.sequences import PooledBySequence
from dmt.plan.towers import TowerPlan
from dmt.training.build import build_model
from dmt.training.check import CheckLimits, check_run
from dmt.training.check.expected import draw_samples
from dmt.training.config import TrainingConfig
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare
from dmt.training.factory import check_outputs
from dmt.training.job import open_job
from dmt.training.serving.export import export_run
from dmt.training.serving.score import score
from tests.seeds import some_slow
from tests.training.small import small
from tests.training.test_resume import attempt

# C5 and C6 are lists, which C1 attends to.
SYNTHETIC = {"num_multi_hot": 2}
SEQUENCES = {"C6": "C1", "C5": "C1"}


def with_sequences(arch: str = "dmt-dlrm", dataflow: str = "auto", **sections: Any) -> TrainingConfig:
    return small(arch, dataflow, synthetic=SYNTHETIC, data={"sequences": SEQUENCES}, **sections)


class ItemTower(torch.nn.Module):
    """Attention of the item to one of its histories, beside the sums of all other features."""

    def __init__(self, tables: list[Any]) -> None:
        super().__init__()
        self.sums = PooledBySequence(tables)
        self.attention = DINTowerModule("C1", "C6", embedding_dim=8, tower_dim=8)
        self.others = [name for name in self.sums.features if name not in ("C1", "C6")]
        self.in_features, self.out_features = 8 * len(self.sums.features), 8 + 8 * len(self.others)

    def forward(self, embeddings: Any) -> torch.Tensor:
        sums = self.sums(embeddings)
        return torch.cat([self.attention(embeddings), *(sums[name] for name in self.others)], dim=1)


class Own(torch.nn.Module):
    """A tower of the item and its histories, and one of bags."""

    def __init__(self, tables: list[Any], towers: TowerPlan, *, device: Any, bags: bool) -> None:
        super().__init__()
        parts, width = [], 3
        for held in towers.tables_by_tower(tables):
            names = [name for table in held for name in table.feature_names]
            module: Any = ItemTower(held) if "C1" in names else PassThroughTowerModule(names, embedding_dims=[8, 8])
            if bags:
                held = [as_config(EmbeddingBagConfig, table) for table in held]
            kind: Any = EmbeddingCollection if isinstance(held[0], EmbeddingConfig) else EmbeddingBagCollection
            parts.append(EmbeddingTower(kind(tables=held, device=device), module))
            width += module.out_features
        self.towers, self.over = EmbeddingTowerCollection(parts), torch.nn.Linear(width, 1)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(torch.cat([self.towers(ids), dense], dim=1))


def as_config(kind: Any, table: Any) -> Any:
    sizes = {"num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim}
    return kind(name=table.name, feature_names=table.feature_names, **sizes)


def own(tables: list[Any], towers: TowerPlan, options: dict[str, Any], device: Any) -> torch.nn.Module:
    return Own(tables, towers, device=device, bags=options.get("bags", False))


FACTORY = {"factory": f"{__name__}:own", "in_towers": True}
REPLICAS = {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2}
RUNS: dict[str, dict[str, Any]] = {
    "dlrm": {"arch": "dlrm"},
    "dcn, row-wise": {"arch": "dcn", "sharding": {"scheme": "row_wise"}},
    "dmt-dlrm": {"arch": "dmt-dlrm", "sharding": {"unique": True}, "towers": {"outside": ["C2"]}},
    "dmt-dcn, row-wise": {"arch": "dmt-dcn", "sharding": {"scheme": "row_wise"}, "train": {"micro_batches": 2}},
    "products, replicas": {"arch": "dmt-dlrm-products", "model": {"p": 1}, "topology": REPLICAS},
    "own": {"model": FACTORY},
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", some_slow(RUNS, ("dlrm", "products, replicas")))
def test_runs_with_sequences_agree_with_the_plain_module(name: str) -> None:
    report = check_run(with_sequences(**RUNS[name]), CheckLimits(steps=2))
    assert report.agrees, [row for row in report.rows if row.verdict != "ok"]


def test_random_samples_have_one_target_each_as_rows_do() -> None:
    ids = draw_samples(open_job(with_sequences()), 20, seed=0).sparse_features
    assert ids["C1"].lengths().tolist() == [1] * 20
    assert set(ids["C6"].lengths().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {**FACTORY, "options": {"bags": True}}},
            r"table 't_C1' is TableSpec.*is_sequence=False\), but .* has .*is_sequence=True\)\. Use .* Emb",
        ),
        ({"model": {"factory": f"{__name__}:own"}}, "makes a flat model, but data.sequences has 'C.'"),
        ({"arch": "dlrm", "dataflow": "sptt"}, "is flat, so in the tower dataflow the embedding of every item"),
        (
            {"towers": {"outside": ["C1", "C5", "C6"]}},
            "'C.' of data.sequences is outside towers, where every feature is a bag",
        ),
    ],
)
def test_what_carries_no_sequences_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(open_job(with_sequences(**sections)), device="meta")


def test_a_tower_with_sequences_takes_whole_tables(tmp_path: Path) -> None:
    lists = [["C1", "C5", "C6", "C2[0:4]"], ["C2[4:8]", "C3", "C4"]]
    TowerPlan.from_lists(lists, column_splits={"C2": (4, 4)}).save(tmp_path / "towers.json")
    message = r"the shard 't_C2\[0:4\]' of a cut table is in a tower with sequences \(data.sequences\)"
    with pytest.raises(InputError, match=message):
        open_job(with_sequences(towers={"plan": str(tmp_path / "towers.json")}))


def test_a_tower_without_sequences_looks_up_bags() -> None:
    job = open_job(with_sequences(model=FACTORY))
    check_outputs(job, build_model(job, device="meta"))


def write_rows(folder: Path, rows: int = 300) -> dict[str, str]:
    """Clicks where the item is in the history, as Parquet with lists and as text with ``|``."""
    draw = np.random.default_rng(0)
    items = draw.integers(0, 40, rows)
    histories = [draw.integers(0, 40, draw.integers(0, 9)).tolist() for _ in range(rows)]
    labels = [int(item in history) for item, history in zip(items, histories, strict=True)]
    columns = {"label": labels, "d": draw.random(rows).round(3), "user": draw.integers(0, 20, rows), "item": items}
    pq.write_table(pa.table({**columns, "history": histories}), folder / "rows.parquet")
    lines = [
        f"{labels[i]},{columns['d'][i]},{columns['user'][i]},{items[i]},{'|'.join(map(str, histories[i]))}"
        for i in range(rows)
    ]
    (folder / "rows.csv").write_text("\n".join(["label,d,user,item,history", *lines]) + "\n")
    return {kind: str(folder / f"rows.{kind}") for kind in ("parquet", "csv")}


@pytest.mark.ranks
def test_from_raw_rows_to_predictions(tmp_path: Path) -> None:
    files = write_rows(tmp_path)
    raw = DataConfig(
        kind="columns",
        train_path=files["parquet"],
        dense=("d",),
        categorical=("user", "item", "history"),
        sequences={"history": "item"},
        max_length=5,
        num_embeddings=50,
        id_mode="frequency",
    )
    prepare(raw, tmp_path / "rows", group_rows=64)
    values = small("dmt-dlrm", topology={"ranks_per_tower": 1}).model_dump(mode="json", exclude={"data"})
    values["data"] = {"prepared": str(tmp_path / "rows")}
    values["train"] |= {"output_dir": str(tmp_path / "run"), "batch_size": 16, "max_steps": 8}
    result = attempt(TrainingConfig.model_validate(values))
    assert result is not None
    exported = export_run(tmp_path / "run", tmp_path / "model.pt2")
    assert [f["target"] for f in exported.manifest["features"]].count("item") == 1
    logits = {}
    for kind, file in files.items():
        for model in ("run", "model.pt2"):
            score(tmp_path / model, tmp_path / "out.parquet", data_path=file)
            logits[kind, model] = pq.read_table(tmp_path / "out.parquet")["logit"].to_pylist()
    first, *others = logits.values()
    assert len(set(first)) > 100
    assert all(other == first for other in others), "text, Parquet, the checkpoint and the program give the same bits"
    scored = score(tmp_path / "model.pt2", tmp_path / "eval.parquet", data_path=None)
    assert scored.metrics is not None
    assert scored.metrics.auc == pytest.approx(result["eval_auc"], abs=1e-6)
    prepare(raw.model_copy(update={"max_length": 2, "vocabulary": str(tmp_path / "rows")}), tmp_path / "short")
    with pytest.raises(InputError, match=r"with a different encoding: data\.max_length: 5 -> 2\."):
        export_run(tmp_path / "run", tmp_path / "model.pt2", data_path=str(tmp_path / "short"))
