"""A torch function mode for exactly one call of a model: entered by its first hook, left by its last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


def watch_one_call(model: nn.Module, mode: TorchFunctionMode, after: Callable[[], None]) -> None:
    """Enter `mode` until the call of `model` under way returns or raises, then call `after`.

    Call it from a forward pre-hook. The mode is nested in the call, so modes of the program's own stay in order.
    """
    handles: list[RemovableHandle] = []

    def leave(*_: Any) -> None:
        handles[0].remove()
        mode.__exit__(None, None, None)
        after()

    # Registered before the mode is entered: were this to fail, nothing would be left open. `prepend`: the mode ends
    # before the program's own forward hooks run.
    handles.append(nn.Module.register_forward_hook(model, leave, prepend=True, always_call=True))
    mode.__enter__()
