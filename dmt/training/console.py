"""What reaches the terminal: our own messages, on rank 0."""

from __future__ import annotations

import logging
import os
import warnings

from rich.console import Console

__all__ = ["quiet_libraries", "table_console"]

_PIPE_WIDTH = 140


def table_console(*, markup: bool) -> Console:
    """A console for tables of names and numbers, as wide as the terminal or ``COLUMNS``.

    Args:
        markup: whether rich's markup is read in what is printed.
    """
    console = Console(highlight=False, markup=markup, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        # A pipe has no width; 80 columns would break what a file has room for.
        console.width = _PIPE_WIDTH
    return console


def quiet_libraries(*, rank: int) -> None:
    """Sends this package's log to the terminal and silences what others say on every rank at INFO or by warning.

    For programs only: a library that changes logging when it is imported takes the choice from its user.

    Args:
        rank: of this process; ranks other than 0 report errors only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("dmt")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # PyTorch sets its loggers' levels itself, but leaves those that have one.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
