# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Kernels for the halves of sums of vectors (norm, cosine, distance), as `halves.py` has them for products.

With t the sum of a half's vectors and n the sum of their squared lengths, each similarity is curve of

    factor * (alpha <t_p, t_q> + beta (|t_p|^2 + |t_q|^2) + gamma (n_p + n_q) + eps)

P holds factor * alpha * t_p, then factor * (beta |t_p|^2 + gamma n_p + eps) and factor; Q holds t_q, then 1 and
beta |t_q|^2 + gamma n_q. Rounded and laid out as `layout.py` says. Sums run in a fixed order, without atomics.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.losses.multiway.halves import BOX, Gains, Half, count_columns, find_gain, pick, round_to
from steadygrad.losses.multiway.layout import FILL
from steadygrad.losses.multiway.precision import Precision, get_dtype, has_gains
from steadygrad.losses.multiway.similarity import EPS, Similarity

NUM_EXTRA = 12  # two columns of three parts, six products each


@dataclass(frozen=True)
class Terms:
    """The numbers in the module's formula; the factor is `factor` times the scale, or its square."""

    factor: float
    alpha: float
    beta: float
    gamma: float
    eps: float


def list_terms(similarity: Similarity, num: int) -> Terms:
    """Return the terms for `num` modalities, all of them present."""
    if similarity == "cosine":
        return Terms(2 / (num * (num - 1)), 1.0, 0.5, -0.5, 0.0)
    if similarity == "norm":
        return Terms(1.0, 2.0, 1.0, 0.0, EPS)
    return Terms(1 / num, -2 / num, -1 / num, 1.0, EPS * num)


@triton.jit
def _find_factor(scale, factor, SQUARED: tl.constexpr):
    s = tl.load(scale)
    return factor * s * s if SQUARED else factor * s


