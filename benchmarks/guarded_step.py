"""What a guarded optimizer step costs, compared with common ways to clip and check.

Every row measures everything from backward() to the end of optimizer.step(), on the same gradients, with fused AdamW,
clipping at 1.0. The claim is the ratio to `clip_grad_norm_` + `step` in the same run. The lower bound is the step alone
plus one read of the gradients at the copy bandwidth measured here.

    python benchmarks/guarded_step.py [--device cuda|cpu] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from machine import describe_machine, write_results
from models import Parameters, parameter_shapes
from steadygrad import Guard

QUIET, CLIPPING = "Guard, norm below the threshold", "Guard, norm twice the threshold"
MODELS = {
    "cuda": ["43M, 1154 small tensors", "GPT-2 124M", "GPT-2 774M", "Llama-like 1.3B"],
    "cpu": ["10M"],
}


def time_rounds(
    ways: dict[str, Callable[[], None]], device: str, rounds: int, before: Callable[[str], None] = lambda name: None
) -> dict[str, float]:
    """Return the median milliseconds of each way; the ways take turns, so that drift affects all equally."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        for _ in range(5):
            before(name)
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            before(name)
            way()
            before(name)
            sync()
            start = time.perf_counter()
            way()
            sync()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def make_ways(model: Parameters, device: str) -> dict[str, Callable[[], None]]:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    guard, clipping_guard = Guard(model, optimizer), Guard(model, optimizer)
    clip = torch.nn.utils.clip_grad_norm_

    def step() -> None:
        optimizer.step()

    def stock() -> None:
        clip(params, 1.0)
        optimizer.step()

    def checked() -> None:
        if torch.isfinite(clip(params, 1.0)):
            optimizer.step()

    def each_parameter() -> None:
        for p in params:
            if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
                return
            p.grad.norm().item()
        clip(params, 1.0)
        optimizer.step()

    def two_foreach_norms() -> None:
        grads = [p.grad for p in params]
        norms = torch.stack(torch._foreach_norm(grads, 2))
        torch.stack(torch._foreach_norm(grads, float("inf")))
        torch._foreach_mul_(grads, (1.0 / (norms.norm() + 1e-6)).clamp(max=1.0))
        optimizer.step()

    ways = {
        "step alone": step,
        "clip_grad_norm_ + step": stock,
        "... and isfinite on the host": checked,
        "isnan, isinf, norm of each parameter": each_parameter,
        "two foreach norms": two_foreach_norms,
        QUIET: guard.step,
        CLIPPING: clipping_guard.step,
    }
    return {name: way if "Guard" in name else torch.no_grad()(way) for name, way in ways.items()}


def set_norm(model: Parameters, norm: float) -> None:
    """Give the gradients a known norm again, because clipping shrinks them in place."""
    std = norm / sum(weight.numel() for weight in model.weights) ** 0.5
    for weight in model.weights:
        weight.grad.normal_(std=std)


def measure_memory(name: str, device: str) -> dict[str, float]:
    """Return the device bytes that a Guard holds, and its peak above the stock step's."""
    if device != "cuda":
        return {}
    model = Parameters(parameter_shapes(name), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    stock_peak = torch.cuda.max_memory_allocated() - before
    guard = Guard(model, optimizer)
    for _ in range(5):
        guard.step()
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    guard.step()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "held_bytes": held,
        "peak_above_stock_bytes": max(0, peak - stock_peak),
        "allowed_bytes": (1 << 20) + gradients // 1000,
    }


def measure_floor(num: int, device: str, step_ms: float) -> float:
    """Return the time of the step alone plus reading the gradients once at this machine's copy bandwidth."""
    source = torch.empty(num, device=device)
    target = torch.empty_like(source)
    copy = time_rounds({"copy": lambda: target.copy_(source)}, device, 10)["copy"]
    return step_ms + copy / 2  # a copy moves every byte twice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller models; nothing is written")
    args = parser.parse_args()
    names = MODELS[args.device][: 2 if args.quick else None]
    table = {}
    print(describe_machine())
    for name in names:
        model = Parameters(parameter_shapes(name), args.device)
        num = sum(p.numel() for p in model.parameters())
        ways = make_ways(model, args.device)
        rounds = 8 if args.quick else 25
        times = time_rounds(ways, args.device, rounds, lambda way, m=model: set_norm(m, 0.5 if way == QUIET else 2.0))
        floor = measure_floor(num, args.device, times["step alone"])
        del model, ways
        memory = measure_memory(name, args.device)
        stock = times["clip_grad_norm_ + step"]
        table[name] = {"num_parameters": num, "milliseconds": times, "floor_milliseconds": floor, "memory": memory}
        table[name]["ratio"] = {way: times[way] / stock for way in (QUIET, CLIPPING)}
        print(f"\n{name}: {num / 1e6:.0f}M parameters, floor {floor:.3f} ms = {floor / stock:.2f} of stock")
        for way, value in times.items():
            print(f"  {way:38s} {value:9.3f} ms   {value / stock:5.2f} of clip + step")
    print("\nwritten:", write_results(f"guarded_step_{args.device}", table, quick=args.quick))


if __name__ == "__main__":
    main()
