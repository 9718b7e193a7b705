"""Meter: the gradients of a list of parameters -> one packed vector of numbers on the device.

The vector is a header (loss, global norm, counts, bad-step flag, clip coefficient, loss scale) and a row of
`GradientStats` for each parameter that has a gradient. Nothing is read back here: on CUDA three kernel launches fill
it, and `found` can go straight into a fused optimizer. Reads only.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadygrad.config import Implementation
from steadygrad.errors import ConfigError
from steadygrad.facts import NUM_COLUMNS, GradientTable, Reading
from steadygrad.measure import gradients as _gradients
from steadygrad.measure.kernels import foreach, reference

if TYPE_CHECKING:
    from steadygrad.measure.kernels import triton as _triton

HEADER = 8
MAX_PLANS = 64
"""Patterns of present gradients whose tables are kept."""
LOSS, NORM, NUM_NONFINITE, NUM_NAN, FOUND, COEFFICIENT, LOSS_SCALE = range(7)


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One step's numbers, still on the device."""

    packed: Tensor
    """Header, then the rows: float64 [HEADER + 5 N]."""
    found: Tensor
    """1.0 when loss or gradients are not finite, else 0.0: float32 scalar."""
    parameters: list[Tensor]
    """The parameters that have a gradient, in order, [N]."""
    gradients: list[Tensor]
    """Their `.grad`, [N]."""
    names: tuple[str, ...]
    numels: tuple[int, ...]
    has_loss: bool

    @property
    def norm(self) -> Tensor:
        """Global norm over the finite elements, after unscaling: float64 scalar."""
        return self.packed[NORM]

    @property
    def table(self) -> Tensor:
        """The rows, [N, 5]."""
        return self.packed[HEADER : HEADER + NUM_COLUMNS * len(self.names)].view(-1, NUM_COLUMNS)

    def read(self, numbers: Sequence[float], **facts: Any) -> Reading:
        """The Reading of `numbers`, which is this packed vector on the host; `facts` are those the host knows."""
        num_nonfinite, num_nan = int(numbers[NUM_NONFINITE]), int(numbers[NUM_NAN])
        norm = numbers[NORM]
        scale = numbers[LOSS_SCALE]
        return Reading(
            loss=numbers[LOSS] if self.has_loss else None,
            grad_norm=math.nan if num_nan else math.inf if num_nonfinite else norm,
            finite_grad_norm=norm,
            num_nonfinite=num_nonfinite,
            num_nan=num_nan,
            clip_coefficient=numbers[COEFFICIENT],
            loss_scale=scale if scale > 0 else None,
            gradients=GradientTable(self.names, self.numels, numbers[HEADER : HEADER + NUM_COLUMNS * len(self.names)]),
            **facts,
        )


class _Plan:
    """What stays the same while the same parameters have gradients of the same kind."""

    def __init__(self, names: list[str], parameters: list[Tensor], device: torch.device) -> None:
        self.names = tuple(names)
        self.numels = tuple(_gradients.numel(p) for p in parameters)
        self.device = device
        self.length = HEADER + NUM_COLUMNS * len(names)
        self.addresses: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.triton: _triton.Plan | None = None


