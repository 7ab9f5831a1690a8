"""The frame of HTML reports: templates that extend ``base.html``, with pictures inside and nothing loaded."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmt.errors import InputError

__all__ = ["data_uri", "render_page"]

_PICTURE_KINDS = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}


def render_page(template: Path, path: str | os.PathLike[str], context: Mapping[str, Any]) -> Path:
    """Fills in a Jinja2 template and writes the page (UTF-8); an existing file is replaced, missing folders are made.

    Whatever the context holds is escaped, and a name that is absent from it is an error. A template may extend
    ``base.html`` of this package, which asks for ``notes`` and ``cards``.

    Raises:
        InputError: the file cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template.name).render(context)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold half of a surrogate pair, which UTF-8 cannot write.
        target.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"Page {target}: cannot be written ({error.strerror}). Name another place.") from error
    return target


def data_uri(picture: str | os.PathLike[str], *, place: str) -> str:
    """A picture (``.png``, ``.svg`` or ``.jpg``) as an address that holds its content, for ``<img src=...>``.

    ``place`` is caller and argument, for the error.

    Raises:
        InputError: the file is of another kind or cannot be read.
    """
    kind = _PICTURE_KINDS.get(Path(picture).suffix.lower())
    if kind is None:
        raise InputError(f"{place}={str(picture)!r} cannot be embedded; give one of {', '.join(_PICTURE_KINDS)}.")
    try:
        content = Path(picture).read_bytes()
    except OSError as error:
        raise InputError(f"{place}={str(picture)!r} cannot be read ({error.strerror}). Draw it first.") from error
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
