"""Microbatches of a step that is not made yet <-> plain state, with the buffers from before its first forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import Accumulated


def gather_accumulated(accumulated: Accumulated, model: nn.Module, buffers: BufferKeeper) -> dict[str, Any]:
    """Microbatches of a step that is not made yet, and the buffers from before its first forward."""
    if accumulated.num == 0:
        return {"num": 0}
    with buffers.as_saved():
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
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
    live = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()} if saved["num"] else {}
    _write(live, saved.get("buffers", {}))
    buffers.refresh(everything=True)
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
