"""What guarding costs in a whole training step: forward, backward, optimizer.

GPT-2 124M, T=1024, bf16 autocast, eager, fused AdamW on CUDA; a 10M-parameter GPT in fp32 on the CPU. All variants take
turns in one process on one model; the claim is the ratio of medians to the plain step (CUDA) or to the step with stock
clipping (CPU).

    python benchmarks/whole_step.py [--device cuda|cpu] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad import Guard


class Loop:
    """One model, one optimizer, one batch, and every way of stepping them."""

    def __init__(self, device: str, batch: int, *, quick: bool) -> None:
        name, context, heads = ("GPT-2 124M", 1024, 12) if device == "cuda" else ("tiny" if quick else "10M", 128, 8)
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(*SHAPES[name], heads=heads, context=context).to(device)
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-5, fused=True)
        self.guard = Guard(self.model, self.optimizer)
        self.ids = torch.randint(SHAPES[name][2], (batch, context + 1), device=device)

    def loss(self, ids: Tensor) -> Tensor:
        cast = torch.autocast("cuda", dtype=torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        with cast:
            return self.model(ids)

    def plain(self) -> None:
        self.loss(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped(self) -> None:
        self.loss(self.ids).backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def host_checks(self) -> None:
        loss = self.loss(self.ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        if torch.isfinite(loss) and torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def parameter_checks(self) -> None:
        self.loss(self.ids).backward()
        for p in self.params:
            if p.grad is not None and (torch.isnan(p.grad).any() or torch.isinf(p.grad).any()):
                raise ValueError("non-finite gradient")
            p.grad.norm().item()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward_hooks(self) -> None:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and torch.isnan(output).any():
                raise ValueError("NaN")

        hooks = [m.register_forward_hook(check) for m in self.model.modules()]
        self.clipped()
        for hook in hooks:
            hook.remove()

    def anomaly(self) -> None:
        with torch.autograd.detect_anomaly():
            self.clipped()

    def guarded(self) -> None:
        self.guard.step(self.loss, self.ids)

    def guarded_loss(self) -> None:
        self.guard.step(self.loss(self.ids))


def time_ways(ways: dict[str, Callable[[], None]], device: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each way in each round; the ways take turns, in a new order each round."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round_number in range(rounds + 1):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            slow = name in ("torch.autograd detect_anomaly",)
            count = max(1, steps // 4) if slow else steps
            ways[name]()
            sync()
            start = time.perf_counter()
            for _ in range(count):
                ways[name]()
            sync()
            if round_number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, on the CPU a tiny model; nothing is written"
    )
    args = parser.parse_args()
    table: dict[str, Any] = {}
    print(describe_machine())
    for batch in (4, 16) if args.device == "cuda" else (2,):
        loop = Loop(args.device, batch, quick=args.quick)
        ways = {
            "plain (no clip, no check)": loop.plain,
            "plain, again (noise)": loop.plain,
            "clip_grad_norm_": loop.clipped,
            "loss and norm checked on the host": loop.host_checks,
            "per-parameter checks and norms": loop.parameter_checks,
            "forward hooks with isnan().any()": loop.forward_hooks,
            "torch.autograd detect_anomaly": loop.anomaly,
            "Guard, guard.step(fn, batch)": loop.guarded,
            "Guard, guard.step(loss)": loop.guarded_loss,
        }
        if args.device == "cpu":  # the slow ways show nothing new there, and take minutes
            ways = {name: way for name, way in ways.items() if "hooks" not in name and "anomaly" not in name}
        rounds, steps = (3, 4) if args.quick else (9, 10) if args.device == "cuda" else (6, 2)
        times = time_ways(ways, args.device, rounds, steps)
        middle = {name: statistics.median(values) for name, values in times.items()}
        base = "plain (no clip, no check)" if args.device == "cuda" else "clip_grad_norm_"
        print(f"\nB={batch}: relative to {base}")
        for name, value in middle.items():
            spread = (max(times[name]) - min(times[name])) / value
            print(f"  {name:36s} {value:9.2f} ms   {value / middle[base]:6.3f}   (spread {spread:.1%})")
        table[f"B={batch}"] = {
            "base": base,
            "milliseconds": middle,
            "ratio": {n: v / middle[base] for n, v in middle.items()},
        }
    print("\nwritten:", write_results(f"whole_step_{args.device}", table, quick=args.quick))


if __name__ == "__main__":
    main()
