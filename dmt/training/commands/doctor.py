"""``dmt doctor``: what is installed, what is missing or does not fit, and the exact command that fixes it.

The versions of torch, torchrec and fbgemm move together, and torchrec requires the CUDA build of fbgemm under another
package name than the CPU build; no resolver sees that. This module needs none of them to run.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["TESTED", "Finding", "diagnose"]

TESTED: Mapping[str, str] = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"}
"""The one triangle this release was tested with."""

_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
_TORCHREC_NEEDS = ("torchmetrics==1.0.3", "tensordict", "pyre-extensions", "tqdm")
_TRAINER_NEEDS = ("pydantic", "pyarrow", "pandas", "tensorboard", "tomli-w", "jinja2")
_PYTHON = "use Python 3.11, e.g. `make install PYTHON=python3.11`"


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
    """The command that fixes it; empty when there is nothing to fix."""

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
    has_gpu: bool | None = None,
) -> list[Finding]:
    """Diagnoses the installation.

    Args:
        version: version of a package, None when absent.
        load_error: last line of the error of importing a module in a fresh process, empty when it loads.
        has_gpu: true with an NVIDIA driver; by default looked up.
    """
    gpu = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    build, python = "fbgemm-gpu" if gpu else "fbgemm-gpu-cpu", platform.python_version()
    builds = {package: number for package in _FBGEMM if (number := version(package)) is not None}
    pin, shown = TESTED["fbgemm"], ", ".join(f"{package} {number}" for package, number in builds.items()) or "absent"
    install = f"pip install {build}=={pin}"
    if len(builds) > 1:
        # Both unpack into the same folder; whichever came last has overwritten half of the other.
        install = f"pip uninstall -y {' '.join(_FBGEMM)} && {install}"
    torchrec = f"pip install --no-deps torchrec=={TESTED['torchrec']} && pip install {' '.join(_TORCHREC_NEEDS)}"
    findings = [
        Finding(what="python", found=python, expected="3.11", fix="" if python.startswith("3.11.") else _PYTHON),
        _pinned("torch", version("torch"), f"pip install torch=={TESTED['torch']}"),
        Finding(what="fbgemm", found=shown, expected=pin, fix="" if [*builds.values()] == [pin] else install),
        _pinned("torchrec", version("torchrec"), torchrec),
    ]
    for need in (*_TORCHREC_NEEDS, *_TRAINER_NEEDS):
        package = need.partition("==")[0]
        if version(package) is None:
            findings.append(Finding(what=package, found="absent", expected="any", fix=f"pip install {need}"))
    if any(not finding.ok for finding in findings):
        return findings
    # TorchRec loads the other two; only if it does not, who is to blame matters.
    load_error = load_error or _load_error
    for module in ("torch", "fbgemm_gpu", "torchrec") if load_error("torchrec") else ():
        if error := load_error(module):
            fix = f"pip install --force-reinstall --no-deps torch=={TESTED['torch']} {build}=={pin}"
            if not gpu and "fbgemm-gpu" in builds:
                # The CUDA build needs the driver's libraries even to be imported.
                fix = f"pip uninstall -y fbgemm-gpu && {fix}"
            return [*findings, Finding(what=f"import {module}", found=error, expected="loads", fix=fix)]
    return [*findings, Finding(what="import", found="torch, fbgemm_gpu and torchrec load", expected="loads")]


def _pinned(what: str, found: str | None, fix: str) -> Finding:
    expected = TESTED[what]
    return Finding(what=what, found=found or "absent", expected=expected, fix="" if found == expected else fix)


def _load_error(module: str) -> str:
    probe = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    return "" if probe.returncode == 0 else (probe.stderr.strip().splitlines() or ["no message"])[-1]
