"""Callers: who calls the model and who calls backward -> a Capture of the loss, so that it can be replayed whole.

When the model is called, the values of the names that the loss will need are noted in each function of the user's that
is under way; when backward is called in one of these, the code between the two becomes a function (`loss_code.py`), and
the noted values its arguments. Holds references only, until the step is over. Library code is not replayed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from steadygrad.adapters.scripts.loss_code import LossCode, find_loss_code, read_spot
from steadygrad.diagnose.capture import AutocastState, Capture, read_version
from steadygrad.diagnose.frames import LIBRARIES, MAX_DEPTH, OURS, RECIPES, TORCH
from steadygrad.diagnose.step_arguments import name_inputs

ASK_FOR_LOCALS = {"locals", "vars", "dir", "eval", "exec"}
MOST_MISSES = 64
"""Backwards in a row without a loss that could be run again, after which no more is noted."""
MOST_NOTED = 16
"""Functions of the user's that are noted at one call, innermost first."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """One function when the model was called in it."""

    code: CodeType
    instruction: int
    values: Mapping[str, Any]
    random: Mapping[str, Any] | None
    autocast: AutocastState


class Callers:
    """Notes calls of one model, and turns them into Captures."""

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}
        self._codes: dict[tuple[CodeType, int, int], LossCode | None] = {}
        """Code and the instructions that call model and backward -> what computes the loss between them."""
        self._needed: dict[CodeType, set[str]] = {}
        """Code -> names that its losses need, as far as known."""
        self._is_learning = True
        """Whether every function is noted, since it is not known yet which one calls backward."""
        self._num_misses = 0
        self._user_code: dict[CodeType, bool] = {}

    def note_call(self, capture: Capture) -> None:
        """The model is called; `capture` is of this call. The first call since the last backward counts."""
        frame: FrameType | None = sys._getframe(1)
        num_noted = 0
        for _ in range(MAX_DEPTH if self._num_misses < MOST_MISSES else 0):
            if frame is None or num_noted == MOST_NOTED:
                return
            code = frame.f_code
            if code in self._needed or (self._is_learning and self._is_users(code)):
                num_noted += 1
                # References to the user's objects, the batch among them; dropped at backward or at the end of the step.
                if id(frame) not in self._noted:
                    values = _read_values(frame, self._needed.get(code))
                    self._noted[id(frame)] = _Noted(code, frame.f_lasti, values, capture.random, capture.autocast)
                if not self._is_learning:
                    return
            frame = frame.f_back

    def note_backward(self, model: nn.Module) -> Capture | None:
        """Backward is called: return a Capture of the loss, if its code can be found. Later calls start over."""
        noted, self._noted = self._noted, {}
        frame: FrameType | None = sys._getframe(1) if noted else None
        capture = None
        while frame is not None:
            then = noted.get(id(frame))
            # The frame of the id may be gone, and another one at its address: then its code is another function's.
            if then is not None and then.code is frame.f_code:
                capture = self._capture(then, frame, model)
                break
            frame = frame.f_back
        if noted:
            self._is_learning = capture is None
            self._num_misses = 0 if capture is not None else self._num_misses + 1
        return capture

    def forget(self) -> None:
        """A step is over."""
        self._noted = {}

    def _capture(self, then: _Noted, frame: FrameType, model: nn.Module) -> Capture | None:
        code = frame.f_code
        key = (code, then.instruction, frame.f_lasti)
        # Parsing the file is slow and done once for each pair of call and backward; a step costs a lookup.
        if key not in self._codes:
            if code in self._needed:  # another line of a function: note all of its values in the next step
                del self._needed[code]
                return None
            self._codes[key] = _find_code(then, frame)
            lines = [found for (one, _, _), found in self._codes.items() if one is code and found is not None]
            self._needed[code] = {name for found in lines for name in found.names}
        found = self._codes[key]
        if found is None or not set(found.names) <= set(then.values):
            return None
        values = {name: then.values[name] for name in found.names}
        return Capture(
            fn=found.make_function(frame.f_globals),
            args=(),
            kwargs=values,
            model=model,
            random=then.random,
            autocast=then.autocast,
            versions=tuple((name, read_version(tensor)) for name, tensor in name_inputs((), values)),
        )

    def _is_users(self, code: CodeType) -> bool:
        found = self._user_code.get(code)
        if found is None:
            path = code.co_filename
            found = path.startswith(RECIPES) or not path.startswith((OURS, TORCH, *LIBRARIES, "<"))
            # Reading a frame fills the very dict that `locals()` has returned to the function: it would notice.
            found = self._user_code[code] = found and not ASK_FOR_LOCALS & set(code.co_names)
        return found


def _find_code(then: _Noted, frame: FrameType) -> LossCode | None:
    call, backward = read_spot(then.code, then.instruction), read_spot(then.code, frame.f_lasti)
    if call is None or backward is None:
        return None
    try:
        return find_loss_code(then.code, call, backward, frozenset(then.values))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _read_values(frame: FrameType, names: Collection[str] | None) -> dict[str, Any]:
    """Return the values of these names, or of all of them; functions, classes and modules of a script stay global."""
    held = frame.f_locals
    chosen = held if names is None else [name for name in names if name in held]
    values = {name: held[name] for name in chosen}
    if held is frame.f_globals:
        return {
            n: v for n, v in values.items() if not isinstance(v, ModuleType | FunctionType | type) and n[:2] != "__"
        }
    # Up to Python 3.12; later ones give a proxy, which holds nothing.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(held) is dict:
        held.clear()  # a copy that the frame keeps: it would hold what the function has let go
    return values
