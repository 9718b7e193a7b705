"""Which parameters or buffers hold a NaN or an Inf right now? One host read; asked on incidents and by `health()`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from steadygrad.state.shards import take_local


@torch.no_grad()
def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that are not finite everywhere."""
    names: list[str] = []
    flags: list[Tensor] = []
    for name, tensor in named:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            values = take_local(tensor.detach())
            names.append(name)
            flags.append((~values.isfinite()).any())
    if not flags:
        return []
    bad = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, is_bad in zip(names, bad) if is_bad]
