"""Checks, before anything is installed, whether pip would install the CUDA build of torch without its libraries.

Run ``python requirements/check_torch.py LOCK [pip's options]`` with the Python of the new environment. The lock is
installed without dependencies, so the CUDA build of torch can only be imported if the lock has its NVIDIA libraries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def names_here(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the requirements whose environment markers hold on this machine."""
    # A new environment has only pip, which contains a parser of markers.
    from pip._vendor.packaging.requirements import Requirement

    found = [Requirement(text) for text in requirements]
    return {one.name for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


def needs_cuda(report: str) -> bool:
    """Returns whether the wheel of a pip report (``--report``) requires NVIDIA's libraries on this machine."""
    needs = [need for wheel in json.loads(report)["install"] for need in wheel["metadata"].get("requires_dist") or []]
    return has_nvidia(names_here(needs))


def has_nvidia(names: Iterable[str]) -> bool:
    """Returns whether any of these packages is one of NVIDIA's libraries."""
    return any(re.match(r"nvidia-|cuda-", name) for name in names)


def main(lock: str, *options: str) -> int:
    """Returns 0 if the lock can work; else prints why not and what to do, and returns 1."""
    if importlib.util.find_spec("pip") is None:
        print(
            f"The environment {sys.prefix} has no pip: making it was interrupted. Remove it and install again:\n\n"
            f"    rm -rf {shlex.quote(sys.prefix)} && make install"
        )
        return 1
    lines = [line.partition("#")[0].strip() for line in Path(lock).read_text(encoding="utf-8").splitlines()]
    pinned = names_here(filter(None, lines))
    torch = re.search(r"^torch==[^\s;]+", "\n".join(lines), re.M)
    if torch is None or "torch" not in pinned or has_nvidia(pinned):
        return 0  # the lock has no torch for this machine, or has the libraries
    here = [one.version.partition("+")[0] for one in importlib.metadata.distributions(name="torch")]
    if here == [torch[0].partition("==")[2]]:
        return 0  # it is installed, so pip will not look for another
    # If the index offers metadata, pip downloads no wheel.
    ask = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    found = subprocess.run([sys.executable, *ask, *options, torch[0]], capture_output=True, text=True, check=False)
    if found.returncode:
        print(found.stderr.strip(), file=sys.stderr)
        print(f"pip finds no {torch[0]}. Check its index (pip config list), or name one: TORCH_INDEX=URL.")
        return 1
    if not needs_cuda(found.stdout):
        return 0
    print(
        f"pip would install the CUDA build of {torch[0]}, but {lock} is for the CPU build and lacks the NVIDIA\n"
        "libraries of the CUDA build. Nothing was installed. Name the index of PyTorch's CPU wheels, which the\n"
        'installation page of PyTorch gives for "Compute Platform: CPU":\n\n'
        "    make install TORCH_INDEX=URL\n\n"
        "or take the packages of torch 2.14, whose lock has the NVIDIA libraries (3 GB): make install STACK=2.14"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
