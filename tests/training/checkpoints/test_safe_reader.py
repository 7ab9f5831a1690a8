"""A checkpoint from elsewhere that would run a program does not run it."""

from __future__ import annotations

import functools
import importlib
import io
import operator
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

from dmt.errors import InputError
from dmt.training.checkpoints.state import TensorReader
from dmt.training.checkpoints.store import load_plain, read_manifest, sha256_of, write_manifest
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.serving import score as score_module
from tests.training.small import dmt, linear, save_alone

INDEX_NAME = ".metadata"


class Call:
    """Is pickled as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._taken = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_alone(linear(1.0), tmp_path)


def sign(folder: Path) -> None:
    """What whoever alters a file can do as well: a manifest that fits."""
    manifest = read_manifest(folder)
    names = [path.name for path in folder.iterdir() if path.name != "checkpoint.json"]
    write_manifest(folder, replace(manifest, files={name: sha256_of(folder / name) for name in names}))


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / INDEX_NAME).read_bytes())


def rewrite(folder: Path, index: Any) -> None:
    (folder / INDEX_NAME).write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    sign(folder)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_plain(linear(0.0), folder)


@pytest.mark.parametrize(
    ("command", "section"),
    [
        (("score", "{}", "-o", "out.parquet"), {"model": {"factory": "evil:f"}}),
        (("score", "{}", "-o", "out.parquet"), {"data": {"source": "evil:f", "categorical": ["c_*"]}}),
        (("export", "{}", "-o", "out.pt2"), {"model": {"factory": "evil:f"}}),
        (("partition", "--checkpoint", "{}", "--towers", "2"), {"model": {"factory": "evil:f"}}),
        (("partition", "--checkpoint", "{}", "--towers", "2"), {"data": {"source": "evil:f", "categorical": ["c_*"]}}),
    ],
)
def test_a_function_that_a_checkpoint_names_runs_only_where_the_user_names_it(
    command: tuple[str, ...], section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    config = to_toml(TrainingConfig.model_validate(section))
    save_alone(linear(1.0), tmp_path / "run", files={"config.toml": config})
    arguments = [argument.format(tmp_path / "run") for argument in command]
    refused = dmt(*arguments, code=2)
    assert not (tmp_path / "ran").exists()
    assert "='evil:f'. If you trust it, add --function evil:f" in refused.stderr
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    dmt(*arguments, "--function", "evil:f", code=2)  # it has no function f
    assert (tmp_path / "ran").exists(), "the function is a dud"


def test_a_source_that_an_exported_file_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {"data": {"source": "evil:f", "categorical": ["c_*"]}}
    monkeypatch.setattr(score_module, "read_manifest", lambda _: manifest)
    monkeypatch.setattr(score_module, "load_program", lambda _: None)
    with pytest.raises(InputError, match=r"data\.source='evil:f'.* --function evil:f"):
        score_module.score(tmp_path / "model.pt2", tmp_path / "out.parquet")


def test_what_is_not_altered_and_an_index_that_python_3_11_2_wrote_load(folder: Path) -> None:
    index, model = index_of(folder), linear(0.0)
    index.planner_data = Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    rewrite(folder, index)
    load_plain(model, folder)
    assert torch.equal(model.weight, torch.ones(2, 3))
    assert TensorReader(folder, read_manifest(folder).files).tensors["model.weight"].size == (2, 3)


@pytest.mark.parametrize("taken", [(_MEM_FORMAT_ENCODING, "__init_subclass__"), (torch.Size, "__new__"), ("", "join")])
def test_no_other_attribute_is_taken(taken: tuple[Any, str], folder: Path) -> None:
    index = index_of(folder)
    index.planner_data = Call(getattr, *taken)
    rewrite(folder, index)
    refused(folder, r"\.metadata (holds code: it calls builtins\.getattr|cannot be read)")


def bombs(mark: Path) -> list[Call]:
    return [
        Call(os.mkdir, str(mark)),
        Call(exec, f"open({str(mark)!r}, 'w').close()"),
        Call(subprocess.run, ["touch", str(mark)]),
        Call(Path.touch, mark),
        Call(operator.call, os.mkdir, str(mark)),
        Call(functools.partial(os.mkdir, str(mark))),
        Call(importlib.import_module, "this"),
    ]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("number", range(7))
def test_an_index_that_runs_a_program_does_not(number: int, inside: bool, folder: Path) -> None:
    mark = folder.parent / "ran"
    index: Any = bombs(mark)[number]
    if inside:
        index = index_of(folder)
        index.planner_data = bombs(mark)[number]
    rewrite(folder, index)
    refused(folder, r"\.metadata holds code: it (imports|calls) .+, which no index needs")
    assert not mark.exists()
    if number < 6:
        index_of(folder)
        assert mark.exists(), "the bomb is a dud"


@pytest.mark.parametrize(
    ("is_tensor", "message"),
    [(True, r"cannot be read .*Weights only load failed"), (False, r"holds a pickled object, .model\.weight.")],
)
def test_an_entry_that_runs_a_program_does_not(is_tensor: bool, message: str, folder: Path) -> None:
    mark, index, stream = folder.parent / "ran", index_of(folder), io.BytesIO()
    torch.save(Call(os.mkdir, str(mark)), stream)
    (folder / "bomb").write_bytes(stream.getvalue())
    place = next(iter(index.storage_data.values()))
    bomb = type(place)("bomb", 0, len(stream.getvalue()))
    if is_tensor:
        index.storage_data = dict.fromkeys(index.storage_data, bomb)
    else:
        index.state_dict_metadata["model.weight"] = BytesStorageMetadata()
        index.storage_data[MetadataIndex("model.weight")] = bomb
    rewrite(folder, index)
    refused(folder, message)
    assert not mark.exists()


def test_an_index_that_reads_from_elsewhere_or_is_none_is_refused(folder: Path) -> None:
    index = index_of(folder)
    for place in index.storage_data.values():
        place.relative_path = "../../elsewhere"
    for content, message in (
        (index, "refers to a file that is not in the manifest"),
        ({"a": 1}, "is a dict, not an index"),
        (b"", r"cannot be read \(Ran out of input\)"),
    ):
        rewrite(folder, content)
        refused(folder, rf"\.metadata {message}")
