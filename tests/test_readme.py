"""The README says what is so: its snippet runs, its commands exist, its file tree is that of the rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmt.training.commands import main
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TREE = re.compile(r"## Code\n\n```\n(.*?)```\n", re.S)


def entries() -> dict[str, str]:
    """Paths in the README's file tree, with what it says of each; a file's folder is the last one with less indent."""
    found = TREE.search(README.read_text())
    assert found, "README.md has no file tree"
    folders: list[str] = []
    texts = {}
    for line in found.group(1).splitlines():
        assert len(line) <= 110, line
        name, text = line.split(maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        texts["".join([*folders[:depth], name])] = text
        if name.endswith("/"):
            folders[depth:] = [name]
    return texts


def test_the_file_tree_is_true() -> None:
    paths = entries()
    for path in paths:
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
    assert sum(not path.endswith("/") for path in paths) <= 14, "the dozen files to read first, no list of all"


def test_the_file_tree_names_every_room() -> None:
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "dmt").glob("*/__init__.py")}
    rooms = {room for room in rooms if not (ROOT / room.rstrip("/")).is_symlink()} | {"partitioner/", "models/"}
    assert rooms <= set(entries())


@pytest.mark.ranks
def test_the_snippet_runs_and_keeps_the_plain_modules_result(tmp_path: Path) -> None:
    text = README.read_text()
    snippet = re.search(r"```python\n(.*?)```", text, re.S)
    assert snippet, "README.md has no Python snippet"
    assert text[: snippet.start()].count("\n") < 40, "the snippet starts before line 40"
    (tmp_path / "snippet.py").write_text(snippet.group(1))
    run = run_program(["snippet.py"], 4, tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "caching params" not in run.stderr
    assert "is_fx_tracing" not in run.stderr
    assert run.stdout == "['user', 'city', 'item', 'shop'] torch.Size([2, 64])\n"


def test_the_commands_exist() -> None:
    named = set(re.findall(r"^dmt ([\w-]+) ", README.read_text(), re.M))
    assert named == set(main.commands)
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "install"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"\b(TREE|DEMO_TABLE|TODO)\b", README.read_text())
