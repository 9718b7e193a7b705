"""A step's function and arguments -> its tensors, each under the expression by which the program itself reaches it.

A tensor of the batch is called by the function's parameter: `x`, `batch['image']`, `batch.pixels`; one that the
function takes from around it by its variable, `images`, `self.bank`; what a model was called with by the expressions of
that call. An argument that has no name in the program is counted: 'the first argument'. Reads only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from types import CodeType
from typing import Any

from torch import Tensor, nn

from steadygrad.diagnose.expressions import name_arguments_of_call
from steadygrad.state.trained_parameters import unwrap
from steadygrad.state.tree import is_a, spell_tensors

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
MOST_ITEMS = 1000
"""A longer container that a function refers to, such as a dataset, is not searched."""


def spell_ordinal(place: int) -> str:
    """Return "first" for 0, and so on."""
    return ORDINALS[place] if place < len(ORDINALS) else f"{place + 1}th"


def spell_inputs(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    call: tuple[CodeType, int] | None = None,
) -> list[tuple[str, Tensor]]:
    """Return the tensors of the arguments, then those that `fn` refers to, each with its name.

    `call`: code and instruction of the program's call, whose own expressions are then used.
    """
    found = [*_spell_call(args, kwargs, call), *_spell_arguments(fn, args, kwargs), *_spell_referred(fn)]
    names: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in found:
        # The first name wins: the words of the call, then the parameter, then what the function takes from around it.
        names.setdefault(id(tensor), (name, tensor))
    return list(names.values())


def _spell_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], call: tuple[CodeType, int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under the expressions of a call; none where the call does not show what was given."""
    texts = None if call is None else name_arguments_of_call(*call)
    if texts is None or len(texts[0]) != len(args) or set(texts[1]) != set(kwargs):
        return
    values = [*zip(texts[0], args), *((texts[1][name], value) for name, value in kwargs.items())]
    for text, value in values:
        if text:
            yield from spell_tensors(value, text)


def _spell_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    bound = bind(fn, args, kwargs)
    if bound is not None:
        for name, value in bound.items():
            yield from spell_tensors(value, name)
        return
    for place, value in enumerate(args):
        argument = f"the {spell_ordinal(place)} argument"
        for path, tensor in spell_tensors(value, ""):
            yield f"{path} of {argument}" if path else argument, tensor
    for name, value in kwargs.items():
        yield from spell_tensors(value, name)


def bind(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by the names of the parameters; None where a function does not show them."""
    function = unwrap(fn).forward if isinstance(fn, nn.Module) else fn
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except Exception:  # written in C, wrapped by something with other parameters, or an object that cannot be read
        return None


def _spell_referred(fn: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function takes from a partial, from its object, or from around it."""
    while isinstance(fn, functools.partial):
        for name, value in (bind(fn.func, fn.args, fn.keywords) or {}).items():
            yield from spell_tensors(value, name)
        fn = fn.func
    for name, value in (*list_attributes(fn), *list_around(fn)):
        if is_a(value, Tensor) or _is_short(value):
            yield from spell_tensors(value, name)


def _is_short(value: Any) -> bool:
    """Return whether a value is a container of few items."""
    try:
        return isinstance(value, Sized) and len(value) <= MOST_ITEMS
    except Exception:  # the program's own code, or a compiled model: it has `__len__` even where its module has none
        return False


def list_attributes(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the object behind a method or a callable."""
    owner = None if inspect.isfunction(fn) else getattr(fn, "__self__", fn)
    yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())


def list_around(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a function takes from the functions around it and from its module."""
    function = getattr(fn, "__func__", fn)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    namespace = getattr(function, "__globals__", {})
    yield from ((name, namespace[name]) for name in code.co_names if name in namespace)
