"""Rules about NaN and Inf in loss and gradients. Stateless: one is enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.facts import Finding, Reading, Severity

SHOWN = 5
"""Parameters named in a message; the rest are counted."""


class NonfiniteLoss:
    """The loss is NaN or Inf: whatever its gradient says means nothing."""

    name = "nonfinite_loss"

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """A Finding when the loss is not finite."""
        if not reading.loss_is_nonfinite:
            return
        yield Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=reading.step,
            message=f"the loss is {reading.loss}",
            advice="Look for log(0), a division by an empty mask, every label ignored, or overflow in half precision.",
            evidence={"loss": str(reading.loss)},
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""


class NonfiniteGradient:
    """A gradient holds a NaN or an Inf. Names the parameters; under a loss scaler an overflow is part of the game."""

    name = "nonfinite_gradient"

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """A Finding when a gradient is not finite."""
        if not reading.num_nonfinite:
            return
        bad = reading.gradients.nonfinite()
        names = list(bad)
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        what = "NaN" if reading.num_nan else "Inf"
        # A dynamic loss scale finds its limit by overflowing: that is how it works, not a defect of the model.
        searching = reading.loss_scale is not None and not reading.loss_is_nonfinite
        yield Finding(
            kind=self.name,
            severity=Severity.INFO if searching else Severity.ERROR,
            step=reading.step,
            message=f"{what} in the gradients of {len(names)} of {len(reading.gradients)} parameters: {shown}",
            advice=f"The loss scale {reading.loss_scale:g} was too high and is lowered."
            if searching
            else "Look for sqrt, norm or division at 0, log of 0, or overflow in half precision.",
            evidence={
                "num_nonfinite": reading.num_nonfinite,
                "num_nan": reading.num_nan,
                "parameters": names[:SHOWN],
                "num_parameters": len(names),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
