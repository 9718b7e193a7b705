"""What saves a training that goes wrong? Each story of the tests, unguarded, clipped, under ZClip's rule, on a Guard.

For each: held-out loss relative to the clean run's, steps lost (skipped, gone back over or left out), whether it died
or was halted, and wall seconds. "Guard" has every default. "own policy" rolls back on `loss_explosion` or
`exploding_gradient` in the stories marked *, and is the default elsewhere. The default policy does not save the
learning-rate jumps; it saves the exploding RNN where gradients are clipped, not with clip=None.
The last stories are saved by nothing here. One seed each; small models, so read orders of magnitude, not digits.
Run `python benchmarks/rescue.py`, with `--quick` for three stories; writes results/rescue.json.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from machine import write_results

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "stories"))

from trainings import Run, Story, make_hopeless_story, make_stories, make_unsaved_stories, train_plain

from steadygrad import Action, FixedNorm
from steadygrad.config import Policy

QUICK = ("NaN batch", "learning rate jumps, SGD", "RNN explodes")
COLUMNS = ("unguarded", "clip_grad_norm_", "ZClip", "Guard", "own policy", "own policy, clip=None")


class ZClipRule:
    """ZClip as published (arXiv 2504.02507): EMA mean and variance of the norm; above z = 2.5 it is pulled back.

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
    "Guard": lambda story: story.train_guarded(clip=FixedNorm(max_norm=1.0), policy=Policy()),
    "own policy": lambda story: story.train_guarded(clip=FixedNorm(max_norm=1.0)),
    "own policy, clip=None": lambda story: story.train_guarded(clip=None),
}


def count_lost(run: Run) -> int:
    """Batches whose training is not in the final weights."""
    if run.guard is None:
        return 0
    back = [i.outcome for i in run.guard.incidents if i.outcome.action is Action.ROLLBACK]
    undone = sum(int(o.before["step"] - o.after["step"]) for o in back)
    stats = run.guard.stats()
    # Steps that were skipped before a rollback are counted by both; told once.
    skipped = {i.step for i in run.guard.incidents if i.outcome.action is Action.SKIP}
    inside = sum(any(o.after["step"] <= step < o.before["step"] for o in back) for step in skipped)
    return undone + len(skipped) - inside + int(stats["num_skipped_batches"] or 0)


def measure(name: str, story: Story, clean_loss: float) -> dict[str, Any]:
    """One run of one story."""
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


def show(cell: dict[str, Any]) -> str:
    if cell["died"]:
        return "died"
    if cell["halted"]:
        return f"halted, {cell['wall_seconds']:.1f} s"
    lost = f", {cell['num_steps_lost']} lost" if cell["num_steps_lost"] else ""
    ratio = cell["relative_loss"]
    return ("NaN" if ratio is None else f"{ratio:.3g}x") + f"{lost}, {cell['wall_seconds']:.1f} s"


def main() -> None:
    """Run every story and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three stories, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    warnings.filterwarnings("ignore", message=".*runs without fused=True")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    stories = [
        s for s in [*make_stories(), make_hopeless_story(), *make_unsaved_stories()] if not quick or s.name in QUICK
    ]
    clean: dict[int, float] = {}
    results = {}
    print(f"{'story':<31}{'clean':>8}" + "".join(f"{name:>24}" for name in COLUMNS))
    for story in stories:
        key = id(story.clean)
        if key not in clean:
            clean[key] = train_plain(story.clean).loss
        cells = {name: measure(name, story, clean[key]) for name in COLUMNS}
        own = {kind: action.value for kind, action in story.policy.actions.items()}
        results[story.name] = {"training": story.clean.name, "clean_loss": clean[key], "own_policy": own, **cells}
        print(
            f"{story.name + ('*' if own else ''):<31}{clean[key]:>8.4f}"
            + "".join(f"{show(cells[name]):>24}" for name in COLUMNS),
            flush=True,
        )
    if not quick:
        print(write_results("rescue", results))


if __name__ == "__main__":
    main()
