"""A run -> the numbers of its charts, as plain lists for the page's script. No text, no colours.

Numbers are rounded to what a screen can show; a list has at most a few thousand of them, whatever the run's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steadygrad.facts import Action
from steadygrad.view.marks import MARKS, find_mark
from steadygrad.view.read.layer_map import LayerMap
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.validation_log import is_loss, is_validation
from steadygrad.words import spell_number

FLAT = ("learning_rate", "loss_scale")
"""Curves that stay at one value for long."""
CHARTS = {
    "loss": "Loss",
    "validation": "Validation loss",
    "metrics": "Validation metrics",
    "extra": "Terms and other numbers",
    "norm": "Gradient norm",
    "rate": "Learning rate",
    "share": "Share of steps clipped and skipped",
    "scale": "Loss scale",
    "layers": "Gradient norms by parameter",
    "ratios": "Update-to-weight ratios by parameter",
}
"""Chart -> title."""
ABOUT = {
    "loss": "The marks below show what happened and when; click one to open its incident.",
    "validation": "A point for each evaluation; the thin line is the training loss.",
    "metrics": "Other numbers from the evaluations.",
    "extra": "Other numbers that the program logged.",
    "norm": "Before clipping, on a logarithmic scale.",
    "rate": "The largest rate of all parameter groups.",
    "share": "In each stretch of the run.",
    "layers": "Blue is far below this run's median, red far above, by powers of ten; purple dots mark NaN or Inf.",
    "ratios": "About 1e-3 is healthy; blue barely moves, red moves too fast, by powers of ten.",
    "scale": "The factor by which the GradScaler multiplied the loss.",
}


def describe_charts(run: RunReader) -> dict[str, Any]:
    """Return everything that the page's script draws for one run."""
    steps = run.steps
    return {
        "name": run.name,
        "curves": {
            name: _list_points(*curve.points(), thin=name in FLAT) for name, curve in steps.curves.items() if curve
        },
        "validation": {name: _list_points(*points) for name, points in list_validation(run).items()},
        "metrics": {name: _list_points(*points) for name, points in list_validation(run, losses=False).items()},
        "extra": {
            name: _list_points(*curve.points())
            for name, curve in steps.extra.items()
            if curve and not is_validation(name)
        },
        "shares": {"clipped": _list_points(*steps.clipped.points()), "skipped": _list_points(*steps.skipped.points())},
        "threshold": run.clip_threshold,
        "marks": _list_marks(run),
        "norms": _list_cells(run.norms),
        "ratios": _list_cells(run.ratios),
        "last_step": steps.last_step,
        "clock": _list_points(*steps.clock.points(), thin=False),
    }


def list_validation(run: RunReader, *, losses: bool = True) -> dict[str, tuple[list[int], list[float]]]:
    """Return name -> steps and values, from evaluations and from validation numbers passed to `guard.log`."""
    logged = {
        name: curve.points()
        for name, curve in run.steps.extra.items()
        if curve and is_validation(name) and is_loss(name) == losses
    }
    return logged | (run.validation.losses if losses else run.validation.metrics)


def summarise_chart(run: RunReader, chart: str) -> str:
    """Describe a chart in words, for users who cannot see it."""
    steps = run.steps
    if chart == "loss":
        return f"Loss from {spell_number(steps.first_loss)} to {spell_number(steps.last_loss)}."
    if chart in ("validation", "metrics"):
        known = list_validation(run, losses=chart == "validation")
        return _format_last({name: values[-1] for name, (_, values) in known.items()})
    if chart == "extra":
        return _format_last({name: number for name, number in steps.last_extra.items() if not is_validation(name)})
    if chart == "norm" and steps.worst_norm is not None:
        return f"Gradient norm, at most {spell_number(steps.worst_norm[0])} at step {steps.worst_norm[1]}."
    if chart == "share":
        return f"{steps.num_clipped} steps clipped and {steps.num_skipped} skipped of {steps.num_steps}."
    if chart in ("layers", "ratios"):
        table = run.norms if chart == "layers" else run.ratios
        return f"{CHARTS[chart]}: {len(table.names)} parameters at {len(table.steps)} times."
    return f"{CHARTS[chart]} over {steps.num_steps} steps."


def _format_last(numbers: Mapping[str, float]) -> str:
    return f"At the end: {', '.join(f'{name} {spell_number(number)}' for name, number in numbers.items())}."


def _list_points(steps: list[int], values: list[float], *, thin: bool = False) -> dict[str, Any]:
    """Return the points; `thin` leaves out those between two of the same value."""
    y = [_round(value) for value in values]
    if thin:
        last = len(y) - 1
        # The ends of a flat stretch stay: it is drawn as a line between them
        kept = [i for i in range(len(y)) if i in (0, last) or not y[i - 1] == y[i] == y[i + 1]]
        return {"x": [steps[i] for i in kept], "y": [y[i] for i in kept]}
    return {"x": steps, "y": y}


def _list_marks(run: RunReader) -> list[dict[str, Any]]:
    """Return a row for each kind of mark, in the order of the steps at which they first occur."""
    marks = []
    for kind, hits in find_marks(run).items():
        if hits:
            steps, counts = [step for step, _ in hits], [count for _, count in hits]
            mark = find_mark(kind)
            style = {"symbol": mark.symbol, "paint": mark.paint, "through": mark.is_turning_point}
            marks.append({"kind": kind, "name": mark.words, **style, "x": steps, "counts": counts})
    order = list(MARKS)
    return sorted(
        marks, key=lambda mark: (mark["x"][0], order.index(mark["kind"]) if mark["kind"] in order else len(order))
    )


def find_marks(run: RunReader) -> dict[str, list[tuple[int, int]]]:
    """Return kind of mark -> (step, count) wherever there is one, in the order of the steps."""
    steps = run.steps
    found = {"nonfinite": steps.nonfinite.hits(), "skip": steps.skips.hits()}
    for action, marks in run.incidents.marks.items():
        if action not in ("skip", "clip"):
            found[action] = marks.hits()
    if jumps := steps.rate_jumps.hits():
        found[Action.SCALE_LR] = sorted({*jumps, *found.get(Action.SCALE_LR, ())})
    return found


def _list_cells(table: LayerMap) -> dict[str, Any] | None:
    """Return the rows of a map, the input first: exponents in tenths, and the columns with a non-finite value."""
    if not table:
        return None
    rows, bad = table.rows(), table.bad_columns()
    cells = [[None if z is None else round(10 * z) for z in row] for row in rows.values()]
    return {
        "x": table.steps,
        "width": table.width,
        "names": list(rows),
        "z": cells,
        "bad": [bad.get(name, []) for name in rows],
    }


def _round(value: float) -> float:
    # Five digits: more than a screen shows, and far fewer bytes in the page
    return float(f"{value:.5g}")
