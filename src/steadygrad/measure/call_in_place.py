"""A call that a torch function mode passes on -> the same call, made from the line that the program made it from.

Python files a warning, and torch those of its C++ code, under the line of the innermost frame. That frame would be
ours: the program's warnings would name a file of this package, be printed once more for the new place, and miss the
filters that the program set for its own modules. So the call is made from a frame with the file, line and globals of
the program's own. Costs about a microsecond a call, and only while a mode is open.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch.overrides import handle_torch_function

TEMPLATE: CodeType = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
NO_COLUMNS = 0x80 | 13 << 3
"""In CPython's table of positions: an entry with a line and no columns, for up to eight units of code."""


def call_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`; call this from `__torch_function__` itself."""
    # Two up: the frame that made the call, above __torch_function__, which is ours.
    frame = sys._getframe(2)
    if frame.f_code is handle_torch_function.__code__:  # torch's own functions in Python: they are what is called
        function = frame.f_back
        frame = function.f_back if function is not None and function.f_back is not None else frame
    code = frame.f_code
    place = _make_code(code.co_filename, frame.f_lineno, code.co_name)
    return FunctionType(place, frame.f_globals)(func, args, kwargs)


@functools.lru_cache(maxsize=1024)
def _make_code(file: str, line: int, name: str) -> CodeType:
    units = len(TEMPLATE.co_code) // 2
    sizes = [min(8, units - start) for start in range(0, units, 8)]
    # Each entry is followed by its line delta, 0.
    table = b"".join(bytes((NO_COLUMNS | size - 1, 0)) for size in sizes)
    return TEMPLATE.replace(co_filename=file, co_firstlineno=line, co_name=name, co_qualname=name, co_linetable=table)
