"""A model of one's own by config alone: through train, resume, check, plan, export and score."""

from __future__ import annotations

import logging
import tomllib
import unittest.mock
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt.errors import InputError
from dmt.models import flat_sparse_arch
from dmt.models.complexity import compression_ratio
from dmt.partitioner import FeatureAffinity
from dmt.plan.towers import TowerPlan
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import build_model
from dmt.training.check import check_run
from dmt.training.check.shrink import CheckLimits
from dmt.training.commands import main
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.factory import check_outputs
from dmt.training.functions import load_function
from dmt.training.job import Job
from dmt.training.metrics import metric_values
from dmt.training.serving.export import read_manifest
from tests.ranks import run_ranks
from tests.training.small import new_run, train_loop, unsharded
from tests.training.test_resume import attempt


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


def train(config: TrainingConfig, steps: int) -> dict[str, Any]:
    result = attempt(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": steps})}))
    assert result is not None
    return result


@pytest.mark.ranks
def test_the_deepfm_of_the_page_from_a_flat_run_to_a_served_one_in_learned_towers(tmp_path: Path) -> None:
    flat, towers = tmp_path / "flat", tmp_path / "towers.json"
    config = deepfm(flat, model=model_of_page() | {"in_towers": False})
    result = train(config, 4)
    assert (result["steps"], result["compression_ratio"]) == (4, 1.0)
    assert_served_alike(flat, result, tmp_path)
    # A program takes seconds: that of the towers below has all parts of a flat one.
    named = ("--function", "examples.deepfm:deepfm")
    dmt(
        "partition",
        "--checkpoint",
        flat,
        *named,
        "--tower-module",
        "dlrm-products",
        "--towers",
        2,
        "--out",
        towers,
        "--save-affinity",
        tmp_path / "affinity.npz",
    )
    assert FeatureAffinity.load(tmp_path / "affinity.npz").is_interactions  # widths differ, so there are no cosines
    learned = TowerPlan.load(towers)
    assert sorted(learned.features) == [f"C{i}" for i in range(1, 9)]
    assert any({"C1", "C2"} <= set(tower.features) for tower in learned.towers)  # their table is one

    run = tmp_path / "run"
    config = deepfm(run, towers={"plan": str(towers)})
    (tmp_path / "config.toml").write_text(to_toml(config))
    dmt("plan", tmp_path / "config.toml")
    assert train(config, 3)["steps"] == 3
    result = train(config, 6)
    assert (result["steps"], result["arch"]) == (6, "examples.deepfm:deepfm")
    assert result["compression_ratio"] > 1.0
    out = tmp_path / "model.pt2"
    dmt("export", run, "-o", out, *named)
    features = read_manifest(out)["features"]
    columns = {feature["name"]: feature["columns"] for feature in features}
    assert columns == {f"C{i}": 8 if i < 3 else 16 for i in range(1, 9)}
    assert {feature["table"] for feature in features if feature["name"] in ("C1", "C2")} == {"t_ads"}
    assert_served_alike(out, result, tmp_path)


def dmt(*arguments: object) -> None:
    ran = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert ran.exit_code == 0, ran.output


def assert_served_alike(model: Path, result: dict[str, Any], folder: Path) -> None:
    dmt("score", model, "-o", folder / "predictions.parquet", "--function", "examples.deepfm:deepfm")
    rows = pq.read_table(folder / "predictions.parquet")
    logits, labels = (torch.tensor(rows[name].to_pylist(), dtype=torch.float64) for name in ("logit", "label"))
    served = metric_values(logits, labels)
    assert (served.loss, served.auc) == pytest.approx((result["eval_loss"], result["eval_auc"]), abs=1e-6)


def model_of_page() -> dict[str, Any]:
    model = deepfm().model
    return {name: getattr(model, name) for name in ("factory", "options", "embedding_dim", "embedding_dims")}


@pytest.mark.ranks
def test_the_deepfm_of_the_page_agrees_with_the_plain_module(tmp_path: Path) -> None:
    limits = CheckLimits(max_rows=20, max_ranks=4, batch_size=4, steps=2)
    report = check_run(deepfm(topology={"num_towers": 2, "ranks_per_tower": 2}), limits)
    assert report.agrees, report.rows


class Flat(nn.Module):
    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.tables = flat_sparse_arch(tables)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.tables(ids).values().sum(1, keepdim=True)


def takes_more(tables: Any, learning_rate: float) -> nn.Module:
    return Flat(tables)


def returns_none(options: dict[str, Any]) -> None:
    return None


def flat(tables: Any) -> nn.Module:
    return Flat(tables)


def lacks_one(tables: Any) -> nn.Module:
    return Flat(tables[1:])


def wider(tables: Any) -> nn.Module:
    for table in tables:
        table.embedding_dim = 4
    return Flat(tables)


def with_more(**given: Any) -> nn.Module:
    more = EmbeddingBagConfig(name="t_more", num_embeddings=3, embedding_dim=4, feature_names=["more"])
    return Flat([*given["tables"], more])


def without_tables(num_dense: int) -> nn.Module:
    return nn.Linear(num_dense + 1, 1)


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


def with_a_part(tables: Any, options: dict[str, Any]) -> nn.Module:
    model = Flat(tables)
    model.part = {"bias": Bias, "scale": Scale}[options["part"]]()
    return model


def of_towers(tables: Any, towers: TowerPlan) -> nn.Module:
    """A tower module without sizes, and a name that is that of a collection's towers."""
    model = Flat([])
    model.towers = nn.ModuleList([nn.Linear(2, 2)])
    parts = [
        EmbeddingTower(EmbeddingBagCollection(tables=own), nn.Identity()) for own in towers.tables_by_tower(tables)
    ]
    model.tables = EmbeddingTowerCollection(parts)
    return model


class Wrong(Flat):
    """A model whose result the trainer cannot use."""

    def __init__(self, tables: list[EmbeddingBagConfig], kind: str) -> None:
        super().__init__(tables)
        self.kind = kind

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Any:
        logits = super().forward(dense, ids)
        if self.kind == "reads ids":
            return logits[ids.lengths()]
        return {"two columns": torch.cat([logits, logits], 1), "a tuple": (logits, logits)}[self.kind]


def wrong(tables: Any, options: dict[str, Any]) -> nn.Module:
    return Wrong(tables, options["kind"])


class Probabilities(Flat):
    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Any:
        return torch.sigmoid(super().forward(dense, ids))


def probabilities(tables: Any) -> nn.Module:
    return Probabilities(tables)


def raises(tables: Any) -> nn.Module:
    return {"flat": Flat(tables)}["towers"]


def with_batch_norm(tables: Any) -> nn.Module:
    model = Flat(tables)
    model.norm = nn.BatchNorm1d(4)
    return model


class OwnTower(nn.Module):
    """A tower module that may say a wrong size."""

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


def towers_with(tables: Any, towers: TowerPlan, options: dict[str, Any]) -> nn.Module:
    one, parts = nn.Linear(4, 2), []
    for own in towers.tables_by_tower(tables):
        width = sum(table.embedding_dim * len(table.feature_names) for table in own)
        linear = one if options.get("shared") else nn.Linear(4, 2)
        parts.append(
            EmbeddingTower(EmbeddingBagCollection(tables=own), OwnTower(width, linear, options.get("said", 2)))
        )
    return InTowers(parts)


not_callable = 3


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("my_models", "is not of the form package.module:function"),
        (".my_models:make", "is not of the form package.module:function"),
        ("my-models:make", "is not of the form package.module:function"),
        ("no_such_module:make", "importing 'no_such_module' raised ModuleNotFoundError: No module named"),
        (":flt", "has no function 'flt'.*did you mean 'flat'"),
        (":not_callable", "has no function 'not_callable'"),
        (":takes_more", r"takes 'learning_rate', which is none of tables, num_dense, options, towers, device"),
        (":returns_none", "returned a NoneType, no torch.nn.Module"),
        (":lacks_one", "the model's table 't_ads' is absent, but it was given TableSpec"),
        (":wider", r"the model's table .* is TableSpec.*embedding_dim=4.*given TableSpec.*columns from model"),
        (":with_more", "the model's table 't_more' is TableSpec.* but it was given none of that name"),
        (":without_tables", "needs one EmbeddingBagCollection and no other module with tables, but has none"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused(factory: str, message: str) -> None:
    name = f"{__name__}{factory}" if factory.startswith(":") else factory
    job = unsharded(deepfm(model={"factory": name, "in_towers": False}))
    with pytest.raises(InputError, match=rf"(?is)model.factory='{name}'.*{message}"):
        build_model(job)


def check_model(job: Job) -> None:
    check_outputs(job, build_model(job, device="meta"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("two columns", r"the model returned a tensor \[(\d+), 2\]\. It must return logits, a tensor \[\1, 1\]"),
        ("a tuple", "the model returned a tuple. It must return logits"),
        ("reads ids", r"the model fails on a batch \(only tables may read sparse_features\): AttributeError"),
    ],
)
def test_what_a_model_returns_is_checked_before_training(kind: str, message: str) -> None:
    job = unsharded(deepfm(model={"factory": f"{__name__}:wrong", "in_towers": False, "options": {"kind": kind}}))
    with pytest.raises(InputError, match=rf"model.factory='.*:wrong':? .*{message}"):
        check_model(job)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"said": 1}, r"tower module OwnTower says out_features=1, but returned a tensor \[\d+, 2\]"),
        ({"shared": True}, "'sparse.towers.0.*' and 'sparse.towers.1.*' are one parameter, but the ranks of a tower"),
    ],
)
def test_tower_modules_are_checked_before_training(options: dict[str, Any], message: str) -> None:
    own = {"factory": f"{__name__}:towers_with", "in_towers": True}
    check_model(unsharded(deepfm(model=own | {"options": {}})))
    with pytest.raises(InputError, match=rf"model.factory='.*:towers_with': .*{message}"):
        check_model(unsharded(deepfm(model=own | {"options": options})))


