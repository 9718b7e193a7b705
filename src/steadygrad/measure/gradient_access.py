"""What the program could do to its gradients between backward and step, and whether it did.

A clip of its own between the two can make finite gradients NaN, and no replay of the loss shows that. One gradient
represents all: an edit in place shows in its version, a new tensor in its identity. Reads two integers, and keeps no
gradient alive.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

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
