"""What a whole guarded run costs: the mean, not the median, with snapshots, scans and records included.

On CUDA: GPT-2 124M eager, compiled and with CUDA graphs, and 774M compiled; bf16 autocast, fused AdamW, T=1024. On the
CPU: an MLP and a CNN that take about a millisecond per step, and a 10M-parameter GPT, on one thread. Each variant has
its own model and optimizer and, if guarded, a new Guard with every default, including its first snapshot; the variants
take turns. On CUDA the variants of one model share a process, and a step is timed between two events. In turns of 250
steps, snapshot memory is pinned during guarded steps only: the plain steps that follow wait until pinning has finished.
In turns of 50, pinning slows the plain steps too. On the CPU each variant has its own process, so that one can be
`steadygrad run`, and a step is timed in CPU seconds of that process, which other programs affect little; glibc is set
to keep freed memory, and all memory is touched beforehand, since what happens otherwise differs from process to process
by more than what is measured; the small models are run four times, in new processes. A turn begins with cold caches, so
its length does not divide the hundred steps between two scans: otherwise every scan would find cold caches, unlike in a
real run. `worst ten` is the slowest stretch of ten consecutive steps; a ratio below 1 means that the plain run stalled
once itself. Eager training needs most of the host's time, so a host that other programs slow down makes some steps
late, and with a Guard more of them: `124M eager` is shown twice, on a quiet host and beside a busy one, whose plain
rows differ as well. The busy host, the compiled 124M and the CUDA graphs were measured a day before the others. In the
run of 774M, one guarded step of no snapshot or scan took 290 ms, which alone makes its worst ten steps.

    python benchmarks/long_run.py [--device cuda|cpu] [--only PART] [--steps N] [--without WAY] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad import Guard, GuardConfig, SnapshotConfig
from steadygrad.act.host_memory import find_free_bytes
from steadygrad.act.pinned_memory import PAGE, map_pages

WARM_UP = 12
"""Unguarded steps before a Guard is created: compiling, autotuning and creating the optimizer's state."""
TURNS = {"cuda": 250, "cpu": 130}
"""Steps of one way before the next way's turn."""
SAME_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Has glibc keep the memory that a step frees. Otherwise it returns some of it in every step and maps it again: up to
6,000 page faults a step of GPT 10M, as the heap happens to lie, which moves the time of equal processes by 4 %."""
TOUCHED = 0.8
"""Share of the free memory that is touched beforehand. A virtual machine may get its memory from its host only when a
page is first touched, 2.5 ms for each MB on the machine of these results, so that a process paid for memory or did not,
depending on what had run before."""
POOL = 16
"""Number of different batches."""


@dataclass(frozen=True)
class Scenario:
    """A model, its batches and how it is run."""

    make: Callable[[str], nn.Module]
    batch: Callable[[str], Tensor]
    compile: str | None = None
    """torch.compile's mode, or None for eager."""
    steps: int = 1000
    quick_steps: int = 100
    rounds: int = 1
    """On the CPU: how often all of it is run, in new processes, which differ by more than what is measured."""


def make_gpt(name: str, heads: int, context: int) -> Callable[[str], nn.Module]:
    return lambda device: GPT(*SHAPES[name], heads=heads, context=context).to(device)


def make_ids(name: str, size: int, context: int) -> Callable[[str], Tensor]:
    return lambda device: torch.randint(SHAPES[name][2], (size, context + 1), device=device)


class Squared(nn.Module):
    """Any network with a loss on top, so that a batch is one tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def make_mlp(_: str) -> nn.Module:
    return Squared(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)))


def make_cnn(_: str) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return Squared(body)


SCENARIOS: dict[str, dict[str, Scenario]] = {
    "cuda": {
        "124M eager B=8": Scenario(make_gpt("GPT-2 124M", 12, 1024), make_ids("GPT-2 124M", 8, 1024)),
        "124M compiled B=16": Scenario(make_gpt("GPT-2 124M", 12, 1024), make_ids("GPT-2 124M", 16, 1024), "default"),
        "124M CUDA graphs B=4": Scenario(
            make_gpt("GPT-2 124M", 12, 1024), make_ids("GPT-2 124M", 4, 1024), "reduce-overhead"
        ),
        "774M compiled B=8": Scenario(make_gpt("GPT-2 774M", 20, 1024), make_ids("GPT-2 774M", 8, 1024), "default"),
    },
    "cpu": {
        "MLP, 6 tensors": Scenario(make_mlp, lambda _: torch.randn(64, 64), rounds=4),
        "CNN, 10 tensors": Scenario(make_cnn, lambda _: torch.randn(8, 3, 32, 32), rounds=4),
        "GPT 10M": Scenario(make_gpt("10M", 8, 128), make_ids("10M", 2, 128), steps=600, quick_steps=30),
    },
}


class Way:
    """One way of training one scenario."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = scenario.make(device)
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-5, fused=device == "cuda")
        self.called = self.model if scenario.compile is None else torch.compile(self.model, mode=scenario.compile)
        self.batches = [scenario.batch(device) for _ in range(POOL)]
        self.num_steps = 0
        self.times: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        on_cuda = self.device == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16) if on_cuda else contextlib.nullcontext():
            loss: Tensor = self.called(batch)
            return loss

    def plain_step(self, batch: Tensor) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> None:
        """Prepare after the warm-up, before the first timed step."""

    def step(self, batch: Tensor) -> None:
        self.plain_step(batch)

    def settle(self) -> None:
        """Wait, after a turn, for work that would disturb the next way."""

    def end(self) -> None:
        """Finish after the last step."""


