"""Which number format to train in, and a loss scaler that is careful with it."""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from steadygrad.config import Precision

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}


def choose_precision(device: str | torch.device | None = None) -> Precision:
    """Return bf16 where the device computes in it, else fp16, else fp32.

    bf16 has fp32's range, so nothing new overflows; fp16 needs a loss scaler. On a CPU only bf16 with hardware support
    is worth it, and it is tried in a separate process: some virtual machines advertise instructions that kill the
    process.
    """
    kind = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            return Precision.FP32
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability >= (8, 0):  # the first NVIDIA generation that computes in bf16
            return Precision.BF16
        return Precision.FP16 if capability >= (5, 3) else Precision.FP32  # 5.3 has native fp16 arithmetic
    if kind == "cpu":
        return Precision.BF16 if _cpu_has_bf16() and half_matmul_works(Precision.BF16) else Precision.FP32
    return Precision.FP32


def _cpu_has_bf16() -> bool:
    # Private to torch, and not in every version.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in probes)


@functools.cache
def half_matmul_works(precision: Precision) -> bool:
    """Whether a half-precision matmul works on this CPU, tried in a separate process because it may crash."""
    dtype = str(DTYPES[precision]).removeprefix("torch.")
    code = f"import torch; a = torch.ones(64, 64, dtype=torch.{dtype}); assert float((a @ a)[0, 0]) == 64.0"
    try:
        # -P: a torch.py in the current directory must not be run
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:  # a machine so busy that it cannot answer: fp32 is always right
        return False
    return done.returncode == 0


def conservative_scaler(device: str = "cuda", *, enabled: bool = True) -> torch.amp.GradScaler:
    """Make a GradScaler for fine-tuning: it starts at 2**10, grows 1.5x every 1000 steps, and halves on overflow."""
    return torch.amp.GradScaler(
        device, init_scale=2.0**10, growth_factor=1.5, backoff_factor=0.5, growth_interval=1000, enabled=enabled
    )
