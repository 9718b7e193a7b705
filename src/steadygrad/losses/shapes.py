"""Dimensions as people name them -> as tuples, what a reduction over them has to do, and which shapes go together.

Sizes only, in plain loops that a compiler can follow: no tensor's values are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from steadygrad.errors import UsageError

Dims = int | Sequence[int] | None


def as_dims(x: Tensor, dim: Dims, function: str) -> tuple[int, ...]:
    """Return `dim` as a tuple of numbers from 0; all dimensions if it is None. `function` is who asks."""
    if dim is None:
        return tuple(range(x.dim()))
    listed = list(dim) if isinstance(dim, Iterable) else [dim]
    room = max(x.dim(), 1)  # as in torch, what has no dimensions may be asked for its last one
    # Not d % room: a compiler may take `dim` for a symbol, and what comes from `range` is always a number.
    dims = [place for d in listed for place in range(room) if d in (place, place - room)]
    if len(dims) != len(listed) or any(d in dims[:n] for n, d in enumerate(dims)) or (x.dim() and not dims):
        raise UsageError(
            f"{function} got dim={dim!r} for a tensor of shape {tuple(x.shape)}. "
            f"Name dimensions from {-room} to {room - 1}, each once, or pass None for all of them."
        )
    return tuple(dims) if x.dim() else ()


def as_dim(x: Tensor, dim: int, function: str) -> int:
    """Return `dim`, which must be one alone, as a number from 0."""
    if not isinstance(dim, int):
        raise UsageError(f"{function} got dim={dim!r} for a tensor of shape {tuple(x.shape)}. Name one dimension.")
    dims = as_dims(x, dim, function)
    return dims[0] if dims else 0


def count_along(x: Tensor, dims: Sequence[int]) -> int:
    """Return how many elements a reduction of `x` over `dims` takes together."""
    count = 1
    for d in dims:
        count = count * x.shape[d]
    return count


def sum_along(x: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """Return the sum over `dims`; over none of them `x` itself, where torch would take all."""
    return x.sum(tuple(dims), keepdim=keepdim) if dims else x


def broadcasts_to(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether broadcasting `part` against `whole` leaves as many elements as `whole` has."""
    for n in range(1, len(part) + 1):
        if part[-n] != (whole[-n] if n <= len(whole) else 1) and part[-n] != 1:
            return False
    return True
