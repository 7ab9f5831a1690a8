"""An exported checkpoint has the bits of the plain model, refuses wrong input, and needs nothing but PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from dmt.errors import InputError
from dmt.plan.towers import TowerPlan
from dmt.training.config import to_toml
from dmt.training.data.config import DataConfig
from dmt.training.data.prepare import prepare
from dmt.training.job import open_unsharded
from dmt.training.serving import export
from dmt.training.serving.export import Exported, export_run, load_program, read_manifest, tensors_of
from dmt.training.serving.program import ServedModel, make_program, quantize_rows, restore_rows
from dmt.training.serving.score import score
from dmt.training.trained import trained_model
from tests.training.small import files_up_to, plain, save_alone, small, source

Inputs = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
FEATURES = [f"C{i}" for i in range(1, 9)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 features, of which two have bags, as far as files can tell."""
    folder = tmp_path_factory.mktemp("run")
    synthetic = {"num_features": 8, "rows_per_table": 40, "num_multi_hot": 2, "num_rows": 600, "num_eval_rows": 128}
    config = small(synthetic=synthetic)
    torch.manual_seed(0)
    save_alone(plain(config), folder / "checkpoint", files={"config.toml": to_toml(config)}, step=6)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> tuple[Path, Exported]:
    return run / "model.pt2", export_run(run, run / "model.pt2")


@pytest.fixture(scope="module", params=["server", "score"])
def program(exported: tuple[Path, Exported], request: pytest.FixtureRequest) -> torch.nn.Module:
    return load_program(exported[0]) if request.param == "score" else torch.export.load(exported[0]).module()


def test_logits_have_the_bits_of_the_plain_model_at_any_batch_size(run: Path, program: torch.nn.Module) -> None:
    _, job, model = trained_model(run)
    seen = set()
    for size in (1, 2, 127, 128, 700, 4096):  # from 128 on, a layer pads its input
        batch = next(job.data.batches("eval", rank=0, world_size=1, batch_size=size))
        with torch.no_grad():
            wanted = model(batch.dense_features, batch.sparse_features).squeeze(1)
            found = program(*tensors_of(batch))
        assert torch.equal(found, wanted), size
        seen.add(tuple(batch.sparse_features["C8"].lengths()[:100].unique().tolist()))
    assert max(seen, key=len) == (0, 1, 2, 3), "no bags of several ids and none"


def test_it_runs_in_a_process_that_has_torch_only(exported: tuple[Path, Exported], tmp_path: Path) -> None:
    code = """if True:
        import sys

        for name in ("dmt", "torchrec", "fbgemm_gpu"):
            sys.modules[name] = None
        import torch

        model = torch.export.load(sys.argv[1]).module()
        names = [f"C{i}" for i in range(1, 9)]
        ids = {name: torch.tensor([3, 1, 4]) for name in names}
        print(model(torch.ones(2, 3), ids, {name: torch.tensor([2, 1]) for name in names}).tolist())
    """
    command = [sys.executable, "-W", "ignore", "-c", code, str(exported[0])]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={})
    assert run.returncode == 0, run.stderr
    found = load_program(exported[0])(*inputs())
    assert json.loads(run.stdout) == found.tolist()


def inputs() -> Inputs:
    ids = {name: torch.tensor([3, 1, 4]) for name in FEATURES}
    return torch.ones(2, 3), ids, {name: torch.tensor([2, 1]) for name in FEATURES}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("ids", torch.tensor([3, 1, 40]), r"Index 2 of input takes value 40 which is not in the valid range \[0, 40\)"),
        ("ids", torch.tensor([3, 1]), r"lengths\['C3'\] do not add up to len\(ids\['C3'\]\)"),
        ("lengths", torch.tensor([-1, 4]), "a length is negative"),
    ],
)
def test_the_program_refuses_wrong_input(part: str, value: Tensor, message: str, program: Any) -> None:
    dense, ids, lengths = inputs()
    (ids if part == "ids" else lengths)["C3"] = value
    with pytest.raises((RuntimeError, AssertionError, ValueError, IndexError), match=message):
        program(dense, ids, lengths)


