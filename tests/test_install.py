"""``make install`` on machines that lack what it needs, and the package as a user installs it: a wheel, elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# Without this machine's settings of pip, which may offer other wheels, and without what `make test STACK=2.14` passes
# to every make that it starts.
ALONE = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS", "STACK"))}
ALONE["PIP_CONFIG_FILE"] = os.devnull


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the files that ``make install`` reads, without an environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=clone, env=ALONE, capture_output=True, text=True, check=False)


def torch_wheel(folder: Path, *needs: str) -> None:
    """Writes an empty wheel of the lock's torch with these requirements."""
    info = "torch-2.13.0.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n{required}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_a_machine_without_its_python_is_told_which_to_install_or_name(clone: Path) -> None:
    made = make(clone, "demo", "PYTHON=no_such_python3")
    assert made.returncode == 2
    assert "needs Python 3.11, 3.12 or 3.13 with venv; 'no_such_python3' does not qualify" in made.stdout
    assert "make demo PYTHON=/path/to/python3.11" in made.stdout
    assert not (clone / ".venv").exists()


def test_a_pip_that_brings_the_cuda_build_is_found_out_before_anything_is_installed(clone: Path) -> None:
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    flags = f"PIP_FLAGS=--disable-pip-version-check --no-index --find-links {clone}"
    torch_wheel(clone, "filelock", 'nvidia-cudnn-cu13==9; platform_system == "Linux"')
    made = make(clone, "install", flags)
    assert made.returncode == 2
    assert "pip would install the CUDA build of torch==2.13.0" in made.stdout
    assert "Nothing was installed" in made.stdout
    assert "    make install TORCH_INDEX=URL\n" in made.stdout
    assert "Installing" not in made.stdout

    path = {"PYTHONPATH": ""}

    def check(lock: str, *needs: str) -> subprocess.CompletedProcess[str]:
        torch_wheel(clone, *needs)
        command = [".venv/bin/python", "requirements/check_torch.py", lock, *flags.partition("=")[2].split()]
        return subprocess.run(command, cwd=clone, env=ALONE | path, capture_output=True, text=True, check=False)

    # The lock of torch 2.14 has the libraries. What markers leave out is neither needed nor there.
    assert check("requirements/cpu-2.14.lock", "nvidia-cudnn-cu13==9").returncode == 0
    elsewhere = 'nvidia-cudnn-cu13==9; sys_platform == "win32"'
    assert check("requirements/cpu.lock", "filelock", elsewhere, 'cuda-bindings; extra == "all"').returncode == 0
    (clone / "marked.lock").write_text(f"# pinned\ntorch==2.13.0; sys_platform == 'linux'  # here\n{elsewhere}\n")
    assert check("marked.lock", "nvidia-cudnn-cu13==9").returncode == 1
    # An environment that has the lock's torch already needs no index, after a change of pyproject.toml.
    installed = clone / "torch-2.13.0+cpu.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    path["PYTHONPATH"] = str(clone)
    assert check("marked.lock", "nvidia-cudnn-cu13==9").returncode == 0


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]


def run(command: list[str], folder: Path, **environment: str) -> str:
    options: dict[str, Any] = {"cwd": folder, "env": os.environ | environment, "capture_output": True, "text": True}
    result = subprocess.run(command, check=False, **options)
    assert result.returncode == 0, f"{command}: {result.stdout[-1000:]} {result.stderr[-2000:]}"
    return str(result.stdout)


def library_files() -> set[str]:
    """Returns every file of the library, by the name under which it is installed."""
    found = set()
    for folder, prefix in (("dmt", ""), ("partitioner", "dmt/"), ("models", "dmt/")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                found.add(prefix + path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built by way of a source archive, from a copy of the tree, in which setuptools leaves files."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("dmt", "partitioner", "models"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
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


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    run([*PIP, "install", *OFFLINE, "--quiet", "--no-compile", "--target", str(folder), str(wheel)], wheel.parent)
    return folder


def test_an_installed_wheel_runs_without_the_repository(installed: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_does_what_the_readme_shows(installed: Path, tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(installed)}
    dmt = [sys.executable, str(installed / "bin" / "dmt")]
    run([*dmt, "doctor"], tmp_path, **path)
    lines = (ROOT / "README.md").read_text().partition("```diff\n")[2].partition("```")[0].splitlines()
    (tmp_path / "five.py").write_text("\n".join(line[1:] for line in lines if not line.startswith("-")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run([*torchrun, "five.py"], tmp_path, **path)
    run([*dmt, "demo", "train.max_steps=20", "--out", "out"], tmp_path, **path)
    assert {"towers.json", "report.html"} <= {file.name for file in (tmp_path / "out").rglob("*")}
