"""Which learning rates train? Final loss by learning rate, for several ways of clipping, two model changes and a Guard.

A small GPT on synthetic text from a Markov chain (its entropy is the lower bound), AdamW (0.9, 0.95), warm-up over the
first 5 %, cosine to a tenth, learning rates 3e-4 ... 3e-1 as in arXiv 2309.14322. Every way starts from the same
weights and gets the same batches, and no more of them: steps undone by a rollback are lost. A learning rate *trains*
when it closes at least nine tenths of the way from the first loss to the lowest final loss in the table. The clip
strategies are this library's, on a Guard that only watches (it still skips a step that is not finite); "no clip" and
"clip at 1.0" are plain loops. "Guard" has all defaults. A cell shows the median over the seeds; "runs that train"
counts single runs.

    python benchmarks/lr_sensitivity.py [--device cuda|cpu] [--quick] [--seeds N] [--seconds N] [--workers N]
                                        [--only COLUMN]
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from machine import describe_machine, write_results
from models import GPT
from steadygrad import AdaGC, AdaptiveUnitClip, AutoClip, Guard, GuardConfig, Policy, ZClip
from steadygrad.config import ClipStrategy, SnapshotConfig
from steadygrad.errors import TrainingHalted

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
GROUPS = 2
"""Number of groups of symbols: to use them, the model must look one symbol further back."""
TRAINS = 0.9
"""Share of the way from the first loss to the lowest final one that a run must close to count as trained."""


@dataclass(frozen=True)
class Size:
    """Size of the model and length of the training."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    symbols: int
    seeds: int
    seconds: float
    """No run starts after this many seconds; seeds that are incomplete by then are left out of the table."""


SIZES = {
    "cpu": Size(width=64, layers=2, heads=4, context=32, batch=16, steps=300, symbols=32, seeds=3, seconds=1200),
    "cuda": Size(width=192, layers=3, heads=6, context=64, batch=128, steps=240, symbols=32, seeds=2, seconds=112),
    "quick": Size(width=48, layers=2, heads=2, context=24, batch=16, steps=120, symbols=16, seeds=1, seconds=600),
}


@dataclass(frozen=True)
class Column:
    """One way to train."""

    clip: ClipStrategy | float | None = None
    """A strategy on a Guard that only watches, or the threshold of `clip_grad_norm_`."""
    guard: bool = False
    qk_norm: bool = False
    z_loss: float = 0.0


COLUMNS = {
    "no clip": Column(),
    "clip at 1.0": Column(clip=1.0),
    "ZClip": Column(clip=ZClip()),
    "AutoClip": Column(clip=AutoClip()),
    "AGC": Column(clip=AdaptiveUnitClip(exclude=("tokens",))),
    "AdaGC": Column(clip=AdaGC()),
    "Guard": Column(guard=True),
    "z-loss": Column(clip=1.0, z_loss=1e-4),
    "qk-norm": Column(clip=1.0, qk_norm=True),
    "Guard, qk-norm, z-loss": Column(guard=True, qk_norm=True, z_loss=1e-4),
}
QUICK_COLUMNS = ("no clip", "clip at 1.0", "ZClip", "Guard", "qk-norm")
QUICK_RATES = (3e-3, 3e-2, 3e-1)


class Language:
    """Text in which the last symbol and the group of the one before it leave four successors: 1/2, 1/4, 1/8, 1/8."""

    def __init__(self, symbols: int, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.rand(GROUPS, symbols, symbols, generator=generator).argsort(-1)
        self.successors = order[..., :4].to(device)  # [G, V, 4]
        self.shares = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device)
        self.symbols, self.device = symbols, device

    @property
    def entropy(self) -> float:
        """Return the entropy in nats per symbol: no model can reach a lower loss."""
        return -float((self.shares * self.shares.log()).sum())

    def write(self, batch: int, length: int, generator: torch.Generator) -> Tensor:  # -> [B, T]
        draw = torch.multinomial(self.shares, batch * length, replacement=True, generator=generator).view(length, batch)
        first = torch.randint(self.symbols, (2, batch), generator=generator, device=self.device)
        text = [first[0], first[1]]
        for which in draw[2:]:
            text.append(self.successors[text[-2] % GROUPS, text[-1], which])
        return torch.stack(text, 1)


