"""Features -> for each modality m and sample i the log-sum-exp over every negative that has i at m: [M, B].

Negatives are all combinations but the samples with themselves.

One sweep over two Khatri-Rao halves serves all M anchors. Rows of P are built box by box (a box is a range of each
index), their logits against all of Q are summed along both sides and forgotten; the backward pass builds them again.
Kept between the passes: the features, the sums of P's rows and Q's, and the [M, B] result. Never built: anything of
size B^M, or all of P.

With L the logits and g the incoming gradient, dLoss/dL[a, b] = sum_m g[m, i_m] exp(L[a, b] - out[m, i_m]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch, count_left
from steadygrad.losses.multiway.check import refuse_second_order
from steadygrad.losses.multiway.engine import Diagonal, Engine, Panel, Side
from steadygrad.losses.multiway.layout import Layout, choose_layout
from steadygrad.losses.multiway.precision import (
    NO_GAINS,
    Gains,
    find_gain,
    find_gains,
    find_top,
    has_gains,
    use_precision,
)
from steadygrad.losses.multiway.similarity import MASKED, Similarity, build_columns, build_rows, find_factor
from steadygrad.losses.multiway.weights import bound_weights, make_highest

Box = tuple[slice, ...]
"""A range of each row index, the leftmost slowest."""


@dataclass(frozen=True)
class Plan:
    """All about a sweep that has no gradient."""

    engine: Engine
    similarity: Similarity
    absent: tuple[Tensor, ...] | None
    span: slice
    """The range of the first index: another process takes another."""
    layout: Layout
    gains: Gains = NO_GAINS
    highest: Tensor | None = None
    """The highest logit, where the bound of the weights needs it."""


def sum_combinations(batch: Batch, engine: Engine) -> Tensor:
    """Return [M, B]; over this process's part of the combinations. MASKED where there is none."""
    layout = choose_layout(engine.precision, batch.similarity, batch.features[0].shape[1])
    highest = make_highest(batch.similarity, engine.precision, batch.scale)
    plan = Plan(engine, batch.similarity, batch.absent, batch.span, layout, highest=highest)
    out: Tensor = _SumCombinations.apply(plan, batch.scale, *batch.features)  # type: ignore[no-untyped-call]
    return out


