"""Hooks of ours on a module, without a trace in what the program makes of the module.

A forward hook lives in the module's own dict, which `torch.save(model)` pickles, `copy.deepcopy` copies and
`torch.jit.script` compiles. So the dicts that hold ours do all that as the plain ones they would be without it. A hook
is hidden if it has a true `is_quiet`.

Hooks of ours are registered by `nn.Module.register_forward_pre_hook(module, ...)`, not by the module's own method: a
scripted or traced module refuses the method, but calls from Python run its hooks all the same, and neither its copies
nor its files have them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

FLAGS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""The dicts of hooks that a module has, and those that say how a hook is called."""


class _Hooks(OrderedDict[int, Any]):
    """A dict of hooks, some of which are ours."""

    def values(self) -> Any:
        """Return the hooks without ours: torch.jit.script compiles these. Calls use `items()`."""
        return {key: hook for key, hook in self.items() if not _is_ours(hook)}.values()

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Pickle and copy.deepcopy rebuild a plain OrderedDict from this.
        return OrderedDict, (), None, None, iter([(key, hook) for key, hook in self.items() if not _is_ours(hook)])


class _Flags(OrderedDict[int, Any]):
    """What is noted about some of the hooks."""

    def __init__(self, hooks: _Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Ids are given out from 0 in each process: one that was kept would pass kwargs to a later hook of that id.
        kept = [(key, flag) for key, flag in self.items() if not _is_ours(self._hooks.get(key))]
        return OrderedDict, (), None, None, iter(kept)


def hide_hooks(module: nn.Module) -> bool:
    """Hide hooks of ours that `module` gets from now on; return False if a hook before the forward cannot be hidden.

    So it is where the program has hooks: its handles refer to the dicts, and could no longer remove them.
    """
    held = vars(module)
    for name, flags in FLAGS.items():
        dicts = [held.get(key) for key in (name, *flags)]
        if all(type(one) is OrderedDict and not one for one in dicts):
            held[name] = hooks = _Hooks()
            held.update({key: _Flags(hooks) for key in flags})
    return isinstance(held.get("_forward_pre_hooks"), _Hooks)


def is_recorded() -> bool:
    """Whether torch compiles or traces what is called now: operations of ours would become part of that."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _is_ours(hook: Any) -> bool:
    return bool(getattr(hook, "is_quiet", False))
