"""What happens to a training whose weights, moments, learning rate or data are damaged mid-run but stay finite?

The thirteen trainings of tests/stories/damage.py, once as they are and once with different data from that step on, in
the clean run too. Each runs unguarded, on a Guard that acts at the first symptom (`Policy.eager()`), and on a Guard
with all defaults, which acts on proof. A cell shows the held-out loss relative to the clean run with the same seed
(median and worst over the seeds) and the steps lost. Below: the number of runs in which each rule acted.

Run `python benchmarks/finite_damage.py`, with `--quick` for three stories and one seed.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from machine import write_results
from rescue import SEEDS, count_lost, show

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "stories"))

from damage import make_damage_stories
from trainings import Run, Story, train_plain

from steadygrad import Action, GuardConfig
from steadygrad.config import Policy

QUICK = ("rate x 100 for good, SGD", "BatchNorm scales x 20", "attention matrices x 20, new data")
COLUMNS = ("unguarded", "acting at once", "Guard")


def run_story(way: str, story: Story) -> Run:
    if way == "unguarded":
        return story.train_plain()
    policy = Policy.eager() if way == "acting at once" else Policy()
    return story.train_guarded(clip=GuardConfig().clip, policy=policy)


def measure(way: str, story: Story, clean_loss: float) -> dict[str, Any]:
    """Run one story once."""
    run = run_story(way, story)
    ratio = run.loss / clean_loss
    acted = [] if run.guard is None else [i for i in run.guard.incidents if i.outcome.action not in PASSIVE]
    return {
        "relative_loss": ratio if math.isfinite(ratio) else None,
        "num_steps_lost": count_lost(run),
        "died": run.died,
        "halted": run.halted is not None,
        "rules": sorted({incident.finding.kind for incident in acted}),
    }


PASSIVE = (Action.NONE, Action.CLIP)


def main() -> None:
    """Run every story and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three stories, one seed, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # tensors are tiny: a second thread would only wait
    warnings.simplefilter("ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    everything = [story for change in (False, True) for story in make_damage_stories(with_data_change=change)]
    clean: dict[tuple[int, int], float] = {}
    stories_done: dict[str, dict[str, list[dict[str, Any]]]] = {}
    print(f"{'story':<44}" + "".join(f"{way:>30}" for way in COLUMNS))
    for story in everything:
        if quick and story.name not in QUICK:
            continue
        cells = stories_done[story.name] = {way: [] for way in COLUMNS}
        for seed in SEEDS[:1] if quick else SEEDS:
            key, seeded = (id(story.clean), seed), story.with_seed(seed)
            if key not in clean:
                clean[key] = train_plain(seeded.clean).loss
            for way in COLUMNS:
                cells[way].append(measure(way, seeded, clean[key]))
        print(f"{story.name:<44}" + "".join(f"{show(cells[way]):>30}" for way in COLUMNS), flush=True)
    print("written:", write_results("finite_damage", {"stories": stories_done}, quick=quick))


if __name__ == "__main__":
    main()
