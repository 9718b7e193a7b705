"""What a periodic scan costs: by default, weights, Adam's ratio, batch and activations are measured every 100 steps.

GPTs with different numbers of tensors under a Guard that scans more often: eager, bf16 autocast and fused AdamW on
CUDA; a small one in fp32 on the CPU. A scan's parts are queued in a few neighbouring steps, and each is read in the
step after, so its cost is how much longer these steps take than as many ordinary ones of the same stretch: median and
mean over scans. `host` waits for the device before each step, which leaves only the host's work; `step` does not wait.
Kernels are counted by torch's profiler, in those steps and in as many others.

    python benchmarks/looks.py [--device cuda|cpu] [--only NAME] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad import Guard, GuardConfig, MeasureConfig, SnapshotConfig
from steadygrad.measure.periodic_scans import GAPS

EVERY = 25
"""Steps from one look to the next."""
AROUND = 6
"""Steps in which the parts of a look are queued and read."""
BEFORE = 2 * (EVERY // GAPS)
"""Steps from the first of them to the step that `EVERY` divides."""
MODELS = {
    "cuda": {"GPT-2 124M": (12, 8, 1024, 12), "43M, 1154 small tensors": (6, 8, 256, 4)},
    "cpu": {"10M": (8, 2, 128, 6)},
}
"""Name of the shapes -> heads, batch size, tokens, looks to time in each way."""


class Training:
    """A guarded GPT, stepped and timed."""

    def __init__(self, name: str, device: str) -> None:
        heads, size, tokens, _ = MODELS[device][name]
        torch.manual_seed(0)
        self._device = device
        self._model = GPT(*SHAPES[name], heads=heads, context=tokens).to(device)
        self.num_tensors = len(list(self._model.parameters()))
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        config = GuardConfig(measure=MeasureConfig(scan_every=EVERY), snapshots=SnapshotConfig(enabled=False))
        self._guard = Guard(self._model, optimizer, config=config)
        self._batches = [torch.randint(SHAPES[name][2], (size, tokens + 1), device=device) for _ in range(16)]
        self._num_steps = 0

    def _loss(self, batch: Tensor) -> Tensor:
        on_cuda = self._device == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16) if on_cuda else contextlib.nullcontext():
            loss: Tensor = self._model(batch)
            return loss

    def step(self) -> None:
        self._guard.step(self._loss, self._batches[self._num_steps % 16])
        self._num_steps += 1

    def step_to_look(self) -> None:
        """Step until the next step looks."""
        while not self._num_steps or (self._num_steps + BEFORE) % EVERY:
            self.step()

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def time_host(self) -> list[float]:
        """Return host milliseconds of EVERY steps, starting at a look."""
        self.step_to_look()
        times = []
        for _ in range(EVERY):
            self.wait()
            begin = time.perf_counter()
            self.step()
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    def time_steps(self) -> list[float]:
        """Return milliseconds of EVERY steps, starting at a look: by events on CUDA, by the clock elsewhere."""
        self.step_to_look()
        if self._device != "cuda":
            return self.time_host()
        self.wait()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(EVERY + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        self.wait()
        return [one.elapsed_time(other) for one, other in itertools.pairwise(events)]

    def count_launches(self) -> dict[str, int]:
        """Return how many kernels and copies the steps around a look launch, and as many steps without one."""
        found = {}
        for which in ("with", "without"):
            if which == "with":
                self.step_to_look()
            self.wait()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
                for _ in range(AROUND):
                    self.step()
                self.wait()
            found[which] = sum(event.device_type == DeviceType.CUDA for event in profiled.events())
        return found


def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    """Time `rounds` looks in each way."""
    training = Training(name, device)
    training.step_to_look()
    training.step()  # the first look, with one-time setup
    host = [training.time_host() for _ in range(rounds)]
    steps = [training.time_steps() for _ in range(rounds)]
    launches = training.count_launches() if device == "cuda" else {}
    return {
        "num_tensors": training.num_tensors, "every": EVERY, "around": AROUND,
        "host": compare(host), "step": compare(steps), "launches": launches,
    }  # fmt: skip


def compare(rounds: list[list[float]]) -> dict[str, Any]:
    """Return how much longer the steps around each look took than ordinary ones, and the time of an ordinary step."""
    # Means: a step's time is skewed on a busy host, and ten of its medians are less than ten steps.
    looks = [sum(times[:AROUND]) - AROUND * statistics.fmean(times[AROUND:]) for times in rounds]
    return {
        "usual_ms": statistics.fmean(time for times in rounds for time in times[AROUND:]),
        "looks_ms": looks,
        "median_ms": statistics.median(looks),
        "mean_ms": statistics.fmean(looks),
        "worst_ms": max(looks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="one look of each kind; nothing is written")
    args = parser.parse_args()
    print(describe_machine())
    table = {}
    for name in (one for one in MODELS[args.device] if args.only in one):
        found = table[name] = measure(name, args.device, 1 if args.quick else MODELS[args.device][name][-1])
        host, step, launches = found["host"], found["step"], found["launches"]
        print(
            f"{name}, {found['num_tensors']} tensors: host {host['median_ms']:+.2f} ms (mean {host['mean_ms']:+.2f}, "
            f"worst {host['worst_ms']:+.2f}, ordinary step {host['usual_ms']:.2f}); step {step['median_ms']:+.2f} ms "
            f"(mean {step['mean_ms']:+.2f}, worst {step['worst_ms']:+.2f}, ordinary {step['usual_ms']:.2f}); "
            f"kernels and copies {launches}",
            flush=True,
        )
    print("\nwritten:", write_results(f"looks_{args.device}", table, quick=args.quick))


if __name__ == "__main__":
    main()
