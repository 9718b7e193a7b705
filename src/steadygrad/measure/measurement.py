"""Measurement: one step's numbers on the device, and the Reading made of them once they are on the host.

The packed vector is a header (loss, global norm, counts, bad-step flag, clip coefficient, loss scale) and a row of
`GradientStats` for each parameter that has a gradient. `Plan` keeps what stays the same from step to step.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steadygrad.facts import NUM_COLUMNS, GradientTable, Reading
from steadygrad.measure import gradients as _gradients
from steadygrad.measure.kernels.foreach import EndToEnd
from steadygrad.measure.transfer import Transfer
from steadygrad.state.shards import is_sharded, take_local

if TYPE_CHECKING:
    from steadygrad.measure.kernels import triton as _triton

LOSS, NORM, NUM_NONFINITE, NUM_NAN, FOUND, COEFFICIENT, LOSS_SCALE = range(7)
HEADER = 8
"""Numbers before the rows: those seven, and one that keeps the rows aligned."""
MOST_TOGETHER = 1 << 18
"""Elements of all gradients that the host measures at once: so small that a call costs more than its work."""


KIND = operator.attrgetter("__class__", "dtype", "is_cpu", "layout", "requires_grad", "shape")
"""Reads what decides how a gradient can be measured; in one call, because it is read of each at every step."""


def split_by_size(numels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the positions of the smallest gradients, as many as are measured together, and those of the others."""
    ordered = sorted(range(len(numels)), key=numels.__getitem__)
    sums = itertools.accumulate(numels[i] for i in ordered)
    num = sum(total <= MOST_TOGETHER for total in sums)
    return sorted(ordered[:num]), sorted(ordered[num:])


