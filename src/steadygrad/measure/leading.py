"""Adam's moments and the gradients that have just entered them -> the RMS of g^2/v of each tensor.

It rises when the second moment lags behind the gradient, before the loss spikes. Measured every N steps, after the
optimizer stepped and before gradients are cleared (a fused step has unscaled and clipped them in place by then). On
CUDA it takes two launches for all tensors of a dtype. Optimizers without `exp_avg_sq` are skipped. Reads only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.measure.meter import triton_is_usable
from steadygrad.measure.rows import PIECE, PLAIN, PendingRows, is_readable, send_rows, split_flat
from steadygrad.measure.transfer import Transfer


class PendingRms:
    """A measurement whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, names: Sequence[str]) -> None:
        self._rows, self._names = rows, names

    def read(self) -> dict[str, float]:
        """Return name -> sqrt(mean(g^2 / max(v, eps^2))); NaN if the step was skipped before Adam ever ran."""
        return dict(zip(self._names, [number for row in self._rows.read().values() for number in row]))


class AdamWatch:
    """Measures the moments of one list of optimizers, repeatedly."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Sequence[tuple[str, Tensor]],
        *,
        transfer: Transfer | None = None,
    ) -> None:
        self._optimizers, self._transfer = optimizers, transfer
        self._names = {id(p): name for name, p in named}
        self._shapes: list[Any] = []
        self._kernels: Any = None

    @torch.no_grad()
    def compile(self) -> None:
        """Compile and lay out what the first measurement will need; do nothing without kernels, or without Adam."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups if "betas" in group]
        trained = [p for group in groups for p in group["params"] if id(p) in self._names and p.requires_grad]
        with contextlib.suppress(Exception):  # a dtype without kernels; measuring then falls back to plain torch
            if trained and trained[0].is_cuda and triton_is_usable():
                from steadygrad.measure.kernels import triton_looks

                # Gradients and moments will most likely be like their parameters.
                states = [triton_looks.AdamState(p.detach(), p.detach(), 1.0, 0.9, 1e-8) for p in trained]
                if all(triton_looks.fits(p) for p in trained) and _are_on_one_device(trained):
                    self._shapes, self._kernels = [state.shape for state in states], triton_looks.RmsLook(states)
                    self._kernels.look(states)

    @torch.no_grad()
    def measure(self) -> PendingRms | None:
        """Queue the measurement without waiting; return None if no optimizer of Adam's family holds a gradient."""
        try:
            held = list(self._list_held())
            if not held:
                return None
            rows = self._measure_fast([(p, g, s) for _, p, g, s in held])
            if rows is None:
                rows = _measure_on_host([(p, g, s) for _, p, g, s in held])
            if rows is None:
                rows = torch.cat([_measure(p, g, s).reshape(1).to(held[0][1].device) for _, p, g, s in held])
            return PendingRms(send_rows({"rms": rows}, self._transfer), [name for name, *_ in held])
        except Exception:  # an unusual state, or no memory: measuring must never end the training
            return None

    def _list_held(self) -> Iterator[tuple[str, Tensor, dict[str, Any], dict[str, Any]]]:
        """Yield name, parameter, group and state of everything that can be measured."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # get(): the state is a defaultdict, and indexing would add an entry to what the program saves.
                    name, state = self._names.get(id(parameter)), optimizer.state.get(parameter)
                    if name is not None and state and _is_adam(parameter, group, state):
                        yield name, parameter, group, state

    def _measure_fast(self, held: Sequence[tuple[Tensor, dict[str, Any], dict[str, Any]]]) -> Tensor | None:
        """Return float64 [N] from kernels over a table of addresses; None if they cannot read everything."""
        if not (held[0][0].is_cuda and triton_is_usable() and _are_on_one_device([p for p, _, _ in held])):
            return None
        from steadygrad.measure.kernels import triton_looks

        states = [triton_looks.read_state(*one) for one in held]
        fitting = [state for state in states if state is not None]
        if len(fitting) < len(held):
            return None
        shapes = [state.shape for state in fitting]
        if shapes != self._shapes:
            self._shapes, self._kernels = shapes, triton_looks.RmsLook(fitting)
        found: Tensor = self._kernels.look(fitting)
        return found


def measure_adam_rms(
    optimizers: Sequence[torch.optim.Optimizer], named: Sequence[tuple[str, Tensor]]
) -> PendingRms | None:
    """Measure once."""
    return AdamWatch(optimizers, named).measure()


def _are_on_one_device(tensors: Sequence[Tensor]) -> bool:
    """Whether one kernel may read them all."""
    return all(tensor.device == tensors[0].device for tensor in tensors)


def _is_adam(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
    if parameter.grad is None or "betas" not in group or "step" not in state:
        return False
    moment = state.get("exp_avg_sq")
    fits = isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.numel() > 0
    return fits and is_readable(parameter.grad) and not parameter.is_complex()


def _measure_on_host(held: Sequence[tuple[Tensor, dict[str, Any], dict[str, Any]]]) -> Tensor | None:
    """Return float64 [N] of small float32 tensors in host memory, in a few calls for all; None if some are others."""
    gradients, moments = [p.grad for p, _, _ in held if p.grad is not None], [s["exp_avg_sq"] for _, _, s in held]
    steps = [state["step"] for _, _, state in held]
    is_plain = all(type(t) in PLAIN and t.dtype is torch.float32 and t.is_cpu for t in (*gradients, *moments))
    is_known = all(not isinstance(step, Tensor) or step.device.type == "cpu" for step in steps)
    if not (is_plain and is_known) or sum(moment.numel() for moment in moments) > PIECE:
        return None
    roots = [math.sqrt(1.0 - float(group["betas"][1]) ** float(step)) for (_, group, _), step in zip(held, steps)]
    scales = torch._foreach_sqrt(moments)
    # Multiplied, not divided: by a list of numbers that is one call; NaN before the first step.
    torch._foreach_mul_(scales, [1.0 / root if root else math.nan for root in roots])
    torch._foreach_clamp_min_(scales, [float(group.get("eps", 1e-8)) for _, group, _ in held])
    norms = torch._foreach_norm(torch._foreach_div(gradients, list(scales)), 2, torch.float64)
    return torch.stack([norm / math.sqrt(moment.numel()) for norm, moment in zip(norms, moments)])


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
    """Return 1 - beta^step: float32 on the moment's device. A step counter on CUDA is not read back."""
    if isinstance(step, Tensor) and step.device.type != "cpu":
        # In float64: 1 - beta^step cancels in the first steps.
        correction: Tensor = 1.0 - torch.pow(beta, step.double())
        return correction.float()
    return torch.full((), 1.0 - float(beta) ** float(step), device=device)
