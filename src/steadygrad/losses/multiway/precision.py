"""In which precision two halves are multiplied, and how: products that always sum in float32 (float64 for float64).

    fp64, fp32   as they are; fp32 ignores a global TF32 switch
    tf32         halves rounded once to TF32's 10 bits of mantissa, products exact, fp32 sums
    fp16         halves and weights times a power of two each, rounded once to fp16: the same 10 bits, twice as fast
    fp16x3       each half as a sum of two fp16 numbers, three of their four products: 22 bits, a third as fast
    bf16         halves built in fp32, rounded once to bf16, products exact, fp32 sums

fp16 has TF32's digits and not its range. Each half, and the weights of the backward pass, have one power of two (a
`gain`) that puts a bound of theirs at fp16's end; the result is divided by it. Numbers down to 2^-29 of the bound keep
all digits, those below 2^-40 count as zero. Logits matter by their absolute error, and so lose nothing by that.

On the CPU the rounding is the same and the multiplication is fp32, so a lower precision can be tried there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from steadygrad.errors import UnsupportedError
from steadygrad.losses.multiway.similarity import Similarity

Precision = Literal["fp64", "fp32", "tf32", "fp16", "fp16x3", "bf16"]
PRECISIONS: tuple[str, ...] = ("auto", "fp64", "fp32", "tf32", "fp16", "fp16x3", "bf16")
# What "auto" means on CUDA. Norm and distance take a root: where it is near 0 and counts (twins in the batch, sums that
# cancel), one rounded product of 11 bits leaves gradients 1e4 times too large, three leave them as in fp32. Elsewhere
# one has the errors of mip; docs/multiway.md has the numbers.
DEFAULTS: dict[Similarity, Precision] = {"mip": "fp16", "cosine": "fp16", "norm": "fp16x3", "distance": "fp16x3"}
MASKED_DEFAULTS: dict[Similarity, Precision] = {"mip": "tf32", "cosine": "tf32", "norm": "fp32", "distance": "fp32"}
HALF = (torch.float16, torch.bfloat16)
HAS_OUT_DTYPE = hasattr(torch.ops.aten.addmm, "dtype_out")  # since torch 2.8, CUDA only


@dataclass(frozen=True)
class Gains:
    """What P, Q and the weights of the backward pass are multiplied by before they are rounded; None is nothing."""

    p: Tensor | None = None
    q: Tensor | None = None
    unit: Tensor | None = None
    """What P Q^T must be multiplied by."""
    weights: Tensor | None = None

    def free_rows(self, grad: Tensor) -> Tensor:
        """Return a gradient that came from weights times Q, without their gains."""
        return _divide(grad, self.weights, self.q)

    def free_columns(self, grad: Tensor) -> Tensor:
        """Return a gradient that came from weights times P, without their gains."""
        return _divide(grad, self.weights, self.p)


NO_GAINS = Gains()


def _divide(grad: Tensor, one: Tensor | None, other: Tensor | None) -> Tensor:
    return grad if one is None or other is None else grad / one / other


def choose_precision(
    asked: str, dtype: torch.dtype, device: torch.device, *, similarity: Similarity = "mip", masked: bool = False
) -> Precision:
    """What `asked` means for features of this dtype on this device."""
    if dtype == torch.float64:
        if asked not in ("auto", "fp64"):
            raise UnsupportedError(
                f"precision={asked!r} for float64 features in multiway_contrastive. "
                "Leave precision='auto', or pass float32 features."
            )
        return "fp64"
    if asked == "fp64":
        raise UnsupportedError(
            f"precision='fp64' for {dtype} features in multiway_contrastive. Convert the features to float64 first."
        )
    if asked in ("fp16", "fp16x3") and masked:
        raise UnsupportedError(
            f"precision={asked!r} of multiway_contrastive with present: a mask needs a range that fp16 does not have. "
            "Use precision='tf32' or 'fp32', or leave 'auto'."
        )
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if device.type != "cuda":
        return "fp32"
    if similarity == "mip" and dtype == torch.bfloat16:
        return "bf16"
    return (MASKED_DEFAULTS if masked else DEFAULTS)[similarity]


def has_gains(precision: Precision) -> bool:
    """Whether numbers are multiplied by a power of two first, since the precision has a short range."""
    return precision in ("fp16", "fp16x3")


def get_dtype(precision: Precision) -> torch.dtype:
    """Return what rounded halves are stored as."""
    narrow = {"fp16": torch.float16, "fp16x3": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
    return narrow.get(precision, torch.float32)


def find_top(numbers: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest size."""
    top: Tensor = torch.linalg.vector_norm(numbers, torch.inf, dim)
    return top


