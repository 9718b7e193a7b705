"""Does it help to act on the forecast? Final loss and steps lost, with and without halving the learning rate.

Every story of benchmarks/rescue.py on a Guard with all defaults, with and without acting on the forecast, and the same
trainings without a fault. Most of the faults come from outside, within one step, and cannot be foreseen. Also held-out
programs of the traces, started again: some that became unstable late and some that did not, with only the forecast to
save them. `--quick` is three stories, one seed, and writes nothing; each part is added to results/forecast.json
separately.

    PYTHONPATH=src python benchmarks/forecast/act.py --part stories [--quick]
    PYTHONPATH=src python benchmarks/forecast/act.py --part again --traces DIR
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from steadygrad.facts import Incident

ACTING = Policy(actions={"instability_forecast": Action.SCALE_LR})
CLEAN = "nothing wrong"
LOW = 0.25
"""A lower probability threshold than the model's own."""


def make_config(threshold: float | None, policy: Policy = ACTING) -> GuardConfig:
    """Return the settings of a Guard with all defaults and the forecast."""
    forecast = ForecastConfig(enabled=True, threshold=threshold)
    return GuardConfig(clip=FixedNorm(max_norm=1.0), policy=policy, detect=DetectConfig(forecast=forecast))


def run_acting(story: Story, threshold: float | None) -> Run:
    """Run the story on a Guard that also acts on the forecast."""
    batches = story.spoil(story.clean.order())
    run = train_guarded(story.faulty, make_config(threshold), batches=batches, make_fault=story.make_fault)
    FORECASTS.extend(i.step for i in run.guard.incidents if is_answered(i))
    return run


FORECASTS: list[int] = []
"""Steps of the last run at which a forecast lowered the rate."""


def is_answered(incident: Incident) -> bool:
    """Whether a forecast lowered the rate."""
    return incident.finding.kind == "instability_forecast" and incident.outcome.action is Action.SCALE_LR


WAYS: dict[str, Callable[[Story], Run]] = {
    "Guard": rescue.RUNS["Guard"],
    "acts on the forecast": lambda story: run_acting(story, None),
    f"acts from {LOW}": lambda story: run_acting(story, LOW),
}


Cells = dict[str, list[dict[str, Any]]]
"""Way -> one run per seed."""


def run_stories(stories: Sequence[Story], seeds: Sequence[int]) -> dict[str, Cells]:
    """Run each story each way, over the seeds; clean runs are shared between stories."""
    rescue.RUNS.update(WAYS)
    results: dict[str, Cells] = {}
    clean: dict[tuple[int, int], float] = {}
    for story in stories:
        cells: Cells = {way: [] for way in WAYS}
        for seed in seeds:
            key, seeded = (id(story.clean), seed), story.with_seed(seed)
            if key not in clean:
                clean[key] = train_plain(seeded.clean).loss
            for way in WAYS:
                FORECASTS.clear()
                measured = rescue.measure(way, seeded, clean[key])
                cells[way].append({"seed": seed, **measured, "forecasts": list(FORECASTS)})
        results[story.name] = cells
        shown = (f"{rescue.show(cells[way])}, {sum(len(c['forecasts']) for c in cells[way])} acted" for way in WAYS)
        print(f"{story.name:<31}" + "".join(f"{text:>34}" for text in shown), flush=True)
    return results


def list_stories() -> list[Story]:
    """Return all stories of benchmarks/rescue.py."""
    return [
        *rescue.make_stories(),
        *rescue.make_rate_stories(),
        rescue.make_slow_story(),
        rescue.make_far_too_high_story(),
    ]


def sum_up(outcomes: Mapping[str, Cells]) -> dict[str, Any]:
    """Compare each way with not acting, run by run: how often it acted, final loss and steps lost."""
    names = [name for name in outcomes if not name.startswith(CLEAN)]
    groups = {"stories": names, CLEAN: [name for name in outcomes if name not in names]}
    return {group: {way: _sum_way(outcomes, chosen, way) for way in WAYS} for group, chosen in groups.items() if chosen}


def _sum_way(outcomes: Mapping[str, Cells], names: Sequence[str], way: str) -> dict[str, Any]:
    pairs = [pair for name in names for pair in zip(outcomes[name]["Guard"], outcomes[name][way])]
    ratios = [b["relative_loss"] / a["relative_loss"] for a, b in pairs if a["relative_loss"] and b["relative_loss"]]
    same = [a["relative_loss"] == b["relative_loss"] and a["num_steps_lost"] == b["num_steps_lost"] for a, b in pairs]
    return {
        "num_stories": len(names),
        "num_runs": len(pairs),
        "num_runs_acted": sum(bool(b["forecasts"]) for _, b in pairs),
        "num_same": sum(same),
        "num_better": sum(ratio < 1.0 for ratio in ratios),
        "num_worse": sum(ratio > 1.0 for ratio in ratios),
        "median_final_loss_ratio": round(statistics.median(ratios), 4) if ratios else None,
        "best_final_loss_ratio": round(min(ratios), 4) if ratios else None,
        "worst_final_loss_ratio": round(max(ratios), 4) if ratios else None,
        "num_steps_lost": sum(b["num_steps_lost"] for _, b in pairs),
        "num_died_or_halted": sum(b["died"] or b["halted"] for _, b in pairs),
    }


