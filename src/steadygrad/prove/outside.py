"""OutsideWeights: which parameters does a step read that belong to another training, and do they change?

A critic, a teacher, a target network: whatever learns from the present weights has moved with them, so their loss says
nothing about earlier ones. A generator's old weights always do better against the critic of today. Parameters that stay
as they are (a frozen reference, a perceptual loss) are fair to both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class OutsideWeights:
    """Remembers the sum of each parameter from outside the training since it was first read by a test."""

    def __init__(self) -> None:
        self._sums: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def have_moved(self, read: Iterable[Tensor], own: Iterable[Tensor]) -> bool:
        """Return whether a parameter in `read`, and not in `own`, differs from what it was at an earlier test."""
        known = {id(parameter) for parameter in own}
        moved = False
        for parameter in read:
            if id(parameter) not in known and _is_there(parameter):
                # By value: averages and target networks are often written through `.data`, which no counter shows.
                total = float(parameter.detach().sum(dtype=_choose_sum(parameter)))
                moved |= self._sums.setdefault(parameter, total) != total
        return moved


def is_outside_candidate(tensor: Tensor) -> bool:
    """Return whether a tensor can be a parameter of another training; sharded ones have types of their own."""
    return type(tensor) is nn.Parameter and tensor.layout is torch.strided


def _is_there(tensor: Tensor) -> bool:
    """Return whether it has memory: FSDP frees that of weights which it gathered for a forward, and reading crashes."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _choose_sum(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float64)
