"""Griffe extension of `make docs`: renames the section ``Example:`` of docstrings to ``Examples:``.

Griffe parses doctests only in a section of that name; in others, it would show ``>>>`` as quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in every docstring that has one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
