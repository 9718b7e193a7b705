"""Losses: what each backward since the last step began from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

LOSS = "_steadygrad_loss"
"""Attribute under which a scaled loss keeps the unscaled one."""


@dataclass(slots=True)
class Loss:
    """The loss that a backward started from."""

    value: Tensor
    is_scaled: bool
    """Whether it carries the loss scale, if there is one."""
    left_nan: bool = False
    """Whether it was not finite, and its backward left NaN in the gradients; False where that was not checked."""


class Losses:
    """The losses of one step; several optimizers may step after one backward."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []
        self._is_spent = False

    def note(self, loss: Tensor) -> None:
        """Note a loss whose backward is about to run; the first one after a step begins the next."""
        if self._is_spent:
            self._losses, self._is_spent = [], False
        true_loss = vars(loss).get(LOSS)
        # Detached: the graph must not live until the optimizer steps. Shares memory, so nothing is copied.
        value = loss.detach() if true_loss is None else true_loss
        value = value.reshape(()) if value.dim() else value
        self._losses.append(Loss(value, is_scaled=true_loss is None))

    @property
    def newest(self) -> Loss:
        """The loss whose backward began last."""
        return self._losses[-1]

    def forget(self) -> None:
        """The script has cleared the gradients of these losses without a step: it dropped them itself."""
        self._losses = []

    def spend(self) -> None:
        """An optimizer has stepped."""
        self._is_spent = True

    @property
    def are_open(self) -> bool:
        """Whether there are losses that no optimizer has stepped on yet."""
        return bool(self._losses) and not self._is_spent

    def list(self) -> Sequence[Loss]:
        """Return them in order."""
        return self._losses
