"""``dmt doctor``: what is installed, what is missing or does not fit, and the command that fixes it.

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

from dmt.training.commands import Shown

__all__ = ["TESTED", "Finding", "diagnose", "show_findings"]

TESTED: Mapping[str, Mapping[str, str]] = {
    "2.13": {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"},
    "2.14": {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm": "1.9.0"},
}
"""The versions this release was tested with, by the minor version of torch; the first are those of the pinned lock."""

_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
_TORCHREC_NEEDS = ("torchmetrics==1.0.3", "tensordict", "pyre-extensions", "tqdm")
_TRAINER_NEEDS = ("pydantic", "pyarrow", "pandas", "tomli-w", "jinja2")
_PYTHONS = ("3.11", "3.12", "3.13")


class Finding(NamedTuple):
    """One line of the diagnosis."""

    what: str
    """Package or check."""
    installed: str
    """Version, "absent", or what went wrong."""
    tested: str
    """Version this release was tested with."""
    fix: str = ""
    """The command that fixes it, to be pasted into a shell; empty when there is nothing to fix."""


def _installed_version(package: str) -> str | None:
    """Version of an installed package without its local part (``+cpu``), or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _load_all() -> tuple[str, str]:
    """The last line of the error of importing TorchRec in a fresh process, and the GPUs that torch sees."""
    program = "import torch, torchrec; print(torch.cuda.device_count(), 'GPUs')"
    probe = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    error = (probe.stderr.strip().splitlines() or ["no message"])[-1] if probe.returncode else ""
    return error, probe.stdout.strip()


def diagnose(
    version: Callable[[str], str | None] = _installed_version,
    load_all: Callable[[], tuple[str, str]] = _load_all,
    *,
    has_gpu: bool | None = None,
) -> list[Finding]:
    """Diagnoses the installation.

    Args:
        version: version of a package, None when absent.
        load_all: the error of importing TorchRec, empty when it loads, and the GPUs that torch sees.
        has_gpu: true with an NVIDIA driver; by default looked up.
    """
    gpu = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    build, other = _FBGEMM[::-1] if gpu else _FBGEMM
    # The versions that belong to the torch that is there.
    tested = TESTED.get(".".join((version("torch") or "").split(".")[:2]), next(iter(TESTED.values())))
    # Both builds unpack into the same folder; whichever came last has overwritten half of the other.
    without_other = f"pip uninstall -y {other} {build} && " if version(other) is not None else ""
    fixes = {
        "torch": f"pip install torch=={tested['torch']}",
        "fbgemm": f"{without_other}pip install {build}=={tested['fbgemm']}",
        "torchrec": f"pip install --no-deps torchrec=={tested['torchrec']} && pip install {' '.join(_TORCHREC_NEEDS)}",
    }
    python = platform.python_version()
    fits = python.rpartition(".")[0] in _PYTHONS
    new_python = "python3.11 -m venv .venv-3.11 && . .venv-3.11/bin/activate"
    findings = [Finding("python", python, f"{_PYTHONS[0]} to {_PYTHONS[-1]}", "" if fits else new_python)]
    for name, fix in fixes.items():
        installed = version(build if name == "fbgemm" else name) or "absent"
        installed += f", beside {other}" if name == "fbgemm" and without_other else ""
        findings.append(Finding(name, installed, tested[name], "" if installed == tested[name] else fix))
    needs = {need.partition("==")[0]: need for need in (*_TORCHREC_NEEDS, *_TRAINER_NEEDS)}
    absent = [package for package in needs if version(package) is None]
    findings += [Finding(package, "absent", "any", f"pip install {needs[package]}") for package in absent]
    if any(finding.fix for finding in findings):
        return findings
    error, gpus = load_all()
    again = f"pip install --force-reinstall torch=={tested['torch']} && pip install --force-reinstall --no-deps "
    # A torch that sees no GPU beside a driver is the CPU build.
    problem = error or ("CPU: torch sees no GPU" if gpu and gpus.startswith("0") else "")
    fix = f"{again}{build}=={tested['fbgemm']}" if problem else ""
    return [*findings, Finding("import", problem or f"loads, {gpus}", "loads", fix)]


def show_findings(findings: Sequence[Finding]) -> Shown:
    """Shows the diagnosis, and each command on a line that can be pasted."""
    rows = [(*finding[:3], "FIX" if finding.fix else "ok") for finding in findings]
    lines = [f"To fix {finding.what}:\n  {finding.fix}" for finding in findings if finding.fix]
    record = [{**finding._asdict(), "ok": not finding.fix} for finding in findings]
    return Shown(record, ("", "installed", "tested with", ""), rows, lines=lines, exit_code=1 if lines else 0)
