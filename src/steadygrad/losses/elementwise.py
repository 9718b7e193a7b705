"""Square root, logarithm, quotient and inverse angles whose value and gradient are finite for every finite input.

Each equals the plain operation wherever that and its derivative are finite. Elsewhere the value is the nearest sensible
one and the gradient is zero: a true select on the *input* of the operation, because a select on its result leaves
0 · inf = NaN in the backward pass. NaN stays NaN: it comes from elsewhere, and the guard must see it. No host
read.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import UnsupportedError
from steadygrad.losses.check import require_broadcast, require_eps, require_tensors
from steadygrad.losses.precision import largest, narrow, result_dtype, smallest_normal, widen


def safe_sqrt(x: Tensor, *, eps: float = 0.0) -> Tensor:
    """Return sqrt(x) for x > 0; 0 with a zero gradient for x <= 0.

    With `eps` the root is a straight line from 0 to sqrt(eps) below eps, so that no derivative exceeds 1 / sqrt(eps).
    Second derivatives are finite in fp32 for x above 1e-25; `eps=1e-24` makes them finite everywhere, which gradient
    penalties need.
    """
    require_tensors("safe_sqrt", x=x)
    require_eps("safe_sqrt", eps)
    wide = widen(x)
    below = wide <= 0  # NaN fails every comparison here and goes through the root
    root = torch.where(below | (wide < eps), 1.0, wide).sqrt()
    if eps > 0:
        root = torch.where(wide < eps, wide * eps**-0.5, root)
    return narrow(torch.where(below, 0.0, root), x, autocast_keeps=False)


def safe_log(x: Tensor, *, eps: float | None = None) -> Tensor:
    """Return log(max(x, eps)), with a zero gradient below eps; by default the smallest normal number of the dtype.

    Second derivatives are finite in fp32 for x above 1e-19; `eps=1e-18` makes them finite everywhere.
    """
    require_tensors("safe_log", x=x)
    require_eps("safe_log", eps)
    wide = widen(x)
    floor = smallest_normal(x) if eps is None else max(eps, smallest_normal(x))
    return narrow(torch.where(wide < floor, floor, wide).log(), x, autocast_keeps=True)


def safe_div(numerator: Tensor | float, denominator: Tensor | float, *, eps: float | None = None) -> Tensor:
    """Return numerator / denominator, with |denominator| at least `eps` and its sign kept; 0 counts as positive.

    By default eps is 1e-12, in fp16 its smallest normal number, 6e-5. A quotient beyond the dtype is held at its
    largest number, and a gradient to the denominator that would be beyond it is zero. Second derivatives are not
    protected.
    """
    _check_operands("safe_div", numerator=numerator, denominator=denominator)
    require_eps("safe_div", eps)
    like, (top, bottom) = _promote(numerator, denominator)
    floor = max(1e-12 if eps is None else eps, smallest_normal(like))
    # A tensor, not a number: `torch.where` of two numbers would have the default dtype
    least = torch.full_like(bottom, floor)
    bottom = torch.where(bottom.abs() < floor, torch.where(bottom < 0, -least, least), bottom)
    size = bottom.detach().abs()
    ratio = top.detach().abs() / size
    too_large = ratio > largest(like)
    too_steep = too_large | (ratio / size > largest(like) / 2)  # half of it: the backward pass rounds
    quotient = top / torch.where(too_steep, bottom.detach(), bottom)
    held = (torch.sign(top) * torch.sign(bottom)).detach() * largest(like)
    return narrow(torch.where(too_large, held, quotient), like, autocast_keeps=False)


def safe_acos(x: Tensor) -> Tensor:
    """Return acos of x held in [-1, 1]; a zero gradient from the ends on, where the plain one is infinite or NaN."""
    require_tensors("safe_acos", x=x)
    return _inside_unit(torch.acos, x)


def safe_asin(x: Tensor) -> Tensor:
    """Return asin of x held in [-1, 1]; a zero gradient from the ends on, where the plain one is infinite or NaN."""
    require_tensors("safe_asin", x=x)
    return _inside_unit(torch.asin, x)


def safe_atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return atan2(y, x); a zero gradient at the origin, where the true one overflows, and at infinity (plain: NaN).

    Coordinates are scaled by a power of two first: plain torch squares them, and its gradient is 0 below 1e-22.
    """
    _check_operands("safe_atan2", y=y, x=x)
    like, (wide_y, wide_x) = _promote(y, x)
    size = torch.maximum(wide_y.detach().abs(), wide_x.detach().abs())
    fixed = (size < smallest_normal(like)) | torch.isinf(size)
    scale = torch.where(fixed, 1.0, power_of_two_near(size))
    # (0, 1) where it is fixed: any point at which the derivative exists
    turned = torch.atan2(torch.where(fixed, 0.0, wide_y) / scale, torch.where(fixed, 1.0, wide_x) / scale)
    constant = torch.atan2(wide_y.detach(), wide_x.detach())
    return narrow(torch.where(fixed, constant, turned), like, autocast_keeps=False)


def power_of_two_near(size: Tensor) -> Tensor:
    """A power of two within a factor of four of `size`, far above the least number: dividing by it changes no digit."""
    least = 2.0**-990 if size.dtype == torch.float64 else 2.0**-99
    return torch.exp2(torch.floor(torch.log2(size.clamp(min=least) / 2)))


def _inside_unit(angle: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    wide = widen(x)
    at_end = wide.abs() >= 1
    inside = angle(torch.where(at_end, 0.0, wide))
    return narrow(torch.where(at_end, angle(wide.detach().clamp(-1, 1)), inside), x, autocast_keeps=True)


def _check_operands(function: str, **operands: object) -> None:
    """Tensors whose shapes can be broadcast; one of the two may be a number. An outer quotient is a quotient."""
    tensors: dict[str, Any] = {name: v for name, v in operands.items() if not isinstance(v, Real)}
    if not tensors:
        raise UnsupportedError(f"{function} takes at least one tensor, got {operands}. Make one with torch.tensor.")
    require_tensors(function, **tensors)
    if len(tensors) == 2:
        require_broadcast(function, *tensors.values())


def _promote(*values: Tensor | float) -> tuple[Tensor, list[Tensor]]:
    """Return an empty tensor of the dtype and device that the plain operation would give, and the values, widened."""
    devices = [v.device for v in values if isinstance(v, Tensor)]
    device = next((d for d in devices if d.type != "cpu"), devices[0])  # a CPU tensor without dimensions may join in
    like = torch.empty((0,), dtype=result_dtype(*values), device=device)
    # A number becomes a fill, not a copy to the device: no wait.
    full = [v.to(like.dtype) if isinstance(v, Tensor) else like.new_full((), v) for v in values]
    return like, [widen(v) for v in full]