def test_the_manifest_says_what_a_server_needs(exported: tuple[Path, Exported]) -> None:
    out, found = exported
    manifest = read_manifest(out)
    assert manifest == found.manifest
    assert [manifest[key] for key in ("model", "step", "tables")] == ["dmt-dlrm", 6, "fp32"]
    assert manifest["dense"] == ["I1", "I2", "I3"]
    assert manifest["towers"] == [["C1", "C3", "C5", "C7"], ["C2", "C4", "C6", "C8"]]
    keys = ("name", "table", "rows", "columns", "multi_hot")
    expected = [(f"C{i}", f"t_C{i}", 40, 8, i >= 7) for i in range(1, 9)]
    assert [tuple(feature[key] for key in keys) for feature in manifest["features"]] == expected
    assert manifest["versions"]["torch"]
    assert found.difference == 0.0


def test_ids_that_another_program_made_are_not_said_to_be_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "read_checkpoint", lambda _: SimpleNamespace(step=0, progress={}))
    (tmp_path / "a.csv").write_text("label,c,d,e\n0,x,x,x\n1,y,y,y\n")
    columns: dict[str, Any] = {"categorical": ("c", "d", "e"), "shared_tables": {"s": ("c", "e")}}
    prepare(DataConfig(kind="columns", train_path=str(tmp_path / "a.csv"), **columns), tmp_path / "out")
    config = small().model_copy(update={"data": DataConfig(kind="prepared", prepared=str(tmp_path / "out"))})
    manifest = tmp_path / "out" / "manifest.json"
    for written_by in ("dmt prepare", "another program"):
        of_job = export._manifest(open_unsharded(config), Path(), "fp32")
        assert bool(of_job["hashing"]) is bool(of_job["features"][0]["examples"]) is (written_by == "dmt prepare")
        assert [feature["name"] for feature in of_job["features"]] == ["c", "d", "e"], "of the input"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"raw": None}))


