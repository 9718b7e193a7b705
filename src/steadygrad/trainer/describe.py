"""Numbers of an epoch -> the line that reports it; a model -> whether it is finite. Reads only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from steadygrad.measure.check import find_nonfinite


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """Format losses, validation, mean and maximum gradient norm where measured, learning rate and skipped steps."""
    losses = {name: value for name, value in metrics.items() if name == "loss" or name.startswith("val_")}
    skipped = f", skipped={metrics['num_skipped']:.0f}" if metrics["num_skipped"] else ""
    norms = f", grad avg={metrics['grad_norm_mean']:.4g} max={metrics['grad_norm_max']:.4g}"
    norms = "" if math.isnan(metrics["grad_norm_mean"]) else norms  # no step was measured; without a guard none ever is
    return f"{spell_numbers(losses)}{norms}, lr={metrics['learning_rate']:.4g}{skipped}"


def spell_numbers(numbers: Mapping[str, Any], prefix: str = "") -> str:
    """Format numbers as `loss=0.4312, r2=0.9134`."""
    return ", ".join(f"{prefix}{name}={value:.4f}" for name, value in numbers.items())


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
