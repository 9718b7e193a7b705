# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Kernels for the halves of a product of vectors: build one, rounded, and pull its gradient back to the features.

A half is a Khatri-Rao product of up to four modalities: row (i, j, k) holds scale * f_0[i] * f_1[j] * f_2[k]. In plain
torch it takes a dozen launches to build and round, and an autograd graph to pull back; at small batches those launches
are the time. Here each is one. Sums run in a fixed order, without atomics: the result is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.losses.multiway.precision import Precision, find_top, get_dtype, has_gains

MOST_AXES = 4  # half of `check.MOST_MODALITIES`
BOX = ["num_rows", *(f"{name}{axis}" for name in ("first", "width") for axis in range(MOST_AXES))]
"""They change from box to box, and a kernel for each kind of number would be compiled."""


@dataclass(frozen=True)
class Half:
    """Which modalities of the stacked features [M, B, D] a half is made of, and which range of each index."""

    modality: int
    """The first of them."""
    box: tuple[slice, ...]

    @property
    def num_axes(self) -> int:
        """How many modalities."""
        return len(self.box)

    @property
    def num_rows(self) -> int:
        """How many combinations."""
        rows = 1
        for r in self.box:
            rows *= r.stop - r.start
        return rows

    @property
    def bounds(self) -> list[int]:
        """First index and width of each axis, as the kernels take them; axes that are not there have the width 1."""
        rest = MOST_AXES - len(self.box)
        return [r.start for r in self.box] + [0] * rest + [r.stop - r.start for r in self.box] + [1] * rest


