"""Each sample against the B ways to exchange one of its vectors: M matrices [B, B], O(M B^2 D), exact.

This is what cross entropy along one axis of a [B]^M tensor with one-hot labels on its diagonal amounts to: every other
fibre of the tensor has no label and adds nothing. The matrices are swept panel by panel, as all combinations are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch
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
from steadygrad.losses.multiway.similarity import Similarity, build_columns, build_rows
from steadygrad.losses.multiway.weights import bound_weights, make_highest


def build_fibres(batch: Batch, modality: int) -> tuple[Tensor, Tensor]:
    """Return P [n, K] of each own sample's other vectors, Q [B, K] of the vectors that may stand at `modality`."""
    num = batch.num_present
    num = num if isinstance(num, int) else batch.own(num)
    absent = None if batch.absent is None else batch.absent[modality]
    # No row is masked, but P needs the two mask columns that Q has
    nobody = None if absent is None else torch.zeros_like(batch.own(absent))
    rows = build_rows(
        batch.others[modality], batch.scale, batch.similarity, num=num, whole=batch.num_modalities, absent=nobody
    )
    return rows, build_columns([batch.features[modality]], batch.similarity, absent=absent)


def sum_fibres(batch: Batch, engine: Engine, modality: int) -> Tensor:
    """Return [n]: the log-sum-exp over which other vector stands at `modality`, for each own sample."""
    halves = build_fibres(batch, modality)
    layout = choose_layout(engine.precision, batch.similarity, batch.features[0].shape[1])
    out: Tensor = _SumRows.apply(engine, batch.similarity, layout, batch.span.start, *halves)  # type: ignore[no-untyped-call]
    return out


class _SumRows(torch.autograd.Function):
    """out[i] = log sum_{k != i + offset} exp curve(p_i . q_k); the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, similarity: Similarity, layout: Layout, offset: int, p: Tensor, q: Tensor
    ) -> Tensor:
        precision = engine.precision
        # Tensors on the device: the gains are never read by the host
        gains = find_gains(find_top(p), find_top(q)) if has_gains(precision) else NO_GAINS
        ctx.num_columns = p.shape[1]
        # An engine reads rows that lie one after another; the caller's features need not.
        p, q = layout.round(p, gains.p, first=True), layout.round(q, gains.q, first=False)
        highest = make_highest(similarity, precision, p)
        make_panel = _PanelMaker(p, q, offset, gains.unit, layout.num_low, highest)
        with use_precision(precision, p.device):
            parts = _cut_rows(engine, p, q, pull=False)
            out = torch.cat([engine.sum_rows(make_panel(part)) for part in parts])
        # p and q are saved as rounded: the backward pass must see the logits of the forward pass, bit for bit
        ctx.engine, ctx.similarity, ctx.layout, ctx.offset = engine, similarity, layout, offset
        ctx.gains, ctx.highest = gains, highest
        ctx.save_for_backward(out, p, q)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        engine: Engine = ctx.engine
        gains: Gains = ctx.gains
        out, p, q = ctx.saved_tensors
        make_panel = _PanelMaker(p, q, ctx.offset, gains.unit, ctx.layout.num_low, None)
        grads_p, grad_q = [], torch.zeros_like(q, dtype=out.dtype)
        if has_gains(engine.precision):
            bound = bound_weights(Side(out, grad_out), out, ctx.similarity, ctx.highest)
            gain = find_gain(bound)
            gains, grad_out = replace(gains, weights=gain), grad_out * gain
        with use_precision(engine.precision, p.device):
            for part in _cut_rows(engine, p, q, pull=True):
                rows = Side(out[part], grad_out[part].contiguous())
                grads_p.append(engine.pull_panel(make_panel(part), rows, None, grad_q))
        grad_p = torch.cat(grads_p) if len(grads_p) > 1 else grads_p[0]
        grads = [
            ctx.layout.join(grad, ctx.num_columns, first=first) for grad, first in ((grad_p, True), (grad_q, False))
        ]
        return None, None, None, None, gains.free_rows(grads[0]), gains.free_columns(grads[1])


def _cut_rows(engine: Engine, p: Tensor, q: Tensor, *, pull: bool) -> list[slice]:
    step = engine.count_rows(*q.shape, pull=pull)
    return [slice(start, min(start + step, len(p))) for start in range(0, len(p), step)]


@dataclass(frozen=True)
class _PanelMaker:
    p: Tensor
    q: Tensor
    offset: int
    unit: Tensor | None
    num_low: int
    highest: Tensor | None

    def __call__(self, part: slice) -> Panel:
        diagonal = Diagonal(0, 1, self.offset + part.start, 1, part.stop - part.start)
        return Panel(self.p[part], self.q, diagonal, self.unit, self.num_low, self.highest)
