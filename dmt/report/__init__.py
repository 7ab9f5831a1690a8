"""Renders the HTML reports, whose templates extend ``base.html``; a page embeds its pictures."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmt.files import write_or_raise

__all__ = ["data_uri", "render_page"]


def render_page(template: Path, path: str | os.PathLike[str], context: Mapping[str, Any]) -> Path:
    """Renders a Jinja2 template to an HTML page in UTF-8, makes missing folders, and returns ``path``.

    Values are escaped. A template may extend ``base.html`` of this folder; ``context`` then needs ``notes``, a list of
    sentences. Raises `InputError` if the file cannot be written, `jinja2.UndefinedError` if ``context`` lacks a name.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([template.parent, Path(__file__).parent])
    settings: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, **settings)
    text = environment.get_template(template.name).render(context)
    with write_or_raise(path, "Page") as scratch:
        scratch.write_text(text, encoding="utf-8")
    return Path(path)


def data_uri(picture: str | os.PathLike[str]) -> str:
    """Returns the content of a PNG file as a ``data:`` URI for ``<img src=...>``."""
    return f"data:image/png;base64,{base64.b64encode(Path(picture).read_bytes()).decode('ascii')}"
