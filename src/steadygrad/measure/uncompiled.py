"""A function -> the same one, which torch.compile leaves alone.

A hook of a compiled model runs where torch.compile looks at every function that is called: it would trace ours too,
which takes 0.1 s in the step that calls it first. Marking the code is what `torch.compiler.disable` comes down to; that
itself would import the compiler, 1 s, in programs that compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Have torch.compile run `function`, and all that it calls, as it is."""
    inner: Any = torch._C._dynamo.eval_frame
    try:
        skip = inner._FrameAction.SKIP
        inner.set_code_exec_strategy(function.__code__, inner._FrameExecStrategy(skip, skip))
    except AttributeError:  # a torch that has no such marks traces it, as before
        pass
    return function
