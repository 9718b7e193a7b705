"""Scans of weights and of Adam's moments on CUDA: two launches each for all tensors of a dtype, however many.

Each program reads one chunk of one tensor once and writes partial sums; a second launch folds a tensor's partials in
fixed order, in float64. Floor: the bytes read over the memory bandwidth, 0.1 ms for the weights of GPT-2 124M on an
H200 and 0.3 ms for its gradients and second moments. Works on the CPU under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.measure.kernels.looks import MULTIPLIER, NUM_NUMBERS
from steadygrad.measure.kernels.triton import TRITON_DTYPES, UNROLL, AddressTable, Chunks, Launch
from steadygrad.measure.rows import is_readable

BITS = {tl.float32: tl.int32, tl.bfloat16: tl.int16, tl.float16: tl.int16}
CHUNK, BLOCK, WARPS = 65536, 1024, 8


# Not specialised: plans differ in these numbers, and Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["first", "num_chunks"])
def _look_at_chunks(
    addresses, numels, chunk_tensor, chunk_index, sums, hashes, first, num_chunks, MULTIPLIER,
    DTYPE: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[:, c] = (#nonfinite, #nan, sum x^2), hashes[c] = sum of m ^ (m >> 32) with m = bits(x) * MULTIPLIER."""
    c = tl.program_id(0) + first
    t = tl.load(chunk_tensor + c)
    start = tl.load(chunk_index + c).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(numels + t) - start, CHUNK).to(tl.int32)
    # Loaded as integers: the hash needs the bits, and one load serves both.
    base = tl.load(addresses + t).to(tl.pointer_type(BITS)) + start
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    hashed = tl.zeros([BLOCK], tl.int64)
    for i in tl.range(0, CHUNK, BLOCK, loop_unroll_factor=UNROLL):
        bits = tl.load(base + i + lanes, mask=i + lanes < count, other=0)  # 0 is never counted, and hashes to 0
        x = bits.to(DTYPE, bitcast=True).to(tl.float32)
        squares += x * x
        nonfinite += ((tl.abs(x) < float("inf")) == 0).to(tl.int32)
        nans += (x != x).to(tl.int32)
        mixed = bits.to(tl.int64) * MULTIPLIER
        # Wraps around, which is harmless: sums modulo 2^64 do not depend on their order.
        hashed += mixed ^ (mixed >> 32)
    tl.store(sums + c, tl.sum(nonfinite, 0).to(tl.float32))
    tl.store(sums + num_chunks + c, tl.sum(nans, 0).to(tl.float32))
    tl.store(sums + 2 * num_chunks + c, tl.sum(squares, 0))
    tl.store(hashes + c, tl.sum(hashed, 0))


