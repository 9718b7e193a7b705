"""Hears when a module is called, without leaving a trace in what the script saves.

A forward pre-hook stands in the module's own dict, and `torch.save(model)` would pickle it. So the dicts that hold ours
pickle and copy themselves as the plain ones that they would be without it. Inside a compiled graph the hook is nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

OnCall = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]


class _Hooks(OrderedDict[int, Any]):
    """A dict of hooks of which one is ours."""

    ours: int = -1

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter([(key, hook) for key, hook in self.items() if key != self.ours])


def hear_calls(module: nn.Module, call: OnCall) -> bool:
    """From now on `call(module, args, kwargs)` comes before each forward; False where that cannot be had."""
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    if any(type(vars(module).get(name)) is not OrderedDict or vars(module)[name] for name in names):
        return False  # the script's own handles know these dicts, and could no longer take their hooks off

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and called is module:
            call(called, args, kwargs)

    for name in names:
        vars(module)[name] = _Hooks()
    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    for name in names:
        vars(module)[name].ours = handle.id
    return True