def test_batch_norm_and_errors_of_the_factory_are_told() -> None:
    with pytest.raises(InputError, match=r"BatchNorm1d 'norm' normalizes over the samples.* Use torch.nn.LayerNorm"):
        check_model(unsharded(deepfm(model={"factory": f"{__name__}:with_batch_norm", "in_towers": False})))
    alone = {"num_towers": 1, "ranks_per_tower": 1}
    check_model(unsharded(deepfm(model={"factory": f"{__name__}:with_batch_norm", "in_towers": False}, topology=alone)))
    with pytest.raises(InputError, match=r":raises' raised KeyError: 'towers' \(.*test_factory.py, line \d+\)"):
        check_model(unsharded(deepfm(model={"factory": f"{__name__}:raises", "in_towers": False})))


def test_tower_modules_have_sizes_and_other_towers_are_none(tmp_path: Path) -> None:
    config = deepfm(model={"factory": f"{__name__}:of_towers", "in_towers": True})
    with pytest.raises(InputError, match=r"tower module Identity has in_features and out_features \[None"):
        build_model(unsharded(config))
    model = Flat([])
    model.towers = nn.ModuleList([nn.Linear(2, 2)])
    assert compression_ratio(model) == 1.0


def test_what_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    towers = deepfm(model={"factory": f"{__name__}:flat", "in_towers": True})
    with pytest.raises(InputError, match=r"needs one EmbeddingTowerCollection and no other .*but has EmbeddingBag"):
        build_model(unsharded(towers))
    with pytest.raises(ValueError, match="in_towers and options are for a model of your own"):
        TrainingConfig.model_validate({"model": {"in_towers": True}})
    with pytest.raises(ValueError, match=r"model\.embedding_dims=\{'C1': 6\}: give multiples of 4"):
        TrainingConfig.model_validate({"model": {"embedding_dims": {"C1": 6}}})
    # A module in the current folder is found, whatever program asks.
    (tmp_path / "made_here.py").write_text("def make(): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert load_function("model.factory", "made_here:make").__name__ == "make"
    # TorchRec would start them from whatever is in memory, and from zeros.
    for part, name in (("bias", "Bias 'part' has 'bias'"), ("scale", "Scale 'part' has 'scale'")):
        own = {"factory": f"{__name__}:with_a_part", "in_towers": False, "options": {"part": part}}
        build_model(unsharded(deepfm(model=own)))
        with pytest.raises(InputError, match=rf"{name}, but a sharded model is made without numbers.* reset_param"):
            build_model(unsharded(deepfm(model=own)), device="meta")
    plain = build_model(unsharded(deepfm(model={"factory": f"{__name__}:flat", "in_towers": False})))
    assert isinstance(plain.tables, EmbeddingBagCollection)


def warnings_on_rank(rank: int) -> list[str]:
    found = []
    # The last run is shorter than the interval of the log.
    for factory, log_every in (("probabilities", 2), ("flat", 2), ("probabilities", 50)):
        model = {"factory": f"{__name__}:{factory}", "options": {}, "in_towers": False}
        alone = {"num_towers": 1, "ranks_per_tower": 1}
        config = deepfm(model=model, topology=alone, train={"log_every": log_every, "max_steps": 4, "save_every": 9})
        with unittest.mock.patch.object(logging.getLogger("dmt.training.train"), "warning") as warning:
            train_loop(new_run(config, TowerMesh(config.topology.build())))
        found.append(" ".join(call.args[0] for call in warning.call_args_list))
    return found


@pytest.mark.ranks
def test_a_model_that_returns_probabilities_is_noticed_once() -> None:
    [[noticed, nothing, short]] = run_ranks(warnings_on_rank, 1, fresh=True)
    for text in (noticed, short):
        assert text.count("The model must return logits: take the sigmoid out of it") == 1
    assert nothing == ""