@triton.jit(do_not_specialize=["num_chunks"])
def _fold_looks(sums, hashes, bounds, numbers, hashes_out, num_chunks, WIDTH: tl.constexpr):
    """Row t of `numbers` = (#nonfinite, #nan, norm) of tensor t, and its hash."""
    t = tl.program_id(0)
    low = tl.load(bounds + 2 * t)
    high = tl.load(bounds + 2 * t + 1)
    nonfinite = tl.zeros([WIDTH], tl.float64)
    nans = tl.zeros([WIDTH], tl.float64)
    squares = tl.zeros([WIDTH], tl.float64)
    hashed = tl.zeros([WIDTH], tl.int64)
    for i in range(low, high, WIDTH):
        c = i + tl.arange(0, WIDTH)
        inside = c < high
        nonfinite += tl.load(sums + c, mask=inside, other=0.0).to(tl.float64)
        nans += tl.load(sums + num_chunks + c, mask=inside, other=0.0).to(tl.float64)
        squares += tl.load(sums + 2 * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
        hashed += tl.load(hashes + c, mask=inside, other=0)
    row = numbers + 3 * t
    tl.store(row, tl.sum(nonfinite, 0))
    tl.store(row + 1, tl.sum(nans, 0))
    tl.store(row + 2, tl.sqrt(tl.sum(squares, 0)))
    tl.store(hashes_out + t, tl.sum(hashed, 0))


@triton.jit(do_not_specialize=["first", "num_tensors"])
def _rms_chunks(
    table, numels, chunk_tensor, chunk_index, sums, first, num_tensors,
    GRADIENT: tl.constexpr, MOMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[c] = sum (g / max(sqrt(v) / root, eps))^2 with root^2 = 1 - beta^step; NaN before the first step.

    Column t of `table` holds the addresses of g and v, then as bits of float64 log(beta) and eps, then the step: its
    value as bits of float64 where the host knows it, else 0 and in the last row its address.
    """
    c = tl.program_id(0) + first
    t = tl.load(chunk_tensor + c)
    start = tl.load(chunk_index + c).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(numels + t) - start, CHUNK).to(tl.int32)
    gradient = tl.load(table + t).to(tl.pointer_type(GRADIENT)) + start
    moment = tl.load(table + num_tensors + t).to(tl.pointer_type(MOMENT)) + start
    log_beta = tl.load(table + 2 * num_tensors + t).to(tl.float64, bitcast=True)
    eps = tl.load(table + 3 * num_tensors + t).to(tl.float64, bitcast=True).to(tl.float32)
    known = tl.load(table + 4 * num_tensors + t).to(tl.float64, bitcast=True)
    place = tl.load(table + 5 * num_tensors + t)
    step = known + tl.load(place.to(tl.pointer_type(tl.float32)), mask=place != 0, other=0.0).to(tl.float64)
    root = tl.sqrt(1.0 - tl.exp(step * log_beta)).to(tl.float32)
    inverse = tl.where(step > 0.0, 1.0 / tl.where(step > 0.0, root, 1.0), float("nan"))
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, CHUNK, BLOCK, loop_unroll_factor=UNROLL):
        inside = i + lanes < count
        g = tl.load(gradient + i + lanes, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(moment + i + lanes, mask=inside, other=0.0).to(tl.float32)
        # NaN, of a moment or before the first step, must survive; a plain maximum would return eps.
        ratio = g / tl.maximum(tl.sqrt(v) * inverse, eps, propagate_nan=tl.PropagateNan.ALL)
        # A select: with eps 0, a lane beyond the end is 0 / 0.
        squares += tl.where(inside, ratio * ratio, 0.0)
    tl.store(sums + c, tl.sum(squares, 0))


@triton.jit
def _fold_rms(sums, bounds, numels, rms, WIDTH: tl.constexpr):
    """rms[t] = sqrt(sum of its chunks / its elements)."""
    t = tl.program_id(0)
    low = tl.load(bounds + 2 * t)
    high = tl.load(bounds + 2 * t + 1)
    squares = tl.zeros([WIDTH], tl.float64)
    for i in range(low, high, WIDTH):
        c = i + tl.arange(0, WIDTH)
        squares += tl.load(sums + c, mask=c < high, other=0.0).to(tl.float64)
    tl.store(rms + t, tl.sqrt(tl.sum(squares, 0) / tl.load(numels + t).to(tl.float64)))


class WeightLook:
    """Scans one list of tensors (sizes and dtypes fixed) repeatedly."""

    def __init__(self, tensors: Sequence[Tensor], chunk: int = CHUNK) -> None:
        device = tensors[0].device
        dtypes = [TRITON_DTYPES[t.dtype] for t in tensors]
        self._chunks = chunks = Chunks([t.numel() for t in tensors], dtypes, device, chunk)
        self._addresses = AddressTable(len(tensors), device)
        self._sums = torch.empty(NUM_NUMBERS * max(1, chunks.num), dtype=torch.float32, device=device)
        self._hashes = torch.empty(max(1, chunks.num), dtype=torch.int64, device=device)
        sizes = {"CHUNK": chunk, "BLOCK": min(BLOCK, chunk), "UNROLL": UNROLL, "num_warps": WARPS}
        self._look = [Launch(_look_at_chunks, DTYPE=d, BITS=BITS[d], **sizes) for d, _, _ in chunks.spans]
        self._fold = Launch(_fold_looks, WIDTH=128)

    def look(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return numbers float64 [N, 3] and hashes int64 [N], newly allocated each time."""
        chunks, device = self._chunks, tensors[0].device
        at = self._addresses.send([t.data_ptr() for t in tensors])
        for launch, (_, first, num) in zip(self._look, chunks.spans):
            launch(
                (num, 1, 1), None,
                at, chunks.numels, chunks.tensors, chunks.indices, self._sums, self._hashes, first, chunks.num,
                MULTIPLIER,
            )  # fmt: skip
        numbers = torch.empty((len(tensors), NUM_NUMBERS), dtype=torch.float64, device=device)
        hashes = torch.empty(len(tensors), dtype=torch.int64, device=device)
        self._fold(
            (len(tensors), 1, 1), None, self._sums, self._hashes, chunks.bounds, numbers, hashes, chunks.num
        )  # fmt: skip
        return numbers, hashes


class AdamState(NamedTuple):
    """One tensor's gradient and second moment in an optimizer of Adam's family."""

    gradient: Tensor
    squares: Tensor
    step: Tensor | float
    """On the device as float32, or a number."""
    beta: float
    eps: float

    @property
    def shape(self) -> tuple[Any, ...]:
        """The properties that a plan depends on."""
        return self.gradient.numel(), self.gradient.dtype, self.squares.dtype, self.gradient.device


def read_state(parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> AdamState | None:
    """Return the state of one parameter; None if the kernels cannot read it."""
    gradient, squares, step = parameter.grad, state["exp_avg_sq"], state["step"]
    # Equal strides: both are read in memory order, and an element must meet its own moment.
    if gradient is None or not fits(gradient) or not fits(squares) or gradient.stride() != squares.stride():
        return None
    if squares.device != gradient.device:  # moments that are kept in host memory
        return None
    # In host memory, so this waits for nothing; a step on the device is read by the kernel.
    if isinstance(step, Tensor) and step.device.type == "cpu":
        step = float(step)
    if isinstance(step, Tensor) and (step.dtype is not torch.float32 or step.device != gradient.device):
        return None
    beta, eps = group["betas"][1], group.get("eps", 1e-8)
    # Their values may be on a device, and reading them here would wait.
    if isinstance(beta, Tensor) or isinstance(eps, Tensor):
        return None
    return AdamState(gradient, squares, step, float(beta), float(eps))


class RmsLook:
    """The root mean square of g / sqrt(v) for one list of moments (sizes and dtypes fixed)."""

    def __init__(self, moments: Sequence[AdamState], chunk: int = CHUNK) -> None:
        device = moments[0].gradient.device
        dtypes = [(TRITON_DTYPES[m.gradient.dtype], TRITON_DTYPES[m.squares.dtype]) for m in moments]
        self._chunks = chunks = Chunks([m.gradient.numel() for m in moments], dtypes, device, chunk)
        self._table = AddressTable(6 * len(moments), device)
        self._sums = torch.empty(max(1, chunks.num), dtype=torch.float32, device=device)
        sizes = {"CHUNK": chunk, "BLOCK": min(BLOCK, chunk), "UNROLL": UNROLL, "num_warps": WARPS}
        self._rms = [Launch(_rms_chunks, GRADIENT=g, MOMENT=m, **sizes) for (g, m), _, _ in chunks.spans]
        self._fold = Launch(_fold_rms, WIDTH=128)

    def look(self, moments: Sequence[AdamState]) -> Tensor:
        """Return float64 [N], newly allocated each time."""
        chunks = self._chunks
        gradients, squares, steps, betas, eps = zip(*moments)
        logs = {beta: math.log(beta) if beta > 0 else -math.inf for beta in set(betas)}
        known = [0.0 if isinstance(step, Tensor) else step for step in steps]
        table = self._table.send(
            [
                *[gradient.data_ptr() for gradient in gradients],
                *[square.data_ptr() for square in squares],
                *_read_bits([*[logs[beta] for beta in betas], *eps, *known]),
                *[step.data_ptr() if isinstance(step, Tensor) else 0 for step in steps],
            ]
        )
        for launch, ((_, first, num)) in zip(self._rms, chunks.spans):
            launch(
                (num, 1, 1), None,
                table, chunks.numels, chunks.tensors, chunks.indices, self._sums, first, len(moments),
            )  # fmt: skip
        rms = torch.empty(len(moments), dtype=torch.float64, device=self._sums.device)
        self._fold((len(moments), 1, 1), None, self._sums, chunks.bounds, chunks.numels, rms)
        return rms


def _read_bits(numbers: Sequence[float]) -> Sequence[int]:
    """Return the bits of each float64 as an integer."""
    return memoryview(array("d", numbers)).cast("B").cast("q").tolist()


def fits(tensor: Tensor) -> bool:
    """Return whether the kernels can read it: memory of its own, a dtype that they know, no gaps between elements."""
    if tensor.dtype not in TRITON_DTYPES or not is_readable(tensor):
        return False
    # A kernel that reads from an address without memory ends every CUDA call of the process: FSDP frees what a
    # parameter holds between its uses.
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        return False
    # Dense in some order of dimensions (channels_last, transposed): neither sums nor hashes need the order.
    return tensor.is_contiguous() or tensor.permute(sorted(range(tensor.dim()), key=_stride_of(tensor))).is_contiguous()


def _stride_of(tensor: Tensor) -> Callable[[int], int]:
    return lambda dim: -tensor.stride(dim)
