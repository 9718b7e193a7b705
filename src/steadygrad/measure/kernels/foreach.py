"""The gradient statistics with stock torch operations: the CPU's implementation, and that of any device without Triton.

On the CPU one pass is really one: the gradient is walked in pieces that stay in cache while cheap reductions read them
(BLAS dot, the least and the largest magnitude; if the least is 0, a dot of the signs, which counts nonzeros in half of
`count_nonzero`'s time), and the expensive questions (how many NaN, is it an overflowed square) are asked only of a
tensor whose sum of squares is not an ordinary number. Where torch has one thread, numpy's reductions take three
quarters of the time, and little more than half where there are zeros. On other devices nothing may be read back, so
every question is asked always. A BLAS dot is also far more accurate than `_foreach_norm` on the CPU, which sums
serially (4e-4 off at 10M elements).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from steadygrad.facts import NUM_COLUMNS
from steadygrad.measure.kernels import reference

PIECE = 1 << 18
"""Elements in a piece: 1 MiB of fp32, so that the reductions after the first read it from the cache."""

PIECE_ALONE = 1 << 17
"""The same for numpy, whose calls cost less."""

ORDINARY = (1e-30, 1e30)
"""Sums of squares in this range lost nothing to over- or underflow in fp32; others are measured again, scaled."""

LARGE = 1e15
"""Elements below this have squares that are ordinary, and `MAX_DOT` of them a sum that fp32 holds."""

MAX_DOT = 8192
"""Elements in one dot product of numpy's: from 10,000 on OpenBLAS starts threads of its own beside torch's."""


def measure_table(gradients: Sequence[Tensor], out: Tensor) -> None:
    """Write norm, max_abs, num_nonfinite, num_nan, num_zeros of each gradient into `out` [N, 5] float64."""
    assert out.shape == (len(gradients), NUM_COLUMNS) and out.dtype == torch.float64
    if not gradients:
        return
    if out.device.type == "cpu":
        out.copy_(torch.tensor([measure_on_host(g) for g in gradients], dtype=torch.float64, device="cpu"))
    else:
        torch.stack([_measure_on_device(g) for g in gradients], out=out)


def measure_on_host(gradient: Tensor) -> tuple[float, ...]:
    """Return the five numbers of one gradient in host memory."""
    flat = gradient.detach().flatten()  # [numel]; a copy if the layout is not contiguous
    numel = flat.numel()
    if numel == 0:
        return (0.0,) * NUM_COLUMNS
    is_alone = flat.dtype is torch.float32 and torch.get_num_threads() == 1
    squares, max_abs, num_zeros = _reduce_alone(flat) if is_alone else _reduce(flat)
    all_zero = squares == 0.0 and num_zeros == numel  # and not only too small to be squared
    if not (ORDINARY[0] < squares < ORDINARY[1] or all_zero):  # NaN fails the comparison too
        return tuple(value.item() for value in reference.measure_one(flat))
    return math.sqrt(squares), max_abs, 0.0, 0.0, num_zeros


def _reduce(flat: Tensor) -> tuple[float, float, float]:
    """Return sum of squares, largest magnitude and number of zeros."""
    squares, max_abs, num_zeros = 0.0, 0.0, 0.0
    for piece in flat.split(PIECE) if len(flat) > PIECE else (flat,):
        # BLAS accumulates in its input's dtype: half precision would lose the sum.
        wide = piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
        # Each dot product covers one piece in the piece's dtype; the pieces add up in Python's float64.
        squares += torch.dot(wide, wide).item()
        smallest, largest = torch.aminmax(wide.abs())
        max_abs = max(max_abs, largest.item())
        if smallest.item() == 0.0:
            signs = torch.sign(wide)
            num_zeros += len(wide) - torch.dot(signs, signs).item()  # exact: fewer elements than fp32 has integers
    return squares, max_abs, num_zeros


def _reduce_alone(flat: Tensor) -> tuple[float, float, float]:
    """Return the same of fp32 numbers, by numpy, which has no threads; the dot product is torch's."""
    squares, max_abs, num_zeros = 0.0, 0.0, 0.0
    for piece in flat.split(PIECE_ALONE):
        values = piece.numpy()
        squares += torch.dot(piece, piece).item()
        # With a NaN these may be anything: the sum of squares shows it.
        max_abs = max(max_abs, float(values.max()), -float(values.min()))
        num_zeros += np.count_nonzero(values == 0.0)  # truth values: numpy counts those several times faster
    return squares, max_abs, num_zeros


