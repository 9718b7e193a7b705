"""What does the paired test cost, and which runs pay for it? A GPT that is left alone, given other data, or damaged.

GPT-2 124M, T=1024, bf16 autocast, eager, fused AdamW on CUDA; a small GPT in fp32 on the CPU. Three runs of the same
training: nothing happens; the data change from one step on; the learning rate is 300 times too high for twelve steps.
For each test: its result, its time in milliseconds and in steps of this run, and its peak memory relative to training.

    python benchmarks/proof.py [--device cuda|cpu] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad import Guard
from steadygrad.prove.comparison import Comparison

WHAT = {"compare_batch": "one batch", "compare": "the weights", "compare_fresh": "40 steps again"}
WARM_UP = 50
STORIES = ("nothing happens", "other data", "rate x 300 for a while")


class Stopwatch:
    """Times every comparison, and checks that it left the weights alone."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.model, self.device = model, device
        self.tests: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def running(self) -> Any:
        """Time comparisons inside this block."""
        plain = {name: getattr(Comparison, name) for name in WHAT}
        for name, method in plain.items():
            setattr(Comparison, name, self._wrap(name, method))
        try:
            yield
        finally:
            for name, method in plain.items():
                setattr(Comparison, name, method)

    def _wrap(self, name: str, method: Any) -> Any:
        def timed(comparison: Comparison, *args: Any, **kwargs: Any) -> Any:
            before = [p.detach().to("cpu", copy=True) for p in self.model.parameters()]
            peak = self._reset_peak()
            start = time.perf_counter()
            proof = method(comparison, *args, **kwargs)
            self._synchronise()
            seconds = time.perf_counter() - start
            same = all(torch.equal(p.detach().cpu(), kept) for p, kept in zip(self.model.parameters(), before))
            test_peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
            self.tests.append(
                {
                    "what": WHAT[name],
                    "answer": proof.answer.value,
                    "milliseconds": seconds * 1e3,
                    "weights_untouched": same,
                    "memory_ratio": test_peak / peak if peak else None,
                    "losses": [round(proof.mean_then, 4), round(proof.mean_now, 4)] if proof.now else None,
                }
            )
            return proof

        return timed

    def _reset_peak(self) -> int:
        self._synchronise()
        if self.device != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_batch(step: int, story: str, at: int, size: tuple[int, int, int], device: str) -> Tensor:
    """Make sequences that count up in steps of 1 to 8, modulo part of the vocabulary; other data count down."""
    batch, context, vocabulary = size
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(low, high, (batch, 1), generator=generator) for low, high in ((0, 512), (1, 9)))
    sign = -1 if story == "other data" and step >= at else 1
    ids = (start + sign * stride * torch.arange(context + 1)) % min(512, vocabulary)
    return ids.to(device)


def run(story: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Run the training once."""
    name, context, heads, batch = ("GPT-2 124M", 1024, 12, 16) if device == "cuda" else ("tiny", 64, 4, 8)
    num_steps, at = (120, 70) if quick else (500, 360)
    torch.manual_seed(0)
    model = GPT(*SHAPES[name], heads=heads, context=context).to(device)
    rate = 6e-4 if device == "cuda" else 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    guard = Guard(model, optimizer)
    watch = Stopwatch(model, device)

    def training_step(ids: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
            return model(ids)

    times, losses = [], []
    with watch.running():
        for step in range(num_steps):
            raised = story == "rate x 300 for a while" and at <= step < at + 12
            optimizer.param_groups[0]["lr"] = rate * (300 if raised else min(1.0, (step + 1) / WARM_UP))
            ids = make_batch(step, story, at, (batch, context, SHAPES[name][2]), device)
            watch._synchronise()
            start = time.perf_counter()
            losses.append(guard.step(training_step, ids))
            times.append(time.perf_counter() - start)
        guard.close()
    step_ms = statistics.median(times[10:]) * 1e3
    for test in watch.tests:
        test["steps"] = round(test["milliseconds"] / step_ms, 2)
    values = [float(loss) for loss in losses]
    return {
        "step_milliseconds": step_ms,
        "mean_step_milliseconds": statistics.mean(times[10:]) * 1e3,
        "loss_before": statistics.median(values[at - 8 : at]),
        "loss_at_end": statistics.median(values[-8:]),
        "tests": watch.tests,
        "incidents": [
            {
                "kind": i.finding.kind,
                "when": i.finding.when,
                "action": i.outcome.action.value,
                "message": i.finding.message,
            }
            for i in guard.incidents
        ],
    }


def main() -> None:
    """Run all three and print what each paid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="shorter runs; nothing is written")
    args = parser.parse_args()
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    print(describe_machine())
    results = {}
    for story in STORIES:
        report = results[story] = run(story, args.device, quick=args.quick)
        print(
            f"{story:<18} step {report['step_milliseconds']:.1f} ms (mean {report['mean_step_milliseconds']:.1f}), "
            f"loss {report['loss_before']:.4g} before, {report['loss_at_end']:.4g} at the end; "
            f"{len(report['tests'])} tests"
        )
        for test in report["tests"]:
            memory = "" if test["memory_ratio"] is None else f", memory {test['memory_ratio']:.2f} of training"
            print(
                f"    {test['what']:<8} {test['answer']:<9} {test['milliseconds']:7.0f} ms = {test['steps']:.1f} steps"
                f"{memory}, weights {'untouched' if test['weights_untouched'] else 'CHANGED'}, losses {test['losses']}"
            )
        for incident in report["incidents"]:
            print(f"    {incident['when']}: {incident['kind']} -> {incident['action']}: {incident['message'][:160]}")
    print("written:", write_results(f"proof_{args.device}", results, quick=args.quick))


if __name__ == "__main__":
    main()