def make_clean_stories() -> list[Story]:
    """Return the trainings without a fault, which show what acting without need costs."""
    trainings: list[Training] = [train_language(), train_images(), train_memory()]
    return [Story(name=f"{CLEAN}, {one.name}", clean=one, finds=frozenset(), does=frozenset()) for one in trainings]


# --- held-out programs, started again --------------------------------------------------------------------------------


def choose_setups(folder: Path, num: int) -> dict[str, list[dict[str, Any]]]:
    """Return setups that became unstable after step 40, and as many of each program that did not."""
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
    """Train once with only the forecast; return its onset, final loss, and how often it lowered the rate before.

    The final loss is the median of the last 16, or None if the run failed. "Before" means before the onset.
    """
    forecast = ForecastConfig(enabled=acts, threshold=threshold)
    answered: list[int] = []

    def note(incident: Incident) -> None:
        answered.extend([incident.step] if is_answered(incident) else [])

    def change(config: GuardConfig) -> GuardConfig:
        detect = dataclasses.replace(config.detect, forecast=forecast)
        policy = ACTING if acts else Policy.observe()
        return dataclasses.replace(config, detect=detect, policy=policy, on_incident=note)

    rows = train(setup, change).astype(float)
    onset = find_onset(rows[:, 0], rows[:, 1], rows[:, 4])
    last = float(np.median(rows[-16:, 0]))
    in_time = [step for step in answered if onset is None or step < onset]
    loss = last if math.isfinite(last) and onset is None else None
    return {"onset": onset, "loss": loss, "num_lowered": len(in_time)}


def compare_again(setups: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the same setups left alone and acted on at either threshold."""
    results: dict[str, Any] = {"num_runs": len(setups)}
    alone = [train_again(setup, None, acts=False) for setup in setups]
    results["left alone"] = {"num_unstable": sum(one["onset"] is not None for one in alone)}
    for way, threshold in (("acts on the forecast", None), (f"acts from {LOW}", LOW)):
        acted = [train_again(setup, threshold, acts=True) for setup in setups]
        both = [(a["loss"], b["loss"]) for a, b in zip(alone, acted) if a["loss"] and b["loss"]]
        ratios = [after / before for before, after in both]
        results[way] = {
            "num_runs_lowered": sum(one["num_lowered"] > 0 for one in acted),
            "num_unstable": sum(one["onset"] is not None for one in acted),
            "num_saved": sum(a["onset"] is not None and b["onset"] is None for a, b in zip(alone, acted)),
            "num_broken": sum(a["onset"] is None and b["onset"] is not None for a, b in zip(alone, acted)),
            "median_final_loss_ratio": round(statistics.median(ratios), 4) if ratios else None,
            "worst_final_loss_ratio": round(max(ratios), 4) if ratios else None,
            "num_pairs": len(ratios),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="what generate.py wrote; only `--part stories` needs none")
    parser.add_argument("--quick", action="store_true", help="three stories, few runs, nothing written")
    parser.add_argument("--part", choices=("all", "again", "stories"), default="all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-again", type=int, default=60, help="runs of held-out programs of each kind")
    arguments = parser.parse_args()
    if arguments.part != "stories" and arguments.traces is None:
        parser.error(f"--part {arguments.part} restarts runs of traces, and none were given. Give --traces DIR.")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    parts: dict[str, Any] = {}
    if arguments.part != "stories":
        num = 6 if arguments.quick else arguments.num_again
        parts["acting_held_out"] = {}
        for kind, setups in choose_setups(arguments.traces, num).items():
            parts["acting_held_out"][kind] = compare_again(setups)
            print(f"held-out programs that {kind}: {parts['acting_held_out'][kind]}", flush=True)
    if arguments.part != "again":
        stories = [s for s in [*make_clean_stories(), *list_stories()] if not arguments.quick or s.name in rescue.QUICK]
        print(f"{'story':<31}" + "".join(f"{way:>34}" for way in WAYS))
        outcomes = run_stories(stories, range(1 if arguments.quick else arguments.seeds))
        parts |= {"acting_stories": outcomes, "acting_stories_in_short": sum_up(outcomes)}
        print(json.dumps(parts["acting_stories_in_short"], indent=1))
    if not arguments.quick:
        print(add_results(**parts))


if __name__ == "__main__":
    main()
