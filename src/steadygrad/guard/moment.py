"""Moment: the current position of a training. Every stage reads it; steps are counted only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from steadygrad.act.microbatches import Accumulated
from steadygrad.errors import UsageError
from steadygrad.measure.loss import read_number
from steadygrad.measure.periodic_scans import Looks


# weakref_slot: the thread that watches the ranks reads the step through a weak reference.
@dataclass(slots=True, weakref_slot=True)
class Moment:
    """The current step and epoch, and what the step under way has gathered so far."""

    next_step: int = 0
    epoch: int = 0
    batches: Accumulated = field(default_factory=Accumulated)
    looks: Looks = field(default_factory=Looks)
    logged: dict[str, list[float | Tensor]] = field(default_factory=dict)
    """Values passed to `guard.log`, by name, one for each microbatch that logged one."""
    num_skipped_batches: int = 0
    """Batches that `guard.batches` left out after a rollback."""
    validation_loss: float | None = None
    """The newest finite loss passed to `guard.validate`, before step `validated_at`."""
    validated_at: int | None = None
    is_driven: bool = False
    """Whether a framework runs backward and clears the gradients."""

    @property
    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return max(0, self.next_step - 1)

    def take_step_number(self) -> int:
        """Return the number of the step being made and advance the counter."""
        self.next_step += 1
        return self.next_step - 1

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Keep numbers that the program logs beside the loss."""
        for name, number in numbers.items():
            value = number.detach() if isinstance(number, Tensor) else read_number(number, f"guard.log({name}=...)")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(
                    f"guard.log got {name} of shape {tuple(value.shape)}. Give one number: {name}.mean() for example."
                )
            self.logged.setdefault(name, []).append(value.reshape(()) if isinstance(value, Tensor) else value)

    def end_step(self) -> None:
        """Clear what the step has gathered."""
        # Replaced, not cleared: a pending step still reads its Looks.
        self.batches, self.looks, self.is_driven = Accumulated(), Looks(), False
        if self.logged:
            self.logged = {}
