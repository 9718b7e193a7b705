"""What the program could do to its gradients between backward and step, and whether it did.

A clip of its own between the two can make finite gradients NaN, and no replay of the loss shows that. One gradient
represents all: an edit in place shows in its version, a new tensor in its identity. Reads two integers, and keeps no
gradient alive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from torch import Tensor


class GradientAccess(enum.Enum):
    """What is known about the time between the last backward and the step."""

    NONE = enum.auto()
    """Both were one call: only hooks could change the gradients."""
    POSSIBLE = enum.auto()
    """The program had the gradients to itself."""
    CHANGED = enum.auto()
    """The program changed them."""


Signature = tuple[int, int]


def sign_gradients(named: Sequence[tuple[str, Tensor]]) -> Signature | None:
    """Return identity and version of the first gradient; None if there is none."""
    for _, parameter in named:
        gradient = parameter.grad
        if gradient is not None:
            # torch keeps the Python object of a tensor as long as the tensor: an identity is not used again before.
            return id(gradient), gradient._version
    return None


def hold_nan(parameters: Iterable[Tensor]) -> bool:
    """Return whether a gradient holds a NaN. Reads them one by one: for after a bad loss only."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Of a sparse one the stored values: a sparse tensor has no `any`.
    return any(bool((g._values() if g.is_sparse else g).isnan().any()) for g in gradients)
