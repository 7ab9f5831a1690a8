"""Collects the pages for `make docs`: those of docs/, and the files elsewhere in the repository that they link to.

MkDocs reads one folder of pages. So the pages are copied into ``build/docs``, and what they link to outside of docs/
into ``build/docs/repository``. Links are changed accordingly, and marks of code blocks that only tests read
(```` ```python run ````) are removed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "docs"
CHANGES = ROOT / "CHANGELOG.md"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```\w+) [^\n]+$", re.M)


def main() -> None:
    """Writes ``build/docs`` anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    waiting = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "site").iterdir()), CHANGES]
    done: set[Path] = set()
    while waiting:
        source = waiting.pop().resolve()
        if source in done:
            continue
        done.add(source)
        place(source).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copy(source, place(source))
            continue
        linked: list[Path] = []
        place(source).write_text(converted(source, linked), encoding="utf-8")
        waiting += linked


def place(source: Path) -> Path:
    """Returns the path in ``build/docs`` of a file of the repository."""
    if source == CHANGES:
        return OUT / "changelog.md"
    for folder in (ROOT / "docs" / "site", ROOT / "docs"):
        if source.is_relative_to(folder):
            return OUT / source.relative_to(folder)
    # In a separate folder: MkDocs takes README.md for an index, and docs/ has one already.
    return OUT / "repository" / source.relative_to(ROOT)


def converted(source: Path, linked: list[Path]) -> str:
    """Returns the text of a page with its links changed; appends the linked files to ``linked``."""

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = (source.parent / path).resolve()
        if target.is_dir():
            return f"{match[1]}{source.name}{match[3]}"  # a folder has no page: the link leads to this page
        linked.append(target)
        return f"{match[1]}{os.path.relpath(place(target), place(source).parent)}{mark}{anchor}{match[3]}"

    text = source.read_text(encoding="utf-8")
    # Text and fenced blocks alternate; brackets in blocks are no links.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
    return _FENCE.sub(r"\1", "".join(parts))


if __name__ == "__main__":
    main()
