"""How well is instability forecast on programs that no model was trained on? Compared with rules about a single number.

For each rule: AUROC over the steps (is the onset within the horizon?), the share of onsets forecast at all, the lead in
steps (median over the forecast onsets), and false alarms per 1000 healthy steps. Thresholds are chosen on the training
programs; all numbers shown are from the held-out ones. docs/forecast.md has the calibration, and the AUROC of each
held-out program.

    PYTHONPATH=src python benchmarks/forecast/compare.py --traces DIR      writes benchmarks/results/forecast.json
    PYTHONPATH=src python benchmarks/forecast/compare.py --quick           makes a few runs, to show that it works

The numbers of `--quick` mean nothing: they come from a handful of runs, and are not written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from alarms import Alarms, choose_threshold, judge_alarms
from generate import make_runs
from programs import HELD_OUT
from rivals import RIVALS, score_rival
from traces import Run, Steps, load_runs, measure_steps

from machine import RESULTS, write_results
from steadygrad.detect.instability import Model, read_model

NUM_QUICK = 24
BUDGET = 0.35
"""False alarms per 1000 healthy steps at which a rival's threshold is chosen; fit.py has the same for the forecast."""


def measure_auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the chance that a positive step scores higher than another; ties count half."""
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    first = np.searchsorted(ranked, ranked, side="left")
    last = np.searchsorted(ranked, ranked, side="right")
    ranks = np.empty(len(scores))
    ranks[order] = (first + last + 1) / 2.0
    num = int(positive.sum())
    if num in (0, len(scores)):
        return math.nan
    return float((ranks[positive].sum() - num * (num + 1) / 2.0) / (num * (len(scores) - num)))


def score_model(model: Model, steps: Steps) -> np.ndarray:
    """Return the shipped model's probability at each step, computed by its own code."""
    return np.array([model.calibrate(model.score(row)) for row in steps.indicators.astype(float).tolist()])


def describe(alarms: Alarms, auroc: float, threshold: float) -> dict[str, Any]:
    """Return one row of the table."""
    missed = [0] * (alarms.num_onsets - len(alarms.leads))
    return {
        "auroc": round(auroc, 4),
        "threshold": threshold,
        "num_onsets": alarms.num_onsets,
        "share_forecast": round(alarms.share_forecast, 4),
        "median_lead_steps": float(np.median(alarms.leads)) if alarms.leads else None,
        "median_lead_steps_all": float(np.median([*alarms.leads, *missed])) if alarms.num_onsets else None,
        "share_lead_10": round(sum(lead >= 10 for lead in alarms.leads) / max(1, alarms.num_onsets), 4),
        "false_alarms_per_1000": round(alarms.false_per_1000, 4),
        "num_healthy_steps": alarms.num_healthy_steps,
    }


def compare_rivals(known: list[Run], new: list[Run], held: Steps, horizon: int) -> dict[str, Any]:
    """Apply each rival, with its threshold from the training programs, to the held-out ones."""
    rows, seen = {}, measure_steps(known, horizon)
    for name, make in RIVALS.items():
        threshold = choose_threshold(score_rival(make, known, seen), seen, known, horizon, patience=1, budget=BUDGET)
        scores = score_rival(make, new, held)
        alarms = judge_alarms(scores, threshold, held, new, horizon, patience=1)
        rows[name] = describe(alarms, measure_auroc(scores, held.is_positive(horizon)), threshold)
    return rows


def draw_calibration(probabilities: np.ndarray, positive: np.ndarray) -> dict[str, Any]:
    """Return forecast and observed frequencies, in bins of the forecast."""
    borders = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0001]
    rows, error = [], 0.0
    for low, high in itertools.pairwise(borders):
        inside = (probabilities >= low) & (probabilities < high)
        if inside.any():
            said, seen = float(probabilities[inside].mean()), float(positive[inside].mean())
            rows.append({"said": round(said, 4), "seen": round(seen, 4), "num_steps": int(inside.sum())})
            error += abs(said - seen) * inside.mean()
    return {"curve": rows, "expected_error": round(float(error), 4)}


def compare_programs(
    model: Model, probabilities: np.ndarray, steps: Steps, runs: list[Run], threshold: float
) -> dict[str, Any]:
    """Rate each held-out program by itself."""
    rows = {}
    names = np.array([run.program for run in runs])[steps.run]
    for name in HELD_OUT:
        mine = names == name
        part = Steps(steps.indicators[mine], steps.run[mine], steps.step[mine], steps.left[mine])
        positive = part.is_positive(model.horizon)
        if not positive.any():
            continue
        alarms = judge_alarms(probabilities[mine], threshold, part, runs, model.horizon, patience=model.patience)
        rows[name] = describe(alarms, measure_auroc(probabilities[mine], positive), threshold)
    return rows


