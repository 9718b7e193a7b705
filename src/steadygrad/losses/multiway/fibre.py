"""Each sample against the B ways to exchange one of its vectors: M matrices [B, B], O(M B^2 D), exact.

This is what cross entropy along one axis of a [B]^M tensor with one-hot labels on its diagonal amounts to: every other
fibre of the tensor has no label and adds nothing. The matrices are swept panel by panel, as all combinations are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch
from steadygrad.losses.multiway.check import refuse_second_order
from steadygrad.losses.multiway.engine import Diagonal, Engine, Panel, Side
from steadygrad.losses.multiway.precision import (
    NO_GAINS,
    Gains,
    find_gain,
    find_gains,
    find_top,
    round_half,
    use_precision,
)
from steadygrad.losses.multiway.similarity import build_columns, build_rows


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
    out: Tensor = _SumRows.apply(engine, batch.span.start, *build_fibres(batch, modality))  # type: ignore[no-untyped-call]
    return out


class _SumRows(torch.autograd.Function):
    """out[i] = log sum_{k != i + offset} exp curve(p_i . q_k); the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, offset: int, p: Tensor, q: Tensor) -> Tensor:
        precision = engine.precision
        # Tensors on the device: the gains are never read by the host
        gains = find_gains(find_top(p), find_top(q)) if precision == "fp16" else NO_GAINS
        # An engine reads rows that lie one after another; the caller's features need not.
        p, q = round_half(p, precision, gains.p).contiguous(), round_half(q, precision, gains.q).contiguous()
        with use_precision(precision, p.device):
            parts = _cut_rows(engine, p, q, pull=False)
            out = torch.cat([engine.sum_rows(_make_panel(p, q, part, offset, gains)) for part in parts])
        # p and q are saved as rounded: the backward pass must see the logits of the forward pass, bit for bit
        ctx.engine, ctx.offset, ctx.gains = engine, offset, gains
        ctx.save_for_backward(out, p, q)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        engine: Engine = ctx.engine
        gains: Gains = ctx.gains
        out, p, q = ctx.saved_tensors
        grads_p, grad_q = [], torch.zeros_like(q, dtype=out.dtype)
        if engine.precision == "fp16":  # no weight is above its row's gradient
            gain = find_gain(find_top(grad_out))
            gains, grad_out = replace(gains, weights=gain), grad_out * gain
        with use_precision(engine.precision, p.device):
            for part in _cut_rows(engine, p, q, pull=True):
                rows = Side(out[part], grad_out[part].contiguous())
                panel = _make_panel(p, q, part, ctx.offset, gains)
                grads_p.append(engine.pull_panel(panel, rows, None, grad_q))
        grad_p = torch.cat(grads_p) if len(grads_p) > 1 else grads_p[0]
        return None, None, gains.free_rows(grad_p), gains.free_columns(grad_q)


def _cut_rows(engine: Engine, p: Tensor, q: Tensor, *, pull: bool) -> list[slice]:
    step = engine.count_rows(*q.shape, pull=pull)
    return [slice(start, min(start + step, len(p))) for start in range(0, len(p), step)]


def _make_panel(p: Tensor, q: Tensor, part: slice, offset: int, gains: Gains) -> Panel:
    return Panel(p[part], q, Diagonal(0, 1, offset + part.start, 1, part.stop - part.start), gains.unit)