class Plan:
    """What stays the same while the same parameters have gradients of the same kind."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], device: torch.device) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        self.numels = tuple(_gradients.numel(p) for p in parameters)
        self.sizes: list[int] = []
        """Numbers of elements of the gradients; that of a part where `numels` counts the whole."""
        self.device = device
        self.length = HEADER + NUM_COLUMNS * len(self.names)
        self.addresses: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.kinds: list[object] = []
        """Class, dtype, device and layout of each gradient that the kernels read."""
        self.is_single_precision = True
        """Whether every gradient is fp32: then scaling before or inside an optimizer's kernel gives the same bits."""
        self.triton: _triton.Plan | None = None
        self.absent: list[tuple[str, Tensor]] = []
        self.is_sharded = any(map(_gradients.is_dtensor, parameters))
        self.shapes = [p.shape for p in parameters]
        self.host_kinds = [(Tensor, torch.float32, True, torch.strided, False, shape) for shape in self.shapes]
        """What `KIND` reads of gradients that the host can measure the short way."""
        # all(): for an empty slice numpy's reduceat returns an element of the next one.
        self.is_short = len(self.numels) > 0 and all(self.numels) and not any(map(is_sharded, parameters))
        """Whether there is a short way: small gradients all at once, large ones one by one."""
        self.together, self.apart = split_by_size(self.numels)
        """Positions of the small gradients, and of the large ones."""
        self.end_to_end: EndToEnd | None = None
        """Where the small ones are measured, once they have been."""

    def find_missing(self) -> tuple[tuple[str, ...], float]:
        """Return the trainable parameters without a gradient, and their share of the elements; free if none."""
        if not self.absent:
            return (), 0.0
        missing = [(name, _gradients.numel(p)) for name, p in self.absent if p.requires_grad]
        if not missing:
            return (), 0.0
        num_missing = sum(count for _, count in missing)
        return tuple(name for name, _ in missing), num_missing / max(1, num_missing + sum(self.numels))


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What the host knows about a step whose numbers are still on the device."""

    step: int
    learning_rates: tuple[float, ...] = ()
    num_microbatches: int = 1
    num_dropped_microbatches: int = 0
    stale: tuple[str, ...] = ()
    """Parameters whose gradients were not cleared after the previous step."""
    bad_rates: Mapping[int, float] = field(default_factory=dict)
    """Position of a parameter group -> its learning rate, where that is NaN or Inf."""


class Measurement:
    """One step's numbers, still on the device; of gradients in host memory, plain numbers until a tensor is needed."""

    __slots__ = ("_flags", "_numbers", "_packed", "has_loss", "plan")

    def __init__(
        self,
        *,
        plan: Plan,
        has_loss: bool,
        packed: Tensor | None = None,
        flags: Tensor | None = None,
        numbers: list[float] | None = None,
    ) -> None:
        """Either `packed` and `flags`, or the `numbers` of both on the host: those of `packed`."""
        self.plan, self.has_loss = plan, has_loss
        self._packed, self._flags, self._numbers = packed, flags, numbers

    @property
    def packed(self) -> Tensor:
        """Header, then the rows: float64 [HEADER + 5 N]; after them the values exchanged between ranks."""
        if self._packed is None:
            self._packed = torch.tensor(self._numbers, dtype=torch.float64, device="cpu")
            self._numbers = None  # the caller may write into the tensor
        return self._packed

    @packed.setter
    def packed(self, packed: Tensor) -> None:
        self._packed, self._numbers = packed, None

    @property
    def flags(self) -> Tensor:
        """Inputs of a fused optimizer: bad step (1 or 0) and 1 / clip coefficient: float32 [2]."""
        if self._flags is None:
            # Numbers in host memory only: on a device the flags come with `packed`, and tolist() would wait.
            numbers = self.packed.tolist() if self._numbers is None else self._numbers
            bad, coefficient = numbers[FOUND], numbers[COEFFICIENT]
            self._flags = torch.tensor(
                [bad, 1.0 / coefficient if coefficient else math.inf], dtype=torch.float32, device="cpu"
            )
        return self._flags

    def take_to_host(self, transfer: Transfer) -> Sequence[float]:
        """Return the numbers of `packed` on the host; waits for the device if they are there."""
        return transfer.send(self.packed).wait() if self._numbers is None else self._numbers

    @property
    def found(self) -> Tensor:
        """1.0 if loss or gradients are not finite, otherwise 0.0: float32 scalar."""
        return self.flags[0]

    @property
    def norm(self) -> Tensor:
        """Global norm over the finite elements, after unscaling: float64 scalar."""
        return self.packed[NORM]

    @property
    def table(self) -> Tensor:
        """The rows, [N, 5]."""
        # A view: what is written into it is what the host reads.
        return self.packed[HEADER : self.plan.length].view(-1, NUM_COLUMNS)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have a gradient, [N]."""
        return self.plan.names

    @property
    def parameters(self) -> list[Tensor]:
        """The same parameters, [N]."""
        return self.plan.parameters

    @property
    def gradients(self) -> list[Tensor]:
        """Their current gradients, [N]; for a DTensor, this rank's part."""
        gradients = [p.grad for p in self.plan.parameters if p.grad is not None]
        return [take_local(g) for g in gradients] if self.plan.is_sharded else gradients

    def set_coefficient(self, coefficient: Tensor) -> None:
        """Set the clip coefficient of a strategy other than a constant threshold; no host read."""
        self.packed[COEFFICIENT] = coefficient
        self.flags[1] = coefficient.reciprocal()

    def scale_in_place(self) -> bool:
        """Multiply the gradients by the coefficient on the device, for free if it is 1; return False if impossible."""
        if self.plan.triton is None:
            return False
        self.plan.triton.scale(self.plan.addresses, self.packed)
        return True

    def read(
        self,
        numbers: Sequence[float],
        context: StepContext,
        *,
        skipped: bool,
        spoilt_buffers: Mapping[str, int] | None = None,
    ) -> Reading:
        """Return the Reading of `numbers`, which is this packed vector on the host."""
        num_nonfinite, num_nan = int(numbers[NUM_NONFINITE]), int(numbers[NUM_NAN])
        norm, scale = numbers[NORM], numbers[LOSS_SCALE]
        missing, missing_share = self.plan.find_missing()
        return Reading(
            loss=numbers[LOSS] if self.has_loss else None,
            grad_norm=math.nan if num_nan else math.inf if num_nonfinite else norm,
            finite_grad_norm=norm,
            num_nonfinite=num_nonfinite,
            num_nan=num_nan,
            clip_coefficient=numbers[COEFFICIENT],
            loss_scale=scale if scale > 0 else None,
            gradients=GradientTable(self.plan.names, self.plan.numels, numbers[HEADER : self.plan.length]),
            missing=missing,
            missing_share=missing_share,
            step=context.step,
            learning_rates=context.learning_rates,
            num_microbatches=context.num_microbatches,
            num_dropped_microbatches=context.num_dropped_microbatches,
            stale=context.stale,
            bad_rates=context.bad_rates,
            skipped=skipped,
            spoilt_buffers=spoilt_buffers or {},
        )
