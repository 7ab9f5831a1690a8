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
from typing import NamedTuple

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
_PYTHONS = ("3.11", "3.12", "3.13")
_PYTHON = "python3.11 -m venv .venv-3.11 && . .venv-3.11/bin/activate"


class Finding(NamedTuple):
    """One line of the diagnosis."""

    what: str
    """Package or check."""
    found: str
    """Version found, "absent", or what went wrong."""
    expected: str
    """Version this release was tested with."""
    fix: str = ""
    """The command that fixes it, to be pasted into a shell; empty when there is nothing to fix."""

    def to_record(self) -> dict[str, object]:
        """Returns the line as JSON writes it."""
        return {**self._asdict(), "ok": not self.fix}


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
) -> list[Finding]:
    """Diagnoses the installation.

    Args:
        version: version of a package, None when absent.
        load_error: last line of the error of importing a module in a fresh process, empty when it loads.
        has_gpu: true with an NVIDIA driver; by default looked up.
        gpus: names of the GPUs that torch sees, in a fresh process.
    """
    gpu = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    build, other = _FBGEMM[::-1] if gpu else _FBGEMM
    # The triangle of the torch that is there.
    tested = TESTED.get(".".join((version("torch") or "").split(".")[:2]), next(iter(TESTED.values())))
    builds = {package: number for package in _FBGEMM if (number := version(package)) is not None}
    install = {
        "torch": f"pip install torch=={tested['torch']}",
        "fbgemm": f"pip install {build}=={tested['fbgemm']}",
        "torchrec": f"pip install --no-deps torchrec=={tested['torchrec']} && pip install {' '.join(_TORCHREC_NEEDS)}",
    }
    if len(builds) > 1:
        # Both unpack into the same folder; whichever came last has overwritten half of the other.
        install["fbgemm"] = f"pip uninstall -y {' '.join(_FBGEMM)} && {install['fbgemm']}"
    found = {
        "torch": version("torch") or "absent",
        "fbgemm": ", ".join(f"{package} {number}" for package, number in builds.items()) or "absent",
        "torchrec": version("torchrec") or "absent",
    }
    fits = {name: found[name] == tested[name] for name in ("torch", "torchrec")}
    fits["fbgemm"] = [*builds.values()] == [tested["fbgemm"]]
    python = platform.python_version()
    no_wheels = python.rpartition(".")[0] not in _PYTHONS
    findings = [Finding("python", python, f"{_PYTHONS[0]} to {_PYTHONS[-1]}", _PYTHON if no_wheels else "")]
    findings += [Finding(name, found[name], tested[name], "" if fits[name] else install[name]) for name in found]
    for need in (*_TORCHREC_NEEDS, *_TRAINER_NEEDS):
        package = need.partition("==")[0]
        if version(package) is None:
            findings.append(Finding(package, "absent", "any", f"pip install {need}"))
    if any(finding.fix for finding in findings):
        return findings
    # TorchRec loads the other two; only if it does not, who is to blame matters.
    load_error = load_error or _load_error
    for module in ("torch", "fbgemm_gpu", "torchrec") if load_error("torchrec") else ():
        if error := load_error(module):
            # With its dependencies, which may be what torch has failed to load. The CUDA build of fbgemm needs the
            # driver's libraries even to be imported.
            fix = f"pip install --force-reinstall torch=={tested['torch']} && pip install --force-reinstall --no-deps "
            fix += f"{build}=={tested['fbgemm']}"
            fix = f"pip uninstall -y {other} && {fix}" if other in builds else fix
            return [*findings, Finding(f"import {module}", error, "loads", fix)]
    findings.append(Finding("import", "torch, fbgemm_gpu and torchrec load", "loads"))
    names = (gpus or _gpus)() if gpu else []
    if not gpu:
        devices = Finding("devices", "CPU (no NVIDIA driver)", "any")
    elif not names:
        # The CPU build of torch, unless CUDA_VISIBLE_DEVICES hides them.
        devices = Finding("devices", "CPU (torch sees no GPU)", "GPUs", f"{install['torch']} --force-reinstall")
    elif build not in builds:
        fix = f"pip uninstall -y {other} && {install['fbgemm']}"
        devices = Finding("devices", "CPU (FBGEMM's CPU build)", "GPUs", fix)
    else:
        devices = Finding("devices", f"{len(names)} x {names[0]}", "any")
    return [*findings, devices]


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
    rows = [[what, found, expected, "FIX" if fix else "ok"] for what, found, expected, fix in findings]
    Console().print(make_table(["", "found", "tested with", ""], rows))
    for finding in findings:
        if finding.fix:
            print(f"To fix {finding.what}:\n  {finding.fix}")
