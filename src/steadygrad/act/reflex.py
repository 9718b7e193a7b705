"""Reflex: an optimizer step that no bad gradient can get through.

With fused optimizers on CUDA, skipping and scaling happen in the optimizer's own kernel (`found_inf`, `grad_scale`), so
the host does not have to know in time. Every other optimizer costs one host read per step, and a bad step is skipped by
not calling it. Either way skipping is a true select: weights, moments and counters keep their values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.adam_lists import QuickLists, can_gather_quickly
from steadygrad.act.host_adam import HostAdam, can_step_on_host
from steadygrad.clip import Clipper
from steadygrad.clip.edit import multiply, scale_gradients
from steadygrad.measure import Measurement
from steadygrad.state.shards import is_dtensor


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's kernel takes `found_inf` and `grad_scale`, for every group, on CUDA."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = optimizer.param_groups
    # Shards go through the host: the flag is a plain tensor here, and DTensors cannot take it.
    fits = all(p.is_cuda and not is_dtensor(p) for g in groups for p in g["params"])
    return fits and all(group.get("fused") for group in groups)


class Reflex:
    """Clips, then steps or skips."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], clipper: Clipper | None) -> None:
        self._optimizers, self._clipper = list(optimizers), clipper
        self.fused = all(is_fused(optimizer) for optimizer in self._optimizers)
        self.expects_clipping = False
        self._lists = {id(o): QuickLists(o) for o in self._optimizers if can_gather_quickly(o)}
        self._on_host = [HostAdam(o) if can_step_on_host(o) else None for o in self._optimizers]
        self._folds_exactly = not any(isinstance(optimizer, torch.optim.SGD) for optimizer in self._optimizers)

    def hint(self) -> None:
        """Log once that `fused=True` would remove the host read."""
        slow = [type(o).__name__ for o in self._optimizers if not is_fused(o) and "fused" in o.defaults]
        if slow and any(p.is_cuda for o in self._optimizers for g in o.param_groups for p in g["params"]):
            warnings.warn(
                f"{', '.join(slow)} runs without fused=True, so each step waits once for the device. "
                "Create the optimizer with fused=True to avoid the wait.",
                stacklevel=4,
            )

    @torch.no_grad()
    def compile(self, device: torch.device) -> None:
        """Load the kernel that takes a skipped step out of a fused optimizer's counters."""
        counters = [torch.zeros((), device=device) for _ in range(2)]
        torch._foreach_sub_(counters, [torch.zeros((), device=device)] * 2)

    def clip(self, m: Measurement, scale: Tensor | None) -> Tensor | None:
        """Write the coefficient into the header; return the loss scale that the gradients still carry."""
        clipper = self._clipper
        if not m.names:
            return scale  # a rank without gradients: the step is bad on all of them
        if clipper is None or (clipper.constant_norm is not None and not clipper.edits_gradients):
            return scale  # the measurement has the coefficient already
        return self._clip(clipper, m, scale)

    @torch.no_grad()
    def _clip(self, clipper: Clipper, m: Measurement, scale: Tensor | None) -> Tensor | None:
        if clipper.edits_gradients and scale is not None:  # its thresholds are in units of the true gradient
            inverse = scale.to(m.packed.device).double().reciprocal()
            scale_gradients(m.gradients, inverse.expand(len(m.gradients)), [1] * len(m.gradients))
            scale = None
        if clipper.constant_norm is None:
            m.set_coefficient(clipper.clip(m))
        return scale

    @torch.no_grad()
    def step_on_device(self, m: Measurement, scale: Tensor | None) -> None:
        """Queue the optimizers; a bad step passes through them without a trace. No host read.

        The coefficient either goes into the optimizer's kernel, which then writes every gradient back, or is applied
        beforehand by a kernel that does nothing when it is 1. The first always costs 4 bytes per element, the second 8
        or nothing, so the first is used while the last step was clipped. When that becomes known depends on the
        device's speed, so the choice must not change a single bit: half-precision gradients, which the optimizer's
        kernel scales without rounding, always take the first. Fused SGD always takes the second: in torch 2.11 a
        `grad_scale` of 1 changes the last bit of its weights.
        """
        divisor: Tensor | None = None
        if self._clipper is not None and not self._clipper.edits_gradients:
            # The kernel divides by grad_scale, so this is 1 / coefficient.
            divisor = m.flags[1]
        if scale is not None:
            divisor = scale if divisor is None else divisor * scale
        elif divisor is not None and not self._folds(m) and m.scale_in_place():
            divisor = None
        for optimizer in self._optimizers:
            _make_momentum(optimizer)
            # A fused step() of torch reads these two attributes, which GradScaler.step sets in the same way.
            optimizer.found_inf = m.found  # type: ignore[attr-defined]
            optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            try:
                with lists.lend() if (lists := self._lists.get(id(optimizer))) else contextlib.nullcontext():
                    optimizer.step()
            finally:
                # A flag left behind would skip a step that the program takes without the guard.
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]

    def _folds(self, m: Measurement) -> bool:
        """Whether the coefficient goes into the optimizer's kernel."""
        is_better = self.expects_clipping or not m.plan.is_single_precision
        return self._folds_exactly and is_better

    def step_on_host(self, m: Measurement, factor: float) -> None:
        """Take a step known to be good: scale the gradients if that changes anything, and step."""
        if self._clipper is not None and self._clipper.edits_gradients:
            factor = 1.0
        if factor != 1.0:  # saves a pass over the gradients
            multiply(m.gradients, factor)
        for optimizer, quick in zip(self._optimizers, self._on_host):
            optimizer.step() if quick is None else quick.step(optimizer.step)

    def skip_on_host(self) -> None:
        """Skip a step known to be bad: leave the optimizers alone, but keep schedulers from warning about it."""
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else the next scheduler.step() warns

    @property
    def ready_for_device(self) -> bool:
        """False for a fused optimizer whose skipped first step would keep an uninitialised momentum."""
        return self.fused and not any(_lacks_damped_momentum(optimizer) for optimizer in self._optimizers)


def _momentum_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [group for group in optimizer.param_groups if group["momentum"] != 0]


def _make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD zeroed momentum before its first step.

    Its own first step creates the buffer with `empty_like`, and a skip leaves it uninitialized, so the next step would
    corrupt the weights. Starting from zeros is bit-identical without dampening.
    """
    for group in _momentum_groups(optimizer):
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lacks_damped_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether momentum is missing and dampening forbids starting from zeros; such a step goes through the host."""
    return any(
        group["dampening"] != 0
        and any(
            p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None for p in group["params"]
        )
        for group in _momentum_groups(optimizer)
    )
