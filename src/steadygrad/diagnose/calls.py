"""One call of an op, as the dispatcher shows it -> its tensors and numbers by name, and what it writes.

Schemas say which arguments an op changes; those of batch norm and of collectives do not, and are written down here.
Reads only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Scalar = bool | int | float | str | None

WRITES_UNTOLD = {
    "fsdp.all_gather_copy_in": ("all_gather_output",),
    **dict.fromkeys(
        (
            "aten.native_batch_norm",
            "aten.cudnn_batch_norm",
            "aten.miopen_batch_norm",
            "aten._batch_norm_with_update",
            "aten._native_batch_norm_legit",
        ),
        ("running_mean", "running_var"),
    ),
}
"""Ops that change arguments, in training, without their schema saying so."""
FILLED_PARTS = {"fsdp.all_gather_copy_in": 0}
"""Ops that fill one part of what they are given -> which of their results is that part.

The rest is memory as it was allocated, for other ranks to fill: it may hold anything, NaN included.
"""
OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.bernoulli_", "aten.set_")
"""In-place ops that do not look at what was there, as far as they are common."""
VIEWS_UNTOLD = ("aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh")
UNINITIALISED = ("aten.empty", "aten.new_empty")
COLLECTIVES = ("c10d.", "_c10d_functional.", "_dtensor.")
"""Ops that exchange values with other ranks. They return before the values are there."""
WAIT = "_c10d_functional.wait_tensor"
WRAPPERS = ("DTensor", "AsyncCollectiveTensor")
"""Kinds of tensor whose values are in another one, this rank's part."""


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
    """What it returns is filled later, by the next op or by another rank."""
    is_view: bool
    """What it returns may share memory with what it was given."""
    filled_part: int | None = None
    """Which result is all that it has written of its arguments; None if it writes them whole."""

    def name_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Argument, Any]]:
        """Yield each argument that was given, with its declaration."""
        yield from zip(self.arguments, args)
        for argument in self.arguments[len(args) :]:
            if argument.name in kwargs:
                yield argument, kwargs[argument.name]


@functools.cache
def read_signature(func: Any) -> Signature:
    """Return the signature of an overload, remembered; of anything else that is dispatched, its name."""
    # A higher-order op: nothing is known, so its results are never taken for memory that the replay itself made.
    if not hasattr(func, "_schema"):
        return Signature(str(func), (), is_mutable=False, overwrites=False, is_uninitialised=False, is_view=True)
    name = str(func.overloadpacket)
    untold = _find_untold(name, [one.name for one in func._schema.arguments])
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
        overwrites=name in OVERWRITES or any(map(_is_room, untold)),
        is_uninitialised=name.startswith((*UNINITIALISED, *COLLECTIVES)),
        is_view=name in VIEWS_UNTOLD or any(one.alias_info is not None for one in func._schema.returns),
        filled_part=FILLED_PARTS.get(name),
    )


def have_parts(types: Iterable[type]) -> bool:
    """Whether a call is about tensors that hold this rank's part: its ops and collectives are those made of the part.

    A dispatch mode that returns NotImplemented then sees these next.
    """
    # By name: importing the classes would load torch.distributed.tensor into every process.
    return any(kind.__name__ in WRAPPERS for kind in types)


def have_no_values(types: Iterable[type]) -> bool:
    """Whether torch only works out shapes with a call, as it does the first time for ops on a rank's part."""
    return any(kind.__name__ == "FakeTensor" for kind in types)


def _find_untold(name: str, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments that an op changes without its schema saying so; a collective's is the first."""
    if name.startswith("c10d.") and name.endswith("_"):
        return arguments[:1]
    return WRITES_UNTOLD.get(name, ())


def _is_room(argument: str) -> bool:
    """Whether a collective only writes it: where it reads and writes, the name is 'tensors'."""
    return "output" in argument


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result; all-gathers have lists of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)


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
    # Runs for every op of a replay, so only plain floats of the first level are looked at.
    for value in args if not kwargs else (*args, *kwargs.values()):
        if type(value) is float and not math.isfinite(value):
            return True
    return False
