"""What one diagnosis costs compared with one training step: time, and peak memory.

GPT-2 124M, T=1024, bf16 autocast, AdamW on CUDA; a 10M-parameter GPT in fp32 on the CPU. Two failures: one sample
overflows in the middle of the model; and a square root at 0 that no single sample causes, where the search for samples
costs most. The targets: at most 12 steps, and at most a tenth more memory than the step, apart from the batch. Memory
is measured on the GPU only.

    python benchmarks/diagnosis.py [--device cuda|cpu] [--batch N] [--rounds N] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad.diagnose import diagnose
from steadygrad.diagnose.closeup import Closeup
from steadygrad.diagnose.frames import StackReader
from steadygrad.diagnose.replay import Step, call_user
from steadygrad.diagnose.step_arguments import name_modules
from steadygrad.diagnose.trace import Trace

MOST_STEPS = 12.0
MOST_MEMORY = 1.1


class Loop:
    """One model, one optimizer, a healthy step and two broken ones."""

    def __init__(self, device: str, batch: int, *, quick: bool) -> None:
        name, context, heads = ("GPT-2 124M", 1024, 12) if device == "cuda" else ("tiny" if quick else "10M", 128, 8)
        torch.manual_seed(0)
        self.device, self.vocabulary = device, SHAPES[name][2]
        self.model = GPT(*SHAPES[name], heads=heads, context=context).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        self.ids = torch.randint(self.vocabulary, (batch, context + 1), device=device)
        self.gain = torch.zeros(batch, 1, 1, device=device)
        self.gain[batch // 2] = 1000.0

    def loss(self, ids: Tensor) -> Tensor:
        cast = torch.autocast("cuda", dtype=torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        with cast:
            return self.model(ids)

    def overflow_in_one_sample(self, ids: Tensor, gain: Tensor) -> Tensor:
        block = self.model.blocks[len(self.model.blocks) // 2]
        hook = block.register_forward_hook(lambda module, inputs, output: output * gain.exp())
        try:
            return self.loss(ids)
        finally:
            hook.remove()

    def root_of_nothing(self, ids: Tensor) -> Tensor:
        loss = self.loss(ids)
        return loss + torch.sqrt((self.model.norm.bias * 0).square().sum())

    def step(self) -> None:
        self.loss(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(run: Callable[[], Any], device: str, rounds: int) -> tuple[float, int]:
    """Return the median seconds of `run`, and its peak memory in bytes (0 on the CPU)."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    peak = 0
    for round_number in range(rounds + 1):
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        sync()
        start = time.perf_counter()
        run()
        sync()
        if round_number:  # the first round warms up
            times.append(time.perf_counter() - start)
            peak = max(peak, torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    return statistics.median(times), peak


def time_parts(loop: Loop, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the replays that make up a diagnosis."""
    replayed = Step(fn=loop.root_of_nothing, args=(loop.ids,), model=loop.model)

    def replay(observer: Any) -> None:
        with replayed.replay(observer):
            pass

    def trace() -> None:
        observer = Trace(StackReader(name_modules(loop.model), call_user))
        replay(observer)
        observer.ranges.read()

    ways = {"plain replay": lambda: replay(None), "traced": trace, "close up": lambda: replay(Closeup({}))}
    return {name: 1e3 * measure(way, loop.device, rounds)[0] for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="two samples, one round, on the CPU a tiny model; nothing is written"
    )
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    batch = args.batch or (2 if args.quick else 8 if args.device == "cuda" else 4)
    loop = Loop(args.device, batch, quick=args.quick)
    step_seconds, step_peak = measure(loop.step, args.device, args.rounds)
    results: dict[str, Any] = {"batch": batch, "step_ms": 1e3 * step_seconds, "step_bytes": step_peak}
    print(f"{describe_machine()}\nstep {1e3 * step_seconds:.1f} ms, {step_peak / 2**20:.0f} MiB")
    for name, fn, given in (
        ("one sample overflows", loop.overflow_in_one_sample, (loop.ids, loop.gain)),
        ("no sample is to blame", loop.root_of_nothing, (loop.ids,)),
    ):
        run = functools.partial(diagnose, fn, *given, model=loop.model)
        cause = run()
        assert cause is not None
        seconds, peak = measure(run, args.device, args.rounds)
        steps, memory = seconds / step_seconds, peak / step_peak if step_peak else 0.0
        results[name] = {
            "ms": 1e3 * seconds,
            "steps": steps,
            "memory": memory,
            "op": cause.op,
            "samples": cause.samples,
        }
        fine = steps <= MOST_STEPS and memory <= MOST_MEMORY
        print(f"{name}: {steps:.1f} steps, {memory:.2f} of the memory: {'within' if fine else 'ABOVE'} the bound")
        print(cause)
    results["parts_ms"] = time_parts(loop, args.rounds)
    print(results["parts_ms"])
    print("written:", write_results(f"diagnosis_{args.device}", results, quick=args.quick))


if __name__ == "__main__":
    main()
