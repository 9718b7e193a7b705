"""A parameter's `.grad` -> a dense real tensor that the kernels can read, or an error that names the parameter.

Statistics do not depend on the order of elements, so any gap-free layout is read in memory order. Sparse gradients are
measured by their coalesced values (coalescing waits for the device), complex ones as pairs of reals. Reads only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad.errors import UnsupportedError
from steadygrad.state.shards import finish_sum, take_local
from steadygrad.state.shards import is_dtensor as is_dtensor

MEASURABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_dense(gradient: Tensor, name: str, *, sharded: bool = False) -> Tensor:
    """Return the elements of `gradient` as a dense real tensor, sharing memory wherever possible.

    With `sharded`, return this rank's part of a DTensor; the caller combines the numbers of the ranks.
    """
    if is_dtensor(gradient) and not (sharded and hasattr(gradient, "_local_tensor")):
        raise UnsupportedError(
            f"the gradient of {name!r} is a DTensor (FSDP2 or tensor parallelism), whose shards need a norm "
            "across ranks. Use a Guard, wrap the model with DistributedDataParallel, or train it unsharded."
        )
    # A collective where tensor parallelism left a pending sum: all ranks measure at the same point.
    values = take_local(finish_sum(gradient)).detach()
    if values.layout is not torch.strided:
        values = _sparse_values(values, name)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in MEASURABLE:
        raise UnsupportedError(
            f"the gradient of {name!r} has dtype {values.dtype}, which cannot be measured. "
            "Keep that parameter in float32, bfloat16, float16 or float64, or leave it out of the optimizer."
        )
    return values if _is_gap_free(values) else values.contiguous()


def count_implicit_zeros(gradient: Tensor, dense: Tensor) -> int:
    """Return the number of zeros that a sparse gradient does not store."""
    if gradient.layout is torch.strided:
        return 0
    return numel(gradient) - dense.numel()


def numel(tensor: Tensor) -> int:
    """Return the number of real numbers in `tensor`: a complex element counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _sparse_values(gradient: Tensor, name: str) -> Tensor:
    if gradient.layout is torch.sparse_coo:
        return gradient.coalesce().values()
    if gradient.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return gradient.values()
    raise UnsupportedError(
        f"the gradient of {name!r} has layout {gradient.layout}, which cannot be measured. "
        "Use a strided or sparse COO gradient (sparse=False in nn.Embedding)."
    )


def _is_gap_free(values: Tensor) -> bool:
    if values.is_contiguous():
        return True
    if values.dim() == 4:
        return values.is_contiguous(memory_format=torch.channels_last)
    return values.dim() == 2 and values.t().is_contiguous()
