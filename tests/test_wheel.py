"""The package as a user installs it: a wheel, built from a source archive, holds every file and runs elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]


def run(command: list[str], folder: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-1000:]} {result.stderr[-2000:]}"
    return result.stdout


def library_files() -> set[str]:
    """Every file of the library under the name that it is installed by."""
    found = set()
    for folder, prefix in (("dmt", ""), ("partitioner", "dmt/"), ("models", "dmt/")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                found.add(prefix + path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built by way of a source archive, from a copy of the tree: setuptools leaves files where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(
        ROOT,
        tree,
        symlinks=True,
        ignore=lambda path, names: (
            set(names) - {"dmt", "partitioner", "models", "pyproject.toml", "README.md", "LICENSE"}
            if Path(path) == ROOT
            else {"__pycache__"}
        ),
    )
    build = """if True:
        import os, sys, tarfile
        from setuptools import build_meta

        folder = sys.argv[1]
        archive = build_meta.build_sdist(folder)
        os.chdir(folder)
        tarfile.open(archive).extractall(filter="data")
        os.chdir(archive.removesuffix(".tar.gz"))
        build_meta.build_wheel(folder)
    """
    run([sys.executable, "-W", "ignore", "-c", build, str(folder)], tree)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == library_files()
    assert {"dmt/py.typed", "dmt/partitioner/__init__.py", "dmt/models/complexity.py"} <= inside
    assert any(name.endswith(".html") for name in inside)
    assert any(name.endswith(".toml") for name in inside)


def test_an_installed_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    run([*PIP, "install", *OFFLINE, "--quiet", "--no-compile", "--target", str(installed), str(wheel)], tmp_path)
    path = {"PYTHONPATH": str(installed)}
    # Where the modules are from; then the script, in the same process.
    program = (
        "import runpy, sys, dmt.models.complexity as m, dmt.partitioner as p; print(m.__file__); print(p.__file__); "
    )
    program += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [str(installed / "bin" / "dmt"), "complexity", "--arch", "dlrm", "--json"]
    first, second, *text = run([sys.executable, "-c", program, *command], tmp_path, **path).splitlines()
    assert all(Path(file).is_relative_to(installed) for file in (first, second))
    assert round(json.loads("".join(text))["mflops_per_sample"], 2) == 14.74
