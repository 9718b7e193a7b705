"""One call of an op, as the dispatcher shows it -> its tensors and numbers by name, and what it writes.

Schemas say which arguments an op changes; those of batch norm do not, and are written down here. Reads only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Scalar = bool | int | float | str | None

WRITES_UNTOLD = dict.fromkeys(
    (
        "aten.native_batch_norm",
        "aten.cudnn_batch_norm",
        "aten.miopen_batch_norm",
        "aten._batch_norm_with_update",
        "aten._native_batch_norm_legit",
    ),
    ("running_mean", "running_var"),
)
"""Ops that change arguments, in training, without their schema saying so."""
OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.bernoulli_", "aten.set_")
"""In-place ops that do not look at what was there, as far as they are common."""
VIEWS_UNTOLD = ("aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh")
UNINITIALISED = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    is_written: bool
    is_out: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """What is known about an op before it is called."""

    name: str
    """Without its overload: 'aten.sqrt'."""
    arguments: tuple[_Argument, ...]
    is_mutable: bool
    overwrites: bool
    is_uninitialised: bool
    is_view: bool
    """What it returns may share memory with what it was given."""

    def name_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Argument, Any]]:
        """Yield each argument that was given, with its declaration."""
        yield from zip(self.arguments, args)
        for argument in self.arguments[len(args) :]:
            if argument.name in kwargs:
                yield argument, kwargs[argument.name]


@functools.cache
def read_signature(func: Any) -> Signature:
    """Return the signature of an overload, remembered; of anything else that is dispatched, its name."""
    if not hasattr(func, "_schema"):
        return Signature(str(func), (), is_mutable=False, overwrites=False, is_uninitialised=False, is_view=True)
    name = str(func.overloadpacket)
    untold = WRITES_UNTOLD.get(name, ())
    arguments = tuple(
        _Argument(
            one.name,
            is_written=one.name in untold or (one.alias_info is not None and one.alias_info.is_write),
            is_out=one.kwarg_only and one.alias_info is not None and one.alias_info.is_write,
        )
        for one in func._schema.arguments
    )
    return Signature(
        name,
        arguments,
        is_mutable=func._schema.is_mutable or bool(untold),
        overwrites=name in OVERWRITES,
        is_uninitialised=name.startswith(UNINITIALISED),
        is_view=name in VIEWS_UNTOLD or any(one.alias_info is not None for one in func._schema.returns),
    )


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item


def find_scalars(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the arguments that are not tensors, by name."""
    found: dict[str, Scalar] = {}
    for argument, value in signature.name_arguments(args, kwargs):
        if isinstance(value, bool | int | float | str):
            found[argument.name] = value
        elif isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], int | float):
            found[argument.name] = value[0]
    return found


def has_nonfinite_scalar(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a number among the arguments is NaN or Inf: a constant of the program."""
    for value in args if not kwargs else (*args, *kwargs.values()):
        if type(value) is float and not math.isfinite(value):
            return True
    return False
