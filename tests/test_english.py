"""The prose of code and pages: docstrings begin with a subject or a verb, words that are not the field's stay out.

``python -m tests.test_english`` prints every sentence that breaks a rule, by room.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ("dmt", "partitioner", "models")
SOURCES = [path for folder in (*LIBRARY, "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
TEMPLATES = [path for folder in LIBRARY for path in sorted((ROOT / folder).rglob("*.html"))]

SUBJECTLESS = {"what", "where", "how", "whether", "why", "which", "of", "as"}
BANNED = re.compile(
    r"""\b(
        mend(s|ed|ing)? | so\ many | h[au]ng(s|ing)?\ on | stood | stands?(?!-|\ for\b|\ in\ for\b|\ out\b)
        | (goes|go|went)\ before | under\ way | put(s|ting)?\ out | in\ the\ words\ of | anew | besides(?=[.;:)])
        | as\ it\ is\ asked
    )(?!\w)""",
    re.VERBOSE | re.IGNORECASE,
)
# A function is named by a verb or a noun, not by a phrase that needs its caller to be read.
BAD_NAME = re.compile(r"_*(of_\w+|some|one)$")


class Offence(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.text}"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes: every string that is a statement of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; lines of one comment that follow each other are one text."""
    start, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if text and token.start[0] == last + 1:
            text += " " + token.string.lstrip("# ")
        else:
            if text:
                yield start, text
            start, text = token.start[0], token.string.lstrip("# ")
        last = token.start[0]
    if text:
        yield start, text


def is_subjectless(docstring: str) -> bool:
    words = re.findall(r"[A-Za-z_]+", docstring.strip())[:2]
    return bool(words) and (words[0].lower() in SUBJECTLESS or [word.lower() for word in words] == ["the", "same"])


def banned_words(path: Path, texts: Iterator[tuple[int, str]]) -> Iterator[Offence]:
    for line, text in texts:
        for found in BANNED.finditer(" ".join(text.split())):
            around = " ".join(text.split())[max(0, found.start() - 40) : found.end() + 30]
            yield Offence(path, line, f"says {found.group(1)!r}", around)


def offences_in_source(path: Path, source: str) -> Iterator[Offence]:
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        if is_subjectless(text):
            yield Offence(path, line, "has no subject", text.strip().splitlines()[0])
    yield from banned_words(path, strings(tree))
    yield from banned_words(path, comments(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and BAD_NAME.match(node.name):
            yield Offence(path, node.lineno, "has no noun or verb", node.name)


def offences_on_page(path: Path) -> Iterator[Offence]:
    text, line = path.read_text(), 1
    for paragraph in text.split("\n\n"):
        yield from banned_words(path, iter([(line, paragraph)]))
        line += paragraph.count("\n") + 2


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_of_a_file(path: Path) -> None:
    assert not list(map(str, offences_in_source(path, path.read_text())))


@pytest.mark.parametrize("path", [*PAGES, *TEMPLATES], ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_of_a_page(path: Path) -> None:
    assert not list(map(str, offences_on_page(path)))


def test_offences_are_found() -> None:
    source = '''
"""What this module holds."""
RATE = 1
"""How fast."""
def of_one(x):
    """`x`, anew."""
    # A file stands
    # here. Others hang
    # on it.
    raise ValueError(f"{x} is under "
                     f"way: it mends itself")
def fine(recommend, understand):
    """Stand-in for a recommended, outstanding module; so that many may use it, "as" is. GB stands for gigabytes."""
'''
    found = Counter(offence.rule for offence in offences_in_source(ROOT / "x.py", source))
    said = ("anew", "stands", "hang on", "under way", "mends")
    assert found == {"has no subject": 2, "has no noun or verb": 1, **{f"says {word!r}": 1 for word in said}}


def main() -> None:
    """Prints the offences of every room, and how many there are."""
    rooms: dict[str, list[Offence]] = {}
    for path in [*SOURCES, *TEMPLATES, *PAGES]:
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: 2 if parts[0] == "dmt" and len(parts) > 2 else 1])
        offences = offences_in_source(path, path.read_text()) if path.suffix == ".py" else offences_on_page(path)
        rooms.setdefault(room, []).extend(offences)
    print({room: len(offences) for room, offences in rooms.items() if offences})
    for room, offences in rooms.items():
        if offences:
            print(f"\n== {room}: {len(offences)}", *offences, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
