"""Listen for calls of a module without leaving a trace in what the program saves.

The hook that listens is hidden (`hidden_hooks.py`). In a compiled graph it does nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from steadygrad.state.hidden_hooks import hide_hooks, is_recorded

OnCall = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]


def hear_calls(module: nn.Module, call: OnCall) -> bool:
    """Have `call(module, args, kwargs)` run before each forward; return False where that leaves a trace."""
    found = _find_listeners(module)
    if found is not None:
        found[1].append(call)
        return True
    # FSDP2 has hooks of its own, and its modules cannot be pickled or copied anyway.
    is_fsdp = hasattr(module, "_get_fsdp_state")
    if not hide_hooks(module) and not is_fsdp:
        return False
    nn.Module.register_forward_pre_hook(module, _make_hook(module, [call]), prepend=is_fsdp, with_kwargs=True)
    return True


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
    return next(((key, hook.heard_by) for key, hook in hooks.items() if hasattr(hook, "heard_by")), None)


def _make_hook(module: nn.Module, listeners: list[OnCall]) -> Callable[..., None]:
    # Weakly: the module holds its hook, and a model that holds itself is freed only by the garbage collector.
    heard = weakref.ref(module)

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Shallow copies, such as the replicas of nn.DataParallel, share the dict and so this hook.
        if not is_recorded() and called is heard():
            for listener in list(listeners):  # one may leave now
                listener(called, args, kwargs)

    before.heard_by = listeners  # type: ignore[attr-defined]
    before.is_quiet = True  # type: ignore[attr-defined]
    return before
