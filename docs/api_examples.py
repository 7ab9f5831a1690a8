"""Griffe extension of `make docs`: a docstring's section ``Example:`` is read as ``Examples:``, which holds doctests.

Without it they would be taken for the text of a note, and ``>>>`` for quotations.
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
