"""The Python stack at one op -> a Place: the user's own line, the line that called into a library, and the module.

The line is that of the innermost frame outside torch and steadygrad. An op that autograd's engine runs on its own has
no such frame; a recomputed segment, a custom backward and a hook have one. Code objects are sorted once and remembered,
because this runs for every op of a replay. Reads frames only, keeps none.
"""

from __future__ import annotations

import enum
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

OURS = os.path.join(os.path.dirname(os.path.abspath(sys.modules["steadygrad"].__file__ or "")), "")
RECIPES = os.path.join(OURS.rstrip(os.sep) + "_recipes", "")
"""Programs that a person runs, and copies: their lines are named as the user's own are."""
TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
LIBRARIES = tuple({os.path.join(path, "") for path in map(sysconfig.get_path, ("purelib", "platlib", "stdlib"))})
"""Where code lives that the user did not write."""
NOT_USERS = (OURS, TORCH, *LIBRARIES, "<frozen")
MAX_DEPTH = 400
"""Frames that are looked at for one op."""


class _Sort(enum.Enum):
    """What a code object is, by where it lives."""

    USER = enum.auto()
    LIBRARY = enum.auto()
    TORCH = enum.auto()
    CALL = enum.auto()
    """nn.Module.__call__'s inside: its `self` is the module."""
    ENGINE = enum.auto()
    """Where torch starts backward."""
    CHECKPOINT = enum.auto()
    """Activation checkpointing, which runs forward code inside backward."""
    END = enum.auto()
    """Our own call of the user's function: frames outside are not the step's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op was called from."""

    code: CodeType | None = None
    line: int | None = None
    instruction: int = -1
    caller: CodeType | None = None
    """The innermost frame of the user's own, when `code` is a library's."""
    caller_line: int | None = None
    module: nn.Module | None = None
    by_engine: bool = False
    """Autograd's engine ran it, and no Python code stood between."""
    in_backward: bool = False
    """Python code that the engine called: a custom backward or a hook, not a recomputed segment."""


@dataclass(slots=True)
class _Walk:
    """What was seen on the way from the innermost frame outwards."""

    in_backward: bool
    user: tuple[CodeType, int, int] | None = None
    caller: tuple[CodeType, int] | None = None
    module: nn.Module | None = None
    engine: bool = False
    recomputes: bool = False

    def finish(self) -> Place:
        """Return the Place."""
        if self.user is None:
            return Place(by_engine=self.engine, module=None if self.engine else self.module)
        code, line, instruction = self.user
        caller = None if self.caller == (code, line) else self.caller
        return Place(
            code=code,
            line=line,
            instruction=instruction,
            caller=None if caller is None else caller[0],
            caller_line=None if caller is None else caller[1],
            module=self.module,
            in_backward=self.in_backward and self.engine and not self.recomputes,
        )


