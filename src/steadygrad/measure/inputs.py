"""The batch of a training step -> an InputScan: statistics of its tensors, however they are nested.

Each tensor becomes six numbers on its own device, sent with one asynchronous copy, so a scan waits for nothing on
CUDA; it reads the batch a few times, which is cheap enough every N steps and on incidents. What cannot be read is left
out, and no failure here reaches the training. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts import InputScan, InputStats
from steadygrad.measure.rows import PendingRows, is_readable, send_rows, split_flat
from steadygrad.measure.transfer import Transfer
from steadygrad.state.tree import find_tensors

MAX_TENSORS = 32
"""Most tensors of a batch to scan."""
IGNORE_INDEX = -100
"""Label that torch's losses ignore by default."""
NUM_COLUMNS = 6
"""Numbers of a tensor: elements that are not finite, 0, 1, `IGNORE_INDEX`; the least and the largest."""
LOW, HIGH = 4, 5
PLAIN_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class PendingScan:
    """A scan of a batch whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, shapes: Mapping[str, tuple[int, bool]]) -> None:
        self._rows, self._shapes = rows, shapes

    def read(self, step: int) -> InputScan:
        """Return the numbers as a scan of the batch of `step`."""
        rows = self._rows.read()
        tensors = {path: _describe(*shape, rows[path]) for path, shape in self._shapes.items()}
        return InputScan(step=step, tensors=tensors)


def scan_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, transfer: Transfer | None = None
) -> PendingScan:
    """Scan the tensors in the arguments of a training step.

    A single positional argument is the batch, and paths start inside it; else they start with the argument's position
    or keyword.

    >>> scan_inputs([{"x": torch.tensor([1.0, float("nan")])}]).read(0).tensors["x"].num_nonfinite
    1
    """
    rows: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, bool]] = {}
    try:
        for path, tensor in find_tensors(args, kwargs or {}):
            if len(rows) == MAX_TENSORS:
                break
            if path not in rows and is_readable(tensor):
                rows[path] = _measure(tensor)
                shapes[path] = (tensor.numel(), tensor.is_floating_point() or tensor.is_complex())
        return PendingScan(send_rows(rows, transfer), shapes)
    except Exception:  # a custom batch type, or no memory: measuring must never end the training
        return PendingScan(PendingRows(), {})


@torch.no_grad()
def _measure(tensor: Tensor) -> Tensor:
    """Return float64 [6] on the tensor's device: the columns below."""
    if not tensor.numel():
        return torch.zeros(NUM_COLUMNS, dtype=torch.float64, device=tensor.device)
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    measure = _measure_floats if is_floating else _measure_integers
    pieces = [measure(piece) for piece in split_flat(tensor)]
    if len(pieces) == 1:
        return pieces[0]
    table = torch.stack(pieces)  # [pieces, 6]
    return torch.cat([table[:, :LOW].sum(0), table[:, LOW].amin(0, keepdim=True), table[:, HIGH].amax(0, keepdim=True)])


def _measure_floats(x: Tensor) -> Tensor:
    x = x if x.dtype in PLAIN_FLOATS else x.float()  # float8 has few operators
    finite = x.isfinite()
    counts = torch.stack([~finite, x == 0, x == 1, torch.zeros_like(finite)]).sum(1)
    return torch.cat([counts.double(), *_find_range(torch.where(finite, x, 0.0))])


def _measure_integers(x: Tensor) -> Tensor:
    x = x.to(torch.int64)  # unsigned ones have few operators, and uint8 cannot be compared with -100
    zero = x == 0
    counts = torch.stack([torch.zeros_like(zero), zero, x == 1, x == IGNORE_INDEX]).sum(1)
    return torch.cat([counts.double(), *_find_range(x)])


def _find_range(x: Tensor) -> list[Tensor]:
    """Return the least and the largest element. Not the largest of abs(): the smallest integer has none."""
    return [one.double().reshape(1) for one in x.aminmax()]


def _describe(numel: int, is_floating: bool, row: Sequence[float]) -> InputStats:
    nonfinite, zeros, ones, ignored, low, high = row
    return InputStats(
        numel=numel,
        num_nonfinite=int(nonfinite),
        max_abs=max(high, -low),
        num_zeros=int(zeros),
        num_ignored=int(ignored),
        is_floating=is_floating,
        is_binary=0 < numel == int(zeros + ones),
    )
