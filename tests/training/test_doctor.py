"""`dmt doctor`: every way the torch x torchrec x fbgemm triangle is usually broken, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import subprocess

import pytest

from dmt.training.commands.doctor import diagnose

GOOD = {
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    **dict.fromkeys(
        ["torchmetrics", "tensordict", "pyre-extensions", "tqdm", "pydantic", "pyarrow", "pandas", "tensorboard"], "1"
    ),
    "tomli-w": "1",
    "jinja2": "1",
}


def fixes(changes: dict[str, str | None], *, gpu: bool = False, error: str = "", gpus: int = 2) -> dict[str, str]:
    versions = {**GOOD, **changes}
    findings = diagnose(versions.get, lambda module: error, has_gpu=gpu, gpus=lambda: ["H100"] * gpus)
    return {f.what: f.fix for f in findings if f.fix}


NEWER = {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}


def test_a_good_installation_needs_nothing() -> None:
    assert fixes({}) == {}
    assert fixes(NEWER) == {}
    assert fixes({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, gpu=True) == {}


@pytest.mark.parametrize(
    ("changes", "gpu", "what", "command"),
    [
        ({"torch": "2.12.0"}, False, "torch", "pip install torch==2.13.0"),
        ({"torch": None}, False, "torch", "pip install torch==2.13.0"),
        ({"torchrec": "1.9.0"}, False, "torchrec", "pip install --no-deps torchrec==1.8.0 && pip install torchmetrics"),
        ({**NEWER, "torch": "2.14.0"}, False, "torch", "pip install torch==2.14.1"),
        ({**NEWER, "torchrec": "1.8.0"}, False, "torchrec", "pip install --no-deps torchrec==1.9.2"),
        ({**NEWER, "fbgemm-gpu-cpu": "1.8.0"}, False, "fbgemm", "pip install fbgemm-gpu-cpu==1.9.0"),
        ({"fbgemm-gpu-cpu": None}, False, "fbgemm", "pip install fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm-gpu-cpu": None}, True, "fbgemm", "pip install fbgemm-gpu==1.8.0"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, False, "fbgemm", "pip install fbgemm-gpu-cpu==1.8.0"),
        (
            {"fbgemm-gpu": "1.8.0"},
            False,
            "fbgemm",
            "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install fbgemm-gpu-cpu",
        ),
        ({"tensordict": None}, False, "tensordict", "pip install tensordict"),
        ({"torchmetrics": None}, False, "torchmetrics", "pip install torchmetrics==1.0.3"),
        ({"tomli-w": None}, False, "tomli-w", "pip install tomli-w"),
    ],
)
def test_what_is_wrong_is_mended(changes: dict[str, str | None], gpu: bool, what: str, command: str) -> None:
    found = fixes(changes, gpu=gpu)
    assert list(found) == [what]
    assert found[what].startswith(command)
    # It can be pasted: a shell reads it as commands, and nothing in it is a remark.
    assert subprocess.run(["sh", "-n", "-c", found[what]], check=False).returncode == 0
    assert {step.split()[0] for step in found[what].split(" && ")} <= {"pip"}
    assert not {"#", "or", "e.g."} & set(found[what].split())


@pytest.mark.parametrize(
    ("python", "fits"), [("3.10.14", False), ("3.11.7", True), ("3.13.0", True), ("3.14.1", False)]
)
def test_an_interpreter_without_wheels_is_replaced(python: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: python)
    assert ("python" in fixes({})) is not fits


def test_the_devices_are_named() -> None:
    cuda = {**GOOD, "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}
    on_gpus = diagnose(cuda.get, lambda module: "", has_gpu=True, gpus=lambda: ["H100"] * 2)[-1]
    assert (on_gpus.what, on_gpus.found, on_gpus.ok) == ("devices", "2 x H100", True)
    assert diagnose(GOOD.get, lambda module: "", has_gpu=False)[-1].found == "CPU (no NVIDIA driver)"
    assert fixes({}, gpu=True)["devices"].endswith("pip install fbgemm-gpu==1.8.0")
    unseen = fixes({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, gpu=True, gpus=0)["devices"]
    assert unseen.startswith("pip install --force-reinstall torch==2.13.0")


def test_a_library_that_does_not_load_is_reported_with_its_error() -> None:
    findings = diagnose(GOOD.get, lambda module: "" if module == "torch" else "undefined symbol: _ZN", has_gpu=False)
    assert findings[-1].found == "undefined symbol: _ZN"
    assert findings[-1].what == "import fbgemm_gpu"
    assert f"torch=={GOOD['torch']}" in findings[-1].fix


def test_the_wheel_that_does_not_load_is_not_advised_again() -> None:
    error = "libcudnn.so.9: cannot open shared object file"

    def fix(*, cuda_build: bool, gpu: bool = False) -> str:
        builds = {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"} if gpu else {}
        given = {"has_gpu": gpu, "cuda_build": cuda_build, "gpus": lambda: ["H100"]}
        return diagnose({**GOOD, **builds}.get, lambda module: error, **given)[-1].fix

    on_cpu = fix(cuda_build=True)
    assert on_cpu.startswith('pip install --force-reinstall --index-url "${TORCH_INDEX:?')
    assert on_cpu.endswith('" torch==2.13.0')
    # With a GPU it is the right wheel, and what it lacks are its dependencies.
    assert fix(cuda_build=True, gpu=True) == "pip install --force-reinstall torch==2.13.0"
    assert fix(cuda_build=False) == "pip install --force-reinstall --no-deps torch==2.13.0 fbgemm-gpu-cpu==1.8.0"
    absent = diagnose({**GOOD, "torch": None}.get, lambda module: "", has_gpu=False)[1]
    assert absent.fix == "pip install torch==2.13.0"
    assert "for the CPU build alone: pip install --index-url" in absent.note
    unset = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX"}
    told = subprocess.run(["sh", "-c", on_cpu], env=unset, capture_output=True, text=True, check=False)
    assert told.returncode != 0
    assert "TORCH_INDEX: is to be the address of the CPU wheels" in told.stderr
    assert fixes({"torch": None, "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, gpu=True)["torch"].endswith("2.13.0")


def test_this_installation_is_good() -> None:
    assert [f for f in diagnose() if not f.ok] == []