class Meter:
    """Measures the gradients of `named` parameters with the implementation asked for."""

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], implementation: Implementation = Implementation.AUTO
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._implementation = _choose(implementation, self._parameters)
        self._plans: dict[bytes, _Plan] = {}

    @property
    def implementation(self) -> Implementation:
        """The implementation in use."""
        return self._implementation

    @torch.no_grad()
    def measure(self, loss: Tensor | None = None, *, scale: Tensor | None = None) -> Measurement | None:
        """Measure all gradients; None when no parameter has one. `scale` is the loss scale they were made with."""
        all_grads = [p.grad for p in self._parameters]
        present = bytes([g is not None for g in all_grads])
        grads = [g for g in all_grads if g is not None]
        if not grads:
            return None
        plan = self._plans.get(present)
        if plan is None or plan.device != grads[0].device:
            if len(self._plans) >= MAX_PLANS:  # experts that come and go make new patterns for ever
                self._plans.clear()
            plan = self._plans[present] = self._make_plan(present, grads)
        packed = torch.empty(plan.length, dtype=torch.float64, device=plan.device)
        found = torch.empty((), device=plan.device)
        loss = None if loss is None else loss.detach().to(plan.device)
        inverse = None if scale is None else scale.to(plan.device).double().reciprocal()
        measurement = Measurement(
            packed=packed,
            found=found,
            parameters=[p for p, g in zip(self._parameters, all_grads) if g is not None]
            if len(grads) < len(all_grads)
            else self._parameters,
            gradients=grads,
            names=plan.names,
            numels=plan.numels,
            has_loss=loss is not None,
        )
        if not self._measure_fast(plan, measurement, loss, inverse):
            self._measure_any(plan, measurement, loss, inverse)
        return measurement

    def _make_plan(self, present: bytes, grads: list[Tensor]) -> _Plan:
        names = [name for name, there in zip(self._names, present) if there]
        parameters = [p for p, there in zip(self._parameters, present) if there]
        return _Plan(names, parameters, grads[0].device)

    def _measure_fast(self, plan: _Plan, m: Measurement, loss: Tensor | None, inverse: Tensor | None) -> bool:
        """One CUDA device, dense gradients of the three dtypes: three launches."""
        if self._implementation is not Implementation.TRITON:
            return False
        from steadygrad.measure.kernels import triton

        try:
            addresses = [g.data_ptr() for g in m.gradients]
        except (RuntimeError, NotImplementedError):  # sparse gradients have no one address
            return False
        if addresses != plan.addresses:
            # Layout and dtype are looked at again whenever a gradient has moved.
            plain = all(
                g.device == plan.device
                and g.dtype in triton.TRITON_DTYPES
                and g.layout is torch.strided
                and not _gradients.is_dtensor(g)
                and g.is_contiguous()
                for g in m.gradients
            )
            plan.addresses = addresses
            dtypes = [g.dtype for g in m.gradients] if plain else []
            if dtypes != plan.dtypes:
                plan.dtypes = dtypes
                plan.triton = triton.Plan(m.gradients) if plain else None
        if plan.triton is None:
            return False
        plan.triton.measure(addresses, loss=loss, inverse_scale=inverse, packed=m.packed, found=m.found)
        return True

    def _measure_any(self, plan: _Plan, m: Measurement, loss: Tensor | None, inverse: Tensor | None) -> None:
        """Any mix of devices, dtypes and layouts: a table for each device, gathered on the first one."""
        dense = [_gradients.as_dense(g, name) for g, name in zip(m.gradients, plan.names)]
        table = m.table
        by_device: dict[torch.device, list[int]] = {}
        for i, values in enumerate(dense):
            by_device.setdefault(values.device, []).append(i)
        kernel = reference if self._implementation is Implementation.REFERENCE else foreach
        for device, rows in by_device.items():
            part = torch.empty(len(rows), NUM_COLUMNS, dtype=torch.float64, device=device)
            kernel.measure_table([dense[i] for i in rows], part)
            if len(by_device) == 1:
                table.copy_(part)
            else:
                for row, values in zip(rows, part.to(table.device)):
                    table[row] = values
        for i, (gradient, values) in enumerate(zip(m.gradients, dense)):
            implicit = _gradients.count_implicit_zeros(gradient, values)
            if implicit:
                table[i, NUM_COLUMNS - 1] += implicit
        if inverse is not None:
            table[:, :2] *= inverse
        _summarise(m, loss)


def _summarise(m: Measurement, loss: Tensor | None) -> None:
    """Fill the header and `found` from the rows and the loss."""
    table, packed = m.table, m.packed
    counts = table[:, 2:4].sum(0)
    value = packed.new_ones(()) if loss is None else loss.double()
    bad = (counts[0] > 0) | ~value.isfinite()
    packed[LOSS] = value
    packed[NORM] = torch.linalg.vector_norm(table[:, 0])
    packed[NUM_NONFINITE : NUM_NAN + 1] = counts
    packed[FOUND] = bad
    packed[COEFFICIENT], packed[LOSS_SCALE] = 1.0, 0.0  # until somebody writes them
    m.found.copy_(bad)


def _choose(wanted: Implementation, parameters: Sequence[Tensor]) -> Implementation:
    if wanted is not Implementation.AUTO and wanted is not Implementation.TRITON:
        return wanted
    on_cuda = bool(parameters) and all(p.is_cuda for p in parameters)
    available = importlib.util.find_spec("triton") is not None
    if wanted is Implementation.TRITON and not (on_cuda and available):
        raise ConfigError(
            "MeasureConfig.implementation is 'triton', but "
            + ("the parameters are not on CUDA. " if available else "Triton is not installed. ")
            + "Use 'auto', which takes Triton where it can be used."
        )
    return Implementation.TRITON if on_cuda and available else Implementation.FOREACH
