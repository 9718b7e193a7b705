"""Tensors -> how many elements of which are not finite; and the same tensors with these replaced.

One pass over memory clears the good tensors: no sum with a NaN or an Inf in it is finite. Only the others are counted.
On a device all passes are queued before the one host read. Never changes its input.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

# at::internal::GRAIN_SIZE
SERIAL = 1 << 15
"""Elements that torch still gives to one thread."""


@torch.no_grad()
def count_nonfinite(tensors: Mapping[str, Tensor], *, may_be: Container[str] = ()) -> dict[str, int]:
    """Return name -> number of NaNs and Infs, for tensors that have any; those named in `may_be` are not looked at."""
    looked = {
        name: values
        for name, tensor in tensors.items()
        if name not in may_be and (values := _values_of(tensor)) is not None
    }
    groups: dict[torch.device, list[str]] = {}
    for name, values in looked.items():
        groups.setdefault(values.device, []).append(name)
    bad: set[str] = set()
    for device, names in groups.items():
        pieces = [(name, piece) for name in names for piece in _cut(_as_looked_at(looked[name]), device)]
        sums = torch.stack([piece.sum(dtype=_wide(piece)).double() for _, piece in pieces])
        bad |= {name for (name, _), is_finite in zip(pieces, sums.isfinite().tolist()) if not is_finite}
    counts = {name: int((~looked[name].isfinite()).sum()) for name in looked if name in bad}
    return {name: count for name, count in counts.items() if count}  # a sum may overflow where no element is bad


@torch.no_grad()
def replace_nonfinite(tensor: Tensor, value: float) -> Tensor:
    """Return a copy with every NaN and Inf replaced by `value`."""
    made = tensor.detach().clone()
    values = made._values() if made.layout is torch.sparse_coo else made
    values.masked_fill_(~values.isfinite(), value)
    return made


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return the elements to look at; None when there is none that could be bad."""
    if tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.layout is torch.sparse_coo:
        values = tensor._values()
        return values if values.numel() else None
    return tensor.detach() if tensor.layout is torch.strided else None


def _cut(values: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """On the CPU in pieces that one thread reads: more threads would wait for those that load the data."""
    return values.reshape(-1).split(SERIAL) if device.type == "cpu" else (values,)


def _wide(piece: Tensor) -> torch.dtype:
    """A sum of many half-precision numbers overflows in half precision."""
    return torch.float64 if piece.dtype is torch.float64 else torch.float32


def _as_looked_at(values: Tensor) -> Tensor:
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    return values.float() if values.element_size() == 1 else values  # float8 has few operators
