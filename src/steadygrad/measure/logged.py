"""Numbers that the user's program logs beside the loss: `guard.log(text=..., image=...)` -> one copy to the host.

Tensors stay on their device until the step is judged, so logging them costs no wait; values that several microbatches
log under the same name are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.measure.transfer import Ticket, Transfer


@dataclass(slots=True)
class Logged:
    """One step's logged numbers, still being copied to the host."""

    plain: dict[str, float]
    names: Sequence[str]
    ticket: Ticket | None

    def read(self) -> dict[str, float]:
        """Return the numbers by name."""
        if self.ticket is None:
            return self.plain
        return {**self.plain, **dict(zip(self.names, self.ticket.wait()))}


def send_logged(logged: Mapping[str, Sequence[float | Tensor]], transfer: Transfer) -> Logged:
    """Start copying the means of the logged values."""
    on_device = {name: values for name, values in logged.items() if any(_is_elsewhere(v) for v in values)}
    plain = {n: sum(map(float, values)) / len(values) for n, values in logged.items() if n not in on_device}
    if not on_device:
        return Logged(plain, (), None)
    means = [_mean(values) for values in on_device.values()]
    return Logged(plain, tuple(on_device), transfer.send(torch.stack([mean.to(means[0].device) for mean in means])))


def _is_elsewhere(value: float | Tensor) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _mean(values: Sequence[float | Tensor]) -> Tensor:
    device = next(v.device for v in values if isinstance(v, Tensor) and v.device.type != "cpu")
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]).mean()