@dataclass(frozen=True)
class Gains:
    """Powers of two that fp16 needs, [4] on the device: of P, of Q, 1 / (P's Q's), of the weights. None for others."""

    buffer: Tensor | None

    @property
    def unit(self) -> Tensor | None:
        """What P Q^T must be multiplied by."""
        return None if self.buffer is None else self.buffer[2]

    @property
    def weights(self) -> Tensor | None:
        """What the weights of the backward pass are multiplied by."""
        return None if self.buffer is None else self.buffer[3]

    def of_half(self, *, first: bool) -> Tensor | None:
        """Return that of P (`first`) or Q."""
        return None if self.buffer is None else self.buffer[0 if first else 1]

    def of_gradient(self, *, first: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return what a gradient of P (`first`) or Q must be divided by: it came from weights times the other half."""
        return self.weights, self.of_half(first=not first)


@triton.jit
def pick(axis: tl.constexpr, a, b, c, d):
    """Return the one of four that belongs to the axis, chosen when the kernel is compiled."""
    return a if axis == 0 else (b if axis == 1 else (c if axis == 2 else d))


@triton.jit
def round_to(x, PRECISION: tl.constexpr):
    """Return x with the digits of the precision, as `precision.round_half` does; what is not a number stays so."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -8192  # ~0x1FFF: the lower 13 bits cleared
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if PRECISION == "bf16":  # to nearest even; a cast alone does that on the device, but cuts in the interpreter
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit(do_not_specialize=BOX)
def _build_half(
    features, scale, gain, half, num_rows, size, dim,
    first0, first1, first2, first3, width0, width1, width2, width3,
    NUM_AXES: tl.constexpr, SCALED: tl.constexpr, GAINED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """half[a, z] = round(gain * scale * prod_k f_k[i_k, z]), i_k being the digits of a, the last the fastest."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    z = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (z < dim)[None, :]
    product = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    if SCALED:
        product *= tl.load(scale)
    divisor = num_rows.to(tl.int64)
    rest = row
    for axis in tl.static_range(NUM_AXES):  # the slowest first: products round as `similarity.build_rows` has them
        width = pick(axis, width0, width1, width2, width3)
        divisor = divisor // width
        index = rest // divisor + pick(axis, first0, first1, first2, first3)
        rest = rest % divisor
        at = (axis * size + index)[:, None] * dim + z[None, :]
        product *= tl.load(features + at, mask=inside, other=0.0)
    if GAINED:
        product *= tl.load(gain)  # exact: a power of two
    rounded = round_to(product, PRECISION).to(half.dtype.element_ty)
    tl.store(half + row[:, None] * dim + z[None, :], rounded, mask=inside)


@triton.jit(do_not_specialize=BOX)
def _pull_half(
    features, scale, weights_gain, other_gain, grad_half, grads, slopes, num_rows, size, dim,
    first0, first1, first2, first3, width0, width1, width2, width3,
    NUM_AXES: tl.constexpr, SCALED: tl.constexpr, GAINED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grads[k, i, z] += scale * sum over rows with i at k of grad_half[a, z] prod_{j != k} f_j[i_j, z].

    One program has one (k, i) and a tile of columns.
    slopes[i, t] += the same for k = 0, without the scale, times f_0[i, z], over the columns z of tile t.
    """
    chosen = tl.program_id(0) // size
    own = tl.program_id(0) % size
    z = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own_first = tl.full([], 0, tl.int32)
    own_width = tl.full([], 0, tl.int32)
    for axis in tl.static_range(NUM_AXES):
        own_first = tl.where(axis == chosen, pick(axis, first0, first1, first2, first3), own_first)
        own_width = tl.where(axis == chosen, pick(axis, width0, width1, width2, width3), own_width)
    if own < own_width:
        total = tl.zeros([COLUMNS], tl.float32)
        count = num_rows // own_width
        for start in range(0, count, ROWS):
            rest = start + tl.arange(0, ROWS)
            inside = (rest < count)[:, None] & (z < dim)[None, :]
            row = tl.zeros([ROWS], tl.int64)
            step = tl.full([], 1, tl.int64)
            product = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
            for axis in tl.static_range(NUM_AXES - 1, -1, -1):  # the fastest first
                width = pick(axis, width0, width1, width2, width3)
                # The chosen index is not a digit of `rest`
                free = tl.where(axis == chosen, 1, width)
                index = tl.where(axis == chosen, own, rest % free)
                rest = rest // free
                row += index * step
                step *= width
                at = (axis * size + index + pick(axis, first0, first1, first2, first3)).to(tl.int64)
                factor = tl.load(features + at[:, None] * dim + z[None, :], mask=inside, other=0.0)
                product *= tl.where(axis == chosen, 1.0, factor)
            grad = tl.load(grad_half + row[:, None] * dim + z[None, :], mask=inside, other=0.0)
            total += tl.sum(grad * product, 0)
        if GAINED:
            total = total / tl.load(weights_gain) / tl.load(other_gain)
        place = (chosen * size + own + own_first).to(tl.int64) * dim + z
        if SCALED:
            if chosen == 0:
                feature = tl.load(features + place, mask=z < dim, other=0.0)
                slope = slopes + (own + own_first) * tl.num_programs(1) + tl.program_id(1)
                tl.store(slope, tl.load(slope) + tl.sum(total * feature, 0))
            total *= tl.load(scale)
        tl.store(grads + place, tl.load(grads + place, mask=z < dim, other=0.0) + total, mask=z < dim)


@triton.jit
def _score_samples(
    features, scale, scores, size, dim, NUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scores[i] = scale * sum_z prod_m f_m[i, z]."""
    sample = tl.program_id(0)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, dim, COLUMNS):
        z = start + tl.arange(0, COLUMNS)
        product = tl.full([COLUMNS], 1.0, tl.float32) * tl.load(scale)
        for m in tl.static_range(NUM):
            at = (m * size + sample).to(tl.int64) * dim + z
            product *= tl.load(features + at, mask=z < dim, other=0.0)
        total += product
    tl.store(scores + sample, tl.sum(total, 0))


@triton.jit
def _pull_samples(
    features, scale, grad_scores, grad_stride, grads, slopes, size, dim, NUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grads[k, i, z] = g[i] scale prod_{m != k} f_m[i, z]; slopes[i, t] = g[i] sum_{z in tile t} prod_m f_m[i, z]."""
    sample = tl.program_id(0)
    z = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    grad = tl.load(grad_scores + sample * grad_stride)
    whole = tl.full([COLUMNS], 1.0, tl.float32) * grad
    for k in tl.static_range(NUM):
        # Not the whole product divided by one vector, which fails where that is 0
        product = tl.full([COLUMNS], 1.0, tl.float32) * (grad * tl.load(scale))
        for m in tl.static_range(NUM):
            if m != k:
                at = (m * size + sample).to(tl.int64) * dim + z
                product *= tl.load(features + at, mask=z < dim, other=0.0)
        place = (k * size + sample).to(tl.int64) * dim + z
        whole *= tl.load(features + place, mask=z < dim, other=0.0)
        tl.store(grads + place, product, mask=z < dim)
    tl.store(slopes + sample * tl.num_programs(1) + tl.program_id(1), tl.sum(whole, 0))


@triton.jit
def find_gain(bound):
    """Return the power of two that puts `bound` just below 2^15, as `precision.find_gain` does."""
    power = (tl.maximum(bound, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return 16384.0 / power


@triton.jit
def _find_gains(tops, scale, gains, dim, NUM: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr):
    """gains = those of P and of Q, and what P Q^T must be multiplied by; tops[m, z] is the largest |f_m[:, z]|.

    From a bound of each half: the largest product there could be of what its features hold in one column.
    """
    p_top = tl.zeros([BLOCK], tl.float32)
    q_top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, dim, BLOCK):
        z = start + tl.arange(0, BLOCK)
        left = tl.full([BLOCK], 1.0, tl.float32)
        right = tl.full([BLOCK], 1.0, tl.float32)
        for m in tl.static_range(NUM):
            top = tl.load(tops + m * dim + z, mask=z < dim, other=0.0)
            if m < MIDDLE:
                left *= top
            else:
                right *= top
        p_top = tl.maximum(p_top, left)
        q_top = tl.maximum(q_top, right)
    p_gain = find_gain(tl.max(p_top, 0) * tl.abs(tl.load(scale)))
    q_gain = find_gain(tl.max(q_top, 0))
    tl.store(gains, p_gain)
    tl.store(gains + 1, q_gain)
    tl.store(gains + 2, (1.0 / p_gain) * (1.0 / q_gain))


class ProductHalves:
    """Both halves of a product of vectors: built from the stacked features [M, B, D] and pulled back to them."""

    num_low = 0

    def __init__(
        self, features: Tensor, scale: Tensor, precision: Precision, middle: int, gains: Gains | None = None
    ) -> None:
        self._features, self._scale, self._precision, self._middle = features, scale, precision, middle
        self.gains = gains or (self._find_gains() if has_gains(precision) else Gains(None))

    def _find_gains(self) -> Gains:
        num, _, dim = self._features.shape
        buffer = torch.empty(4, device=self._features.device)
        tops = find_top(self._features, dim=1)  # [M, D]
        _find_gains[(1,)](tops, self._scale, buffer, dim, NUM=num, MIDDLE=self._middle, BLOCK=1024)
        return Gains(buffer)

    def build(self, half: Half, *, first: bool) -> Tensor:
        """Return the half [rows, D], rounded."""
        size, dim = self._features.shape[1:]
        out = torch.empty(half.num_rows, dim, dtype=get_dtype(self._precision), device=self._features.device)
        columns = count_columns(dim)
        rows = max(1, 2048 // columns)
        _build_half[triton.cdiv(half.num_rows, rows), triton.cdiv(dim, columns)](
            self._features[half.modality], self._scale, self.gains.of_half(first=first), out, half.num_rows, size, dim,
            *half.bounds, NUM_AXES=half.num_axes, SCALED=first, GAINED=self.gains.buffer is not None,
            PRECISION=self._precision, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
        return out

    def score_samples(self) -> Tensor:
        """Return the logit of each sample with itself [B], in fp32."""
        num, size, dim = self._features.shape
        scores = torch.empty(size, device=self._features.device)
        _score_samples[(size,)](self._features, self._scale, scores, size, dim, NUM=num, COLUMNS=count_columns(dim))
        return scores

    def start_pull(self, grad_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the samples' own logits mean for the features [M, B, D], and for the scale in parts [B, tiles].

        Both are written whole, so that nothing must be filled with zeros; `pull` adds to them.
        """
        num, size, dim = self._features.shape
        columns = count_columns(dim)
        tiles = triton.cdiv(dim, columns)
        grads, slopes = torch.empty_like(self._features), torch.empty(size, tiles, device=self._features.device)
        _pull_samples[size, tiles](
            self._features, self._scale, grad_scores, grad_scores.stride(0), grads, slopes, size, dim, NUM=num,
            COLUMNS=columns,
        )  # fmt: skip
        return grads, slopes

    def pull(self, half: Half, grad_half: Tensor, grads: Tensor, slopes: Tensor, *, first: bool) -> None:
        """Add to `grads` and `slopes` what `grad_half` [rows, D], its gains included, means for them."""
        size, dim = self._features.shape[1:]
        columns = count_columns(dim)
        weights_gain, other_gain = self.gains.of_gradient(first=first)
        _pull_half[half.num_axes * size, triton.cdiv(dim, columns)](
            self._features[half.modality], self._scale, weights_gain, other_gain, grad_half, grads[half.modality],
            slopes, half.num_rows, size, dim, *half.bounds, NUM_AXES=half.num_axes, SCALED=first,
            GAINED=self.gains.buffer is not None, ROWS=max(1, 2048 // columns), COLUMNS=columns,
        )  # fmt: skip

    def finish_pull(self, slopes: Tensor) -> Tensor:
        """Return the gradient of the scale."""
        return slopes.sum()


def count_columns(dim: int) -> int:
    """Return how many features one program takes: 64 make whole cache lines, and enough programs at small batches."""
    return 64 if dim > 32 else int(triton.next_power_of_2(dim))
