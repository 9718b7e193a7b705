"""Dimensions as people name them -> as tuples, and what a reduction over them has to do.

Sizes only, in plain loops that a compiler can follow: no tensor's values are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Dims = int | Sequence[int] | None


def as_dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """`dim` as a tuple of numbers from 0; all dimensions if it is None."""
    if dim is None:
        return tuple(range(x.dim()))
    listed = [dim] if isinstance(dim, int) else list(dim)
    return tuple([d % x.dim() for d in listed]) if x.dim() else ()


def count_along(x: Tensor, dims: Sequence[int]) -> int:
    """How many elements a reduction of `x` over `dims` takes together."""
    count = 1
    for d in dims:
        count = count * x.shape[d]
    return count


def sum_along(x: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """The sum over `dims`; over none of them `x` itself, where torch would take all."""
    return x.sum(tuple(dims), keepdim=keepdim) if dims else x
