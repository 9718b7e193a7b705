"""What saves a training that goes wrong? Each faulty training of the tests: unguarded, clipped, with ZClip, on a Guard.

A cell shows the held-out loss relative to the clean run with the same seed (median and worst over the seeds) and the
steps lost (skipped, undone or left out); runs that died or were halted are counted. "Guard" has all defaults; "clip at
1.0" changes only that. "own policy" also rolls back on `exploding_gradient` in the training marked *, and is the
default elsewhere. The models are small: only orders of magnitude mean something.

Run `python benchmarks/rescue.py`, with `--quick` for three stories and one seed; writes results/rescue.json. `--only
TEXT` runs the stories with that text in their names and keeps the results of the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from machine import RESULTS, write_results

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "stories"))

from trainings import Run, Story, make_far_too_high_story, make_rate_stories, make_slow_story, make_stories, train_plain

from steadygrad import Action, FixedNorm, GuardConfig
from steadygrad.config import Policy

QUICK = ("NaN batch", "learning rate jumps, SGD", "learning rate 30x, CNN")
SEEDS = (0, 1, 2)
COLUMNS = ("unguarded", "clip_grad_norm_", "ZClip", "Guard", "own policy", "Guard, clip at 1.0")


class ZClipRule:
    """ZClip as published (arXiv 2504.02507): EMA mean and variance of the norm; a norm above z = 2.5 is reduced.

    Warm-up of 25 steps, alpha 0.97, reciprocal mode: the norm becomes mean + (2.5^2 / z) std.
    """

    def __init__(self, *, alpha: float = 0.97, threshold: float = 2.5, warm_up: int = 25) -> None:
        self._alpha, self._threshold, self._warm_up = alpha, threshold, warm_up
        self._norms: list[float] = []
        self._mean = self._variance = 0.0

    def __call__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters])))
        if len(self._norms) < self._warm_up:
            self._norms.append(norm)
            self._mean = sum(self._norms) / len(self._norms)
            self._variance = sum((n - self._mean) ** 2 for n in self._norms) / len(self._norms)
            return
        deviation = math.sqrt(self._variance) if self._variance >= 0 else math.nan
        z = (norm - self._mean) / (deviation + 1e-6)
        if z > self._threshold:
            clipped = self._mean + (self._threshold**2 / z) * deviation
            for parameter in parameters:
                parameter.grad.mul_(clipped / (norm + 1e-6))
            norm = clipped
        self._mean = self._alpha * self._mean + (1 - self._alpha) * norm
        self._variance = self._alpha * self._variance + (1 - self._alpha) * (norm - self._mean) ** 2


def clip_plainly(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


RUNS: dict[str, Callable[[Story], Run]] = {
    "unguarded": lambda story: story.train_plain(),
    "clip_grad_norm_": lambda story: story.train_plain(clip_plainly),
    "ZClip": lambda story: story.train_plain(ZClipRule()),
    "Guard": lambda story: story.train_guarded(clip=GuardConfig().clip, policy=Policy()),
    "own policy": lambda story: story.train_guarded(clip=GuardConfig().clip),
    "Guard, clip at 1.0": lambda story: story.train_guarded(clip=FixedNorm(max_norm=1.0), policy=Policy()),
}


def count_lost(run: Run) -> int:
    """Count the batches whose training is not in the final weights."""
    if run.guard is None:
        return 0
    back = [i.outcome for i in run.guard.incidents if i.outcome.action is Action.ROLLBACK]
    undone = sum(int(o.before["step"] - o.after["step"] - o.after.get("num_steps_made_again", 0)) for o in back)
    stats = run.guard.stats()
    # Both counts include steps skipped before a rollback; count them once.
    skipped = {i.step for i in run.guard.incidents if i.outcome.action is Action.SKIP}
    inside = sum(any(o.after["step"] <= step < o.before["step"] for o in back) for step in skipped)
    return undone + len(skipped) - inside + int(stats["num_skipped_batches"] or 0)


def measure(name: str, story: Story, clean_loss: float) -> dict[str, Any]:
    """Run one story once."""
    start = time.perf_counter()
    run = RUNS[name](story)
    seconds = time.perf_counter() - start
    ratio = run.loss / clean_loss
    return {
        "relative_loss": ratio if math.isfinite(ratio) else None,
        "num_steps_lost": count_lost(run),
        "died": run.died,
        "halted": run.halted is not None,
        "wall_seconds": round(seconds, 2),
        "actions": sorted({i.outcome.action.value for i in run.guard.incidents}) if run.guard is not None else [],
    }


def show(cells: list[dict[str, Any]]) -> str:
    """Return one cell of the table: the outcome of the story over the seeds."""
    lived = sorted(
        c["relative_loss"] for c in cells if not (c["died"] or c["halted"]) and c["relative_loss"] is not None
    )
    died, halted = sum(c["died"] for c in cells), sum(c["halted"] for c in cells)
    parts = [f"{count} {word}" for count, word in ((died, "died"), (halted, "halted")) if count]
    if lived:
        worst = f" (worst {lived[-1]:.3g}x)" if len(lived) > 1 else ""
        parts.append(f"{statistics.median(lived):.3g}x{worst}")
    lost = statistics.median(c["num_steps_lost"] for c in cells)
    return ", ".join([*parts, *([f"{lost:.0f} lost"] if lost else [])]) or "NaN"


def run_columns(story: Story, seeds: Sequence[int], clean: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Run every column of one story over the seeds; clean runs are shared between stories."""
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in COLUMNS}
    for seed in seeds:
        key, seeded = (id(story.clean), seed), story.with_seed(seed)
        if key not in clean:
            clean[key] = train_plain(seeded.clean).loss
        for name in COLUMNS:
            cells[name].append({"seed": seed, **measure(name, seeded, clean[key])})
    own = {kind: action.value for kind, action in story.policy.actions.items()}
    losses = [clean[id(story.clean), seed] for seed in seeds]
    return {"training": story.clean.name, "clean_losses": losses, "own_policy": own, **cells}


def main() -> None:
    """Run every story and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three stories, one seed, nothing written")
    parser.add_argument("--only", default="", metavar="TEXT", help="only stories with this in their names")
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    torch.set_num_threads(1)  # tensors are tiny: a second thread would only wait
    warnings.filterwarnings("ignore", message=".*runs without fused=True")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    everything = [*make_stories(), *make_rate_stories(), make_slow_story(), make_far_too_high_story()]
    stories = [story for story in everything if only in story.name and (not quick or story.name in QUICK)]
    seeds = SEEDS[:1] if quick else SEEDS
    clean: dict[tuple[int, int], float] = {}
    results = json.loads((RESULTS / "rescue.json").read_text(encoding="utf-8"))["results"] if only else {}
    print(f"{'story':<31}{'clean':>8}" + "".join(f"{name:>34}" for name in COLUMNS))
    for story in stories:
        columns = results[story.name] = run_columns(story, seeds, clean)
        print(
            f"{story.name + ('*' if columns['own_policy'] else ''):<31}"
            f"{statistics.median(columns['clean_losses']):>8.4f}"
            + "".join(f"{show(columns[name]):>34}" for name in COLUMNS),
            flush=True,
        )
    print("written:", write_results("rescue", results, quick=quick))


if __name__ == "__main__":
    main()