class _SumCombinations(torch.autograd.Function):
    """The formulas are in the module's docstring."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: Tensor, *features: Tensor) -> Tensor:
        middle, size = count_left(len(features)), len(features[0])
        precision = plan.engine.precision
        if has_gains(precision):
            plan = replace(plan, gains=_find_gains(plan.similarity, scale, features, middle))
        row_sums = []
        with use_precision(precision, scale.device):
            # [B^(M - middle), K]: the only half that is ever whole in memory
            q = plan.layout.round(_build_q(plan, features[middle:]), plan.gains.q, first=False)
            column_sums = torch.full((len(q),), MASKED, dtype=features[0].dtype, device=q.device)
            for box in cut_boxes(middle, size, plan.span, plan.engine.count_rows(*q.shape, pull=False)):
                half = _build_p(plan, box, scale, [f[r] for f, r in zip(features, box)], len(features))
                positives = find_positives(box, len(features), size)
                p = plan.layout.round(half, plan.gains.p, first=True)
                panel = Panel(p, q, positives, plan.gains.unit, plan.layout.num_low, plan.highest)
                rows, columns = plan.engine.sum_panel(panel)
                row_sums.append(rows)
                column_sums = torch.logaddexp(column_sums, columns)
        # Neither inputs nor outputs, so they make no reference cycle; all others go through save_for_backward
        ctx.plan, ctx.sums = plan, (torch.cat(row_sums), column_sums)
        first, *others = _sum_axes(ctx.sums[0].view(-1, *[size] * (middle - 1)))
        # Rows of other processes: `join_sums` adds them up, and MASKED adds nothing
        first = torch.nn.functional.pad(first, (plan.span.start, size - plan.span.stop), value=MASKED)
        out = torch.stack([first, *others, *_sum_axes(column_sums.view([size] * (len(features) - middle)))])
        ctx.save_for_backward(out, scale, *features)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        plan: Plan = ctx.plan
        out, scale, *features = ctx.saved_tensors
        middle, size = count_left(len(features)), len(features[0])
        grads = [torch.zeros_like(tensor) for tensor in (scale, *features)]
        full = slice(0, size)
        rows = _weigh_side(out[:middle], grad_out[:middle], (plan.span, *[full] * (middle - 1)))
        columns = _weigh_side(out[middle:], grad_out[middle:], (full,) * (len(features) - middle))
        if has_gains(plan.engine.precision):
            bounds = [
                bound_weights(side, sums, plan.similarity, plan.highest)
                for side, sums in zip((rows, columns), ctx.sums)
            ]
            gain = find_gain(bounds[0] + bounds[1])
            plan = replace(plan, gains=replace(plan.gains, weights=gain))
            rows, columns = (replace(side, weight=side.weight * gain) for side in (rows, columns))
        with use_precision(plan.engine.precision, scale.device):
            q = plan.layout.round(_build_q(plan, features[middle:]), plan.gains.q, first=False)
            grad_q = torch.zeros(q.shape, dtype=out.dtype, device=q.device)
            start = 0
            for box in cut_boxes(middle, size, plan.span, plan.engine.count_rows(*q.shape, pull=True)):
                stop = start + math.prod(r.stop - r.start for r in box)
                side = Side(rows.peak[start:stop], rows.weight[start:stop])
                for target, grad in zip(
                    # `g[r]` is a view, so `+=` below adds into grads
                    [grads[0], *(g[r] for g, r in zip(grads[1:], box))],
                    _pull_box(plan, box, scale, features, q, side, columns, grad_q),
                ):
                    target += grad
                start = stop
            del q  # before its graph is built: that needs as much again
            # Once, after all boxes, which share the gains
            grads[: 1 + middle] = [plan.gains.free_rows(grad) for grad in grads[: 1 + middle]]
            grads[1 + middle :] = [plan.gains.free_columns(grad) for grad in _pull_q(plan, features[middle:], grad_q)]
        return None, *(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[1:]))


def _pull_box(
    plan: Plan,
    box: Box,
    scale: Tensor,
    features: Sequence[Tensor],
    q: Tensor,
    rows: Side,
    columns: Side,
    grad_q: Tensor,
) -> tuple[Tensor, ...]:
    """Return gradients of the scale and of the features inside the box, gains included; grad_q is added to."""
    leaves = [t.detach().requires_grad_() for t in (scale, *(f[r] for f, r in zip(features, box)))]
    # A backward pass runs without grad mode; this small graph lives for one box only
    with torch.enable_grad():
        graph = _build_p(plan, box, leaves[0], leaves[1:], len(features))
    p = plan.layout.round(graph, plan.gains.p, first=True)
    positives = find_positives(box, len(features), len(features[-1]))
    panel = Panel(p, q, positives, plan.gains.unit, plan.layout.num_low)
    grad_p = plan.layout.join(plan.engine.pull_panel(panel, rows, columns, grad_q), graph.shape[-1], first=True)
    return torch.autograd.grad(graph, leaves, grad_p.view(graph.shape))


def _pull_q(plan: Plan, features: Sequence[Tensor], grad_q: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of the columns' features, gains included."""
    leaves = [feature.detach().requires_grad_() for feature in features]
    with torch.enable_grad():
        graph = _build_q(plan, leaves)
    grad_q = plan.layout.join(grad_q, graph.shape[-1], first=False)
    return torch.autograd.grad(graph, leaves, grad_q.view(graph.shape))


def _find_gains(similarity: Similarity, scale: Tensor, features: Sequence[Tensor], middle: int) -> Gains:
    """From a bound of each half."""
    stacked, num = torch.stack(tuple(features)), len(features)
    factor = find_factor(scale, similarity, num=num, whole=num).abs()
    if similarity == "mip":  # the largest product there could be of what the features hold in one column
        tops = find_top(stacked, dim=1)
        return find_gains(tops[:middle].prod(0).amax() * factor, tops[middle:].prod(0).amax())
    # With N the largest length of a half's sum its columns are at most N, 2 N, N^2 and 1: (1 + N)^2 is above all
    lengths = torch.linalg.vector_norm(stacked, dim=2).amax(1)
    return find_gains(factor * (1 + lengths[:middle].sum()).square(), (1 + lengths[middle:].sum()).square())


