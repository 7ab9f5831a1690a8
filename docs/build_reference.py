"""Writes the keys of a configuration and the options of all commands into their pages, from the code itself.

    python docs/build_reference.py

Everything between the two marker lines is replaced; a test fails when a page is not current.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dmt.training.commands import Advanced, main
from dmt.training.config import TrainingConfig

__all__ = ["BEGIN", "END", "PAGES", "commands", "current_page", "keys"]

BEGIN = "<!-- begin: written by docs/build_reference.py -->"
"""The line above the generated text."""
END = "<!-- end: written by docs/build_reference.py -->"
"""The line below the generated text."""

_KINDS = {int: "integer", float: "number", bool: "boolean", str: "text"}
_PLURALS = {int: "integers", str: "texts", float: "numbers", Any: "values"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def commands() -> str:
    """Returns every command as Markdown: arguments, purpose, options and examples.

    Example:
        >>> "## `dmt score MODEL`" in commands()
        True
    """
    parts = []
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"dmt {name}", show_default=True)
        parameters = command.get_params(context)
        arguments = [part.make_metavar(context) for part in parameters if isinstance(part, click.Argument)]
        parts.append(f"## `{' '.join(['dmt', name, *arguments])}`\n\n{_paragraphs(command.help or '')}\n")
        options = [part for part in parameters if isinstance(part, click.Option)]
        records = [(option, option.get_help_record(context)) for option in options]
        shown = [(option, record) for option, record in records if record and record[0] not in ("--help", "--json")]
        rows = [
            f"| `{_cell(record[0])}` | {'Advanced: ' * isinstance(option, Advanced)}{_cell(_one_line(record[1]))} |"
            for option, record in shown
        ]
        if rows:
            parts += ["| option | meaning |\n| --- | --- |", *rows, ""]
        for example in (command.epilog or "").split("\n\n"):
            if example:
                parts.append(f"{example.partition(': ')[0]}: `{example.partition(': ')[2]}`\n")
    return "\n".join(parts)


def keys() -> str:
    """Returns the sections of `TrainingConfig` as Markdown: a table each, with every key, its default and its meaning.

    Example:
        >>> "| `batch_size` | `1024` | integer >= 1 | B, rows per rank" in keys()
        True
    """
    parts = []
    for path, section in _sections(TrainingConfig, ()):
        heading = _one_line((section.__doc__ or "").split("\n\n")[0])
        parts.append(f"## `[{path}]`\n\n{heading}\n")
        parts.append("| key | default | values | meaning |\n| --- | --- | --- | --- |")
        parts += [_row(key, field) for key, field in section.model_fields.items() if _model_of(field) is None]
        parts.append("")
    return "\n".join(parts)


def current_page(page: str, reference: str) -> str:
    """Returns the text of a page with ``reference`` between its two marker lines.

    Example:
        >>> " new " in " ".join(current_page(f"before {BEGIN} old {END} after", "new").split())
        True
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"the page lacks the line {BEGIN!r}"
    assert end, f"the page lacks the line {END!r}"
    return f"{before}{BEGIN}\n\n{reference}\n{END}{after}"


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
    return f"| {' | '.join(map(_cell, cells))} |"


def _values(field: FieldInfo) -> str:
    limits = {name: getattr(rule, name) for rule in field.metadata for name in _BOUNDS if hasattr(rule, name)}
    # Larger upper bounds only catch typos.
    limits = {name: value for name, value in limits.items() if name in ("ge", "gt") or value < 65_536}
    if limits.keys() == {"ge", "le"}:
        return f"{_kind(field.annotation)}, {limits['ge']} to {limits['le']}"
    return " ".join(
        [_kind(field.annotation), ", ".join(f"{_BOUNDS[name]} {value}" for name, value in limits.items())]
    ).strip()


def _kind(annotation: Any) -> str:
    """Describes an annotation in terms of TOML."""
    origin = get_origin(annotation)
    # Bounds of elements are left out.
    arguments = [get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(annotation)]
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {_PLURALS.get(arguments[0], 'these')}"
    if origin is dict:
        return f"table of {_PLURALS[arguments[1]] if arguments[1] in _PLURALS else _kind(arguments[1])}"
    if origin in (UnionType, Union):
        return " or ".join(_kind(argument) for argument in arguments if argument is not NoneType)
    return _KINDS[annotation]


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _paragraphs(text: str) -> str:
    paragraphs = (_one_line(paragraph) for paragraph in text.replace(chr(8), "").split("\n\n"))
    # The page explains OVERRIDES once.
    return "\n\n".join(paragraph.partition(" OVERRIDES set")[0] for paragraph in paragraphs)


PAGES = {Path(__file__).parent / "keys.md": keys, Path(__file__).parent / "commands.md": commands}
"""The pages, and the functions that return their text."""

if __name__ == "__main__":
    for path, reference in PAGES.items():
        path.write_text(current_page(path.read_text(), reference()))
