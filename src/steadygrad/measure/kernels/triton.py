"""The gradient statistics on CUDA: one launch over a table of gradient addresses for all tensors of a dtype.

Each program reads one chunk of one tensor once, in three cheap operations an element, and writes partial sums; a
second launch folds a tensor's partials in fixed order, in float64, into its row, and its last program the rows into the
step's header. No float atomics, so the norm, and with it the clip coefficient, is the same in every run and on every
rank. A chunk whose sum is not ordinary (NaN, Inf, or squares that over- or underflow fp32) is read once more with
scaling and exact counts: healthy chunks never pay for that.

Floor: the gradients' bytes over the memory bandwidth. Works on the CPU under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.facts import NUM_COLUMNS

NUM_PARTIALS = 6  # sum of squares, exponent of its scale, max_abs, nonfinite, nan, zeros
# As in measurement.py. The kernels have it, and the 5 columns of a row, as literals: change all of them together.
HEADER = 8
UNROLL = 4
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _measure_chunks(
    addresses, numels, chunk_tensor, chunk_index, partials, first, num_chunks,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """partials[:, c] = (sum (x*2^s)^2, s, max|x|, #nonfinite, #nan, #zero) over chunk c, finite x only."""
    c = tl.program_id(0) + first
    t = tl.load(chunk_tensor + c)
    start = tl.load(chunk_index + c).to(tl.int64) * CHUNK  # int64: a tensor may have more than 2^31 elements
    count = tl.minimum(tl.load(numels + t) - start, CHUNK).to(tl.int32)
    base = tl.load(addresses + t).to(tl.pointer_type(DTYPE)) + start
    lanes = tl.arange(0, BLOCK)

    squares = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, CHUNK, BLOCK, loop_unroll_factor=UNROLL):  # four loads in flight: 3.6 -> 4.5 TB/s on an H200
        inside = i + lanes < count
        # Lanes beyond the end read 0, which is neutral for sum and maximum but not for the count of zeros.
        x = tl.load(base + i + lanes, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
        largest = tl.maximum(largest, tl.abs(x))
        zeros += ((x == 0.0) & inside).to(tl.int32)
    total = tl.sum(squares, 0)
    top = tl.max(largest, 0)
    num_zeros = tl.sum(zeros, 0)
    exponent = 0.0
    num_nonfinite = num_zeros * 0
    num_nan = num_zeros * 0

    # Ordinary: no square overflowed, and none that matters underflowed. NaN fails every comparison.
    if ((total < 1e30) & ((total > 1e-30) | (num_zeros == count))) == 0:
        largest = tl.zeros([BLOCK], tl.float32)
        for i in range(0, CHUNK, BLOCK):
            x = tl.load(base + i + lanes, mask=i + lanes < count, other=0.0).to(tl.float32)
            # A comparison that NaN fails, and a select: Inf * 0 would be NaN.
            largest = tl.maximum(largest, tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0))
        top = tl.max(largest, 0)
        # By a power of two, which leaves the mantissas as they are.
        exponent = tl.where(top > 1.0, -100.0, 100.0)
        scale = tl.where(top > 1.0, 7.888609052210118e-31, 1.2676506002282294e30)  # 2^-100, 2^100
        squares = tl.zeros([BLOCK], tl.float32)
        nonfinite = tl.zeros([BLOCK], tl.int32)
        nans = tl.zeros([BLOCK], tl.int32)
        # Between 1e-14 and 1e15 squares need no scaling; a NaN among ordinary values comes here too.
        if (top > 1e-14) & (top < 1e15):
            exponent = 0.0
            scale = 1.0
        for i in range(0, CHUNK, BLOCK):
            inside = i + lanes < count
            x = tl.load(base + i + lanes, mask=inside, other=0.0).to(tl.float32)
            finite = tl.abs(x) < float("inf")
            scaled = tl.where(finite, x, 0.0) * scale
            squares += scaled * scaled
            nonfinite += (inside & (finite == 0)).to(tl.int32)
            nans += (inside & (x != x)).to(tl.int32)
        total = tl.sum(squares, 0)
        num_nonfinite = tl.sum(nonfinite, 0)
        num_nan = tl.sum(nans, 0)

    # [6, num_chunks]; counts are exact in fp32 as long as a chunk has at most 2^24 elements
    tl.store(partials + c, total)
    tl.store(partials + num_chunks + c, exponent)
    tl.store(partials + 2 * num_chunks + c, top)
    tl.store(partials + 3 * num_chunks + c, num_nonfinite.to(tl.float32))
    tl.store(partials + 4 * num_chunks + c, num_nan.to(tl.float32))
    tl.store(partials + 5 * num_chunks + c, num_zeros.to(tl.float32))


