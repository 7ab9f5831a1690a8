"""A model of one's own by config alone: through train, resume, check, plan, export and score."""

from __future__ import annotations

import logging
import tomllib
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt.errors import InputError
from dmt.models import flat_sparse_arch
from dmt.models.complexity import compression_ratio
from dmt.plan.towers import TowerPlan
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state
from dmt.training.build import build_model, shard_model
from dmt.training.check import check_run
from dmt.training.check.shrink import CheckLimits
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.factory import check_outputs
from dmt.training.functions import load_function
from dmt.training.job import Job, open_job, open_unsharded
from dmt.training.metrics import ClickMetrics
from dmt.training.serving.export import export_run, read_manifest
from tests.parity import sequence_config
from tests.ranks import on_ranks
from tests.training.small import dmt, linear, new_run, plain, save_alone, train_loop
from tests.training.test_resume import trained


def deepfm(folder: Path | None = None, **sections: dict[str, Any]) -> TrainingConfig:
    """The run of examples/deepfm.toml, small; ``sections`` change single values."""
    values = tomllib.loads((Path(__file__).parents[2] / "examples" / "deepfm.toml").read_text())
    values["model"]["factory"] = "examples.deepfm:deepfm"
    values["data"]["synthetic"] |= {"rows_per_table": 40, "num_rows": 1400, "num_eval_rows": 64, "num_groups": 2}
    values["train"] = {"batch_size": 16, "log_every": 1, "save_every": 2}
    if folder is not None:
        values["train"]["output_dir"] = str(folder)
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return TrainingConfig.model_validate(values)


@pytest.mark.ranks
def test_the_deepfm_of_the_page_from_a_flat_run_to_a_served_one_in_learned_towers(tmp_path: Path) -> None:
    flat, towers = tmp_path / "flat", tmp_path / "towers.json"
    config = deepfm(flat, model=model_of_page() | {"in_towers": False})
    result = trained(config, 4)
    assert (result["steps"], result["compression_ratio"]) == (4, 1.0)
    assert_served_alike(flat, result, tmp_path)
    # A program takes seconds: that of the towers below has all parts of a flat one.
    named = ("--function", "examples.deepfm:deepfm")
    asked = ("--tower-module", "dlrm-products", "--towers", 2, "--out", towers)
    dmt("partition", "--checkpoint", flat, *named, *asked)
    learned = TowerPlan.load(towers)
    assert sorted(learned.features) == [f"C{i}" for i in range(1, 9)]
    assert any({"C1", "C2"} <= set(tower.features) for tower in learned.towers)  # their table is one

    run = tmp_path / "run"
    config = deepfm(run, towers={"plan": str(towers)})
    (tmp_path / "config.toml").write_text(to_toml(config))
    dmt("plan", tmp_path / "config.toml")
    trained(config, 3)
    result = trained(config, 6)
    assert (result["steps"], result["arch"]) == (6, "examples.deepfm:deepfm")
    assert result["compression_ratio"] > 1.0
    out = tmp_path / "model.pt2"
    dmt("export", run, "-o", out, *named)
    features = read_manifest(out)["features"]
    columns = {feature["name"]: feature["columns"] for feature in features}
    assert columns == {f"C{i}": 8 if i < 3 else 16 for i in range(1, 9)}
    assert {feature["table"] for feature in features if feature["name"] in ("C1", "C2")} == {"t_ads"}
    assert_served_alike(out, result, tmp_path)


def assert_served_alike(model: Path, result: dict[str, Any], folder: Path) -> None:
    dmt("score", model, "-o", folder / "predictions.parquet", "--function", "examples.deepfm:deepfm")
    rows = pq.read_table(folder / "predictions.parquet")
    logits, labels = (torch.tensor(rows[name].to_pylist(), dtype=torch.float64) for name in ("logit", "label"))
    metrics = ClickMetrics()
    metrics.update(logits, labels, torch.ones_like(labels))
    served = metrics.compute()
    assert (served.loss, served.auc) == pytest.approx((result["eval_loss"], result["eval_auc"]), abs=1e-6)