def cut_boxes(num_axes: int, size: int, span: slice, max_rows: int) -> Iterator[Box]:
    """Yield boxes of at most `max_rows` rows that cover span x size x ... x size, in order."""
    axis = next(k for k in range(num_axes) if size ** (num_axes - 1 - k) <= max_rows or k == num_axes - 1)
    step = max(1, max_rows // size ** (num_axes - 1 - axis))
    ranges = [range(span.start, span.stop)] + [range(size)] * (num_axes - 1)
    whole = (slice(0, size),) * (num_axes - 1 - axis)
    for outer in itertools.product(*ranges[:axis]):
        for start in range(ranges[axis].start, ranges[axis].stop, step):
            yield (*(slice(i, i + 1) for i in outer), slice(start, min(start + step, ranges[axis].stop)), *whole)


def find_positives(box: Box, num_modalities: int, size: int) -> Diagonal:
    """Return where the rows (i, i, ...) of the box meet the columns (i, i, ...)."""
    low, high = max(r.start for r in box), min(r.stop for r in box)
    row = row_step = 0
    for r in box:
        width = r.stop - r.start
        row, row_step = row * width + low - r.start, row_step * width + 1
    column_step = sum(size**k for k in range(num_modalities - len(box)))
    return Diagonal(row, row_step, low * column_step, column_step, max(0, high - low))


def _spread(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[n_k, ...] each -> shapes that broadcast to [n_0, n_1, ..., ...]: index k on axis k."""
    num = len(tensors)
    return [t.view([1] * k + [len(t)] + [1] * (num - 1 - k) + list(t.shape[1:])) for k, t in enumerate(tensors)]


def _build_p(plan: Plan, box: Box, scale: Tensor, features: Sequence[Tensor], whole: int) -> Tensor:
    absent = _join_absent(plan.absent, 0, box)
    return build_rows(_spread(features), scale, plan.similarity, num=whole, whole=whole, absent=absent)


def _build_q(plan: Plan, features: Sequence[Tensor]) -> Tensor:
    box = (slice(None),) * len(features)
    absent = _join_absent(plan.absent, -len(features), box)
    return build_columns(_spread(features), plan.similarity, absent=absent)


def _join_absent(absent: tuple[Tensor, ...] | None, first: int, box: Box) -> Tensor | None:
    """Return True where any of the box's modalities is missing."""
    if absent is None:
        return None
    group = absent[first:] if first < 0 else absent[: len(box)]
    masks = _spread([mask[r] for mask, r in zip(group, box)])
    out = masks[0]
    for mask in masks[1:]:
        out = out | mask
    return out


def _sum_axes(sums: Tensor) -> list[Tensor]:
    """Return for each axis the log-sum-exp over all others."""
    axes = range(sums.dim())
    return [sums.logsumexp([other for other in axes if other != axis]) if len(axes) > 1 else sums for axis in axes]


def _weigh_side(sums: Tensor, grads: Tensor, box: Box) -> Side:
    """Return sum_m g[m, i_m] exp(L - sums[m, i_m]) as exp(L - peak) * weight, where peak is the least of the sums."""
    peaks = _spread([s[r] for s, r in zip(sums, box)])
    peak = peaks[0]
    for other in peaks[1:]:
        # The least: a logit is below each of these sums, so neither exp(L - peak) nor exp(peak - own) exceeds 1
        peak = torch.minimum(peak, other)
    weight = torch.zeros_like(peak)
    for own, grad in zip(peaks, _spread([g[r] for g, r in zip(grads, box)])):
        weight = weight + grad * (peak - own).exp()
    return Side(peak.reshape(-1).contiguous(), weight.reshape(-1).contiguous())
