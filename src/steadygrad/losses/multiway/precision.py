"""In which precision two halves are multiplied, and how: products that always sum in float32 (float64 for float64).

    fp64, fp32   as they are; fp32 ignores a global TF32 switch
    tf32         halves rounded once to TF32's 10 bits of mantissa, products exact, fp32 sums
    bf16         halves built in fp32, rounded once to bf16, products exact, fp32 sums

On the CPU the rounding is the same and the multiplication is fp32, so a lower precision can be tried there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from steadygrad.errors import UnsupportedError

Precision = Literal["fp64", "fp32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = ("auto", "fp64", "fp32", "tf32", "bf16")
HAS_OUT_DTYPE = hasattr(torch.ops.aten.addmm, "dtype_out")  # since torch 2.8, CUDA only


def choose_precision(asked: str, dtype: torch.dtype, device: torch.device, *, linear: bool) -> Precision:
    """What `asked` means for features of this dtype on this device; sums of squares need fp32."""
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
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if not linear or device.type != "cuda":
        return "fp32"
    return "bf16" if dtype == torch.bfloat16 else "tf32"


def round_half(half: Tensor, precision: Precision) -> Tensor:
    """`half` as the multiplication sees it; no gradient goes through."""
    half = half.detach()
    if precision == "bf16":
        return half.bfloat16()
    if precision == "tf32":
        bits = half.contiguous().view(torch.int32)
        return (bits + 0x1000).bitwise_and_(~0x1FFF).view(torch.float32)
    return half


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed and returned in fp32 or wider."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda and HAS_OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, in place."""
    if a.dtype == torch.bfloat16 and a.is_cuda and HAS_OUT_DTYPE:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


@contextmanager
def use_precision(precision: Precision) -> Iterator[None]:
    """cuBLAS takes TF32 for fp32 operands here if `precision` says so, and not otherwise, whatever the program set."""
    switch = torch.backends.cuda.matmul
    name, on, off = (
        ("fp32_precision", "tf32", "ieee") if hasattr(switch, "fp32_precision") else ("allow_tf32", True, False)
    )
    before = getattr(switch, name)
    setattr(switch, name, on if precision == "tf32" else off)
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        setattr(switch, name, before)
