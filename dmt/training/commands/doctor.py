"""``dmt doctor``: what is installed, what is missing or does not fit, and the exact command that fixes it.

The versions of torch, torchrec and fbgemm move together (fbgemm 1.X is built for torch 2.(X+5)), and torchrec requires
the CUDA build of fbgemm under another package name than the CPU build; no resolver sees that. This module needs none of
them to run.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from dmt.training.console import make_table

__all__ = ["TESTED", "Finding", "diagnose", "print_findings"]

TESTED: Mapping[str, Mapping[str, str]] = {
    "2.13": {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"},
    "2.14": {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm": "1.9.0"},
}
"""The triangles this release was tested with, by the minor version of torch; the first is that of the pinned lock."""

_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
_TORCHREC_NEEDS = ("torchmetrics==1.0.3", "tensordict", "pyre-extensions", "tqdm")
_TRAINER_NEEDS = ("pydantic", "pyarrow", "pandas", "tensorboard", "tomli-w", "jinja2")
# pip's torch is the CUDA build on most machines; the CPU build has an index of its own. A shell that does not know the
# variable says what it is to be, and runs nothing.
_CPU_INDEX = """--index-url "${TORCH_INDEX:?is to be the address of the CPU wheels, see docs/install.md}\""""
_CPU_INDEX_NOTE = "TORCH_INDEX is the address of PyTorch's CPU wheels (docs/install.md)"
_PYTHONS = ("3.11", "3.12", "3.13")
_PYTHON = "python3.11 -m venv .venv-3.11 && . .venv-3.11/bin/activate"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis."""

    what: str
    """Package or check."""
    found: str
    """Version found, "absent", or what went wrong."""
    expected: str
    """Version this release was tested with."""
    fix: str = ""
    """The command that fixes it, to be pasted into a shell; empty when there is nothing to fix."""
    note: str = ""
    """A word on the command."""

    @property
    def ok(self) -> bool:
        """True if there is nothing to fix."""
        return not self.fix


def installed_version(package: str) -> str | None:
    """Version of an installed package without its local part (``+cpu``), or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def diagnose(
    version: Callable[[str], str | None] = installed_version,
    load_error: Callable[[str], str] | None = None,
    *,
    has_gpu: bool | None = None,
    gpus: Callable[[], list[str]] | None = None,
    cuda_build: bool | None = None,
) -> list[Finding]:
    """Diagnoses the installation.

    Args:
        version: version of a package, None when absent.
        load_error: last line of the error of importing a module in a fresh process, empty when it loads.
        has_gpu: true with an NVIDIA driver; by default looked up.
        gpus: names of the GPUs that torch sees, in a fresh process.
        cuda_build: true if the installed torch requires NVIDIA's libraries; by default looked up.
    """
    gpu = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    build, python = "fbgemm-gpu" if gpu else "fbgemm-gpu-cpu", platform.python_version()
    builds = {package: number for package in _FBGEMM if (number := version(package)) is not None}
    torch = version("torch")
    # The pair that fits the torch that is there.
    tested = TESTED.get(".".join((torch or "").split(".")[:2]), next(iter(TESTED.values())))
    pin, shown = tested["fbgemm"], ", ".join(f"{package} {number}" for package, number in builds.items()) or "absent"
    install = f"pip install {build}=={pin}"
    if len(builds) > 1:
        # Both unpack into the same folder; whichever came last has overwritten half of the other.
        install = f"pip uninstall -y {' '.join(_FBGEMM)} && {install}"
    torchrec = f"pip install --no-deps torchrec=={tested['torchrec']} && pip install {' '.join(_TORCHREC_NEEDS)}"
    findings = [
        Finding(
            what="python",
            found=python,
            expected=f"{_PYTHONS[0]} to {_PYTHONS[-1]}",
            fix="" if python.rpartition(".")[0] in _PYTHONS else _PYTHON,
            note="install again there",
        ),
        _pinned(
            "torch", torch, tested["torch"], f"pip install torch=={tested['torch']}", "" if gpu else _cpu_build(tested)
        ),
        Finding(what="fbgemm", found=shown, expected=pin, fix="" if [*builds.values()] == [pin] else install),
        _pinned("torchrec", version("torchrec"), tested["torchrec"], torchrec),
    ]
    for need in (*_TORCHREC_NEEDS, *_TRAINER_NEEDS):
        package = need.partition("==")[0]
        if version(package) is None:
            findings.append(Finding(what=package, found="absent", expected="any", fix=f"pip install {need}"))
    if any(not finding.ok for finding in findings):
        return findings
    # TorchRec loads the other two; only if it does not, who is to blame matters.
    load_error = load_error or _load_error
    cuda_build = _is_cuda_build() if cuda_build is None else cuda_build
    for module in ("torch", "fbgemm_gpu", "torchrec") if load_error("torchrec") else ():
        if error := load_error(module):
            fix, note = f"pip install --force-reinstall --no-deps torch=={tested['torch']} {build}=={pin}", ""
            if cuda_build and module == "torch":
                # That would be the same wheel again, without the libraries that it has failed to load.
                fix = f"pip install --force-reinstall torch=={tested['torch']}"
                if not gpu:
                    fix, note = f"pip install --force-reinstall {_CPU_INDEX} torch=={tested['torch']}", _CPU_INDEX_NOTE
            if not gpu and "fbgemm-gpu" in builds:
                # The CUDA build needs the driver's libraries even to be imported.
                fix = f"pip uninstall -y fbgemm-gpu && {fix}"
            return [*findings, Finding(what=f"import {module}", found=error, expected="loads", fix=fix, note=note)]
    findings.append(Finding(what="import", found="torch, fbgemm_gpu and torchrec load", expected="loads"))
    return [*findings, _devices(gpu, builds, tested, (gpus or _gpus)() if gpu else [])]


