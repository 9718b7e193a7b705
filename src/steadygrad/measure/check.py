"""`check_nan_inf`: one tensor -> is there a NaN or an Inf in it? For people who want the piece, not the guard."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger("steadygrad")


def check_nan_inf(tensor: Tensor, name: str = "tensor") -> bool:
    """Whether `tensor` holds a NaN or an Inf; if so a warning names it. One host read.

    >>> check_nan_inf(torch.tensor([1.0, 2.0]))
    False
    """
    values = tensor.detach()
    if not (values.is_floating_point() or values.is_complex()):
        return False
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    num_nan, num_nonfinite = torch.stack([values.isnan().sum(), (~values.isfinite()).sum()]).tolist()
    if num_nan:
        logger.warning("NaN detected in %s", name)
    elif num_nonfinite:
        logger.warning("Inf detected in %s", name)
    return bool(num_nonfinite)
