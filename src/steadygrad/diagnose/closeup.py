"""Closeup: the calls that matter, looked at closely in a second replay -> Operands with ranges and counts.

Calls are known by their number, which is the same in every exact replay; a call that is another op than expected is
left alone. In-place ops are looked at before they change anything. Tensors are read in pieces, so that the masks of a
large one cost little memory. Reads only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadygrad.diagnose.calls import Scalar, Signature, find_scalars, find_tensors, read_signature
from steadygrad.diagnose.situation import Operand
from steadygrad.measure.rows import PIECE, is_readable, split_flat

MAX_OPERANDS = 8
"""Tensors of one call that are looked at: enough for every op but those over lists."""
MAX_ROWS = 1 << 14
"""Rows along the first dimension that are looked at one by one."""


@dataclass(slots=True)
class View:
    """One call, closely."""

    operands: list[Operand] = field(default_factory=list)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    outputs: list[Operand] = field(default_factory=list)
    bad_rows: tuple[int, ...] = ()
    """Rows along the first dimension of the first bad output that hold a NaN or an Inf."""
    num_rows: int = 0
    error: str = ""


class Closeup:
    """An observer that looks at the calls in `targets` (number -> name) and lets all others pass."""

    def __init__(self, targets: Mapping[int, str]) -> None:
        self._targets = dict(targets)
        self._next = 0
        self._lock = threading.Lock()
        self.views: dict[int, View] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the call; look at it if it is one of those."""
        # Backward runs a thread for each device.
        with self._lock:
            number, self._next = self._next, self._next + 1
        if number not in self._targets:
            return func(*args, **kwargs)
        signature = read_signature(func)
        # Threads of several devices interleave differently in each replay: then the number is another call's.
        if signature.name != self._targets[number]:
            return func(*args, **kwargs)
        # Before the call, which may write to its operands.
        view = View(operands=look_at_operands(signature, args, kwargs))
        view.scalars = find_scalars(signature, args, kwargs)
        self.views[number] = view
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            view.error = str(error)
            raise
        look_at_result(view, result)
        return result


def look_at_operands(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Operand]:
    """Return every tensor argument that the call reads."""
    operands: list[Operand] = []
    for argument, value in signature.name_arguments(args, kwargs):
        if not argument.is_out:
            operands += [measure_operand(argument.name, tensor) for tensor in find_tensors(value)]
    return operands[:MAX_OPERANDS]


def look_at_result(view: View, result: Any) -> None:
    """Ranges of the outputs, and the bad rows of the first one that has any."""
    for tensor in list(find_tensors(result))[:MAX_OPERANDS]:
        operand = measure_operand("output", tensor)
        view.outputs.append(operand)
        if (operand.num_nan or operand.num_inf) and not view.num_rows:
            view.bad_rows, view.num_rows = find_bad_rows(tensor), tensor.shape[0] if tensor.dim() else 0


@torch.no_grad()
def find_bad_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return the indices along the first dimension that hold a NaN or an Inf."""
    if tensor.dim() == 0 or not is_readable(tensor) or tensor.shape[0] > MAX_ROWS:
        return ()
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]  # [N, *]
    some = max(1, PIECE // max(1, rows.shape[1]))
    flags = [~piece.isfinite().all(1) for piece in rows.split(some)]
    return tuple(torch.cat(flags).nonzero().flatten().tolist())


@torch.no_grad()
def measure_operand(name: str, tensor: Tensor) -> Operand:
    """Return the numbers of one tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    if not is_readable(values) or values.numel() == 0 or values.dtype is torch.bool:
        return Operand(name=name, dtype=dtype, shape=shape, num_zeros=_count_false(values))
    pieces = torch.stack([_measure_piece(piece) for piece in split_flat(values)])  # [pieces, 7]
    low, high, smallest = pieces[:, 0].amin(), pieces[:, 1].amax(), pieces[:, 2].amin()
    numbers = torch.stack([low, high, smallest, *pieces[:, 3:].sum(0)]).tolist()
    found = numbers[0] <= numbers[1]  # inf and -inf where no element is finite
    return Operand(
        name=name,
        dtype=dtype,
        shape=shape,
        minimum=numbers[0] if found else None,
        maximum=numbers[1] if found else None,
        smallest=numbers[2] if numbers[2] != float("inf") else None,
        num_zeros=int(numbers[3]),
        num_negative=int(numbers[4]),
        num_nan=int(numbers[5]),
        num_inf=int(numbers[6]),
    )


def _count_false(values: Tensor) -> int:
    if values.dtype is not torch.bool or not is_readable(values):
        return 0
    return int(values.numel() - values.sum().item())


def _measure_piece(piece: Tensor) -> Tensor:
    """Return low, high and smallest magnitude of the finite elements, then counts: float64 [7]."""
    x = piece if piece.dtype in (torch.float64, torch.float32) else piece.double()
    finite = x.isfinite()
    infinity = float("inf")
    # Selected, not multiplied by the mask: 0 * NaN is NaN, and one NaN would win every reduction.
    low = torch.where(finite, x, infinity).amin()
    high = torch.where(finite, x, -infinity).amax()
    smallest = torch.where(finite & (x != 0), x.abs(), infinity).amin()
    counts = (x == 0).sum(), (x < 0).sum(), x.isnan().sum(), x.isinf().sum()
    # float64 holds counts exactly up to 2**53; float32 only up to 2**24.
    return torch.stack([number.double() for number in (low, high, smallest, *counts)])