def _cpu_build(tested: Mapping[str, str]) -> str:
    return f"for the CPU build alone: pip install {_CPU_INDEX} torch=={tested['torch']}; {_CPU_INDEX_NOTE}"


def _is_cuda_build() -> bool:
    return any(need.startswith(("nvidia-", "cuda-")) for need in importlib.metadata.requires("torch") or ())


def _pinned(what: str, found: str | None, expected: str, fix: str, note: str = "") -> Finding:
    if found == expected:
        fix = note = ""
    return Finding(what=what, found=found or "absent", expected=expected, fix=fix, note=note)


def _devices(driver: bool, builds: Mapping[str, str], tested: Mapping[str, str], gpus: Sequence[str]) -> Finding:
    """Says where ranks will train: on the GPUs that torch sees, or on the CPU."""
    if not driver:
        return Finding(what="devices", found="CPU (no NVIDIA driver)", expected="any")
    if not gpus:
        fix, note = (
            f"pip install --force-reinstall torch=={tested['torch']}",
            "the CUDA build; or see CUDA_VISIBLE_DEVICES",
        )
        return Finding(what="devices", found="CPU (torch sees no GPU)", expected="GPUs", fix=fix, note=note)
    if "fbgemm-gpu" not in builds:
        fix = f"pip uninstall -y fbgemm-gpu-cpu && pip install fbgemm-gpu=={tested['fbgemm']}"
        return Finding(what="devices", found="CPU (FBGEMM's CPU build)", expected="GPUs", fix=fix)
    return Finding(what="devices", found=f"{len(gpus)} x {gpus[0]}", expected="any")


def _gpus() -> list[str]:
    names = "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]"
    return [name for name in _probe(f"import torch; print(*{names}, sep='\\n')").stdout.splitlines() if name]


def _load_error(module: str) -> str:
    probe = _probe(f"import {module}")
    return "" if probe.returncode == 0 else (probe.stderr.strip().splitlines() or ["no message"])[-1]


def _probe(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints the diagnosis, and each command on a line that can be pasted."""
    rows = [[f.what, f.found, f.expected, "ok" if f.ok else "FIX"] for f in findings]
    Console().print(make_table(["", "found", "tested with", ""], rows))
    for finding in findings:
        if finding.fix:
            print(f"To fix {finding.what}{f' ({finding.note})' if finding.note else ''}:\n  {finding.fix}")