class Training:
    """One model, its optimizer, schedule and text, the same for every way of stepping."""

    def __init__(self, column: Column, rate: float, seed: int, size: Size, device: str) -> None:
        torch.manual_seed(seed)
        self.size, self.language = size, Language(size.symbols, device)
        shape = (size.width, size.layers, size.symbols)
        cures = {"qk_norm": column.qk_norm, "z_loss": column.z_loss}
        self.model = GPT(*shape, heads=size.heads, context=size.context, **cures).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._share_of_rate)
        generator = torch.Generator(device).manual_seed(1000 + seed)
        # Generated at once: symbol by symbol is slow on a GPU.
        text = self.language.write(size.steps * size.batch, size.context + 1, generator)
        self.batches = text.view(size.steps, size.batch, -1)
        self.unseen = self.language.write(8 * size.batch, size.context + 1, generator).view(8, size.batch, -1)

    def _share_of_rate(self, step: int) -> float:
        warm_up = max(1, self.size.steps // 20)
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / (self.size.steps - warm_up))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    @torch.no_grad()
    def test(self) -> float:
        """Return the loss on unseen text, without the z-loss."""
        self.model.eval()
        loss = float(torch.stack([self.model(ids) for ids in self.unseen]).mean())
        self.model.train()
        return loss


def train_plainly(training: Training, max_norm: float | None) -> dict[str, Any]:
    """Train with a plain loop."""
    for ids in training.batches:
        training.model(ids).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
    return {}


def train_guarded(training: Training, config: GuardConfig) -> dict[str, Any]:
    """Train with the same loop on a Guard, and return what it did."""
    guard = Guard(training.model, training.optimizer, scheduler=training.scheduler, config=config)
    halted = False
    try:
        for ids in training.batches:
            guard.step(training.model, ids)
        guard.flush()
    except TrainingHalted:
        halted = True
    done = [f"{i.finding.step} {i.finding.kind}: {i.outcome.action.value}" for i in guard.incidents]
    return {"halted": halted, "incidents": [text for text in done if not text.endswith((": none", ": clip"))]}


def run_one(name: str, rate: float, seed: int, size: Size, device: str) -> dict[str, Any]:
    """Train once and return the result."""
    column, begin = COLUMNS[name], time.perf_counter()
    training = Training(column, rate, seed, size, device)
    first = training.test()
    if column.guard:
        outcome = train_guarded(training, GuardConfig())
    elif column.clip is None or isinstance(column.clip, float):
        outcome = train_plainly(training, column.clip)
    else:
        watching = GuardConfig(clip=column.clip, policy=Policy.observe(), snapshots=SnapshotConfig(enabled=False))
        outcome = {"halted": train_guarded(training, watching)["halted"]}
    loss = training.test()
    found = {"first_loss": first, "loss": loss if math.isfinite(loss) else None, **outcome}
    return {"column": name, "rate": rate, "seed": seed, **found, "seconds": round(time.perf_counter() - begin, 2)}


Task = tuple[str, float, int, Size, str, float]


def work(task: Task) -> dict[str, Any] | None:
    """Run one task in a worker; do nothing after the time limit."""
    *what, deadline = task
    if time.time() > deadline:
        return None
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return run_one(*what)


