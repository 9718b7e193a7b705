"""The circumstances of a script's step: its losses and their scale, and whether other ranks take it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.adapters.scripts.losses import Loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The circumstances of a step about to be taken, as far as they can be known from a script."""

    losses: Sequence[Loss] = ()
    """The loss of each backward since the last step."""
    loss_counts: bool = True
    """Whether a bad loss alone makes the step bad."""
    carried_scale: Tensor | None = None
    """The loss scale that the gradients still carry."""
    loss_scale: Tensor | None = None
    """The current loss scale."""
    has_many_ranks: bool = False
    """Whether other ranks train too, which must skip the same steps."""

    def are_cleaned(self) -> bool:
        """Return whether each bad loss has left NaN in the gradients, so that finite ones were cleaned by the script.

        Clips and divisions change gradients too, but they keep a NaN. Reads the losses: call it after a bad one only.
        """
        # The bad loss may be another rank's, and all must come to the same verdict.
        return not self.has_many_ranks and all(loss.left_nan or bool(loss.value.isfinite()) for loss in self.losses)

    def add_up_losses(self) -> Tensor | None:
        """Return the loss of the step, without its scale, on the device where it was computed."""
        if not self.losses:
            return None
        last = self.losses[-1].value
        if len(self.losses) == 1 and self.loss_scale is None:
            return last.float()
        device = last.device
        scale = 1.0 if self.loss_scale is None else self.loss_scale.to(device)
        values = [(loss.value.to(device).float(), loss.is_scaled) for loss in self.losses]
        # On the device, without a host read; float32, since the sum of fp16 losses may overflow where they do not.
        return torch.stack([value / scale if is_scaled else value for value, is_scaled in values]).sum()