def vary_threshold(model: Model, probabilities: np.ndarray, steps: Steps, runs: list[Run]) -> list[dict[str, Any]]:
    """Return what other thresholds would give: more onsets for more false alarms."""
    rows = []
    for threshold in (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1):
        alarms = judge_alarms(probabilities, threshold, steps, runs, model.horizon, patience=model.patience)
        rows.append(describe(alarms, measure_auroc(probabilities, steps.is_positive(model.horizon)), threshold))
    return rows


def find_reasons(probabilities: np.ndarray, steps: Steps, runs: list[Run], horizon: int) -> dict[str, float]:
    """Return AUROC on subsets of the steps, which shows what is hard."""
    positive, unstable = steps.is_positive(horizon), np.isfinite(steps.left)
    sudden = np.array([run.setup["schedule"] in ("jump", "restarts") for run in runs])[steps.run]
    parts = {
        "healthy steps of stable runs only": positive | ~unstable,
        "steps of unstable runs only": unstable,
        "without rates that jump": ~sudden,
        "rates that jump only": sudden,
        **{
            f"onset {low} to {high} steps away": ~positive | ((steps.left >= low) & (steps.left <= high))
            for low, high in ((1, 4), (5, 8), (9, 16), (17, 32))
        },
    }
    return {name: round(measure_auroc(probabilities[part], positive[part]), 4) for name, part in parts.items()}


def compare(runs: list[Run], horizon: int) -> dict[str, Any]:
    """Return everything about one horizon."""
    model = read_model(horizon)
    known = [run for run in runs if run.program not in HELD_OUT]
    new = [run for run in runs if run.program in HELD_OUT]
    steps = measure_steps(new, horizon)
    positive = steps.is_positive(horizon)
    probabilities = score_model(model, steps)
    alarms = judge_alarms(probabilities, model.threshold, steps, new, horizon, patience=model.patience)
    early = sum(run.onset is not None for run in new) - alarms.num_onsets
    return {
        "horizon": horizon,
        "num_runs": {"trained_on": len(known), "held_out": len(new)},
        "num_onsets_too_early_to_judge": early,
        "rules": {
            "instability_forecast": describe(alarms, measure_auroc(probabilities, positive), model.threshold),
            **compare_rivals(known, new, steps, horizon),
        },
        "programs": compare_programs(model, probabilities, steps, new, model.threshold),
        "auroc_of_parts": find_reasons(probabilities, steps, new, horizon),
        "thresholds": vary_threshold(model, probabilities, steps, new),
        "calibration": draw_calibration(probabilities, positive),
    }


def render(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    head = "| | AUROC | onsets forecast | median lead, steps | the same, missed as 0 | false alarms / 1000 |"
    lines = [f"\nHorizon {result['horizon']} steps, programs never trained on:\n", head, "|---|" + "---:|" * 5]
    rows = {**result["rules"], **{f"forecast, {name}": row for name, row in result["programs"].items()}}
    rows |= {f"forecast from {row['threshold']}": row for row in result["thresholds"]}
    for name, row in rows.items():
        lead = "-" if row["median_lead_steps"] is None else f"{row['median_lead_steps']:.0f}"
        lines.append(
            f"| {name} | {row['auroc']:.3f} | {row['share_forecast']:.0%} of {row['num_onsets']} | {lead} "
            f"| {row['median_lead_steps_all']:.0f} | {row['false_alarms_per_1000']:.2f} |"
        )
    lines += ["", *(f"AUROC, {name}: {value:.3f}" for name, value in result["auroc_of_parts"].items())]
    lines += ["\n| said | seen | steps |", "|---:|---:|---:|"]
    for point in result["calibration"]["curve"]:
        lines.append(f"| {point['said']:.3f} | {point['seen']:.3f} | {point['num_steps']} |")
    return "\n".join(lines)


def make_few_runs(num: int) -> list[Run]:
    """Make a few runs in memory."""
    warnings.filterwarnings("ignore")
    np.seterr(all="ignore")
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    return [Run(setup, rows) for setup, rows in itertools.islice(make_runs(1), num)]


def add_results(**parts: Any) -> Path | None:
    """Add parts to results/forecast.json and keep the others."""
    path = RESULTS / "forecast.json"
    before = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
    return write_results("forecast", {**before, **parts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="what generate.py wrote")
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} new runs; nothing is written")
    arguments = parser.parse_args()
    if arguments.traces is None and not arguments.quick:
        print("left out: it takes traces of thousands of runs. Make them with generate.py, and give --traces DIR.")
        return
    torch.set_num_threads(1)
    runs = make_few_runs(NUM_QUICK) if arguments.traces is None else load_runs(arguments.traces)
    result = compare(runs, arguments.horizon)
    print(render(result))
    print("written:", None if arguments.quick else add_results(foreseeing=result))


if __name__ == "__main__":
    main()
