"""The examples run as their docstrings say, and print what they promise."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from dmt import TowerPlan
from tests.ranks import run_program

ROOT = Path(__file__).parent.parent.parent


def output_of(name: str, *more: str) -> str:
    """What an example prints, run as its docstring says; ``[OPTIONAL]`` arguments are left out."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
    lines = [line.strip() for line in docstring.splitlines() if line.startswith("    ")]
    assert len(lines) == 1, f"{name}: expected one indented command in the docstring, found {lines}"
    program, *arguments = (word for word in shlex.split(lines[0]) if not word.startswith("["))
    ranks = 1
    if program == "torchrun":
        assert arguments[:2] == ["--standalone", "--nproc-per-node"]
        ranks, arguments = int(arguments[2]), arguments[3:]
    else:
        assert program == "python"
    result = run_program([*arguments, *more], ranks, ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.ranks
def test_learn_towers_finds_the_planted_groups(tmp_path: Path) -> None:
    out = output_of("learn_towers.py", str(tmp_path / "out"))
    assert "planted groups found: True" in out
    within = {name: float(value) for name, value in re.findall(r"(\w+): mean affinity ([\d.]+) within", out)}
    assert within["learned"] > 0.6 > within["strided"]
    plan = TowerPlan.load(tmp_path / "out" / "towers.json")
    assert [f"{tower.name}: {' '.join(tower.features)}" for tower in plan.towers] == out.splitlines()[:3]
    assert (tmp_path / "out" / "affinity.png").stat().st_size > 1000


@pytest.mark.ranks
def test_a_torchrec_script_sends_less_with_each_step_of_the_tutorial() -> None:
    """The script itself compares the outputs of the same model bit for bit."""
    out = output_of("from_torchrec.py")
    assert f"```text\n{out}```" in (ROOT / "docs" / "tutorial.md").read_text()
    flat, over_towers, unique, compressed = (int(number) for number in re.findall(r": (\d+)", out))
    assert flat == over_towers > unique > compressed


@pytest.mark.ranks
def test_training_over_towers_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "same_training.py"), run_name="__main__")  # in no rank, as it starts ranks
    out = capsys.readouterr().out
    found = re.findall(r"(\S+): moved (\S+), differs by (\S+)", out)
    assert len(found) == 6, out
    assert all(float(differs) < 1e-5 * float(moved) for _, moved, differs in found), out


def test_the_proof_takes_frozen_weights_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmt.testing.run_on_ranks", lambda *_, **__: [{"frozen": (0.0, 0.0)}])
    example = runpy.run_path(str(ROOT / "examples" / "same_training.py"), run_name="__main__")
    assert example["distance"](torch.tensor([True]), torch.tensor([False])) == 1


@pytest.mark.ranks
def test_a_loop_resumes_and_its_checkpoint_loads_in_one_process() -> None:
    assert "began at steps [0, 2]; the plain model equals the sharded one on 2 of 2 ranks" in output_of("resume.py")


@pytest.mark.ranks
def test_an_own_tower_module_compresses_and_learns() -> None:
    out = output_of("own_tower_module.py")
    ratio, first, last = (float(x) for x in re.findall(r"(?:ratio|loss|10,) ([\d.]+)", out))
    assert ratio == 6.0
    assert last < first - 0.05, out


@pytest.mark.ranks
def test_the_outputs_of_a_history_are_as_many_bytes_at_any_length() -> None:
    out = output_of("history.py")
    found = re.findall(r": outputs (\d+), gradients (\d+), ids (\d+)", out)
    (*short, few), (*long, many) = ([int(number) for number in numbers] for numbers in found)
    assert {*short, *long} == {4 * 128 * 2 * 8 * 4}, "4 ranks, 128 samples, 2 D numbers of 4 bytes for the other host"
    assert many > 2 * few
    first, last = (float(x) for x in re.findall(r"(?:loss|,) (\d\.\d{4}) in", out))
    assert last < 0.5 * first, out