@triton.jit
def _find_gains(
    lengths, scale, gains, size, factor,
    NUM: tl.constexpr, MIDDLE: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gains = those of P and of Q, and what P Q^T must be multiplied by; lengths[m, i] = |f_m[i]|.

    With N the largest length of a half's sum its columns are at most N, 2 N, N^2 and 1: (1 + N)^2 is above all.
    """
    left = tl.full([], 1.0, tl.float32)
    right = tl.full([], 1.0, tl.float32)
    for m in tl.static_range(NUM):
        top = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            top = tl.maximum(top, tl.load(lengths + m * size + i, mask=i < size, other=0.0))
        if m < MIDDLE:
            left += tl.max(top, 0)
        else:
            right += tl.max(top, 0)
    p_gain = find_gain(tl.abs(_find_factor(scale, factor, SQUARED)) * left * left)
    q_gain = find_gain(right * right)
    tl.store(gains, p_gain)
    tl.store(gains + 1, q_gain)
    tl.store(gains + 2, (1.0 / p_gain) * (1.0 / q_gain))


@triton.jit
def _place_parts(c, high0, high1, middle0, middle1, low0, low1, FIRST: tl.constexpr):
    """Return [rows, columns]: in column c of the extra ones the part that `layout.FIRST` or `SECOND` names."""
    block = c // 2
    if FIRST:  # h h h m m l
        is_high = block < 3
        is_middle = (block == 3) | (block == 4)
        is_low = block == 5
    else:  # h m l h m h
        is_high = (block == 0) | (block == 3) | (block == 5)
        is_middle = (block == 1) | (block == 4)
        is_low = block == 2
    even = (c % 2 == 0)[None, :]
    high = tl.where(even, high0[:, None], high1[:, None])
    middle = tl.where(even, middle0[:, None], middle1[:, None])
    low = tl.where(even, low0[:, None], low1[:, None])
    return tl.where(
        is_high[None, :], high, tl.where(is_middle[None, :], middle, tl.where(is_low[None, :], low, 0.0))
    )  # fmt: skip


@triton.jit(do_not_specialize=BOX)
def _build_sums(
    features, scale, gain, half, num_rows, size, dim, depth,
    first0, first1, first2, first3, width0, width1, width2, width3, factor, alpha, beta, gamma, eps,
    NUM_AXES: tl.constexpr, FIRST: tl.constexpr, SQUARED: tl.constexpr, GAINED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Write rows of P (FIRST) or Q as the module's docstring has them, times `gain`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit = tl.full([], 1.0, tl.float32)
    if GAINED:
        unit *= tl.load(gain)
    one = unit  # what a 1 becomes
    weight = unit  # of t
    if FIRST:
        one = unit * _find_factor(scale, factor, SQUARED)
        weight = one * alpha
    start_high = dim if SPLIT else 0
    lengths = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, dim, COLUMNS):
        z = start + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (z < dim)[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        divisor = num_rows.to(tl.int64)
        rest = row
        for axis in tl.static_range(NUM_AXES):
            divisor = divisor // pick(axis, width0, width1, width2, width3)
            index = rest // divisor + pick(axis, first0, first1, first2, first3)
            rest = rest % divisor
            at = (axis * size + index)[:, None] * dim + z[None, :]
            vector = tl.load(features + at, mask=inside, other=0.0)
            total += vector
            squares += tl.sum(vector * vector, 1)
        lengths += tl.sum(total * total, 1)
        x = total * weight
        high = round_to(x, PRECISION).to(half.dtype.element_ty)
        place = half + row[:, None] * depth + z[None, :]
        tl.store(place + start_high, high, mask=inside)
        if SPLIT:
            tl.store(place, (x - high.to(tl.float32)).to(half.dtype.element_ty), mask=inside)
    own = beta * lengths + gamma * squares
    if FIRST:
        x0 = (own + eps) * one
        x1 = one + tl.zeros([ROWS], tl.float32)
    else:
        x0 = one + tl.zeros([ROWS], tl.float32)
        x1 = own * one
    dtype = half.dtype.element_ty
    high0 = round_to(x0, PRECISION).to(dtype).to(tl.float32)
    high1 = round_to(x1, PRECISION).to(dtype).to(tl.float32)
    middle0 = round_to(x0 - high0, PRECISION).to(dtype).to(tl.float32)
    middle1 = round_to(x1 - high1, PRECISION).to(dtype).to(tl.float32)
    low0 = round_to(x0 - high0 - middle0, PRECISION)
    low1 = round_to(x1 - high1 - middle1, PRECISION)
    c = tl.arange(0, EXTRA)
    parts = _place_parts(c, high0, high1, middle0, middle1, low0, low1, FIRST).to(dtype)
    first_extra = start_high + dim
    place = half + row[:, None] * depth + first_extra + c[None, :]
    tl.store(place, parts, mask=(row < num_rows)[:, None] & (first_extra + c < depth)[None, :])


@triton.jit
def _load_extra(grads, column, inside, FIRST: tl.constexpr):
    """Return the gradient [rows] of an extra column: of the other half's h, m and l, wherever they stand there."""
    # Blocks of two columns: the other half is h m l h m h for the first, h h h m m l for the second
    second: tl.constexpr = 2 if FIRST else 6
    third: tl.constexpr = 4 if FIRST else 10
    total = tl.load(grads + column, mask=inside, other=0.0)
    total += tl.load(grads + column + second, mask=inside, other=0.0)
    return total + tl.load(grads + column + third, mask=inside, other=0.0)


@triton.jit(do_not_specialize=BOX)
def _pull_sums(
    features, scale, weights_gain, other_gain, grad_half, grads, slopes, num_rows, size, dim, depth,
    first0, first1, first2, first3, width0, width1, width2, width3, factor, alpha, beta, gamma, eps,
    NUM_AXES: tl.constexpr, FIRST: tl.constexpr, SQUARED: tl.constexpr, GAINED: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grads[k, i] += what grad_half means for vector i of modality k; slopes likewise for the factor, in parts.

    With g the gradient of a row's t, r that of its squares: alpha g + r (2 beta t + 2 gamma f), summed over its rows.
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
        start_high = dim if SPLIT else 0
        straight = tl.zeros([COLUMNS], tl.float32)
        bent = tl.zeros([COLUMNS], tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        rest_mass = tl.zeros([ROWS], tl.float32)
        count = num_rows // own_width
        for start in range(0, count, ROWS):
            rest = start + tl.arange(0, ROWS)
            there = rest < count
            inside = there[:, None] & (z < dim)[None, :]
            row = tl.zeros([ROWS], tl.int64)
            step = tl.full([], 1, tl.int64)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for axis in tl.static_range(NUM_AXES - 1, -1, -1):  # the fastest first
                width = pick(axis, width0, width1, width2, width3)
                # The chosen index is not a digit of `rest`
                free = tl.where(axis == chosen, 1, width)
                index = tl.where(axis == chosen, own, rest % free)
                rest = rest // free
                row += index * step
                step *= width
                at = (axis * size + index + pick(axis, first0, first1, first2, first3)).to(tl.int64)
                total += tl.load(features + at[:, None] * dim + z[None, :], mask=inside, other=0.0)
            begin = grad_half + row * depth
            place = begin[:, None] + z[None, :]
            straight += tl.sum(tl.load(place + start_high, mask=inside, other=0.0), 0)
            if SPLIT:
                straight += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
            r = _load_extra(begin + start_high + dim, 0 if FIRST else 1, there, FIRST)
            mass += r
            bent += tl.sum(r[:, None] * total, 0)
            if FIRST:
                rest_mass += _load_extra(begin + start_high + dim, 1, there, FIRST)
        sum_mass = tl.sum(mass, 0)
        unit = tl.full([], 1.0, tl.float32)
        if GAINED:
            unit = unit / tl.load(weights_gain) / tl.load(other_gain)
        at = (chosen * size + own + own_first).to(tl.int64) * dim + z
        vector = tl.load(features + at, mask=z < dim, other=0.0)
        if FIRST:
            straight *= alpha
            slope = tl.sum(vector * (straight + beta * bent + gamma * vector * sum_mass), 0)
            if (chosen == 0) & (tl.program_id(1) == 0):
                slope += eps * sum_mass + tl.sum(rest_mass, 0)
            part = slopes + (chosen * size + own + own_first) * tl.num_programs(1) + tl.program_id(1)
            tl.store(part, tl.load(part) + slope * unit)
            unit *= _find_factor(scale, factor, SQUARED)
        change = (straight + 2.0 * (beta * bent + gamma * vector * sum_mass)) * unit
        tl.store(grads + at, tl.load(grads + at, mask=z < dim, other=0.0) + change, mask=z < dim)


class SumHalves:
    """Both halves of a similarity that sums vectors; as `halves.ProductHalves`."""

    def __init__(
        self,
        features: Tensor,
        scale: Tensor,
        precision: Precision,
        middle: int,
        similarity: Similarity,
        gains: Gains | None = None,
    ) -> None:
        self._features, self._scale, self._precision, self._middle = features, scale, precision, middle
        self._terms = list_terms(similarity, len(features))
        self._squared = similarity != "cosine"
        self._split = precision == "fp16x3"
        self.gains = gains or (self._find_gains() if has_gains(precision) else Gains(None))

    @property
    def num_low(self) -> int:
        """See `layout.Layout`."""
        return self._features.shape[2] if self._split else 0

    def _find_gains(self) -> Gains:
        num, size, _ = self._features.shape
        buffer = torch.empty(4, device=self._features.device)
        lengths = torch.linalg.vector_norm(self._features, dim=2)  # [M, B]
        _find_gains[(1,)](
            lengths, self._scale, buffer, size, self._terms.factor, NUM=num, MIDDLE=self._middle,
            SQUARED=self._squared, BLOCK=1024,
        )  # fmt: skip
        return Gains(buffer)

    def build(self, half: Half, *, first: bool) -> Tensor:
        """Return the half [rows, K], rounded and laid out."""
        size, dim = self._features.shape[1:]
        fill = -(dim + NUM_EXTRA) % FILL if self._features.is_cuda else 0
        depth = self.num_low + dim + NUM_EXTRA + fill
        out = torch.empty(half.num_rows, depth, dtype=get_dtype(self._precision), device=self._features.device)
        columns = count_columns(dim)
        rows = max(1, 1024 // columns)
        _build_sums[(triton.cdiv(half.num_rows, rows),)](
            self._features[half.modality], self._scale, self.gains.of_half(first=first), out, half.num_rows, size, dim,
            depth, *half.bounds, *astuple(self._terms), ROWS=rows, COLUMNS=columns, PRECISION=self._precision,
            EXTRA=triton.next_power_of_2(NUM_EXTRA + fill), **self._options(half, first=first),
        )  # fmt: skip
        return out

    def start_pull(self, grad_scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return zeros for the gradients of the features [M, B, D], and for those of the factor in parts."""
        del grad_scores  # positives have their own gradient
        size, dim = self._features.shape[1:]
        tiles = triton.cdiv(dim, count_columns(dim))
        slopes = torch.zeros(self._middle * size, tiles, device=self._features.device)
        return torch.zeros_like(self._features), slopes

    def pull(self, half: Half, grad_half: Tensor, grads: Tensor, slopes: Tensor, *, first: bool) -> None:
        """Add to `grads` and `slopes` what `grad_half` [rows, K], its gains included, means for them."""
        size, dim = self._features.shape[1:]
        columns = count_columns(dim)
        weights_gain, other_gain = self.gains.of_gradient(first=first)
        _pull_sums[half.num_axes * size, triton.cdiv(dim, columns)](
            self._features[half.modality], self._scale, weights_gain, other_gain, grad_half, grads[half.modality],
            slopes, half.num_rows, size, dim, grad_half.shape[1], *half.bounds, *astuple(self._terms),
            ROWS=max(1, 2048 // columns), COLUMNS=columns, **self._options(half, first=first),
        )  # fmt: skip

    def finish_pull(self, slopes: Tensor) -> Tensor:
        """Return the gradient of the scale."""
        slope = slopes.sum() * self._terms.factor
        return 2 * self._scale * slope if self._squared else slope

    def _options(self, half: Half, *, first: bool) -> dict[str, int | bool]:
        return {
            "NUM_AXES": half.num_axes,
            "FIRST": first,
            "SQUARED": self._squared,
            "GAINED": self.gains.buffer is not None,
            "SPLIT": self._split,
        }