@triton.jit
def _fold(
    partials, bounds, inverse_scale, packed, num_chunks, num_tensors, loss, flags, max_norm, counter,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row t of `packed` = (norm, max_abs, nonfinite, nan, zeros) of tensor t; the last program folds the header.

    A tensor's chunks, and then the rows, are summed in fixed order in float64: which program is last changes nothing.
    """
    t = tl.program_id(0)
    low = tl.load(bounds + 2 * t)
    high = tl.load(bounds + 2 * t + 1)
    squares = tl.zeros([WIDTH], tl.float64)
    largest = tl.zeros([WIDTH], tl.float32)
    nonfinite = tl.zeros([WIDTH], tl.float64)
    nans = tl.zeros([WIDTH], tl.float64)
    zeros = tl.zeros([WIDTH], tl.float64)
    for i in range(low, high, WIDTH):
        c = i + tl.arange(0, WIDTH)
        inside = c < high
        exponent = tl.load(partials + num_chunks + c, mask=inside, other=0.0)
        one = tl.full([WIDTH], 1.0, tl.float64)
        scaled = tl.where(exponent < 0.0, one * 1.6069380442589903e60, one * 6.223015277861142e-61)  # 2^200, 2^-200
        unscale = tl.where(exponent == 0.0, one, scaled)
        # In float64: squares of fp32 numbers reach 1e77.
        squares += tl.load(partials + c, mask=inside, other=0.0).to(tl.float64) * unscale
        largest = tl.maximum(largest, tl.load(partials + 2 * num_chunks + c, mask=inside, other=0.0))
        nonfinite += tl.load(partials + 3 * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
        nans += tl.load(partials + 4 * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
        zeros += tl.load(partials + 5 * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
    unscale_loss = tl.load(inverse_scale).to(tl.float64)
    table = packed + 8
    row = table + t * 5
    tl.store(row, tl.sqrt(tl.sum(squares, 0)) * unscale_loss)
    tl.store(row + 1, tl.max(largest, 0).to(tl.float64) * unscale_loss)
    tl.store(row + 2, tl.sum(nonfinite, 0))
    tl.store(row + 3, tl.sum(nans, 0))
    tl.store(row + 4, tl.sum(zeros, 0))
    tl.debug_barrier()
    # Release this row, acquire all others: the program that counts last sees all of them.
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_tensors - 1:
        tl.store(counter, 0)
        _fold_header(table, num_tensors, loss, packed, flags, max_norm, ROWS)


@triton.jit
def _fold_header(table, num_rows, loss, header, flags, max_norm, ROWS: tl.constexpr):
    """header = (loss, norm, #nonfinite, #nan, found, c = min(1, max_norm / (norm + 1e-6)), 0); flags = (found, 1 / c).

    found = 1 when loss or any gradient is not finite. max_norm = 0 means no constant threshold: coefficient 1.
    """
    squares = tl.zeros([ROWS], tl.float64)
    nonfinite = tl.zeros([ROWS], tl.float64)
    nans = tl.zeros([ROWS], tl.float64)
    for i in range(0, num_rows, ROWS):
        t = i + tl.arange(0, ROWS)
        inside = t < num_rows
        norm = tl.load(table + t * 5, mask=inside, other=0.0)
        squares += norm * norm
        nonfinite += tl.load(table + t * 5 + 2, mask=inside, other=0.0)
        nans += tl.load(table + t * 5 + 3, mask=inside, other=0.0)
    value = tl.load(loss).to(tl.float64)
    num_nonfinite = tl.sum(nonfinite, 0)
    # Written so that a NaN loss fails the comparison, and so is bad.
    bad = (num_nonfinite > 0.0) | ((tl.abs(value) < float("inf")) == 0)
    total = tl.sqrt(tl.sum(squares, 0))
    # 1e-6 as in torch's clip_grad_norm_.
    coefficient = tl.where((max_norm > 0.0) & (total + 1e-6 > max_norm), max_norm / (total + 1e-6), 1.0)
    tl.store(header, value)
    tl.store(header + 1, total)
    tl.store(header + 2, num_nonfinite)
    tl.store(header + 3, tl.sum(nans, 0))
    tl.store(header + 4, bad.to(tl.float64))
    tl.store(header + 5, coefficient)
    tl.store(header + 6, 0.0)  # the loss scale, until the caller writes it
    tl.store(flags, bad.to(tl.float32))
    tl.store(flags + 1, (1.0 / coefficient).to(tl.float32))


@triton.jit
def _scale_chunks(
    addresses, numels, chunk_tensor, chunk_index, header, first,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """x *= coefficient, in place; nothing at all when the coefficient is 1 or the step is bad.

    As a division by its reciprocal in fp32, correctly rounded: bit for bit what the fused optimizers make of a
    `grad_scale`, so that it is the same training whichever of the two is taken.
    """
    coefficient = tl.load(header + 5)
    # The same for all programs: in a step that is not clipped no gradient is even read.
    if (coefficient < 1.0) & (tl.load(header + 4) == 0.0):
        c = tl.program_id(0) + first
        t = tl.load(chunk_tensor + c)
        start = tl.load(chunk_index + c).to(tl.int64) * CHUNK
        count = tl.minimum(tl.load(numels + t) - start, CHUNK).to(tl.int32)
        base = tl.load(addresses + t).to(tl.pointer_type(DTYPE)) + start
        # The number in flags[1], which a fused optimizer divides by.
        divisor = (1.0 / coefficient).to(tl.float32)
        for i in tl.range(0, CHUNK, BLOCK, loop_unroll_factor=UNROLL):
            lanes = i + tl.arange(0, BLOCK)
            x = tl.load(base + lanes, mask=lanes < count, other=0.0).to(tl.float32)
            tl.store(base + lanes, tl.div_rn(x, divisor).to(DTYPE), mask=lanes < count)


class Launch:
    """One kernel with its constants. The first launch goes through Triton, which compiles and checks; later ones of the
    same kind go straight to what it compiled: 5 µs of host time instead of 30, three times a step.

    `kind` names what Triton specialises on: dtypes, and whether addresses are multiples of 16. It must be all that can
    change between two launches with the same grid.
    """

    def __init__(self, kernel: Any, *, num_warps: int = 4, **constants: Any) -> None:
        self._kernel, self._constants, self._num_warps = kernel, constants, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], kind: Hashable, *arguments: Any) -> None:
        """Launch `grid` programs."""
        compiled = self._compiled.get((grid, kind))
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **self._constants, num_warps=self._num_warps)
            self._compiled[grid, kind] = None if compiled is None else compiled[grid]  # None: the interpreter
        else:
            compiled(*arguments, *self._constants.values())


class AddressTable:
    """Gradient addresses on the device; sent only when they change, through a ring so that no copy in flight is hit."""

    SLOTS = 4

    def __init__(self, length: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = [
            torch.empty(length, dtype=torch.int64, pin_memory=pinned, device="cpu") for _ in range(self.SLOTS)
        ]
        self._device = [torch.empty(length, dtype=torch.int64, device=device) for _ in range(self.SLOTS)]
        self._sent: list[torch.cuda.Event | None] = [None] * self.SLOTS
        self._slot = -1
        self._current: list[int] = []

    def send(self, addresses: list[int]) -> Tensor:
        """Return the device tensor that holds `addresses`."""
        if addresses is self._current or addresses == self._current:
            return self._device[self._slot]
        self._slot = (self._slot + 1) % self.SLOTS
        event = self._sent[self._slot]
        if event is not None:
            event.synchronize()  # four changes ago: long done
        # Pinned, and read by the copy below while the host goes on: the event above protects it.
        self._host[self._slot].copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self._device[self._slot].copy_(self._host[self._slot], non_blocking=True)
        if self._device[self._slot].is_cuda:
            event = self._sent[self._slot] = event or torch.cuda.Event()
            event.record()
        # Kept and not copied: callers make a new list when an address changes, and never write into an old one.
        self._current = addresses
        return self._device[self._slot]


class Chunks:
    """How a list of tensors (sizes and dtypes fixed, addresses free) is cut into chunks, those of one dtype together.

    `spans` are (dtypes, first chunk, number of chunks): one launch each. The tables are on the device.
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[Any], device: torch.device, chunk: int) -> None:
        self.size = chunk
        spans: list[tuple[Any, int, int]] = []
        tensors: list[int] = []
        indices: list[int] = []
        bounds = [(0, 0)] * len(numels)  # chunks are ordered by dtype, not by tensor: each has its own [first, last)
        for i in sorted(range(len(numels)), key=lambda i: str(dtypes[i])):
            num, first = -(-numels[i] // chunk), len(tensors)
            # [num_chunks]: the tensor of each chunk, and its place in that tensor
            tensors += [i] * num
            indices += range(num)
            bounds[i] = (first, len(tensors))
            if spans and spans[-1][0] == dtypes[i]:
                spans[-1] = (dtypes[i], spans[-1][1], spans[-1][2] + num)
            else:
                spans.append((dtypes[i], first, num))
        self.spans = [span for span in spans if span[2]]
        self.num, self.num_tensors = len(tensors), len(numels)
        self.tensors = _send(tensors, torch.int32, device)
        self.indices = _send(indices, torch.int32, device)
        self.bounds = _send(bounds, torch.int32, device)
        self.numels = _send(numels, torch.int64, device)


def _send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values on the device without waiting for it."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    # The pinned tensor may be dropped at once: torch's host allocator keeps its memory until the copy is done.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Plan:
    """Measures one list of gradients, step after step."""

    def __init__(
        self,
        gradients: Sequence[Tensor],
        *,
        chunk: int = 65536,
        block: int = 1024,
        width: int = 128,
        num_warps: int = 8,
    ) -> None:
        device = gradients[0].device
        dtypes = [TRITON_DTYPES[g.dtype] for g in gradients]
        self._chunks = Chunks([g.numel() for g in gradients], dtypes, device, chunk)
        self.chunk, self.spans = chunk, self._chunks.spans
        self.num_chunks, self.num_tensors = self._chunks.num, self._chunks.num_tensors
        self._chunk_tensor, self._chunk_index = self._chunks.tensors, self._chunks.indices
        self._bounds, self._numels = self._chunks.bounds, self._chunks.numels
        # Used again each step: kernels on one stream run in order, so no step reads the partials of another.
        self._partials = torch.empty(NUM_PARTIALS * max(1, self.num_chunks), dtype=torch.float32, device=device)
        self._addresses = AddressTable(len(gradients), device)
        self._one = torch.ones((), device=device)
        self._counter = torch.zeros((), dtype=torch.int32, device=device)  # finished programs; reset to 0 each time
        sizes = {"CHUNK": chunk, "BLOCK": block, "UNROLL": UNROLL, "num_warps": num_warps}
        self._measure = [Launch(_measure_chunks, DTYPE=dtype, **sizes) for dtype, _, _ in self.spans]
        self._scale = [Launch(_scale_chunks, DTYPE=dtype, **sizes) for dtype, _, _ in self.spans]
        self._fold = Launch(_fold, WIDTH=width, ROWS=512)

    def measure(
        self,
        addresses: list[int],
        *,
        loss: Tensor | None,
        inverse_scale: Tensor | None,
        packed: Tensor,
        flags: Tensor,
        max_norm: float = 0.0,
    ) -> None:
        """Fill `packed` (header, then rows) and `flags` from the gradients at `addresses`."""
        at = self._addresses.send(addresses)
        for launch, (_, first, num) in zip(self._measure, self.spans):
            launch(
                (num, 1, 1), None,
                at, self._numels, self._chunk_tensor, self._chunk_index, self._partials, first, self.num_chunks,
            )  # fmt: skip
        loss = self._one if loss is None else loss
        unscale = self._one if inverse_scale is None else inverse_scale
        self._fold(
            (self.num_tensors, 1, 1), (loss.dtype, loss.data_ptr() % 16, unscale.dtype, unscale.data_ptr() % 16),
            self._partials, self._bounds, unscale, packed, self.num_chunks, self.num_tensors, loss, flags,
            # A float: Triton compiles an integer argument of 1 into the kernel, and Launch would then keep that.
            float(max_norm), self._counter,
        )  # fmt: skip

    def scale(self, addresses: list[int], packed: Tensor) -> None:
        """Multiply the gradients by the coefficient in `packed`'s header; costs one empty launch when that is 1."""
        at = self._addresses.send(addresses)
        for launch, (_, first, num) in zip(self._scale, self.spans):
            launch(
                (num, 1, 1), None, at, self._numels, self._chunk_tensor, self._chunk_index, packed, first
            )  # fmt: skip


def compile_for(tensors: Sequence[Tensor]) -> None:
    """Compile or load the kernels for gradients like these, which are read and not changed."""
    device, addresses = tensors[0].device, [tensor.data_ptr() for tensor in tensors]
    plan = Plan(tensors)
    # A bad step with a coefficient of 1: `scale` has two reasons to write nothing.
    packed = torch.ones(HEADER + NUM_COLUMNS * len(tensors), dtype=torch.float64, device=device)
    plan.scale(addresses, packed)
    plan.measure(addresses, loss=None, inverse_scale=None, packed=packed, flags=torch.empty(2, device=device))


def measure_table(gradients: Sequence[Tensor], out: Tensor, **sizes: int) -> None:
    """Write the table of `gradients` into `out` [N, 5] float64, as the reference does; for tests and single calls."""
    assert out.shape == (len(gradients), NUM_COLUMNS) and out.dtype == torch.float64
    if not gradients:
        return
    packed = torch.empty(HEADER + out.numel(), dtype=torch.float64, device=out.device)
    flags = torch.empty(2, device=out.device)
    plan = Plan(gradients, **sizes)
    plan.measure([g.data_ptr() for g in gradients], loss=None, inverse_scale=None, packed=packed, flags=flags)
    out.copy_(packed[HEADER:].view_as(out))