class StackReader:
    """Reads Places; `known` are the modules that have a name."""

    def __init__(self, known: Mapping[int, str], *boundaries: Callable[..., Any]) -> None:
        """`boundaries`: functions of ours outside which no frame is the step's."""
        self._known = known
        self._boundaries = {boundary.__code__ for boundary in boundaries}
        self._sorts: dict[CodeType, _Sort] = {}
        self._running_backward = torch._C._current_graph_task_id

    def read(self, start: FrameType | None = None) -> Place:
        """Return the Place that called into torch; `start` is the innermost frame, by default the caller's."""
        walk = _Walk(in_backward=self._running_backward() != -1)
        frame: FrameType | None = start if start is not None else sys._getframe(1)
        for _ in range(MAX_DEPTH):
            if frame is None:
                walk.engine = walk.in_backward  # another thread's stack ends where the engine begins
                break
            sort = self._sort(frame.f_code)
            if sort is _Sort.END or self._look(walk, sort, frame):
                break
            frame = frame.f_back
        return walk.finish()

    def _look(self, walk: _Walk, sort: _Sort, frame: FrameType) -> bool:
        """Record what a frame shows; return whether nothing more is needed."""
        if sort is _Sort.ENGINE:
            walk.engine = walk.engine or walk.in_backward
            return walk.engine and walk.user is None
        if sort is _Sort.CHECKPOINT:
            # Met before the engine's frame, it recomputes; further out, backward itself was called inside a checkpoint.
            walk.recomputes = walk.recomputes or not walk.engine
        elif sort is _Sort.CALL:
            walk.module = walk.module or self._find_named(frame.f_locals.get("self"))
        elif sort is _Sort.USER or sort is _Sort.LIBRARY:
            walk.user = walk.user or (frame.f_code, frame.f_lineno, frame.f_lasti)
            if sort is _Sort.USER:
                walk.caller = walk.caller or (frame.f_code, frame.f_lineno)
            walk.module = walk.module or self._find_self(frame)
        # In backward the walk goes on: only the engine's frame shows whether it stands between the op and the line.
        return bool(walk.user and walk.caller and walk.module and not walk.in_backward)

    def _find_self(self, frame: FrameType) -> nn.Module | None:
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return None
        # Up to Python 3.12, f_locals copies every local of the frame: not for frames that can have no module.
        return self._find_named(frame.f_locals.get("self"))

    def _find_named(self, thing: Any) -> nn.Module | None:
        return thing if isinstance(thing, nn.Module) and id(thing) in self._known else None

    def _sort(self, code: CodeType) -> _Sort:
        sort = self._sorts.get(code)
        if sort is None:
            sort = self._sorts[code] = self._sort_new(code)
        return sort

    def _sort_new(self, code: CodeType) -> _Sort:
        path = os.path.abspath(code.co_filename)
        if code in self._boundaries:
            return _Sort.END
        if path.startswith(TORCH):
            return _sort_torch(code, path)
        if path.startswith(RECIPES):
            return _Sort.USER
        if path.startswith(OURS) or code.co_filename.startswith("<frozen"):
            return _Sort.TORCH
        return _Sort.LIBRARY if path.startswith(LIBRARIES) else _Sort.USER


def _sort_torch(code: CodeType, path: str) -> _Sort:
    # Private names of torch: if one of them changes, modules lose their names, or backward is taken for forward.
    if code is nn.Module._call_impl.__code__:
        return _Sort.CALL
    if code.co_name == "_engine_run_backward":
        return _Sort.ENGINE
    if path.endswith(os.path.join("utils", "checkpoint.py")):
        return _Sort.CHECKPOINT
    return _Sort.TORCH


class Caller(NamedTuple):
    """The user's line that called the model."""

    code: CodeType
    line: int
    instruction: int
    """-1 when a library stands between: then what the line calls is not the model."""


def find_caller() -> Caller | None:
    """Return the user's innermost frame now; None when only libraries are on the stack."""
    frame: FrameType | None = sys._getframe(1)
    is_direct = True
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        is_users, is_library = _find_owner(frame.f_code.co_filename)
        if is_users:
            return Caller(frame.f_code, frame.f_lineno, frame.f_lasti if is_direct else -1)
        if is_library:
            is_direct = False
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=1024)  # asked of a dozen frames at every call of the model
def _find_owner(path: str) -> tuple[bool, bool]:
    """Return whether a file is the user's, and whether it is a library's other than torch and this one."""
    # Recipes are installed beside the library, and are the user's all the same.
    is_users = not path.startswith(NOT_USERS) or path.startswith(RECIPES)
    return is_users, not path.startswith((OURS, TORCH))


def read_source(code: CodeType | None, line: int | None) -> str | None:
    """Return the text of a line, without its indentation and trailing comment; None when it cannot be read."""
    if code is None or line is None:
        return None
    text = linecache.getline(code.co_filename, line).strip()
    return _cut_comment(text) or None


def _cut_comment(text: str) -> str:
    """Return `text` up to its comment; a '#' inside quotes does not start one."""
    quote = ""
    for position, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "#":
            return text[:position].rstrip()
    return text


def spell_place(code: CodeType | None, line: int | None) -> str | None:
    """Format a place for reading: 'model.py:41'."""
    return None if code is None else f"{os.path.basename(code.co_filename)}:{line}"