def find_gain(bound: Tensor) -> Tensor:
    """The power of two that puts `bound` (fp32) just below 2^15, half of what fp16 holds; 0 if it is not a number."""
    # The exponent bits of an fp32 number: the power of two at or below it; for NaN and Inf they read as Inf
    power = bound.clamp(min=1e-30).view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return 2.0**14 / power


def find_gains(p_bound: Tensor, q_bound: Tensor) -> Gains:
    """Return the gains for halves that hold nothing larger."""
    gains = find_gain(torch.stack([p_bound, q_bound]))
    return Gains(gains[0], gains[1], gains.reciprocal().prod())


def round_half(half: Tensor, precision: Precision, gain: Tensor | None = None) -> Tensor:
    """Return `half` (times `gain`) as the multiplication sees it; no gradient goes through."""
    half = half.detach()
    if gain is not None:
        half = half * gain  # exact: a power of two
    if precision in ("fp16", "fp16x3", "bf16"):
        return half.to(get_dtype(precision))
    if precision == "tf32":
        bits = half.contiguous().view(torch.int32)
        # Of fp32's 23 bits of mantissa TF32 keeps 10: add half of the last kept one, then clear the lower 13
        rounded = (bits + 0x1000).bitwise_and_(~0x1FFF).view(torch.float32)
        # The sum carries a NaN with all bits set, as CUDA makes it, over into the sign, and one with few of them to Inf
        return torch.where(half.isnan(), half, rounded)
    return half


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed and returned in fp32 or wider."""
    if a.dtype not in HALF:
        return a @ b
    if a.is_cuda and HAS_OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, in place."""
    if a.dtype in HALF and a.is_cuda and HAS_OUT_DTYPE:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:
        # Widened first: a half-precision product would round before it is added
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


@contextmanager
def use_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """cuBLAS takes TF32 for fp32 operands if `precision` says so and not otherwise, and sums fp16 in fp32.

    Whatever the program has set, which is put back. Only what the products of this precision look at is touched.
    """
    wanted = _list_switches(precision) if device.type == "cuda" else {}
    before = {name: _read_switch(name) for name in wanted}
    # Process-wide: matmuls of other threads see these until they are put back
    _set_switches(wanted)
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        _set_switches(before)


def _list_switches(precision: Precision) -> dict[str, object]:
    matmul = torch.backends.cuda.matmul
    if has_gains(precision) and hasattr(matmul, "allow_fp16_accumulation"):  # since torch 2.7
        return {"allow_fp16_accumulation": False}
    if precision not in ("fp32", "tf32"):
        return {}
    if hasattr(matmul, "fp32_precision"):  # since 2.9
        return {"fp32_precision": "tf32" if precision == "tf32" else "ieee"}
    return {"allow_tf32": precision == "tf32"}


def _read_switch(name: str) -> object:
    """Return its value; of one that follows the switch above it, that it does, not what it follows to."""
    value: object = getattr(torch.backends.cuda.matmul, name)
    return "none" if name == "fp32_precision" and value == getattr(torch.backends, name) else value


def _set_switches(values: dict[str, object]) -> None:
    for name, value in values.items():
        setattr(torch.backends.cuda.matmul, name, value)
