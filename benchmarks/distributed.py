"""What guarding a training on two ranks costs, compared with the same loop with stock `clip_grad_norm_`, over gloo.

Two processes on one machine train a GPT with DistributedDataParallel, then sharded (FSDP2). Both ways take turns in
rounds; the claim is the ratio of medians. Also measured: saving a checkpoint on both ranks, and resuming from it.

    python benchmarks/distributed.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from machine import describe_machine, write_results
from models import GPT, SHAPES
from steadygrad import Guard
from steadygrad.testing.ranks import run_ranks

CONTEXT, HEADS, BATCH = 128, 8, 2


class Loop:
    """One model on this rank, stepped both ways."""

    def __init__(self, kind: str, shape: str, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT(*SHAPES[shape], heads=HEADS, context=CONTEXT)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-5)
        self.guard = Guard(self.model, self.optimizer, run_dir=run_dir)
        self.ids = torch.randint(SHAPES[shape][2], (BATCH, CONTEXT + 1))

    def loss(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def clipped(self) -> None:
        self.loss(self.ids).backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def guarded(self) -> None:
        self.guard.step(self.loss, self.ids)


def time_rank(kind: str, shape: str, rounds: int, steps: int, run_dir: Path) -> dict[str, Any]:
    loop = Loop(kind, shape, run_dir)
    ways: dict[str, Callable[[], None]] = {
        "clip_grad_norm_": loop.clipped,
        "clip_grad_norm_, again (noise)": loop.clipped,
        "Guard": loop.guarded,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways)
        for name in names[number % 3 :] + names[: number % 3]:
            ways[name]()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                ways[name]()
            dist.barrier()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / steps * 1e3)
    start = time.perf_counter()
    saved = loop.guard.save()
    save_seconds = time.perf_counter() - start
    start = time.perf_counter()
    loop.guard.resume()
    return {
        "times": copy.copy(times),
        "save_seconds": save_seconds,
        "resume_seconds": time.perf_counter() - start,
        "saved": saved is not None and saved.error is None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, two rounds of two steps; nothing is written"
    )
    quick = parser.parse_args().quick
    shape, rounds, steps = ("tiny", 2, 2) if quick else ("10M", 21, 4)
    print(describe_machine())
    table: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        with tempfile.TemporaryDirectory() as folder:
            timed = run_ranks(time_rank, 2, kind, shape, rounds, steps, Path(folder) / "run", time_limit_seconds=900)[0]
        middle = {name: statistics.median(values) for name, values in timed["times"].items()}
        # Ratios within a round: other load on the machine slows both ways.
        base = timed["times"]["clip_grad_norm_"]
        ratios = {
            name: statistics.median(v / b for v, b in zip(values, base)) for name, values in timed["times"].items()
        }
        print(f"\n{kind}, 2 ranks, {shape} GPT, {BATCH} x {CONTEXT} tokens a rank")
        for name, value in middle.items():
            print(f"  {name:32s} {value:9.2f} ms   {ratios[name]:6.3f}")
        print(f"  save {timed['save_seconds']:.2f} s, resume {timed['resume_seconds']:.2f} s, saved: {timed['saved']}")
        table[kind] = {
            "milliseconds": middle,
            "ratio": ratios,
            **{key: timed[key] for key in ("save_seconds", "resume_seconds", "saved")},
        }
    print("\nwritten:", write_results("distributed_cpu", table, quick=quick))


if __name__ == "__main__":
    main()
