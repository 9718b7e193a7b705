"""The arguments of a step -> the model whose modules have names, and the tensors that have names.

Wrappers are opened: compiled models, DataParallel and DistributedDataParallel name their modules as the model inside
does. Reads only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from steadygrad.state.tree import find_tensors, is_a


def find_model(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """Return the first module among the arguments, behind a bound method, or among what the function refers to."""
    return next(iter(_find_modules(fn, args, kwargs)), None)


def find_wrappers(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], model: nn.Module | None
) -> tuple[nn.DataParallel[Any], ...]:
    """Return DataParallel models that a step may call: their threads on other devices cannot be watched."""
    found = [*_find_modules(fn, args, kwargs), *([] if model is None else [model])]
    return tuple({id(one): one for one in found if isinstance(one, nn.DataParallel)}.values())


def _find_modules(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    given = [*args, *kwargs.values()]
    while isinstance(fn, functools.partial):
        given += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    given += [fn, getattr(fn, "__self__", None), *_find_referred(fn)]
    return [thing for thing in given if is_a(thing, nn.Module)]


def _find_referred(fn: Callable[..., Any]) -> list[Any]:
    code = getattr(fn, "__code__", None)
    if code is None:
        return []
    found = []
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    namespace = getattr(fn, "__globals__", {})
    return [*found, *(namespace[name] for name in code.co_names if name in namespace)]


def name_modules(model: nn.Module | None) -> dict[int, str]:
    """id of a module -> its qualified name; '' for the model itself."""
    names: dict[int, str] = {}
    for name, module in model.named_modules() if model is not None else ():
        names.setdefault(id(module), name)
    return names


def name_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return path inside the arguments -> tensor; modules among the arguments are left out."""
    given = [arg for arg in args if not is_a(arg, nn.Module)]
    named = {key: value for key, value in kwargs.items() if not is_a(value, nn.Module)}
    return list(find_tensors(given, named))
