"""Writes the table of configuration keys into ``docs/training.md``, from the config classes themselves.

    python docs/build_reference.py

Everything between the two marker lines is replaced; a test fails when the page is not current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dmt.training.config import TrainingConfig

__all__ = ["BEGIN", "END", "PAGE", "current_page", "reference"]

PAGE = Path(__file__).parent / "training.md"
"""The page that holds the table."""
BEGIN = "<!-- begin: written by docs/build_reference.py -->"
"""The line above the table."""
END = "<!-- end: written by docs/build_reference.py -->"
"""The line below it."""

_KINDS = {int: "integer", float: "number", bool: "boolean", str: "text"}
_PLURALS = {int: "integers", str: "texts", float: "numbers", Any: "values"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference() -> str:
    """The sections of `TrainingConfig` as Markdown: one table each, with every key, its default and its meaning.

    Example:
        >>> "| `batch_size` | `1024` | integer, at least 1, at most 16777216 | B, rows per rank" in reference()
        True
    """
    parts = []
    for path, section in _sections(TrainingConfig, ()):
        # The class docstrings point developers to the design record, which is not among the user's pages.
        heading = re.sub(r" \(DESIGN[^)]*\)", "", _one_line((section.__doc__ or "").split("\n\n")[0]))
        parts.append(f"### `[{path}]`\n\n{heading}\n")
        parts.append("| key | default | values | meaning |\n| --- | --- | --- | --- |")
        parts += [_row(key, field) for key, field in section.model_fields.items() if _model_of(field) is None]
        parts.append("")
    return "\n".join(parts)


def current_page(page: str) -> str:
    """The text of the page with its table replaced by today's.

    Example:
        >>> current_page(f"before {BEGIN} old {END} after").count(BEGIN)
        1
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} lacks the line {BEGIN!r}"
    assert end, f"{PAGE} lacks the line {END!r}"
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, type[BaseModel]]]:
    if path:
        yield ".".join(path), model
    for key, field in model.model_fields.items():
        inner = _model_of(field)
        if inner is not None:
            yield from _sections(inner, (*path, key))


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _row(key: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "not set" if default is None else f"`{json.dumps(default)}`"
    cells = [f"`{key}`", shown, _values(field), _one_line(field.description or "")]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(field: FieldInfo) -> str:
    limits = [
        f"{word} {getattr(rule, name)}"
        for rule in field.metadata
        for name, word in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    """Describes an annotation in terms of TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {_PLURALS.get(arguments[0], 'these')}"
    if origin is dict:
        return f"table of {_PLURALS[arguments[1]] if arguments[1] in _PLURALS else _kind(arguments[1])}"
    if origin in (UnionType, Union):
        return " or ".join(_kind(argument) for argument in arguments if argument is not NoneType)
    return _KINDS[annotation]


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(current_page(PAGE.read_text()))
