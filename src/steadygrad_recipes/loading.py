"""`module:function` or `file.py:function` -> the function: how a recipe's settings name code of the user's own.

Whatever that code raises is an error about the setting, with the line of the user's own where it happened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

import steadygrad
from steadygrad.errors import ConfigError

_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = tuple(os.path.join(folder, "") for folder in (_HERE, os.path.dirname(os.path.abspath(steadygrad.__file__))))
LIBRARIES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))


def load_function(name: str, field: str) -> Callable[..., Any]:
    """Return the function; ConfigError, which names `field`, if there is none. Modules are also found in the folder."""
    place, _, function = name.rpartition(":")
    advice = "Give module:function, or file.py:function."
    if not place or not function:
        raise ConfigError(f"{field}: {name!r} names no function. {advice}")
    try:
        found = getattr(_load_module(place), function)
    except (Exception, SystemExit) as error:  # the user's own file is run
        reason = (
            str(error) if isinstance(error, ImportError | AttributeError | OSError | SyntaxError) else name_error(error)
        )
        raise ConfigError(f"{field}: {name} cannot be loaded ({reason}){spell_place(error)}. {advice}") from error
    if not callable(found):
        raise ConfigError(f"{field}: {name} is {type(found).__name__}, not a function. {advice}")
    checked: Callable[..., Any] = found
    return checked


def call_function(name: str, field: str) -> Any:
    """Return what that function returns without arguments; ConfigError, which names `field`, if it raises."""
    function = load_function(name, field)
    try:
        return function()
    except (Exception, SystemExit) as error:  # the user's own code; SystemExit would end the command without a word
        place = spell_place(error, function)
        raise ConfigError(
            f"{field}: {name}() raised {name_error(error)}{place}. It is called without arguments: mend it, or name "
            "another function."
        ) from error


def name_error(error: BaseException) -> str:
    """Return the exception's type and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def spell_place(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return " at FILE:LINE", the innermost line of the user's own; of a call that did not fit, where it is defined."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    others = [place for place in frames if not place[0].startswith((*OURS, "<frozen"))]
    # A function of an installed package has no line outside the libraries
    own = [place for place in others if not place[0].startswith(LIBRARIES)] or others
    code = getattr(function, "__code__", None)
    if not own and code is not None:
        own = [(code.co_filename, code.co_firstlineno)]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def _load_module(place: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            # Stays there: a module of the user's may import its neighbours later
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(os.path.basename(place).removesuffix(".py"), place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Runs the user's file: the name comes from their own settings, never from data or a checkpoint
    spec.loader.exec_module(module)
    return module
