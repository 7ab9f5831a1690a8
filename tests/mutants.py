"""`make mutants`: changes one place of the library at a time, and expects the test that is named beside it to fail.

    python -m tests.mutants [WORD ...]       only the mutations whose file or test contains one of the words

Works on a copy of the tracked files. Each test is first run unchanged and must pass; a mutation whose old text is not
in its file exactly once, or that no test catches, is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """A deliberate fault."""

    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    test: str
    """Arguments of pytest."""


MUTATIONS = [
    Mutation(
        "dmt/plan/topology.py",
        "return in_replica * self.num_replicas + replica",
        "return in_replica + replica",
        "tests/dmt/test_topology.py",
    ),
    Mutation(
        "dmt/plan/topology.py",
        "divmod(in_replica, self.ranks_per_tower)",
        "divmod(in_replica, self.num_towers)",
        "tests/dmt/test_topology.py",
    ),
    Mutation(
        "dmt/plan/topology.py",
        "return rank // self.host_size",
        "return rank % self.host_size",
        "tests/dmt/test_topology.py",
    ),
    Mutation(
        "dmt/plan/topology.py",
        "self.peer_groups()[: self.ranks_per_tower]",
        "self.tower_groups()[: self.num_towers]",
        "tests/dmt/test_topology.py",
    ),
]


def copy_of_the_tree(folder: Path) -> None:
    """Copies all tracked files, links included, as they are in the working tree."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def passes(test: str, folder: Path) -> bool:
    """Runs a test in the copy.

    Raises:
        RuntimeError: pytest found no test, or could not collect it.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split(" ", 1)]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return False  # A dropped wait may leave ranks waiting for one another: that is noticed too.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def survives(mutation: Mutation, folder: Path) -> bool:
    """Puts the fault into the copy, runs its test, and takes the fault out again; True if the test passes."""
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise RuntimeError(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once.")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        return passes(mutation.test, folder)
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    """Runs all mutations; returns the number of those that no test catches."""
    chosen = [one for one in MUTATIONS if not words or any(word in one.file or word in one.test for word in words)]
    start, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="dmt-mutants-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        for test in dict.fromkeys(mutation.test for mutation in chosen):
            if not passes(test, folder):
                raise RuntimeError(f"{test} fails without a mutation.")
        for number, mutation in enumerate(chosen, 1):
            verdict = "missed" if (is_missed := survives(mutation, folder)) else "caught"
            missed += is_missed
            change = f"{mutation.file}: {mutation.old!r} -> {mutation.new!r}"
            print(f"{number:3}/{len(chosen)} {verdict}  {change}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught in {(time.monotonic() - start) / 60:.1f} minutes")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
