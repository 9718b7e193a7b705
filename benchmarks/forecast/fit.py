"""Turns traces into `src/steadygrad/detect/forecast_model.json`: boosted trees, their calibration and their threshold.

Programs in `programs.HELD_OUT` are never used here. Calibration and threshold come from folds over the other programs,
so that each step is judged by trees that have not seen its program; the shipped trees are fitted on all of them. The
threshold is the lowest that keeps `BUDGET` false alarms per 1000 healthy steps over the folds. Needs scikit-learn.

    PYTHONPATH=src python benchmarks/forecast/fit.py --traces DIR
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from alarms import choose_threshold
from programs import HELD_OUT, PROGRAMS
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score
from traces import Run, Steps, load_runs, measure_steps

import steadygrad.detect.instability as instability
from steadygrad.detect.indicators import NAMES

MODEL = Path(instability.__file__).with_name("forecast_model.json")
HORIZONS = (32,)
PATIENCE = 2
BUDGET = 0.35
"""False alarms per 1000 healthy steps over the folds; below the target of 0.5, since new programs do slightly worse."""
NUM_FOLDS = 4
EVERY = 8
"""Every eighth of the steps that are not positive is used for fitting: neighbours carry the same information."""
RISES = {
    "norm_trend", "norm_volatility_rise", "norm_above_lowest", "loss_trend", "loss_slow_trend", "loss_above_best",
    "loss_volatility_rise", "rate_rise", "skip_share", "scale_fall", "update_rise", "gradient_over_moment",
}  # fmt: skip
"""Indicators that may never lower the danger as they grow; with this constraint, new programs are forecast better."""


def build_trees() -> HistGradientBoostingClassifier:
    """Build small trees with large leaves: patterns of a single program are useless."""
    return HistGradientBoostingClassifier(
        learning_rate=0.1,
        max_iter=80,
        max_bins=64,
        max_leaf_nodes=12,
        min_samples_leaf=400,
        l2_regularization=20.0,
        max_features=0.5,
        early_stopping=False,
        monotonic_cst=[int(name in RISES) for name in NAMES],
        random_state=0,
    )


def fit_trees(steps: Steps, runs: list[Run], chosen: np.ndarray, horizon: int) -> HistGradientBoostingClassifier:
    """Fit on the chosen steps; each program has the same weight, and so do its positive steps in total."""
    positive = steps.is_positive(horizon)
    used = np.flatnonzero(chosen & (positive | (steps.step % EVERY == 0)))
    weights = np.where(positive[used], 1.0, EVERY)
    programs = np.array([runs[i].program for i in steps.run[used]])
    for program in set(programs):
        mine = programs == program
        weights[mine] *= len(used) / (weights[mine].sum() * len(set(programs)))
    return build_trees().fit(steps.indicators[used], positive[used], sample_weight=weights)


def fold_scores(steps: Steps, runs: list[Run], horizon: int) -> np.ndarray:
    """Return each step's score by trees that have not seen its program."""
    names = sorted({run.program for run in runs})
    programs = np.array([names.index(run.program) for run in runs])[steps.run]
    scores = np.zeros(len(programs))
    for fold in range(NUM_FOLDS):
        outside = programs % NUM_FOLDS == fold
        model = fit_trees(steps, runs, ~outside, horizon)
        scores[outside] = model.decision_function(steps.indicators[outside])
    return scores


def calibrate(scores: np.ndarray, positive: np.ndarray, num_points: int = 16) -> dict[str, list[float]]:
    """Return the points that map a score to a probability: isotonic, then thinned out."""
    fitted = IsotonicRegression(out_of_bounds="clip").fit(scores, positive)
    points = np.unique(np.quantile(scores, np.concatenate([np.linspace(0, 0.9, 8), 1 - np.logspace(-1, -4, 8)])))
    values = np.maximum.accumulate(fitted.predict(points))
    return {"scores": [round(float(p), 5) for p in points], "probabilities": [round(float(v), 5) for v in values]}


def export_trees(model: HistGradientBoostingClassifier) -> list[list[list[float]]]:
    """Export plain nodes: indicator, threshold, left, right, value; an inner node has the mean of its subtree."""
    return [_export(predictor.nodes) for (predictor,) in model._predictors]


def _export(nodes: np.ndarray) -> list[list[float]]:
    plain: list[list[float]] = []
    for node in nodes:
        leaf = bool(node["is_leaf"])
        feature = -1 if leaf else int(node["feature_idx"])
        threshold = 0.0 if leaf else float(node["num_threshold"])
        plain.append([feature, threshold, int(node["left"]), int(node["right"]), float(node["value"])])
    counts = [int(node["count"]) for node in nodes]
    for node in reversed(plain):  # children come after their parents
        if node[0] >= 0:
            below = (int(node[2]), int(node[3]))
            node[4] = sum(counts[i] * plain[i][4] for i in below) / sum(counts[i] for i in below)
    for node in plain:
        node[1], node[4] = float(f"{node[1]:.6g}"), float(f"{node[4]:.5g}")
    return plain


def fit_horizon(runs: list[Run], horizon: int) -> dict[str, Any]:
    """Return the model of one horizon, as shipped."""
    steps = measure_steps(runs, horizon)
    positive = steps.is_positive(horizon)
    scores = fold_scores(steps, runs, horizon)
    auroc = float(roc_auc_score(positive, scores))
    calibration = calibrate(scores, positive)
    probabilities = np.interp(scores, calibration["scores"], calibration["probabilities"])
    threshold = choose_threshold(probabilities, steps, runs, horizon, patience=PATIENCE, budget=BUDGET)
    model = fit_trees(steps, runs, np.ones(len(positive), dtype=bool), horizon)
    print(f"horizon {horizon}: {len(positive)} steps, {positive.mean():.3f} positive, AUROC over folds {auroc:.3f}")
    return {
        "threshold": round(threshold, 5),
        "patience": PATIENCE,
        "base": float(np.ravel(model._baseline_prediction)[0]),
        "calibration": calibration,
        "fold_auroc": round(auroc, 4),
        "trees": export_trees(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=MODEL)
    arguments = parser.parse_args()
    start = time.perf_counter()
    runs = [run for run in load_runs(arguments.traces) if run.program not in HELD_OUT]
    models = {str(horizon): fit_horizon(runs, horizon) for horizon in HORIZONS}
    content = {
        "format": instability.FORMAT,
        "made_by": "benchmarks/forecast/fit.py",
        "num_runs": len(runs),
        "num_unstable": sum(run.onset is not None for run in runs),
        "programs": [name for name in PROGRAMS if name not in HELD_OUT],
        "indicators": list(NAMES),
        "models": models,
    }
    arguments.out.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e3:.0f} kB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
