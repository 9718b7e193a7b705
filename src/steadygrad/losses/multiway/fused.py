# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""`sweep.sum_combinations` in about thirty launches for a product of vectors, fifty for the others, on CUDA.

The same numbers by the same steps as `sweep.py`, which is written in plain torch for every precision: there a batch of
16 samples spends nine tenths of its time launching small operations. Here halves, gains, sums and weights are one
kernel each, forward and backward. Nothing waits for the device, and nothing is summed by atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch, count_left, score_stacked
from steadygrad.losses.multiway.check import refuse_second_order
from steadygrad.losses.multiway.engine import Engine, Panel, Side
from steadygrad.losses.multiway.halves import Gains, Half, ProductHalves, find_gain
from steadygrad.losses.multiway.precision import use_precision
from steadygrad.losses.multiway.similarity import CURVES, Similarity
from steadygrad.losses.multiway.sums import SumHalves
from steadygrad.losses.multiway.sweep import cut_boxes, find_positives
from steadygrad.losses.multiway.triton import TritonEngine, fold_parts
from steadygrad.losses.multiway.weights import make_highest

BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _find_weights_gain(
    row_tops, column_tops, highest, gain, num_rows, num_columns, HAS_HIGHEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gain = that of weights which are at most the largest of the rows' tops plus the largest of the columns'.

    Times the slope at the highest logit, if given, see `weights.bound_weights`.
    """
    row_top = tl.zeros([BLOCK], tl.float32)
    column_top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row_top = tl.maximum(row_top, tl.load(row_tops + at, mask=at < num_rows, other=0.0))
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column_top = tl.maximum(column_top, tl.load(column_tops + at, mask=at < num_columns, other=0.0))
    bound = tl.max(row_top, 0) + tl.max(column_top, 0)
    if HAS_HIGHEST:
        bound *= 0.5 / tl.maximum(-tl.load(highest), 5e-7)
    tl.store(gain, find_gain(bound))


@triton.jit(do_not_specialize=["first", "own", "row_step", "column_step"])
def _fold_axes(
    sums, out, size, first, own, row_step, column_step,
    MIDDLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m, i] = log sum exp over the rows (m < MIDDLE) or columns that have sample i at modality m; one (m, i) each.

    `row_step` is size^(MIDDLE - 1), from one first index of a row to the next; this process has the `own` samples from
    `first` on there. Others are -1e30, `similarity.MASKED`.
    """
    m = tl.program_id(0) // size
    i = tl.program_id(0) % size
    left = m < MIDDLE
    sums += tl.where(left, 0, own * row_step)  # the columns' come after the rows'
    axis = tl.where(left, m, m - MIDDLE)
    step = tl.where(left, row_step, column_step).to(tl.int64)  # from one index at this axis to the next
    whole = tl.where(left, own, size) * step  # all rows, or columns
    for _ in range(axis):
        step = step // size
    here = tl.where(left & (axis == 0), i - first, i)
    width = tl.where(left & (axis == 0), own, size)
    count = whole // width
    inside = (here >= 0) & (here < width)
    limit = tl.where(inside, count, 0)
    top = tl.full([], -1e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        at = (e // step) * (step * width) + here * step + e % step
        x = tl.load(sums + at, mask=e < limit, other=-1e30)
        new = tl.maximum(top, tl.max(x, 0))
        part = tl.sum(tl.where(e < count, tl.exp(x - new), 0.0), 0)
        total = total * tl.exp(top - new) + part
        top = new
    result = tl.where(inside, top + tl.log(total), -1e30)
    tl.store(out + tl.program_id(0), result)


@triton.jit(do_not_specialize=["num", "first", "step", "modality_step", "sample_step"])
def _weigh_side(
    out, grads, modality_step, sample_step, sums, peak, weight, tops, num, size, first, step,
    NUM_AXES: tl.constexpr, BOUNDED: tl.constexpr, CURVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """peak[a] = min_m out[m, i_m]; weight[a] = sum_m g[m, i_m] exp(peak[a] - out[m, i_m]); tops: a bound of weights.

    The least: a logit is below each of these sums, so neither exp(L - peak) nor exp(peak - own) exceeds 1.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num
    least = tl.full([BLOCK], float("inf"), tl.float32)
    rest = row
    divisor = step.to(tl.int64)
    for axis in tl.static_range(NUM_AXES):
        index = rest // divisor + (first if axis == 0 else 0)
        rest = rest % divisor
        least = tl.minimum(least, tl.load(out + axis * size + index, mask=inside, other=0.0))
        divisor = divisor // size
    total = tl.zeros([BLOCK], tl.float32)
    rest = row
    divisor = step.to(tl.int64)
    for axis in tl.static_range(NUM_AXES):
        index = rest // divisor + (first if axis == 0 else 0)
        rest = rest % divisor
        grad = tl.load(grads + axis * modality_step + index * sample_step, mask=inside, other=0.0)
        total += grad * tl.exp(least - tl.load(out + axis * size + index, mask=inside, other=0.0))
        divisor = divisor // size
    tl.store(peak + row, least, mask=inside)
    tl.store(weight + row, total, mask=inside)
    if BOUNDED:
        # As `weights.bound_weights`: no logit of a row is above their log-sum-exp, which is in `sums`
        own = tl.load(sums + row, mask=inside, other=0.0)
        share = tl.exp(tl.minimum(own - least, 0.0))
        if CURVE == "root":
            lowest = tl.exp(tl.minimum(5e-7 - least, 0.0)) * 2e6
            share = 0.5 * tl.maximum(share / tl.maximum(own, 5e-7), lowest)
        tl.store(tops + tl.program_id(0), tl.max(tl.where(inside, share * tl.abs(total), 0.0), 0))


def sum_combinations(batch: Batch, engine: TritonEngine) -> tuple[Tensor, Tensor]:
    """Return [M, B] as `sweep.sum_combinations`, and the logit of each sample with itself [B]."""
    features = torch.stack(batch.features)  # [M, B, D]: the gradient comes back as views of one tensor
    table, positives = _SumFused.apply(engine, batch.similarity, batch.span, batch.scale, features)  # type: ignore[no-untyped-call]
    if positives is None:
        positives = score_stacked(features, batch.scale, batch.similarity)
    return table, positives


def can_fuse(batch: Batch, engine: Engine) -> bool:
    """Whether `sum_combinations` is written for it: masks are columns that only `similarity.py` builds."""
    if not engine.fuses or batch.present is not None:
        return False
    return engine.precision != "fp16x3" if batch.similarity == "mip" else engine.precision != "fp32"


class _SumFused(torch.autograd.Function):
    """The formulas are in the docstring of `sweep.py`; backward computes halves and logits again, as there."""

    @staticmethod
    def forward(
        ctx: Any, engine: TritonEngine, similarity: Similarity, span: slice, scale: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        num, size, _ = features.shape
        halves = _make_halves(engine, similarity, scale, features)
        highest = make_highest(similarity, engine.precision, features)
        q = halves.build(_list_columns(num, size), first=False)
        num_rows, start = (span.stop - span.start) * size ** (count_left(num) - 1), 0
        sums = torch.empty(num_rows + len(q), device=q.device)
        for box in cut_boxes(count_left(num), size, span, engine.count_rows(*q.shape, pull=False)):
            p = halves.build(Half(0, box), first=True)
            positives = find_positives(box, num, size)
            rows, columns = engine.sum_by_tile(Panel(p, q, positives, halves.gains.unit, halves.num_low, highest))
            fold_parts(rows, 1, sums[start : start + len(p)])
            fold_parts(columns, 0, sums[num_rows:], add=start > 0)
            start += len(p)
        out = _fold_sums(sums, num, size, span)
        # Neither inputs nor outputs, so they make no reference cycle; all others go through save_for_backward
        ctx.engine, ctx.similarity, ctx.span, ctx.gains, ctx.highest = engine, similarity, span, halves.gains, highest
        ctx.sums = sums.split([num_rows, len(q)])
        ctx.save_for_backward(out, scale, features)
        return out, halves.score_samples() if isinstance(halves, ProductHalves) else None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        engine: TritonEngine = ctx.engine
        out, scale, features = ctx.saved_tensors
        num, size, _ = features.shape
        halves = _make_halves(engine, ctx.similarity, scale, features, ctx.gains)
        grads, slopes = halves.start_pull(grad_scores)
        rows, columns = _weigh_sides(out, grad_out, ctx)
        kept, start, grad_q = _list_columns(num, size), 0, None
        with use_precision(engine.precision, scale.device):
            q = halves.build(kept, first=False)
            for box in cut_boxes(count_left(num), size, ctx.span, engine.count_rows(*q.shape, pull=True)):
                half = Half(0, box)
                p = halves.build(half, first=True)
                panel = Panel(p, q, find_positives(box, num, size), halves.gains.unit, halves.num_low)
                side = Side(rows.peak[start : start + len(p)], rows.weight[start : start + len(p)])
                grad_p, grad_q = engine.pull_both(panel, side, columns, grad_q, gain=halves.gains.weights)
                halves.pull(half, grad_p, grads, slopes, first=True)
                start += len(p)
        assert grad_q is not None
        halves.pull(kept, grad_q, grads, slopes, first=False)
        grad_scale = halves.finish_pull(slopes) if ctx.needs_input_grad[3] else None
        return None, None, None, grad_scale, grads


def _make_halves(
    engine: TritonEngine, similarity: Similarity, scale: Tensor, features: Tensor, gains: Gains | None = None
) -> ProductHalves | SumHalves:
    middle = count_left(len(features))
    if similarity == "mip":
        return ProductHalves(features, scale, engine.precision, middle, gains)
    return SumHalves(features, scale, engine.precision, middle, similarity, gains)


def _list_columns(num: int, size: int) -> Half:
    """Return the half that is kept whole: all combinations of the last modalities."""
    middle = count_left(num)
    return Half(middle, (slice(0, size),) * (num - middle))


def _fold_sums(sums: Tensor, num: int, size: int, span: slice) -> Tensor:
    """Return [M, B] of the sums of all rows, then all columns.

    MASKED for first indices of other processes: `join_sums` adds them up, and it adds nothing.
    """
    middle = count_left(num)
    out = torch.empty(num, size, device=sums.device)
    steps = size ** (middle - 1), size ** (num - middle - 1)
    _fold_axes[(num * size,)](
        sums, out, size, span.start, span.stop - span.start, *steps, MIDDLE=middle,
        BLOCK=min(BLOCK, triton.next_power_of_2(steps[0] + 1)),
    )  # fmt: skip
    return out


def _weigh_sides(out: Tensor, grads: Tensor, ctx: Any) -> tuple[Side, Side]:
    """Return the sides of all rows and columns, without the weights' gain, which is written to `ctx.gains`."""
    num, size = out.shape
    middle, gains, curve = count_left(num), ctx.gains, CURVES[ctx.similarity].name
    blocks = [triton.cdiv(len(side), BLOCK) for side in ctx.sums]
    tops = torch.empty(sum(blocks), device=out.device) if gains.buffer is not None else None
    parts = [None, None] if tops is None else tops.split(blocks)
    sides = []
    for own, first, axes, start, top, count in zip(
        ctx.sums, (0, middle), (middle, num - middle), (ctx.span.start, 0), parts, blocks
    ):
        side = Side(torch.empty_like(own), torch.empty_like(own))
        _weigh_side[(count,)](
            out[first:], grads[first:], *grads.stride(), own, side.peak, side.weight, top, len(own), size, start,
            size ** (axes - 1), NUM_AXES=axes, BOUNDED=top is not None, CURVE=curve, BLOCK=BLOCK,
        )  # fmt: skip
        sides.append(side)
    if tops is not None:
        highest = ctx.highest
        _find_weights_gain[(1,)](
            *parts, highest, gains.weights, *blocks, HAS_HIGHEST=highest is not None, BLOCK=BLOCK
        )  # fmt: skip
    return sides[0], sides[1]
