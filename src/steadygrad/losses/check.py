"""What the losses and safe pieces refuse, before any arithmetic: what was found, in which function, what to do.

Names, shapes, dtypes and devices are looked at, and settings that are numbers. No value of a tensor is read: nothing
waits for the device, and compilers and vmap can follow. So labels out of range are torch's to find (classification.py).
A shape that torch would broadcast is taken as long as it enlarges one of two tensors: [N, 1] against [N] is [N, N], a
loss of every prediction against every target, and never meant.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import ConfigError, UnsupportedError, UsageError
from steadygrad.losses.shapes import broadcasts_to

OPTIONAL = ("mask", "weight", "pos_weight", "alpha", "negatives")
"""Arguments that may be None."""

LARGEST = sys.float_info.max
SMALLEST = math.ulp(0.0)
"""The largest finite number, and the smallest above 0."""


def require_tensors(function: str, /, **tensors: object) -> None:
    """Require real tensors on one device; as in torch, a zero-dimensional one may be elsewhere."""
    first: Tensor | None = None
    for name, value in tensors.items():
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{function}'s {name} must be a tensor, got {type(value).__name__}. Make one with torch.as_tensor."
            )
        if value.is_complex():
            raise UnsupportedError(
                f"{function}'s {name} must hold real numbers, got {value.dtype} of shape {tuple(value.shape)}. "
                "Take its abs(), or view_as_real."
            )
        first = value if first is None else first
        if value.device != first.device and value.dim() and first.dim():
            raise UsageError(
                f"{function} got {next(iter(tensors))} on {first.device} and {name} on {value.device}. "
                "Put all of them on one device with .to(device)."
            )


def require_pair(function: str, **pair: Tensor) -> tuple[int, ...]:
    """Return the common shape, which must be that of one tensor: broadcasting may enlarge the other, but not both."""
    (first_name, first), (second_name, second) = pair.items()
    for whole, part in ((first, second), (second, first)):
        if len(part.shape) <= len(whole.shape) and broadcasts_to(part.shape, whole.shape):
            return tuple(whole.shape)
    raise UsageError(
        f"{function} got {first_name} of shape {tuple(first.shape)} and {second_name} of shape {tuple(second.shape)}, "
        f"which {_describe_broadcast(first.shape, second.shape)}. Give both one shape: squeeze, unsqueeze or reshape."
    )


def require_masked(function: str, x: Tensor, mask: Tensor | None) -> None:
    """Require a mask of the tensor's shape; the smaller of the two is repeated."""
    require_tensors(function, x=x, mask=mask)
    if mask is not None:
        require_pair(function, x=x, mask=mask)


def require_broadcast(function: str, first: Tensor, second: Tensor) -> None:
    """Require that torch can broadcast them, even if that enlarges both."""
    for n in range(1, min(first.dim(), second.dim()) + 1):
        if first.shape[-n] != second.shape[-n] and first.shape[-n] != 1 and second.shape[-n] != 1:
            raise UsageError(
                f"{function} got shapes {tuple(first.shape)} and {tuple(second.shape)}, which do not go together. "
                "Counted from the end, each size must be equal or 1."
            )


def require_same_shape(function: str, **pair: Tensor) -> None:
    """Require equal shapes: nothing is broadcast."""
    (first_name, first), (second_name, second) = pair.items()
    if first.shape != second.shape:
        raise UsageError(
            f"{function} takes {first_name} and {second_name} of one shape, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}. Use squeeze, unsqueeze or reshape on one of them."
        )


def require_same_size(function: str, axis: int, **pair: Tensor) -> None:
    """Require that dimension, counted from the end, in both tensors with the same size."""
    sizes = [t.shape[axis] if t.dim() >= -axis else None for t in pair.values()]
    if sizes[0] != sizes[1]:
        found = " and ".join([f"{name} of shape {tuple(t.shape)}" for name, t in pair.items()])
        raise UsageError(f"{function} got {found}. Dimension {axis} must be of one size in both.")


def require_fit(function: str, name: str, value: object, shape: Sequence[int], whole: str) -> None:
    """`value`, if it is a tensor, may be broadcast to `shape`, which is that of `whole`, and never enlarges it."""
    if isinstance(value, Tensor) and not broadcasts_to(value.shape, shape):
        raise UsageError(
            f"{function} got {name} of shape {tuple(value.shape)} for {whole} of shape {tuple(shape)}, which "
            f"{_describe_broadcast(value.shape, shape)}. Give {name} that shape, or 1 where it is to be repeated."
        )


def require_number(
    function: str,
    name: str,
    value: Any,
    hint: str,
    *,
    rule: str = "be a finite number",
    least: float = -LARGEST,
    most: float = LARGEST,
) -> None:
    """Require a number from `least` to `most`, as `rule` words it. One in a tensor is not read: that would wait."""
    if isinstance(value, Tensor):
        return
    is_number = isinstance(value, Real)
    if not is_number or not least <= value <= most:  # NaN is in no range
        raise ConfigError(f"{function}'s {name} must {rule}, got {value!r}. {hint}")


def require_not_negative(function: str, name: str, value: object, hint: str) -> None:
    """Require a finite number of at least 0."""
    rule = "be a finite number" if value == math.inf else "not be negative"
    require_number(function, name, value, hint, rule=rule, least=0.0)


def require_positive(function: str, name: str, value: object, hint: str, *, most: float = math.inf) -> None:
    """Require a number above 0; infinity is allowed unless `most` is lower."""
    require_number(function, name, value, hint, rule="be a positive number", least=SMALLEST, most=most)


def require_share(function: str, name: str, value: object, hint: str) -> None:
    """Require a number from 0 to 1."""
    require_number(function, name, value, hint, rule="be between 0 and 1", least=0.0, most=1.0)


def require_eps(function: str, eps: float | None) -> None:
    if eps is not None:
        require_not_negative(function, "eps", eps, "Leave it out for the default.")


def _describe_broadcast(first: Sequence[int], second: Sequence[int]) -> str:
    try:
        return f"would be broadcast to {tuple(torch.broadcast_shapes(tuple(first), tuple(second)))}"
    except RuntimeError:
        return "do not go together"
