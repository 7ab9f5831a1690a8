"""`dmt doctor`: every way the torch x torchrec x fbgemm triangle is usually broken, and the command that fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmt.training.commands import doctor
from dmt.training.commands.doctor import diagnose

GOOD = {
    **{one.name: "9999" for one in doctor._requirements()},
    **{"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "torchmetrics": "1.0.3"},
}


def fixes(
    changes: dict[str, str | None], *, gpu: bool = False, error: str = "", gpus: str = "2 GPUs"
) -> dict[str, str]:
    versions = {**GOOD, **changes}
    findings = diagnose(versions.get, lambda: (error, gpus), has_gpu=gpu)
    return {finding.what: finding.fix for finding in findings if finding.fix}


NEWER = {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}


def test_a_good_installation_needs_nothing() -> None:
    assert fixes({}) == {}
    assert fixes(NEWER) == {}
    assert fixes(CUDA, gpu=True) == {}


@pytest.mark.parametrize(
    ("changes", "gpu", "what", "command"),
    [
        ({"torch": None}, False, "torch", "pip install torch==2.13.0"),
        ({"torchrec": "1.9.0"}, False, "torchrec", "pip install --no-deps torchrec==1.8.0"),
        ({**NEWER, "torch": "2.14.0"}, False, "torch", "pip install torch==2.14.1"),
        ({**NEWER, "fbgemm-gpu-cpu": "1.8.0"}, False, "fbgemm-gpu-cpu", "pip install fbgemm-gpu-cpu==1.9.0"),
        ({"fbgemm-gpu-cpu": None}, True, "fbgemm-gpu", "pip install fbgemm-gpu==1.8.0"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, False, "fbgemm-gpu-cpu", "pip install fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm-gpu": "1.8.0"}, False, "fbgemm-gpu-cpu", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install"),
        ({}, True, "fbgemm-gpu", "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install fbgemm-gpu==1.8.0"),
        ({"duckdb": None}, False, "duckdb", "pip install 'duckdb>="),
        ({"duckdb": "1.4.0"}, False, "duckdb", "pip install 'duckdb>="),
        ({"k-means-constrained": None}, False, "k-means-constrained", "pip install 'k-means-constrained>="),
        ({"torchmetrics": None}, False, "torchmetrics", "pip install 'torchmetrics==1.0.3'"),
    ],
)
def test_what_is_wrong_is_mended(changes: dict[str, str | None], gpu: bool, what: str, command: str) -> None:
    found = fixes(changes, gpu=gpu)
    assert list(found) == [what]
    assert found[what].startswith(command)
    # It can be pasted: nothing in it is a remark.
    assert {step.split()[0] for step in found[what].split(" && ")} <= {"pip"}
    assert not {"#", "or", "e.g."} & set(found[what].split())


CUDA: dict[str, str | None] = {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}
AGAIN = "pip install --force-reinstall torch==2.13.0 && pip install --force-reinstall --no-deps "


@pytest.mark.parametrize(
    ("changes", "gpu", "error", "gpus", "fix"),
    [
        ({}, False, "undefined symbol: _ZN", "", f"{AGAIN}fbgemm-gpu-cpu==1.8.0"),
        (CUDA, True, "libcudnn.so.9: cannot open shared object file", "", f"{AGAIN}fbgemm-gpu==1.8.0"),
        (CUDA, True, "", "0 GPUs", f"{AGAIN}fbgemm-gpu==1.8.0"),  # the CPU build of torch
    ],
)
def test_what_does_not_load_or_sees_no_gpu_is_installed_again(
    changes: dict[str, str | None], gpu: bool, error: str, gpus: str, fix: str
) -> None:
    assert fixes(changes, gpu=gpu, error=error, gpus=gpus) == {"import": fix}
    found = diagnose({**GOOD, **changes}.get, lambda: (error, gpus), has_gpu=gpu)[-1]
    assert found.installed == (error or "CPU: torch sees no GPU")


def test_torchrec_is_imported_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = lambda: 3")
    (tmp_path / "torchrec.py").touch()
    assert doctor._load_all() == ("", "3 GPUs")
    (tmp_path / "torchrec.py").write_text("raise OSError('undefined symbol: _ZN')")
    assert doctor._load_all() == ("OSError: undefined symbol: _ZN", "")