class Clipped(Way):
    """Stock clipping."""

    def step(self, batch: Tensor) -> None:
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Guarded(Way):
    """A Guard with all defaults and a run directory."""

    config = GuardConfig()

    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.guard = Guard(self.model, self.optimizer, config=self.config, run_dir=f"{self._folder.name}/run")

    def step(self, batch: Tensor) -> None:
        self.guard.step(self.loss, batch)

    def settle(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "steadygrad-pin":
                thread.join()

    def end(self) -> None:
        self.findings = [f.kind for f in self.guard.findings if f.severity.rank > 0]
        self.guard.close()
        self._folder.cleanup()


class GuardedWithoutSnapshots(Guarded):
    """The same without snapshots, to show what they cost."""

    config = GuardConfig(snapshots=SnapshotConfig(enabled=False))


WAYS: dict[str, type[Way]] = {
    "Guard, defaults, with run_dir": Guarded,  # first, while no memory of this process is pinned yet
    "plain": Way,
    "plain, again (noise)": Way,
    "clip_grad_norm_": Clipped,
    "Guard, no snapshots": GuardedWithoutSnapshots,
}
RUN = "steadygrad run, script unchanged"


def time_turn(way: Way, count: int) -> None:
    """Run `count` steps and add their milliseconds to `way.times`."""
    batches = [way.batches[(way.num_steps + i) % POOL] for i in range(count)]
    way.num_steps += count
    if way.device == "cuda":
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for batch, event in zip(batches, events[1:]):
            way.step(batch)
            event.record()
        torch.cuda.synchronize()
        way.times += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return
    for batch in batches:
        start = time.process_time_ns()
        way.step(batch)
        way.times.append((time.process_time_ns() - start) / 1e6)


# --- on CUDA: all ways in one process ---------------------------------------------------------------------------------


def run_on_cuda(scenario: Scenario, steps: int, without: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return times and findings of each way, and the memory of all ways together."""
    gc.collect()
    torch.cuda.empty_cache()
    ways = {title: kind(scenario, "cuda") for title, kind in WAYS.items() if title not in without}
    for way in ways.values():
        for i in range(WARM_UP):
            way.plain_step(way.batches[i % POOL])
    for way in ways.values():
        way.optimizer.state.clear()  # a run begins without optimizer state
        way.begin()
    for count in list_turns(steps, TURNS["cuda"]):
        for way in ways.values():
            time_turn(way, count)
            way.settle()
    found = {}
    for title, way in ways.items():
        way.end()
        found[title] = {"times": way.times, "findings": getattr(way, "findings", [])}
    memory = {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
    }
    return found, memory


# --- on the CPU: a process for each way -------------------------------------------------------------------------------


class Child:
    """A way in its own process. It runs the requested number of steps, then waits."""

    def __init__(self, scenario: str, title: str, folder: str) -> None:
        program = [__file__, "--serve", scenario, "--way", "plain" if title == RUN else title]
        if title == RUN:
            program = ["-m", "steadygrad", "run", "--run-dir", f"{folder}/run", *program]
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **SAME_MEMORY},
        )
        self.ask("")

    def ask(self, line: str) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self._process.args} has ended with {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> Any:
        """Return its measurements after it has ended, since it writes its record until then."""
        measured = self.ask("end")
        self._process.communicate()
        return measured


def touch_memory() -> None:
    """Have the system get its memory once, and free it again."""
    size = int(TOUCHED * find_free_bytes()) // PAGE * PAGE
    pages = torch.frombuffer(map_pages(size), dtype=torch.uint8)
    for start in range(0, size, PAGE):
        pages[start : start + PAGE : mmap.PAGESIZE] = 1


def run_on_cpu(scenario: str, steps: int, without: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return times, findings and memory of each way, of all rounds together."""
    full = SCENARIOS["cpu"][scenario]
    rounds = [run_round(scenario, steps, without) for _ in range(full.rounds if steps >= full.steps else 1)]
    return {
        title: {
            "times": [taken for one in rounds for taken in one[title]["times"]],
            "findings": sorted({kind for one in rounds for kind in one[title]["findings"]}),
            "host_peak_bytes": max(one[title]["host_peak_bytes"] for one in rounds),
            "rounds": len(rounds),
        }
        for title in rounds[0]
    }, {}


def run_round(scenario: str, steps: int, without: Sequence[str]) -> dict[str, Any]:
    """Return the same of one process for each way."""
    with tempfile.TemporaryDirectory() as folder:
        children = {title: Child(scenario, title, folder) for title in (*WAYS, RUN) if title not in without}
        for count in list_turns(steps, TURNS["cpu"]):
            for child in children.values():
                child.ask(str(count))
        return {title: child.end() for title, child in children.items()}


def serve(scenario: Scenario, title: str) -> None:
    """Run as such a process. Under `steadygrad run` the warm-up takes no step, so the first step is the run's first."""
    way = WAYS[title](scenario, "cpu")
    for i in range(WARM_UP):
        way.loss(way.batches[i % POOL]).backward()
        way.optimizer.zero_grad()
    way.begin()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            way.end()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answer = {"times": way.times, "findings": getattr(way, "findings", []), "host_peak_bytes": peak}
            print(json.dumps(answer), flush=True)
            return
        time_turn(way, int(line))
        print(json.dumps("done"), flush=True)


# --- both -------------------------------------------------------------------------------------------------------------


def list_turns(steps: int, turn: int) -> list[int]:
    """Split a number of steps into turns."""
    return [turn] * (steps // turn) + ([steps % turn] if steps % turn else [])


def run_scenario(name: str, device: str, steps: int, without: Sequence[str]) -> dict[str, Any]:
    """Run all ways of one scenario, in turns."""
    if device == "cuda":
        ways, memory = run_on_cuda(SCENARIOS[device][name], steps, without)
    else:
        ways, memory = run_on_cpu(name, steps, without)
    rows: dict[str, Any] = {}
    base = statistics.fmean(ways["plain"]["times"])
    base_ten = statistics.fmean(worst_ten(ways["plain"]["times"]))
    print(f"\n{name}, {steps} steps each", flush=True)
    for title, measured in ways.items():
        times = measured.pop("times")
        mean, middle = statistics.fmean(times), statistics.median(times)
        ten = statistics.fmean(worst_ten(times))
        rows[title] = {
            "mean_ms": mean, "median_ms": middle, "worst_ten_ms": ten, "mean_ratio": mean / base,
            "more_ms": mean - base, "worst_ten_ratio": ten / base_ten, **measured,
        }  # fmt: skip
        print(
            f"  {title:32s} mean {mean:8.3f} ms ({mean / base:.3f}, {mean - base:+.3f} ms)  median {middle:8.3f}  "
            f"worst ten {ten:8.3f} ({ten / base_ten:.2f})  {' '.join(measured['findings'])}",
            flush=True,
        )
        slowest = sorted(range(len(times)), key=lambda i: -times[i])[:12]
        print(f"    slowest: {' '.join(f'{i}:{times[i]:.1f}' for i in sorted(slowest))}", flush=True)
    return {"steps": steps, "turn": TURNS[device], "ways": rows, **({"memory": memory} if memory else {})}


def worst_ten(times: list[float]) -> list[float]:
    """Return the times of the slowest ten consecutive steps."""
    start = max(range(max(1, len(times) - 9)), key=lambda i: sum(times[i : i + 10]))
    return times[start : start + 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    parser.add_argument("--steps", type=int, default=0, help="instead of the scenario's own number")
    parser.add_argument("--without", action="append", default=[], choices=[*WAYS], help="a way to leave out")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps or less; nothing is written")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="plain", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        torch.set_num_threads(1)
        serve(SCENARIOS["cpu"][args.serve], args.way)
        return
    print(describe_machine(), flush=True)
    if args.device == "cpu" and not args.quick:
        touch_memory()
    table = {}
    for name, scenario in SCENARIOS[args.device].items():
        if args.only in name:
            steps = args.steps or (scenario.quick_steps if args.quick else scenario.steps)
            table[name] = run_scenario(name, args.device, steps, args.without)
            write_results(f"long_run_{args.device}", table, quick=args.quick or bool(args.only))
    print("\nwritten:", write_results(f"long_run_{args.device}", table, quick=args.quick or bool(args.only)))


if __name__ == "__main__":
    main()
