"""`dmt doctor`: every way the torch x torchrec x fbgemm triangle is usually broken, and the command that fixes it."""

from __future__ import annotations

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
    assert (on_gpus.what, on_gpus.found, on_gpus.fix) == ("devices", "2 x H100", "")
    assert diagnose(GOOD.get, lambda module: "", has_gpu=False)[-1].found == "CPU (no NVIDIA driver)"
    assert fixes({}, gpu=True)["devices"].endswith("pip install fbgemm-gpu==1.8.0")
    unseen = fixes({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, gpu=True, gpus=0)["devices"]
    assert unseen.startswith("pip install torch==2.13.0 --force-reinstall")


def test_a_library_that_does_not_load_is_reported_with_its_error() -> None:
    findings = diagnose(GOOD.get, lambda module: "" if module == "torch" else "undefined symbol: _ZN", has_gpu=False)
    assert findings[-1].found == "undefined symbol: _ZN"
    assert findings[-1].what == "import fbgemm_gpu"
    assert f"torch=={GOOD['torch']}" in findings[-1].fix


def test_a_torch_that_does_not_load_is_installed_again_with_what_it_needs() -> None:
    error = "libcudnn.so.9: cannot open shared object file"
    cuda = {**GOOD, "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}
    for versions, gpu, before, build in (
        (GOOD, False, "", "fbgemm-gpu-cpu"),
        (cuda, True, "", "fbgemm-gpu"),
        (GOOD, True, "pip uninstall -y fbgemm-gpu-cpu && ", "fbgemm-gpu"),
    ):
        found = diagnose(versions.get, lambda module: error, has_gpu=gpu, gpus=lambda: ["H100"])[-1]
        again = "pip install --force-reinstall torch==2.13.0 && pip install --force-reinstall --no-deps"
        assert (found.what, found.fix) == ("import torch", f"{before}{again} {build}==1.8.0")


def test_this_installation_is_good() -> None:
    assert [f for f in diagnose() if f.fix] == []