def run_all(tasks: Sequence[Task], workers: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each task as it arrives."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for number, found in enumerate(pool.imap_unordered(work, tasks), 1):
            if found is not None:
                loss = "NaN" if found["loss"] is None else f"{found['loss']:.3f}"
                where = f"{found['column']}, rate {found['rate']:g}, seed {found['seed']}"
                print(f"  {number}/{len(tasks)}  {where}: loss {loss}  ({found['seconds']:.0f} s)", flush=True)
                yield found


def keep_complete(runs: Sequence[dict[str, Any]], num_cells: int) -> list[dict[str, Any]]:
    """Return the seeds that have every cell, or all seeds when none is complete."""
    counts = Counter(run["seed"] for run in runs)
    complete = {seed for seed, count in counts.items() if count == num_cells}
    kept = [run for run in runs if run["seed"] in complete] or list(runs)
    return sorted(kept, key=lambda run: (list(COLUMNS).index(run["column"]), run["rate"], run["seed"]))


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median final losses by column and rate, the share of runs that train, and the mean excess loss."""
    first = statistics.median(run["first_loss"] for run in runs)
    medians: dict[str, dict[str, float | None]] = {}
    for run in runs:
        medians.setdefault(run["column"], {}).setdefault(f"{run['rate']:g}", None)
    for name, cells in medians.items():
        for rate in cells:
            losses = [r["loss"] for r in runs if r["column"] == name and f"{r['rate']:g}" == rate]
            finite = [math.inf if loss is None else loss for loss in losses]
            middle = statistics.median_high(finite)
            cells[rate] = middle if math.isfinite(middle) else None
    lowest = min(value for cells in medians.values() for value in cells.values() if value is not None)
    bound = first - TRAINS * (first - lowest)
    columns = {}
    for name, cells in medians.items():
        own = [r for r in runs if r["column"] == name]
        losses = [first if r["loss"] is None else min(first, r["loss"]) for r in own]
        columns[name] = {
            "loss": cells,
            "num_trained": sum(loss <= bound for loss in losses),
            "num_runs": len(losses),
            "mean_excess_loss": sum(losses) / len(losses) - lowest,
        }
    return {"first_loss": first, "lowest_loss": lowest, "trains_below": bound, "columns": columns}


def render(summary: Mapping[str, Any]) -> str:
    """Return the table as Markdown: learning rates down, ways across."""
    columns = summary["columns"]
    rates = sorted({rate for one in columns.values() for rate in one["loss"]}, key=float)
    lines = ["| learning rate | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for rate in rates:
        cells = [show_loss(one["loss"], rate, summary["trains_below"]) for one in columns.values()]
        lines.append(f"| {rate} | " + " | ".join(cells) + " |")
    shares = " | ".join(f"{one['num_trained']} of {one['num_runs']}" for one in columns.values())
    excess = " | ".join(f"{one['mean_excess_loss']:.3f}" for one in columns.values())
    return "\n".join([*lines, f"| runs that train | {shares} |", f"| mean loss above the lowest | {excess} |"])


def show_loss(cells: Mapping[str, float | None], rate: str, bound: float) -> str:
    """Return '1.243', in bold if it trained; '-' if there was no time to run it."""
    loss = cells.get(rate)
    if loss is None:
        return "NaN" if rate in cells else "-"
    return f"**{loss:.3f}**" if loss <= bound else f"{loss:.3f}"


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="three rates, five ways, a tiny model; nothing is written")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds, run one after the other  [default: 3 on cpu, 2 on cuda]"
    )
    parser.add_argument("--seconds", type=float, help="start no run after this many seconds")
    parser.add_argument("--workers", type=int, help="number of processes  [default: all cores except a few]")
    parser.add_argument("--only", action="append", choices=list(COLUMNS), help="this way only; nothing is written")
    args = parser.parse_args()
    size = SIZES["quick" if args.quick else args.device]
    size = replace(size, seeds=args.seeds or size.seeds)
    names = args.only or (QUICK_COLUMNS if args.quick else list(COLUMNS))
    rates = QUICK_RATES if args.quick else RATES
    workers = args.workers or max(1, (os.cpu_count() or 1) - (3 if args.device == "cuda" else 0))
    begin = time.perf_counter()
    deadline = time.time() + (args.seconds or size.seconds)
    tasks: list[Task] = []
    for seed in range(size.seeds):
        cells = [(name, rate, seed, size, args.device, deadline) for name in names for rate in rates]
        random.Random(seed).shuffle(cells)  # so that the slow ways do not all run last
        tasks += cells
    print(describe_machine())
    print(f"{len(tasks)} trainings of {size.steps} steps, {workers} at a time", flush=True)
    runs = keep_complete(list(run_all(tasks, workers)), len(names) * len(rates))
    if not runs:
        print("no training was done in the time given; use a larger --seconds", file=sys.stderr)
        return 2
    summary = summarise(runs)
    entropy = Language(size.symbols, "cpu").entropy
    print(f"\n{render(summary)}\n")
    print(f"first loss {summary['first_loss']:.3f}, no model can go below {entropy:.3f}; bold: trains", end="; ")
    print(f"{time.perf_counter() - begin:.0f} s")
    if not args.only:
        facts = {"size": asdict(size), "num_seeds": len({run["seed"] for run in runs}), "entropy": entropy}
        results = {**facts, **summary, "runs": runs}
        print("written:", write_results(f"lr_sensitivity_{args.device}", results, quick=args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
