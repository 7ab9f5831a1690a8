"""Tables of README and docs that come from records have the rows of their records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pages import TABLES, pages, with_current_tables


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_hold_what_their_records_hold(page: Path) -> None:
    text = page.read_text()
    assert with_current_tables(text).splitlines() == text.splitlines(), "run: python -m benchmarks.pages"


def headers(text: str) -> set[tuple[str, ...]]:
    return {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line[:1] == "|"}


def test_every_known_table_is_on_a_page() -> None:
    found = set().union(*(headers(page.read_text()) for page in pages()))
    assert set(TABLES) <= found, "a table that is on no page is taken out of benchmarks/pages.py"


@pytest.mark.parametrize("header", TABLES, ids=lambda header: header[1])
def test_a_changed_cell_is_noticed(header: tuple[str, ...]) -> None:
    page = next(page for page in pages() if header in headers(page.read_text()))
    lines = page.read_text().splitlines()
    first = (
        next(i for i, line in enumerate(lines) if tuple(c.strip() for c in line.strip("|").split("|")) == header) + 2
    )
    last = next(i for i in range(first, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
    changed = 0
    for i in range(first, last):
        for digit in re.finditer(r"\d(?=[^|\d]*\|)", lines[i]):
            other = str((int(digit[0]) + 1) % 10)
            row = lines[i][: digit.start()] + other + lines[i][digit.end() :]
            assert with_current_tables("\n".join([*lines[:i], row, *lines[i + 1 :]])) == "\n".join(lines), row
            changed += 1
    assert changed >= last - first
