"""The DeepFM of docs/your_model.md as a module, so that a config can name its factory in every process."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
SECTION = PAGE.read_text().partition("## In the trainer")[2]
PROGRAM, SETTINGS = (re.search(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("python run", "toml"))
assert PROGRAM is not None, "the page has lost its program"
exec(compile(PROGRAM[1], str(PAGE), "exec"), globals())
