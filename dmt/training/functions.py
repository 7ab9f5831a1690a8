"""Loads and calls the user's functions, which a config names as ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dmt.errors import InputError, did_you_mean

__all__ = ["call_named", "check_allowed", "load_function"]


def check_allowed(place: str, names: Mapping[str, str | None], allowed: Collection[str]) -> None:
    """Checks that the user allows the functions that a file names, before any of them is imported.

    Args:
        place: the file, for the message.
        names: the function that each setting names, by setting; None: it names none.
        allowed: the functions that the user allows (``--function``).

    Raises:
        InputError: a function is not allowed.
    """
    for setting, name in names.items():
        if name is not None and name not in allowed:
            raise InputError(f"{place} names code to run, {setting}={name!r}. If you trust it, add --function {name}")


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Imports the function ``package.module:function``; appends the current folder to ``sys.path``.

    Raises:
        InputError: ``name``, the value of ``setting``, is not of this form, there is no such module or function, or
            importing the module fails.
    """
    place = f"{setting}={name!r}"
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise InputError(f"{place} is not of the form package.module:function, such as my_models:deepfm.")
    if (here := str(Path.cwd())) not in sys.path:
        # Python does not search the current folder for an installed program such as dmt.
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's program may do anything
        raise InputError(
            f"{place}: importing {module_name!r} raised {type(error).__name__}: {error}. Run from the folder that has "
            "the module, set PYTHONPATH, or repair or install what the module imports."
        ) from error
    function: Callable[..., Any] = getattr(module, function_name, None)  # type: ignore[assignment]
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = did_you_mean(function_name, known)
        raise InputError(f"{place}: {module_name!r} has no function {function_name!r}.{hint} Correct the name.")
    return function


def call_named(place: str, function: Callable[..., Any], given: Mapping[str, Any], *, takes_all: bool = False) -> Any:
    """Calls a function with those given keyword arguments that it accepts.

    Args:
        place: the function, for messages.
        function: the function; if it has ``**kwargs``, it gets all arguments.
        given: the arguments by name.
        takes_all: whether the function must accept all of them.

    Raises:
        InputError: the function does not accept an argument that it must accept, or requires one that is not given.
    """
    signature = inspect.signature(function)
    takes_all |= any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    arguments = {name: value for name, value in given.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"{place} is called with the keywords {', '.join(given)}: {error}. Correct the function's parameters; put "
            "settings into options."
        ) from error
    return function(**arguments)