def test_a_damaged_or_other_file_is_refused(exported: tuple[Path, Exported], tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(exported[0].read_bytes()[:5000])
    for read in (read_manifest, load_program):
        with pytest.raises(InputError, match=r"model\.pt2: cannot be read"):
            read(path)
    for name, text, message in (
        ("other/data", "1", "has no manifest, so `dmt export` did not write it"),
        ("old/extra/manifest.json", '{"format": 99}', "its manifest is not of format 1"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, text)
        with pytest.raises(InputError, match=rf"model\.pt2: {message}"):
            read_manifest(path)


def test_a_program_that_computes_something_else_is_not_written(
    run: Path, exported: tuple[Path, Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*_: Any, **__: Any) -> torch.export.ExportedProgram:
        program = torch.export.load(exported[0])
        biases = [value for name, value in program.state_dict.items() if "over_arch" in name and name.endswith("bias")]
        with torch.no_grad():
            biases[-1].add_(0.001)
        return program

    monkeypatch.setattr(export, "make_program", spoilt)
    with pytest.raises(InputError, match=r"differs from the model in its logits \(by 1\.0e-03\)"):
        export_run(run, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with files_up_to(10_000), pytest.raises(InputError, match=r"model\.pt2' cannot be written: File too large"):
        export_run(run, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_file_whose_manifest_has_more_rows_than_its_tables_is_refused(
    exported: tuple[Path, Exported], tmp_path: Path
) -> None:
    with zipfile.ZipFile(exported[0]) as old, zipfile.ZipFile(tmp_path / "larger.pt2", "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry).replace(b'"rows_per_table": 40', b'"rows_per_table": 4000'))
    with pytest.raises(InputError, match=r"larger\.pt2: the program refuses the rows \(.*40\)"):
        score(tmp_path / "larger.pt2", tmp_path / "out.parquet")


# `ServedModel` before it is traced: formats of tables, cut tables, names, and what it refuses.


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_off_by_half_a_step_at_most(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 12, generator=generator) * torch.logspace(-30, 6, 200).unsqueeze(1)
    weight[3], weight[4], weight[5, :] = 0.0, 1e-7, torch.arange(12.0)
    codes, scales = quantize_rows(weight, bits)
    assert codes.shape == (200, 12 * bits // 8)
    step = (weight.amax(1) - weight.amin(1)) / (2**bits - 1)
    error = (restore_rows(codes, scales, bits=bits) - weight).abs().amax(1)
    assert bool((error <= 0.51 * step + 1e-6 * weight.abs().amax(1)).all())
    assert float(error[3]) == 0.0
    # The rounding is used: a row of 16 equal steps is not off at all, a random one is.
    assert float(error[100]) > 0.1 * float(step[100])


@pytest.mark.parametrize(("stored", "most"), [("fp32", 0.0), ("int8", 3e-2), ("int4", 0.5)])
@pytest.mark.parametrize(("arch", "trained"), [("dlrm", "fp32"), ("dmt-dcn", "fp32"), ("dmt-dlrm-products", "fp16")])
def test_logits_are_near_those_of_the_model(arch: str, trained: str, stored: Any, most: float) -> None:
    torch.manual_seed(0)
    config = small(arch, model={"p": 1}, synthetic={"num_multi_hot": 3}, sharding={"table_precision": trained})
    data, model = source(config), plain(config).model.eval()
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=32))
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.sparse_features).squeeze(1)
        found = ServedModel(model, data.columns.feature_names, stored=stored)(*tensors_of(batch))
    difference = float((found - wanted).abs().max())
    assert difference <= most * float(wanted.std())
    assert stored == "fp32" or difference > 0.0


def test_column_shards_are_looked_up_with_the_ids_of_their_feature(tmp_path: Path) -> None:
    torch.manual_seed(0)
    towers = [["C1[0:4]", "C2", "C3"], ["C1[4:8]", "C4", "C5", "C6"]]
    TowerPlan.from_lists(towers, column_splits={"C1": (4, 4)}).save(tmp_path / "towers.json")
    config = small("dlrm", "sptt", towers={"plan": str(tmp_path / "towers.json")})
    data, model = source(config), plain(config).model.eval()
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=32))
    dense, ids, lengths = tensors_of(batch)
    cuts = {"C1": (4, 4)}
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.split_columns(cuts).sparse_features).squeeze(1)
        found = ServedModel(model, data.columns.feature_names, splits=cuts)(dense, ids, lengths)
    assert torch.equal(found, wanted)


class Clicks(nn.Module):
    """A model of one's own: a shared table, mean pooling, another width, names that are no identifiers."""

    def __init__(self, change: Callable[[Tensor], Any] | None = None, **bags: Any) -> None:
        super().__init__()
        self.change = change or nn.Identity()
        tables = [
            EmbeddingBagConfig(name="t_ad", num_embeddings=2000, embedding_dim=128, feature_names=["ad", "last ad"]),
            EmbeddingBagConfig(
                name="t_u", num_embeddings=20, embedding_dim=7, feature_names=["user.country"], pooling=PoolingType.MEAN
            ),
        ]
        self.tables = EmbeddingBagCollection(tables=tables, **bags)
        self.over = nn.Linear(2 * 128 + 7 + 2, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Any:
        found = self.tables(ids)
        return self.change(self.over(torch.cat([dense, found["last ad"], found["ad"], found["user.country"]], dim=1)))


NAMES = ["ad", "last ad", "user.country"]


def test_a_model_of_ones_own_is_exported_and_int8_is_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Clicks().eval()
    lengths = {name: torch.tensor([2, 0, 1, 3]) for name in NAMES}
    ids = {name: torch.tensor([4, 3, 19, 0, 7, 7]) for name in NAMES}
    dense = torch.randn(4, 2)
    batch = KeyedJaggedTensor(keys=NAMES, values=torch.cat([*ids.values()]), lengths=torch.cat([*lengths.values()]))
    served = ServedModel(model, NAMES)
    with torch.no_grad():
        assert torch.equal(served(dense, ids, lengths), model(dense, batch).squeeze(1))
        program = make_program(ServedModel(model, NAMES, stored="int8"), num_dense=2)
        difference = (program.module()(dense, ids, lengths) - model(dense, batch).squeeze(1)).abs().max()
    assert 0.0 < float(difference) < 1e-2
    torch.export.save(program, tmp_path / "model.pt2")
    weights = sum(table.weight.nbytes for table in model.tables.embedding_bags.values())
    # The program's text and the dense layers take 100 kB whatever the tables' size.
    assert (tmp_path / "model.pt2").stat().st_size - 150_000 < 0.27 * weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_a_compiled_program_refuses_ids_without_a_row(tmp_path: Path) -> None:
    """With other operators, it would read row -1 as the last one."""
    program = make_program(ServedModel(Clicks(), NAMES, stored="int8"), num_dense=2)
    model = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2")))
    dense, ones = torch.ones(3, 2), {name: torch.ones(3, dtype=torch.long) for name in NAMES}
    assert model(dense, ones, ones).shape == (3,)
    for row in (-1, 20):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            model(dense, ones | {"user.country": torch.tensor([1, row, 1])}, ones)


class Words(EmbeddingCollection):
    """A subclass may compute anything."""


class Sequences(Clicks):
    def __init__(self) -> None:
        super().__init__()
        self.words = Words(
            tables=[EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["word"])]
        )


class Attention(nn.Module):
    """Reads a target's embeddings as [B, N], and pads its history by an operator of FBGEMM."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["item", "history"])
        self.table = EmbeddingCollection(tables=[table])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.table(ids)
        return (found["item"].values() * found["history"].to_padded_dense(4).sum(1)).sum(1)


def test_a_target_has_one_id_per_sample_and_operators_of_fbgemm_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model, names, dense = Attention(), ["item", "history"], torch.zeros(4, 1)
    ids = {"item": torch.tensor([4, 3, 8, 0]), "history": torch.tensor([7, 1, 0, 2, 2, 5])}
    lengths = {"item": torch.ones(4, dtype=torch.long), "history": torch.tensor([2, 0, 1, 3])}
    batch = KeyedJaggedTensor(keys=names, values=torch.cat([*ids.values()]), lengths=torch.cat([*lengths.values()]))
    program = make_program(ServedModel(model, names), num_dense=1, targets=["item"])
    assert "Attention calls fbgemm." in caplog.text
    with torch.no_grad():
        assert torch.allclose(program.module()(dense, ids, lengths), model(dense, batch))


def test_another_output_than_one_number_for_each_sample_is_refused() -> None:
    changes: dict[str, Callable[[Tensor], Any]] = {
        r"a tensor \[\d, 2\]": lambda logits: logits.expand(-1, 2),
        "a dict": lambda logits: {"click": logits},
    }
    ones = {name: torch.ones(2, dtype=torch.long) for name in NAMES}
    for returned, change in changes.items():
        served = ServedModel(Clicks(change), NAMES)
        message = rf"Clicks returned {returned} for \d samples; return logits \[samples, 1\]"
        with pytest.raises(InputError, match=message):
            make_program(served, num_dense=2)
        with pytest.raises(InputError, match=message):
            served(torch.zeros(2, 2), ones, ones)


def test_what_cannot_be_exported_is_refused() -> None:
    make_program(ServedModel(Clicks(lambda logits: logits[:, 0]), NAMES), num_dense=2)  # [B] is fine
    with pytest.raises(InputError, match=r"cannot export Clicks .*without branches on the data.* and read ids by key"):
        make_program(ServedModel(Clicks(lambda x: x if bool(x.sum() > 0) else -x), NAMES), num_dense=2)
    with pytest.raises(InputError, match='Feature "it\'s": PyTorch cannot export names with quotation marks'):
        make_program(ServedModel(Clicks(), [*NAMES, "it's"]), num_dense=2)
    with pytest.raises(InputError, match="module 'words' is a Words, whose tables cannot"):
        ServedModel(Sequences(), NAMES)
    with pytest.raises(InputError, match="'t_u' has 7 columns, but int4 packs two numbers into a byte"):
        ServedModel(Clicks(), NAMES, stored="int4")
    with pytest.raises(InputError, match="that holds table 't_ad' has is_weighted=True"):
        ServedModel(Clicks(is_weighted=True), NAMES)
