"""Adam's moments and the gradients that have just entered them -> the RMS of g^2/v of each tensor.

It rises when the second moment lags behind the gradient, before the loss spikes. Asked for every N steps, after the
optimizer stepped and before gradients are cleared (a fused step has unscaled and clipped them in place by then).
Optimizers without `exp_avg_sq` are passed over. Everything stays on the device until somebody reads. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.measure.rows import PendingRows, is_readable, send_rows, split_flat
from steadygrad.measure.transfer import Transfer


class PendingRms:
    """Numbers on their way."""

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows

    def read(self) -> dict[str, float]:
        """Name -> sqrt(mean(g^2 / max(v, eps^2))); NaN where the step was skipped before Adam ever ran."""
        return {name: row[0] for name, row in self._rows.read().items()}


@torch.no_grad()
def measure_adam_rms(
    optimizers: Sequence[torch.optim.Optimizer],
    named: Sequence[tuple[str, Tensor]],
    *,
    transfer: Transfer | None = None,
) -> PendingRms | None:
    """Queue the measurement; None when no optimizer of Adam's family holds a gradient. Waits for nothing."""
    try:
        rows = _measure_all(optimizers, {id(p): name for name, p in named})
        return PendingRms(send_rows(rows, transfer)) if rows else None
    except Exception:  # a state of its own kind, or no memory: looking must never end the training
        return None


def _measure_all(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> dict[str, Tensor]:
    rows: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None and _is_adam(parameter, group, optimizer.state.get(parameter)):
                    rows[name] = _measure(parameter, group, optimizer.state[parameter]).reshape(1)
    return rows


def _is_adam(parameter: Tensor, group: dict[str, Any], state: dict[str, Any] | None) -> bool:
    if not state or parameter.grad is None or "betas" not in group or "step" not in state:
        return False
    moment = state.get("exp_avg_sq")
    fits = isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.numel() > 0
    return fits and is_readable(parameter.grad) and not parameter.is_complex()


def _measure(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    assert parameter.grad is not None
    gradient, moment = parameter.grad, state["exp_avg_sq"]
    root = _bias_correction(group["betas"][1], state["step"], moment.device).sqrt()
    eps = group.get("eps", 1e-8)
    norms: list[Tensor] = [
        torch.linalg.vector_norm(g.float() / (v.float().sqrt() / root).clamp_min(eps), dtype=torch.float64)
        for g, v in zip(split_flat(gradient), split_flat(moment))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total / math.sqrt(moment.numel())


def _bias_correction(beta: Any, step: Any, device: torch.device) -> Tensor:
    """1 - beta^step: float32 on the moment's device. A step counter on CUDA is not read back."""
    if isinstance(step, Tensor) and step.device.type != "cpu":
        correction: Tensor = 1.0 - torch.pow(beta, step.double())
        return correction.float()
    return torch.full((), 1.0 - float(beta) ** float(step), device=device)