class EndToEnd:
    """Memory for the magnitudes of several small gradients, laid end to end; every step overwrites it."""

    def __init__(self, shapes: Sequence[torch.Size], memory: Tensor) -> None:
        """`memory`: fp32, contiguous, one element for each of the gradients; several layouts may share it."""
        numels = [shape.numel() for shape in shapes]
        edges = np.cumsum([0, *numels])
        self.starts = edges[:-1]
        self.parts = [part.view(shape) for part, shape in zip(memory.split(numels), shapes)]
        self.flat = memory.numpy()
        self.rows = [self.flat[start:end] for start, end in pairwise(edges.tolist())]
        split = [[row[start : start + MAX_DOT] for start in range(0, row.size, MAX_DOT)] for row in self.rows]
        self.pieces = [piece for row in split for piece in row]
        self.spans = list(pairwise(np.cumsum([0, *map(len, split)]).tolist()))
        """Where the pieces of each row are."""


def measure_together(gradients: Sequence[Tensor], layout: EndToEnd) -> list[float] | None:
    """Return the cells of small gradients in host memory, a row each, in four passes over all of them at once.

    They must be strided, fp32, of the layout's shapes, none of them empty and none part of a graph. For a handful of
    small tensors a torch operation costs more than its work, and a numpy one a fifth of that. Return None if some
    number is not ordinary: the caller then measures one gradient after another.
    """
    # Into memory that is there: new memory for a copy costs more than the copy.
    for gradient, part in zip(gradients, layout.parts):
        torch.abs(gradient, out=part)
    largest = np.maximum.reduceat(layout.flat, layout.starts).tolist()
    smallest = np.minimum.reduceat(layout.flat, layout.starts).tolist()
    # Before the squares, which numpy would warn about if they overflowed. The sum, because max() may miss a NaN.
    if not sum(largest) < LARGE:
        return None
    # BLAS sums in fp32 over at most MAX_DOT elements; the rest of the sum is float64.
    dots = list(map(float, map(np.ndarray.dot, layout.pieces, layout.pieces)))
    squares = [sum(dots[start:end]) for start, end in layout.spans]
    low, high = ORDINARY
    is_ordinary = low < min(squares) <= max(squares) < high  # all of them at nearly every step
    if not (is_ordinary or all(low < square < high or top == 0.0 for square, top in zip(squares, largest))):
        return None
    cells = [0.0] * (NUM_COLUMNS * len(squares))
    cells[0::NUM_COLUMNS] = map(math.sqrt, squares)
    cells[1::NUM_COLUMNS] = largest
    if not all(smallest):
        pairs = zip(layout.rows, smallest)
        cells[4::NUM_COLUMNS] = [0.0 if least else float(np.count_nonzero(row == 0)) for row, least in pairs]
    return cells


def _measure_on_device(gradient: Tensor) -> Tensor:
    """Return the five numbers without a host read, and without float64 over the elements, which is slow on a device."""
    values = gradient.detach().flatten()
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    if values.numel() == 0:
        return torch.zeros(NUM_COLUMNS, dtype=torch.float64, device=values.device)
    magnitude = values.abs()
    finite = magnitude < math.inf
    # A select, not a product: Inf * 0 is NaN.
    magnitude = torch.where(finite, magnitude, 0.0)
    max_abs = magnitude.max()
    # Scaled by the largest element, so that its square neither over- nor underflows.
    scale = torch.where(max_abs > 0, max_abs, 1.0)
    norm = torch.linalg.vector_norm(magnitude / scale).double() * scale.double()
    counts = [(~finite).sum(), (values != values).sum(), (values == 0).sum()]
    return torch.stack([norm, max_abs.double(), *(count.double() for count in counts)])
