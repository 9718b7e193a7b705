"""Does it help to act on the forecast? Final loss and steps lost, with the learning rate halved at a forecast or not.

First the stories of benchmarks/rescue.py on a Guard with every default, with and without the forecast acting, and the
same trainings with nothing wrong. Most of their faults come from outside, within one step, and cannot be foreseen. Then
held-out programs of the traces, begun anew: some that became unstable late and some that did not, with nothing but the
forecast to save them.

    PYTHONPATH=src python benchmarks/forecast/act.py --traces DIR [--quick]    adds to results/forecast.json
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "stories"))

from compare import add_results
from generate import train
from programs import HELD_OUT
from traces import load_runs
from trainings import Run, Story, Training, train_guarded, train_images, train_language, train_memory, train_plain
from truth import find_onset

import rescue
from steadygrad import Action, FixedNorm, GuardConfig, Policy
from steadygrad.config import DetectConfig, ForecastConfig

ACTING = Policy(actions={"instability_forecast": Action.SCALE_LR})
LOW = 0.25
"""A probability that is passed more often than the model's own threshold."""


def make_config(threshold: float | None, policy: Policy = ACTING) -> GuardConfig:
    """A Guard with every default and the forecast."""
    forecast = ForecastConfig(enabled=True, threshold=threshold)
    return GuardConfig(clip=FixedNorm(max_norm=1.0), policy=policy, detect=DetectConfig(forecast=forecast))


def run_acting(story: Story, threshold: float | None) -> Run:
    """The story on a Guard that also acts on the forecast."""
    batches = story.spoil(story.clean.order())
    return train_guarded(story.faulty, make_config(threshold), batches=batches, meddle=story.meddle)


WAYS: dict[str, Callable[[Story], Run]] = {
    "Guard": rescue.RUNS["Guard"],
    "acts on the forecast": lambda story: run_acting(story, None),
    f"acts from {LOW}": lambda story: run_acting(story, LOW),
}


def tell_stories(stories: Sequence[Story], seeds: Sequence[int]) -> dict[str, Any]:
    """Each story, each way, over the seeds."""
    rescue.RUNS.update(WAYS)
    results: dict[str, Any] = {}
    for story in stories:
        cells: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for seed in seeds:
            seeded = story.with_seed(seed)
            clean = train_plain(seeded.clean).loss
            for way in WAYS:
                cells[way].append({"seed": seed, **rescue.measure(way, seeded, clean)})
        results[story.name] = cells
        print(f"{story.name:<31}" + "".join(f"{rescue.show(cells[way]):>34}" for way in WAYS), flush=True)
    return results


def make_clean_stories() -> list[Story]:
    """The trainings with nothing wrong: what acting without need costs."""
    trainings: list[Training] = [train_language(), train_images(), train_memory()]
    return [
        Story(name=f"nothing wrong, {one.name}", clean=one, finds=frozenset(), does=frozenset()) for one in trainings
    ]


# --- held-out programs, begun anew -----------------------------------------------------------------------------------


def choose_setups(folder: Path, num: int) -> dict[str, list[dict[str, Any]]]:
    """Setups that became unstable after step 40, and setups that did not; as many of each program."""
    runs = [run for run in load_runs(folder) if run.program in HELD_OUT and run.setup["outlier_at"] < 0]
    chosen: dict[str, list[dict[str, Any]]] = {"became unstable": [], "stayed stable": []}
    for program in HELD_OUT:
        mine = [run for run in runs if run.program == program]
        late = [run.setup for run in mine if run.onset is not None and run.onset > 40]
        stable = [run.setup for run in mine if run.onset is None]
        chosen["became unstable"] += late[: num // len(HELD_OUT)]
        chosen["stayed stable"] += stable[: num // len(HELD_OUT)]
    return chosen


def train_again(setup: dict[str, Any], threshold: float | None, *, acts: bool) -> dict[str, Any]:
    """One run with nothing but the forecast; its onset and the median of its last 16 losses (inf when it broke)."""
    forecast = ForecastConfig(enabled=acts, threshold=threshold)

    def change(config: GuardConfig) -> GuardConfig:
        detect = dataclasses.replace(config.detect, forecast=forecast)
        return dataclasses.replace(config, detect=detect, policy=ACTING if acts else Policy.observe())

    rows = train(setup, change).astype(float)
    onset = find_onset(rows[:, 0], rows[:, 1], rows[:, 4])
    last = float(np.median(rows[-16:, 0]))
    lowered = bool(acts and np.isfinite(last) and _was_lowered(setup, rows))
    return {"onset": onset, "loss": last if math.isfinite(last) and onset is None else None, "lowered": lowered}


def _was_lowered(setup: dict[str, Any], rows: np.ndarray) -> bool:
    """Whether the rate was ever half of what it had been one step before, which no schedule here but `drop` does."""
    rates = rows[:, 3]
    ratio = rates[1:] / np.maximum(rates[:-1], 1e-30)
    return bool(((ratio > 0.45) & (ratio < 0.55)).any())


def compare_again(setups: list[dict[str, Any]]) -> dict[str, Any]:
    """The same setups, left alone and acted on at either threshold."""
    results: dict[str, Any] = {"num_runs": len(setups)}
    alone = [train_again(setup, None, acts=False) for setup in setups]
    results["left alone"] = {"num_unstable": sum(one["onset"] is not None for one in alone)}
    for way, threshold in (("acts on the forecast", None), (f"acts from {LOW}", LOW)):
        acted = [train_again(setup, threshold, acts=True) for setup in setups]
        both = [(a["loss"], b["loss"]) for a, b in zip(alone, acted) if a["loss"] and b["loss"]]
        ratios = [after / before for before, after in both]
        results[way] = {
            "num_lowered": sum(one["lowered"] for one in acted),
            "num_unstable": sum(one["onset"] is not None for one in acted),
            "num_saved": sum(a["onset"] is not None and b["onset"] is None for a, b in zip(alone, acted)),
            "num_broken": sum(a["onset"] is None and b["onset"] is not None for a, b in zip(alone, acted)),
            "median_final_loss_ratio": round(statistics.median(ratios), 4) if ratios else None,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="three stories, few runs, nothing written")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-again", type=int, default=60, help="runs of held-out programs of each sort")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    num = 6 if arguments.quick else arguments.num_again
    again = {}
    for kind, setups in choose_setups(arguments.traces, num).items():
        again[kind] = compare_again(setups)
        print(f"held-out programs that {kind}: {again[kind]}", flush=True)
    stories = [*make_clean_stories(), *rescue.make_stories(), *rescue.make_rate_stories()]
    stories = [s for s in stories if not arguments.quick or s.name in rescue.QUICK]
    print(f"{'story':<31}" + "".join(f"{way:>34}" for way in WAYS))
    told = tell_stories(stories, range(1 if arguments.quick else arguments.seeds))
    if not arguments.quick:
        print(add_results(acting={"stories": told, "held_out_programs": again}))


if __name__ == "__main__":
    main()
