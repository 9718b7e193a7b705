"""FusedAdamW beside torch's fused AdamW: a step of the optimizer alone, on the tensors of GPT-2 124M and of a 1.3B GPT.

Plain, with a `grad_scale` (what clipping and a loss scale need), and in bfloat16, rounded to the nearest and at random.
The floor is the bytes that must move over the memory bandwidth of the device. Milliseconds of device time.

    python benchmarks/optimizer.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from machine import write_results
from models import GPT, SHAPES
from steadygrad.optim import FusedAdamW

SIZES = {"GPT-2 124M": 12, "Llama-like 1.3B": 16}
"""Heads; they change no shape."""
BANDWIDTH = 4.3e12
"""Bytes a second that a copy reaches on an H200."""
WARM_UP, ROUNDS = 3, 30


def time_steps(steps: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the device's milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UP:
                times[name].append(start.elapsed_time(end))
    return times


def make_step(kind: type[torch.optim.Optimizer], model: torch.nn.Module, divides: bool, **settings: Any) -> Any:
    optimizer = kind(model.parameters(), lr=1e-4, weight_decay=0.1, **settings)

    def step() -> None:
        optimizer.found_inf = torch.zeros((), device="cuda")  # type: ignore[attr-defined]
        optimizer.grad_scale = torch.full((), 2.0, device="cuda") if divides else None  # type: ignore[attr-defined]
        optimizer.step()

    return step


def measure(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the times for one model; each optimizer has moments of its own, all share weights and gradients."""
    model = GPT(*SHAPES[name], heads=SIZES[name], context=1024).to("cuda", dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    num, half = sum(p.numel() for p in model.parameters()), dtype is torch.bfloat16
    steps = {
        "torch fused": make_step(torch.optim.AdamW, model, False, fused=True),
        "torch fused, scaled": make_step(torch.optim.AdamW, model, True, fused=True),
        "ours": make_step(FusedAdamW, model, False),
        "ours, scaled": make_step(FusedAdamW, model, True),
    }
    if half:
        steps["ours, rounded at random"] = make_step(FusedAdamW, model, False, stochastic_rounding=True)
    times = time_steps(steps)
    floor = num * (14 if half else 28) / BANDWIDTH * 1e3
    print(f"{name} {str(dtype).removeprefix('torch.')}, {num / 1e6:.0f}M elements, floor {floor:.2f} ms")
    for way, found in times.items():
        print(f"  {way:28} mean {statistics.mean(found):7.3f}  median {statistics.median(found):7.3f} ms")
    rows = {way: {"mean": statistics.mean(t), "median": statistics.median(t)} for way, t in times.items()}
    return {"model": name, "dtype": str(dtype), "elements": num, "floor_ms": floor, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller model alone; nothing is written")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        raise SystemExit("This compares CUDA kernels: run it on a machine with a GPU.")
    names = list(SIZES)[:1] if quick else list(SIZES)
    results = [measure(name, dtype) for dtype in (torch.float32, torch.bfloat16) for name in names]
    write_results("optimizer_cuda", results, quick=quick)


if __name__ == "__main__":
    main()
