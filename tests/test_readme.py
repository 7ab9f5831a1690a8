"""The README says what is so: its snippet runs, its commands exist, its file tree is the tree.

``python -m tests.test_readme`` writes the file tree anew.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmt.training.commands import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TREE = re.compile(r"## The house\n\n```\n(.*?)```\n", re.S)


def file_tree() -> str:
    """The files of the packages with the first line of each docstring."""
    lines = []
    for folder in ("dmt", "partitioner", "models", "training"):
        lines.append(f"{folder + '/':<28}{_summary(ROOT / folder / '__init__.py')}")
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.stem == "__init__" and path.parent == ROOT / folder:
                continue
            name = str(path.relative_to(ROOT / folder)).removesuffix("__init__.py")
            lines.append(f"  {name:<26}{_summary(path)}")
    for folder, text in (
        ("examples/", "scripts of 30-80 lines that show one thing each"),
        ("benchmarks/", "scripts that measure, and their records in results/; not installed"),
        ("tests/", "mirrors the folders above; ranks.py starts gloo ranks, parity.py is the oracle"),
        ("docs/", "the pages a user reads"),
        ("requirements/", "the lock of exact versions"),
    ):
        lines.append(f"{folder:<28}{text}")
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.splitlines()[0].replace("`", "").rstrip(".")
    return first if len(first) <= 100 else first[:97] + "..."


def test_the_file_tree_is_true() -> None:
    found = TREE.search(README.read_text())
    assert found, "README.md has no file tree"
    assert found.group(1) == file_tree(), "run `.venv/bin/python -m tests.test_readme`"


@pytest.mark.ranks
def test_the_snippet_runs_and_keeps_the_plain_modules_result(tmp_path: Path) -> None:
    text = README.read_text()
    snippet = re.search(r"```python\n(.*?)```", text, re.S)
    assert snippet, "README.md has no Python snippet"
    assert text[: snippet.start()].count("\n") < 40, "the snippet starts before line 40"
    (tmp_path / "snippet.py").write_text(snippet.group(1))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "snippet.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "['user', 'city', 'item', 'shop'] torch.Size([2, 64])\n"


def test_the_commands_exist() -> None:
    named = set(re.findall(r"^dmt (\w+) ", README.read_text(), re.M))
    assert named == set(main.commands)
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "install"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"\b(TREE|DEMO_TABLE|TODO)\b", README.read_text())


if __name__ == "__main__":
    text = README.read_text()
    block = f"## The house\n\n```\n{file_tree()}```\n"
    README.write_text(TREE.sub(lambda _: block, text))
