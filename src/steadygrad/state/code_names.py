"""A function -> the names that its code uses: what it calls and reads, without running it."""

from __future__ import annotations

import types
from typing import Any


def list_names(function: Any) -> set[str]:
    """Return the names in a function's code and in the functions inside it; none for what is not written in Python.

    >>> sorted(list_names(lambda tensor: tensor.isfinite().all()))
    ['all', 'isfinite']
    """
    waiting, names = [getattr(function, "__code__", None)], set[str]()
    while waiting:
        code = waiting.pop()
        if code is not None:
            names |= set(code.co_names)
            waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return names
