"""``dmt doctor``: finds packages that are missing or do not fit each other, and names the commands that fix them.

The versions of torch, torchrec and fbgemm move together (fbgemm 1.X is built for torch 2.(X+5)). The CPU and the CUDA
build of fbgemm have different package names, and torchrec requires the CUDA build even on hosts without a GPU. pip
solves neither problem, so this module checks versions and build. It runs without these packages.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from packaging.requirements import Requirement

from dmt.training.commands import Shown

__all__ = ["TESTED", "Finding", "diagnose", "show_findings"]

TESTED: Mapping[str, Mapping[str, str]] = {
    "2.13": {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0"},
    "2.14": {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm": "1.9.0"},
}
"""The versions this release was tested with, by the minor version of torch; the first are the default."""

_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")


class Finding(NamedTuple):
    """One line of the diagnosis."""

    what: str
    """Name of the package; for the last check, ``"import"``."""
    installed: str
    """Version, "absent", or what went wrong."""
    tested: str
    """Version that this release was tested with, or that it requires, such as ">=2.0"; "loads" for the import."""
    fix: str = ""
    """Shell command that fixes it; empty if there is nothing to fix."""


def _installed_version(package: str) -> str | None:
    """Returns the version of an installed package without its local part (``+cpu``), or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    """Returns what training requires of other packages; empty if this package is not installed."""
    texts = [text for one in importlib.metadata.distributions(name="dmt-recsys") for text in one.requires or ()]
    return [one for one in map(Requirement, texts) if not one.marker or one.marker.evaluate({"extra": "training"})]


def _load_all() -> tuple[str, str]:
    """Imports TorchRec in a new process; returns the last line of any error, and the number of GPUs as text."""
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
    """Returns findings on the installed packages and, if they fit, on whether TorchRec loads.

    Args:
        version: returns the version of a package, None if it is absent.
        load_all: returns the error of importing TorchRec ("": none), and the GPUs that torch sees, such as "2 GPUs".
        has_gpu: whether there is an NVIDIA driver; None: look for ``nvidia-smi``.
    """
    gpu = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    build, other = _FBGEMM[::-1] if gpu else _FBGEMM
    # The versions that fit the installed torch.
    tested = TESTED.get(".".join((version("torch") or "").split(".")[:2]), next(iter(TESTED.values())))
    # Both builds unpack into the same folder; whichever came last has overwritten half of the other.
    without_other = f"pip uninstall -y {other} {build} && " if version(other) is not None else ""
    needed = {
        "torch": (tested["torch"], f"pip install torch=={tested['torch']}"),
        build: (tested["fbgemm"], f"{without_other}pip install {build}=={tested['fbgemm']}"),
        "torchrec": (tested["torchrec"], f"pip install --no-deps torchrec=={tested['torchrec']}"),
    }
    findings = []
    for package, (wanted, fix) in needed.items():
        installed = version(package) or "absent"
        if package == build and without_other:
            installed += f", beside {other}"
        findings.append(Finding(package, installed, wanted, "" if installed == wanted else fix))
    for one in _requirements():
        installed, wanted = version(one.name) or "absent", str(one.specifier)
        is_good = installed != "absent" and one.specifier.contains(installed, prereleases=True)
        if one.name not in needed and not is_good:
            findings.append(Finding(one.name, installed, wanted, f"pip install '{one.name}{wanted}'"))
    if any(finding.fix for finding in findings):
        return findings
    error, gpus = load_all()
    again = f"pip install --force-reinstall torch=={tested['torch']} && pip install --force-reinstall --no-deps "
    # With a driver, a torch that sees no GPU is the CPU build.
    problem = error or ("CPU: torch sees no GPU" if gpu and gpus.startswith("0") else "")
    fix = f"{again}{build}=={tested['fbgemm']}" if problem else ""
    return [*findings, Finding("import", problem or f"loads, {gpus}", "loads", fix)]


def show_findings(findings: Sequence[Finding]) -> Shown:
    """Shows findings as a table, with each command on its own line for pasting."""
    rows = [(*finding[:3], "FIX" if finding.fix else "ok") for finding in findings]
    lines = [f"To fix {finding.what}:\n  {finding.fix}" for finding in findings if finding.fix]
    record = [{**finding._asdict(), "ok": not finding.fix} for finding in findings]
    return Shown(record, ("", "installed", "tested with", ""), rows, lines=lines, exit_code=1 if lines else 0)
