"""What a replay left behind -> Symptoms: the loss, the gradients and the states that are not finite, and a fingerprint.

The fingerprint is a sum of the bits of loss and gradients as integers: exact, in any order, so two replays that are
equal bit for bit have the same one, and two that differ almost never have. Reads only; waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steadygrad.diagnose.ranges import Range, RangeTable
from steadygrad.diagnose.replay import Run
from steadygrad.measure.rows import is_readable

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What is not finite after one replay."""

    loss: Range | None = None
    """Range of a loss that is not finite."""
    gradients: dict[str, Range]
    """Name -> range, of those that are not finite."""
    states: dict[str, Range]
    """Parameters and buffers that were finite before and are not any more."""
    fingerprint: tuple[int, ...]
    error: BaseException | None = None

    @property
    def hurts(self) -> bool:
        """Whether anything is wrong."""
        return self.loss is not None or bool(self.gradients) or bool(self.states) or self.error is not None

    @property
    def kind(self) -> str:
        """'nan' when there is one, else 'inf'; 'error' when the step raised without either."""
        ranges = [*self.gradients.values(), *self.states.values(), *([self.loss] if self.loss else [])]
        if not ranges:
            return "error"
        return "nan" if any(one.has_nan for one in ranges) else "inf"


def find_symptoms(run: Run, model: nn.Module | None) -> Symptoms:
    """Look at everything that `run` left."""
    table = RangeTable()
    loss = None if run.loss is None else table.add(run.loss)
    gradients = {name: table.add(grad) for name, grad in run.grads.items()}
    states = {
        name: (table.add(now), table.add(before))
        for name, now in name_states(model)
        # Only what the replay changed; all others are as they were before it.
        if (before := run.keeper.find_copy(now)) is not None
    }
    bits = [sum_bits(tensor) for tensor in ([] if run.loss is None else [run.loss]) + [*run.grads.values()]]
    table.read()
    return Symptoms(
        loss=table[loss] if loss is not None and table[loss].is_nonfinite else None,
        gradients={name: table[slot] for name, slot in gradients.items() if table[slot].is_nonfinite},
        states={name: table[now] for name, (now, before) in states.items() if _got_worse(table[now], table[before])},
        fingerprint=tuple(torch.stack([bit.cpu() for bit in bits]).tolist()) if bits else (),
        error=run.error,
    )


def name_states(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers, by name."""
    return [] if model is None else [*model.named_parameters(), *model.named_buffers()]


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the bits of all elements as integers, summed: int64, on the tensor's device."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce()._values()
    if not is_readable(values):
        return torch.zeros((), dtype=torch.int64, device="cpu")
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    # Integers wrap around in a sum and lose nothing, so the order of a parallel reduction does not matter.
    return values.contiguous().view(INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def _got_worse(now: Range, before: Range) -> bool:
    return (now.has_nan and not before.has_nan) or (now.is_nonfinite and not before.is_nonfinite)
