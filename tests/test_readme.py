"""The README says what is so: both sides of its diff run and print the same, and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def sides() -> tuple[str, str]:
    """The script before and after the change."""
    found = re.search(r"```diff\n(.*?)```", README, re.S)
    assert found, "README.md has no diff"
    lines = found[1].splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark)) + "\n" for mark in "-+")  # type: ignore[return-value]


def test_it_takes_five_lines() -> None:
    before, after = (side.splitlines() for side in sides())
    assert len(set(after) - set(before)) == 5
    assert len(set(before) - set(after)) == 1


@pytest.mark.ranks
def test_both_sides_of_the_diff_run_and_print_the_same(tmp_path: Path) -> None:
    printed = []
    for name, text in zip(("before.py", "after.py"), sides(), strict=True):
        (tmp_path / name).write_text(text)
        run = run_program([name], 4, tmp_path)
        assert run.returncode == 0, run.stderr[-2000:]
        printed.append(run.stdout)
    assert printed == ["['user', 'city', 'item', 'shop'] (2, 64)\n"] * 2


def test_the_make_targets_exist_and_the_words_are_few() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert len(README.split()) <= 1300
