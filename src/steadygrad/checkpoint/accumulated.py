"""A step that is not made yet -> plain values -> the same step again: its microbatches, and the buffers before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import Accumulated
from steadygrad.state.collect import has_values


def gather_accumulated(accumulated: Accumulated, model: nn.Module, buffers: BufferKeeper) -> dict[str, Any]:
    """The microbatches so far, and the buffers from before their first forward.

    A program that runs backward by itself tells of no microbatch; that its forward was heard is enough.
    """
    before = {}
    if buffers.has_begun:
        with buffers.as_saved():
            before = {name: b.detach().clone() for name, b in model.named_buffers() if has_values(b)}
    if accumulated.num == 0:
        return {"num": 0, "buffers": before}
    return {
        "num": accumulated.num,
        "num_dropped": accumulated.num_dropped,
        "overflowed": accumulated.overflowed,
        "losses": list(accumulated.losses),
        "buffers": before,
    }


@torch.no_grad()
def put_accumulated(saved: Mapping[str, Any], model: nn.Module, buffers: BufferKeeper) -> Accumulated:
    """The microbatches again; `buffers` learns what a skip of their step must go back to."""
    buffers.forget()
    before = saved.get("buffers", {})
    if before:
        live = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers() if has_values(buffer)}
        _write(live, before)
        buffers.begin()
        _write(live, {name: now for name, (_, now) in live.items()})
    if not saved["num"]:
        return Accumulated()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Accumulated(
        losses=[loss.to(device) for loss in saved["losses"]],
        num=saved["num"],
        num_dropped=saved["num_dropped"],
        overflowed=saved["overflowed"],
    )


def _write(live: Mapping[str, tuple[Tensor, Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, (buffer, _) in live.items():
        if name in values and values[name].shape == buffer.shape:
            buffer.data.copy_(values[name])
