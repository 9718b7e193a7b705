"""`check_nan_inf`: one tensor -> does it hold a NaN or an Inf? For use without a guard."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from steadygrad.state.shards import take_local

logger = logging.getLogger("steadygrad")


def check_nan_inf(tensor: Tensor, name: str = "tensor") -> bool:
    """Return whether `tensor` holds a NaN or an Inf; if so, log a warning that names it. One host read.

    >>> check_nan_inf(torch.tensor([1.0, 2.0]))
    False
    """
    values = tensor.detach()
    if not (values.is_floating_point() or values.is_complex()):
        return False
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    # Both counts in one transfer.
    num_nan, num_nonfinite = torch.stack([values.isnan().sum(), (~values.isfinite()).sum()]).tolist()
    if num_nan:
        logger.warning("NaN detected in %s", name)
    elif num_nonfinite:
        logger.warning("Inf detected in %s", name)
    return bool(num_nonfinite)


# --- many tensors -------------------------------------------------------------------------------------------------
# Which parameters or buffers hold a NaN or an Inf right now? One host read; used on incidents and by `health()`.


@torch.no_grad()
def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a non-finite value."""
    names: list[str] = []
    flags: list[Tensor] = []
    for name, tensor in named:
        values = take_local(tensor).detach()
        if (values.is_floating_point() or values.is_complex()) and values.numel():
            names.append(name)
            flags.append((~values.isfinite()).any())
    if not flags:
        return []
    bad = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, is_bad in zip(names, bad) if is_bad]
