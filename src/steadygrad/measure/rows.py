"""Named rows of numbers, each on its own device -> the host: one asynchronous copy for each device.

What the scans share. Sending waits for nothing on CUDA; reading waits for these copies alone. A row is a float64
vector of any length. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from steadygrad.measure.gradients import is_dtensor
from steadygrad.measure.transfer import Ticket, Transfer

PIECE = 1 << 23
"""Elements of a tensor that are measured together: bounds temporary memory to a few times 64 MiB."""
PLAIN = (Tensor, nn.Parameter)


class PendingRows:
    """Rows still being copied. `read()` returns them all; calling it again returns the same ones."""

    def __init__(self, parts: Sequence[tuple[Ticket, Sequence[tuple[str, int]]]] = ()) -> None:
        self._parts = parts

    @property
    def ready(self) -> bool:
        """Whether `read()` would return at once."""
        return all(ticket.ready for ticket, _ in self._parts)

    def read(self) -> dict[str, Sequence[float]]:
        """Return name -> its row."""
        rows: dict[str, Sequence[float]] = {}
        for ticket, lengths in self._parts:
            numbers, start = ticket.wait(), 0
            for name, length in lengths:
                rows[name] = numbers[start : start + length]
                start += length
        return rows


def send_rows(rows: Mapping[str, Tensor], transfer: Transfer | None = None) -> PendingRows:
    """Start copying `rows`; the caller's `transfer`, if passed, lends its pinned buffers."""
    by_device: dict[torch.device, list[str]] = {}
    for name, row in rows.items():
        by_device.setdefault(row.device, []).append(name)
    # One slot for each copy: none waits for another.
    transfer = transfer if transfer is not None else Transfer(slots=max(1, len(by_device)))
    parts = []
    for names in by_device.values():
        packed = torch.cat([rows[name] for name in names])
        parts.append((transfer.send(packed), [(name, rows[name].numel()) for name in names]))
    return PendingRows(parts)


def is_readable(tensor: Tensor) -> bool:
    """Return whether `tensor` has plain local elements: not sparse, nested, sharded, quantized, on meta or lazy."""
    return not (
        # A plain type is asked first: a scan asks this of every tensor of a model.
        (type(tensor) not in PLAIN and (nn.parameter.is_lazy(tensor) or is_dtensor(tensor)))
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        # Inside vmap or grad() a tensor is a wrapper without memory of its own.
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def split_flat(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split the elements into pieces of at most PIECE, complex ones as pairs of reals; views if the layout allows."""
    values = tensor.detach()
    if values.is_complex():
        # view_as_real refuses a tensor whose conjugation is pending.
        values = torch.view_as_real(values.resolve_conj())
    return tuple(values.reshape(-1).split(PIECE))
