"""Listen for calls of a module without leaving a trace in what the program saves.

A forward pre-hook lives in the module's own dict, and `torch.save(model)` would pickle it. So the dicts that hold ours
pickle and copy themselves as the plain ones they would be without it. In a compiled graph the hook does nothing.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

OnCall = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]


class _Hooks(OrderedDict[int, Any]):
    """A dict of hooks, one of which is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = -1
        self.listeners: list[OnCall] = []

    def values(self) -> Any:
        """Return the hooks without ours: torch.jit.script compiles these, and ours is Python. Calls use `items()`."""
        return {key: hook for key, hook in self.items() if key != self.ours}.values()

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Pickle and copy.deepcopy rebuild a plain OrderedDict from this, with the hooks of the script itself: a model
        # that comes back with any of ours could not be listened to.
        kept = [(key, hook) for key, hook in self.items() if key != self.ours and not getattr(hook, "is_quiet", False)]
        return OrderedDict, (), None, None, iter(kept)


def hear_calls(module: nn.Module, call: OnCall) -> bool:
    """Have `call(module, args, kwargs)` run before each forward; return False where that is not possible."""
    hooks, flags = (vars(module).get(name) for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"))
    if isinstance(hooks, _Hooks):
        hooks.listeners.append(call)
        _hook(module, hooks)
        return True
    if hasattr(module, "_get_fsdp_state"):  # has hooks of its own here, and cannot be pickled or copied anyway
        found = _find_listeners(module)
        if found is None:
            module.register_forward_pre_hook(_make_hook(module, [call]), prepend=True, with_kwargs=True)
        else:
            found[1].append(call)
        return True
    if type(hooks) is not OrderedDict or type(flags) is not OrderedDict or hooks or flags:
        return False  # the script's own handles refer to these dicts, and could no longer remove their hooks
    hooks, flags = _Hooks(), _Hooks()
    # Both dicts: our id is in the second too, and a pickle that kept it would pass kwargs to a later hook of that id.
    module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs = hooks, flags
    hooks.listeners.append(call)
    _hook(module, hooks)
    return True


def _hook(module: nn.Module, hooks: _Hooks) -> None:
    """Have the listeners called, unless they are already."""
    # Gone once the last listener has left; a second training of the same model brings it back.
    if hooks.ours not in hooks:
        handle = module.register_forward_pre_hook(_make_hook(module, hooks.listeners), with_kwargs=True)
        hooks.ours = handle.id
        flags = module._forward_pre_hooks_with_kwargs
        if isinstance(flags, _Hooks):
            flags.ours = handle.id


def stop_hearing(module: nn.Module, call: OnCall) -> None:
    """Call it no more; the hook itself goes with the last listener."""
    found = _find_listeners(module)
    if found is not None and call in found[1]:
        ours, listeners = found
        listeners.remove(call)
        if not listeners:
            module._forward_pre_hooks.pop(ours, None)
            module._forward_pre_hooks_with_kwargs.pop(ours, None)


def _find_listeners(module: nn.Module) -> tuple[int, list[OnCall]] | None:
    """Return the id of our hook on `module` and what it calls."""
    hooks = vars(module).get("_forward_pre_hooks", {})
    if isinstance(hooks, _Hooks):
        return hooks.ours, hooks.listeners
    return next(((key, hook.heard_by) for key, hook in hooks.items() if hasattr(hook, "heard_by")), None)


def _make_hook(module: nn.Module, listeners: list[OnCall]) -> Callable[..., None]:
    # Weakly: the module holds its hook, and a model that holds itself is freed only by the garbage collector.
    heard = weakref.ref(module)

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Shallow copies, such as the replicas of nn.DataParallel, share the dict and so this hook.
        if not torch.compiler.is_compiling() and called is heard():
            for listener in list(listeners):  # one may leave now
                listener(called, args, kwargs)

    before.heard_by = listeners  # type: ignore[attr-defined]
    return before
