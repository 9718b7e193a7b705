"""Where the columns of a half go when it is rounded, so that a sum of squares keeps the digits it needs.

A product of vectors is rounded as it is. The other similarities have columns beside the features (lengths, and ones
that they are multiplied by), each as large as the whole result; rounded to 11 bits they alone would be off by 1e-3 of
it. Such a column is written as the sum of three rounded ones, h + m + l, which have all digits of fp32, and the six
products of two such sums that matter stand beside each other:

    first half     [ low | high | h h h m m l | 0 ]
    second half    [ low | high | h m l h m h | 0 ]

`low` is there for "fp16x3" only: what rounding took from `high`. An engine adds low * high and high * low to the
product of all the rest, which gives 22 bits. Zeros fill the depth up to what the kernels take at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.losses.multiway.precision import Precision, get_dtype, round_half
from steadygrad.losses.multiway.similarity import Similarity

FIRST = (0, 0, 0, 1, 1, 2)  # which of h, m, l
SECOND = (0, 1, 2, 0, 1, 0)
FILL = 64  # a multiple of each depth in `triton.DEFAULT_TILES`, so that the kernel loads without a mask
CHUNK = 1 << 16  # rows that are split at a time: the parts need several times their size in fp32


@dataclass(frozen=True)
class Layout:
    """How halves of `dim` features and some more columns are rounded to `precision`."""

    precision: Precision
    dim: int
    plain: bool
    """As it is, every column rounded once."""

    @property
    def num_low(self) -> int:
        """How many columns before the others hold what rounding took from as many after them."""
        return self.dim if self.precision == "fp16x3" else 0

    def round(self, half: Tensor, gain: Tensor | None, *, first: bool) -> Tensor:
        """Return [rows, K] of a half [..., columns], times `gain`; no gradient goes through."""
        half = half.detach().reshape(-1, half.shape[-1])
        if self.plain:
            return round_half(half, self.precision, gain).contiguous()
        width = self.num_low + self.dim + 6 * (half.shape[1] - self.dim)
        fill = -(width - self.num_low) % FILL if half.is_cuda else 0
        out = torch.empty(len(half), width + fill, dtype=get_dtype(self.precision), device=half.device)
        for start in range(0, len(half), CHUNK):
            part = slice(start, start + CHUNK)
            self._write(half[part] if gain is None else half[part] * gain, out[part], first=first)
        return out

    def _write(self, half: Tensor, out: Tensor, *, first: bool) -> None:
        low, end = self.num_low, self.num_low + self.dim
        main, extra = half[:, : self.dim], half[:, self.dim :]
        high = round_half(main, self.precision)
        out[:, low:end] = high
        if low:
            out[:, :low] = main - high
        parts = []
        for _ in range(3):
            parts.append(round_half(extra, self.precision))
            extra = extra - parts[-1]
        columns = torch.cat([parts[k] for k in (FIRST if first else SECOND)], 1)
        out[:, end : end + columns.shape[1]] = columns
        out[:, end + columns.shape[1] :] = 0.0

    def join(self, grad: Tensor, num_columns: int, *, first: bool) -> Tensor:
        """Return the gradient of the `num_columns` of a half from that of its layout, which is weights times the other.

        The sum of the three parts of the other half's column, wherever they stand there.
        """
        if self.plain:
            return grad
        low, end, extra = self.num_low, self.num_low + self.dim, num_columns - self.dim
        main = grad[:, low:end] + grad[:, :low] if low else grad[:, low:end]
        blocks = grad[:, end : end + 6 * extra].unflatten(1, (6, extra))
        high, middle, low_part = (blocks[:, (SECOND if first else FIRST).index(k)] for k in range(3))
        return torch.cat([main, high + middle + low_part], 1)


def choose_layout(precision: Precision, similarity: Similarity, dim: int) -> Layout:
    """Return how halves of this similarity are rounded."""
    exact = precision in ("fp32", "fp64")
    return Layout(precision, dim, plain=exact or (similarity == "mip" and precision != "fp16x3"))
