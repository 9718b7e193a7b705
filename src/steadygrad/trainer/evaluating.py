"""A model as it is evaluated: eval mode and the training's precision, restored afterwards; whether it is finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from steadygrad.act.precision import DTYPES
from steadygrad.config import Precision
from steadygrad.measure.check import find_nonfinite


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set every module to eval mode, then restore the mode of each: a stage may keep some in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # not `.train(mode)`, which would set the children too


def make_autocast(precision: Precision | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context that a guard opens around a step, for code outside a step."""
    if precision is None:
        return contextlib.nullcontext()
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)


def look_at_model(model: nn.Module) -> dict[str, bool]:
    """Return what a guard's `health()` returns, for a model that no guard has watched yet."""
    parameters = find_nonfinite(model.named_parameters())
    buffers = find_nonfinite(model.named_buffers())
    gradients = find_nonfinite((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    parts = {
        "model_healthy": not parameters and not buffers,
        "gradients_healthy": not gradients,
        "losses_healthy": True,
        "parameters_healthy": not parameters,
    }
    return {**parts, "overall_healthy": all(parts.values())}
