"""A tensor that is neither of the batch nor of the model -> the expression by which the step function reaches it.

A teacher, a critic, a running centre: `teacher.fc.weight`, `self.critic.head.bias`, `state.centre`. Breadth first, so
that the shortest expression is found; only when a diagnosis has a tensor without a name. Reads only, calls nothing of
the program's, and passes by what cannot be read.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from steadygrad.diagnose.argument_names import bind, list_around, list_attributes
from steadygrad.diagnose.effects import is_library, read_dict
from steadygrad.state.tree import is_a

MOST_OBJECTS = 5000
"""Objects that are looked at."""
MOST_ITEMS = 100
"""A longer container is data, and holds no networks."""
MODULE_DICTS = ("_parameters", "_buffers", "_modules")

Named = tuple[str, Any]


def name_reachable(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_wanted: Callable[[Tensor], bool]
) -> tuple[str, str, Tensor] | None:
    """Return 'parameter' or 'input', the name and the tensor of the first that `is_wanted`; None if none is reached.

    What a module holds as a parameter or buffer is a parameter.
    """
    waiting: deque[Named] = deque(_list_roots(fn, args, kwargs))
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        name, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if is_a(thing, Tensor):
            if is_wanted(thing):
                return "input", name, thing
            continue
        try:
            if is_a(thing, nn.Module):
                for path, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                    if is_wanted(tensor):
                        return "parameter", f"{name}.{path}", tensor
            waiting.extend(_open(name, thing))
        except Exception:  # the program's own code
            continue
    return None


def _list_roots(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Named]:
    yield from (bind(fn, args, kwargs) or kwargs).items()
    while isinstance(fn, functools.partial):
        yield from (bind(fn.func, fn.args, fn.keywords) or {}).items()
        fn = fn.func
    yield from list_attributes(fn)
    yield from list_around(fn)


def _open(name: str, thing: Any) -> list[Named]:
    """Return what a thing holds, each with the expression that reaches it."""
    if is_a(thing, nn.Module):
        # Submodules too: one may keep a network in a plain list, where it is not registered.
        held = [(key, value) for key, value in vars(thing).items() if key not in MODULE_DICTS]
        return [(f"{name}.{key}", value) for key, value in (*held, *thing.named_children())]
    if is_a(thing, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in thing.items()] if len(thing) <= MOST_ITEMS else []
    if is_a(thing, (list, tuple)):
        return [(f"{name}[{place}]", item) for place, item in enumerate(thing)] if len(thing) <= MOST_ITEMS else []
    if is_a(thing, types.FunctionType):  # what it takes from around it has a name there
        return [] if is_library(thing.__code__.co_filename) else list(list_around(thing))
    if is_a(thing, (type, types.ModuleType)) or type(thing).__module__.partition(".")[0] == "torch":
        return []  # an optimizer holds the weights too, by no name that a reader knows
    return [(f"{name}.{key}", value) for key, value in (read_dict(thing) or {}).items()]