def model_of_page() -> dict[str, Any]:
    model = deepfm().model
    return {name: getattr(model, name) for name in ("factory", "options", "embedding_dim", "embedding_dims")}


class Flat(nn.Module):
    """A model that a factory makes; ``change`` is applied to its logits."""

    def __init__(self, tables: list[EmbeddingBagConfig], change: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.tables, self.change = flat_sparse_arch(tables), change

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Any:
        logits = self.tables(ids).values().sum(1, keepdim=True)
        if self.change is not None:
            return self.change(logits)
        return logits


class ReadsIds(Flat):
    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Any:
        return super().forward(dense, ids)[ids.lengths()]


class Part(nn.Module):
    """A part with numbers of its own, the rows of a table among them, and others in a layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor(rows))
        self.register_buffer("scale", torch.tensor([5.0]))
        self.bias = nn.Parameter(torch.tensor([6.0]))
        self.layer = linear(7.0)


def with_part(tables: Any, part: nn.Module) -> nn.Module:
    model = Flat(tables)
    model.part = part
    return model


def with_table(tables: Any, change: Callable[[nn.Parameter], Any]) -> nn.Module:
    model = Flat(tables)
    change(next(parameter for name, parameter in model.named_parameters() if "embedding_bags" in name))
    return model


def narrowed(tables: Any) -> Any:
    for table in tables:
        table.embedding_dim = 4
    return tables


MORE = EmbeddingBagConfig(name="t_more", num_embeddings=3, embedding_dim=4, feature_names=["more"])
# What the factory `made` makes of its tables, by the option "kind".
KINDS: dict[str, Callable[[Any], Any]] = {
    "flat": Flat,
    "none": lambda tables: None,
    "lacks one": lambda tables: Flat(tables[1:]),
    "narrower": lambda tables: Flat(narrowed(tables)),
    "with more": lambda tables: Flat([*tables, MORE]),
    "without tables": lambda tables: nn.Linear(6, 1),
    "raises": lambda tables: {"flat": Flat(tables)}["towers"],
    "part": lambda tables: with_part(tables, Part(tables[0].num_embeddings)),
    "weighted": lambda tables: EmbeddingBagCollection(tables=tables, is_weighted=True),
    "lazy": lambda tables: with_part(tables, nn.LazyLinear(1)),
    "batch norm": lambda tables: with_part(tables, nn.BatchNorm1d(4)),
    "frozen layer": lambda tables: with_part(tables, nn.Linear(1, 1).requires_grad_(False)),
    "frozen": lambda tables: with_table(tables, lambda weight: weight.requires_grad_(False)),
    "two columns": lambda tables: Flat(tables, lambda logits: torch.cat([logits, logits], 1)),
    "probabilities": lambda tables: Flat(tables, torch.sigmoid),
    "reads ids": ReadsIds,
    "random": lambda tables: Flat(tables, lambda logits: logits + torch.rand_like(logits)),
    "mixes": lambda tables: Flat(tables, lambda logits: logits - logits.logsumexp(0)),
}


def made(tables: Any, options: dict[str, Any]) -> Any:
    return KINDS[options["kind"]](tables)


def on_device(tables: Any, device: torch.device) -> nn.Module:
    with device:
        return Flat(tables)


def takes_more(tables: Any, learning_rate: float) -> nn.Module:
    return Flat(tables)


class OwnTower(nn.Module):  # may say a wrong size
    def __init__(self, in_features: int, linear: nn.Linear, said: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.linear = in_features, said, linear

    def forward(self, embeddings: Any) -> torch.Tensor:
        return self.linear(embeddings.values()[:, : self.linear.in_features])


class InTowers(nn.Module):
    def __init__(self, towers: list[EmbeddingTower]) -> None:
        super().__init__()
        self.sparse = EmbeddingTowerCollection(towers)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse(ids).sum(1, keepdim=True)


def in_towers(tables: Any, towers: TowerPlan, options: dict[str, Any]) -> nn.Module:
    shared, parts = nn.Linear(4, 2), []
    for own in towers.tables_by_tower(tables)[:: options.get("order", 1)]:
        width = sum(table.embedding_dim * len(table.feature_names) for table in own)
        linear = shared if options.get("shared") else nn.Linear(4, 2)
        module = nn.Identity() if options.get("sizes") is False else OwnTower(width, linear, options.get("said", 2))
        collection: nn.Module = EmbeddingBagCollection(tables=own)
        if options.get("sequences"):
            collection = EmbeddingCollection(tables=[sequence_config(own[0])])
        parts.append(EmbeddingTower(collection, module))
    return InTowers(parts)


def job_of(factory: str, *, in_towers: bool = False, **more: Any) -> Job:
    """A job of a factory of this module, ``name``, or of a kind that `made` makes, ``made:kind``."""
    name, _, kind = factory.partition(":")
    options = {"kind": kind} if kind else more.pop("options", {})
    model = {"factory": f"{__name__}:{name}", "in_towers": in_towers, "options": options}
    return open_unsharded(deepfm(model=model, **more))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "takes_more",
            "the keywords tables, num_dense, options, towers, device: missing a required argument: 'learning_rate'",
        ),
        ("mode", "has no function 'mode'.*did you mean 'made'"),
        ("made:none", "returned a NoneType, not a torch.nn.Module"),
        ("made:lacks one", "the model's table 't_ads' is absent, but the argument `tables` has TableSpec"),
        ("made:narrower", r"the model's table .* is TableSpec.*embedding_dim=4.*has TableSpec.*columns from model"),
        ("made:with more", "the model's table 't_more' is TableSpec.* but the argument `tables` has no such table"),
        ("made:without tables", "needs one EmbeddingBagCollection and no other module with tables, but has none"),
        ("made:raises", r"raised KeyError: 'towers' \(.*test_factory.py, line \d+\)"),
        ("made:two columns", r"returned a tensor \[(\d+), 2\] for \1 samples; return logits \[sam"),
        ("made:reads ids", r"the model fails on a batch \(only tables may read sparse_features\): AttributeError"),
        ("made:batch norm", r"BatchNorm1d 'part' is batch normalization.* Use torch.nn.LayerNorm"),
        ("made:frozen", r"'.*embedding_bags.*' has requires_grad=False or its own optimizer, but the trainer"),
        ("made:weighted", "has is_weighted=True, but the trainer's rows have no weights"),
        ("made:lazy", "'part.weight' has no size yet. Replace lazy modules"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_training(factory: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"(?is)model.factory='{__name__}:.*{message}"):
        check_model(job_of(factory))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("my_models", "is not of the form package.module:function"),
        ("no_such_module:make", "importing 'no_such_module' raised ModuleNotFoundError: No module named"),
        ("examples.deepfm:deepfm", r"names unknown options or features: \['C9'\]"),
    ],
)
def test_a_name_that_leads_to_no_function_or_option_is_refused(factory: str, message: str) -> None:
    with pytest.raises(InputError, match=f"model.factory='{factory}'.*{message}"):
        build_model(open_unsharded(deepfm(model={"factory": factory, "in_towers": False, "options": {"mean": ["C9"]}})))


def check_model(job: Job) -> None:
    check_outputs(job, build_model(job, device="meta"))


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("in_towers", {"said": 1}, r"tower module OwnTower says out_features=1, but returned a tensor \[\d+, 2\]"),
        ("in_towers", {"shared": True}, "'sparse.towers.0.*' and 'sparse.towers.1.*' are one parameter, but the ranks"),
        ("in_towers", {"sequences": True}, r"is TableSpec.*is_sequence=True\), but .* has .*is_sequence=False\)"),
        ("in_towers", {"order": -1}, "tower 0 of the model has t_.*, but the tower plan gives it t_.* tower i"),
        ("in_towers", {"sizes": False}, r"tower module Identity has in_features and out_features \[None"),
        ("made", {"kind": "flat"}, r"needs one EmbeddingTowerCollection and no other .*but has EmbeddingBag"),
    ],
)
def test_tower_modules_are_checked_before_training(factory: str, options: dict[str, Any], message: str) -> None:
    check_model(job_of("in_towers", in_towers=True))
    with pytest.raises(InputError, match=message):
        check_model(job_of(factory, in_towers=True, options=options))


def test_features_outside_towers_need_a_collection_of_their_own() -> None:
    with pytest.raises(InputError, match=r"EmbeddingBagCollection of the features outside towers \(C8\) and"):
        check_model(job_of("in_towers", in_towers=True, towers={"outside": ["C8"]}))


def test_what_is_fine_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"num_towers": 1, "ranks_per_tower": 1}
    check_model(job_of("made:batch norm", topology=alone))
    build_model(job_of("on_device"))
    assert all(p.is_meta for p in build_model(job_of("on_device"), device="meta").parameters())
    check_model(job_of("made:frozen layer"))
    model = with_part([], nn.Linear(2, 2))
    model.towers = nn.ModuleList([nn.Linear(2, 2)])  # a name that is that of a collection's towers
    assert compression_ratio(model) == 1.0
    # A module in the current folder is found, whatever program asks.
    (tmp_path / "made_here.py").write_text("def make(): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert load_function("model.factory", "made_here:make").__name__ == "make"


@pytest.mark.ranks
def test_a_model_that_mixes_samples_is_refused_by_check_and_export(tmp_path: Path) -> None:
    message = r"made': a sample's logit depends on the other samples of its batch: halving the batch changes it by \d"
    config = job_of("made:mixes", topology={"num_towers": 1, "ranks_per_tower": 1}).config
    with pytest.raises(InputError, match=message):
        check_run(config, CheckLimits(max_rows=20, batch_size=4, steps=2))
    random = job_of("made:random", topology={"num_towers": 1, "ranks_per_tower": 1}).config
    with pytest.raises(InputError, match="made': the model's logits are random even without"):
        check_run(random, CheckLimits(max_rows=20, batch_size=4, steps=2))
    save_alone(plain(config), tmp_path / "checkpoint", files={"config.toml": to_toml(config)})
    with pytest.raises(InputError, match=message):
        export_run(tmp_path, tmp_path / "model.pt2", functions=[f"{__name__}:made"])


@on_ranks(1)
def test_a_model_that_returns_probabilities_is_noticed_once(rank: int) -> None:
    for kind, times in (("probabilities", 1), ("flat", 0)):
        model = {"factory": f"{__name__}:made", "options": {"kind": kind}, "in_towers": False}
        alone = {"num_towers": 1, "ranks_per_tower": 1}
        config = deepfm(model=model, topology=alone, train={"log_every": 2, "max_steps": 4, "save_every": 9})
        with unittest.mock.patch.object(logging.getLogger("dmt.training.train"), "warning") as warning:
            train_loop(new_run(config, TowerMesh(config.topology.build())))
        assert sum("must return logits" in call.args[0] for call in warning.call_args_list) == times


@on_ranks(2)
def test_ranks_start_with_the_numbers_that_the_factory_gives(rank: int) -> None:
    two = {"topology": {"num_towers": 2, "ranks_per_tower": 1}}
    job = open_job(job_of("made:part", **two).config)
    state = gather_plain_state(shard_model(job, TowerMesh(job.topology)))
    assert [state[f"model.part.{name}"].unique().item() for name in ("scale", "bias", "layer.weight")] == [5, 6, 7]
    assert state["model.tables.embedding_bags.t_ads.weight"].unique().numel() > 40  # drawn for all of its rows
    assert state["model.part.rows"] == 40
