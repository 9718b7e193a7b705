"""Runs, or bare logs of JSON lines -> one picture, PNG, SVG or PDF, with matplotlib. Drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.view.marks import MARKS
from steadygrad.view.read.layer_map import LayerMap
from steadygrad.view.read.run import RunReader, open_run
from steadygrad.view.read.validation_log import is_validation
from steadygrad.view.render.charts import list_validation
from steadygrad.view.render.report import list_named_runs, name_apart

FORMATS = ("png", "svg", "pdf")


def plot_run(path: str | Path, what: Sequence[str], target: str | Path) -> Path:
    """Draw the parts named in `what`, one below the other, and write the picture."""
    target = Path(target)
    unknown = [name for name in what if name not in PANELS]
    if unknown or not what:
        raise UsageError(f"There is no plot called {', '.join(unknown) or '(nothing)'}. Use: {','.join(PANELS)}.")
    run = open_run(path).read_all()
    heights = [4.2 if name in ("layers", "ratios") else 2.9 for name in what]
    figure, axes = _open_figure(target, heights)
    for name, axis in zip(what, axes):
        PANELS[name](run, axis)
        _finish(run, axis)
    axes[-1].set_xlabel("step")
    figure.suptitle(_spell(run.name), fontsize=12, fontweight="bold")
    return _save(figure, target)


def _open_figure(target: Path, heights: Sequence[float]) -> tuple[Any, Any]:
    """Return a figure that can be written to `target`, and its panels."""
    if target.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"{target} has no suffix that selects a format. Use one of: .{', .'.join(FORMATS)}.")
    # Figure, not pyplot: no display, no global state, and the backend that a program has chosen stays
    figure_class = import_extra("view", "matplotlib.figure", what="a plot", error=UsageError).Figure
    figure = figure_class(figsize=(10, sum(heights) + 0.4), layout="constrained")
    return figure, figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]


def _save(figure: Any, target: Path) -> Path:
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}. Choose another place.") from None
    return target


def plot_runs(paths: Sequence[str | Path], what: Sequence[str], target: str | Path) -> Path:
    """Draw several runs into the same panels; one run is drawn as by `plot_run`."""
    found = list_named_runs(paths)
    if len(found) == 1:
        return plot_run(found[0], what, target)
    target = Path(target)
    wrong = [name for name in what if name not in COMPARED]
    if wrong or not what:
        named = ", ".join(wrong) or "(nothing)"
        raise UsageError(f"Several runs cannot be drawn together by {named}. Use: {','.join(COMPARED)}.")
    runs = [open_run(path).read_all() for path in found]
    figure, axes = _open_figure(target, [2.9] * len(what))
    for name, axis in zip(what, axes):
        _compare(runs, name_apart(found), name, axis)
    axes[-1].set_xlabel("step")
    return _save(figure, target)


COMPARED: dict[str, tuple[str, Callable[[RunReader], tuple[list[int], list[float]]]]] = {
    "loss": ("loss", lambda run: run.steps.curves["loss"].points()),
    "validation": ("validation loss", lambda run: next(iter(list_validation(run).values()), ([], []))),
    "norm": ("gradient norm", lambda run: run.steps.curves["grad_norm"].points()),
    "rate": ("learning rate", lambda run: run.steps.curves["learning_rate"].points()),
}
"""Panel -> its label, and the function that returns the points of a run."""
DASHES = ("-", "--", ":", "-.")


def _compare(runs: Sequence[RunReader], names: Sequence[str], panel: str, axis: Any) -> None:
    label, find = COMPARED[panel]
    known = [(i, name, points) for i, (name, points) in enumerate(zip(names, map(find, runs))) if points[0]]
    if not known:
        raise UsageError(f"None of these runs holds a {label}, so it cannot be plotted. Leave it out of --what.")
    values = [value for *_, (_, column) in known for value in column]
    for i, name, (steps, column) in known:
        dash = DASHES[i // 10 % len(DASHES)]  # ten colours, then the next kind of line
        axis.plot(steps, column, linewidth=0.9, color=f"C{i % 10}", linestyle=dash, label=_spell(name))
    if panel == "norm" or (min(values) > 0 and max(values) / min(values) > 100):
        axis.set_yscale("log")
    axis.set_ylabel(label)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, loc="upper right", framealpha=0.7)


def choose_panels(paths: Sequence[str | Path]) -> list[str]:
    """Return the default panels: the loss, and validation loss and norm if there are any."""
    run = open_run(list_named_runs(paths)[0]).read_all()
    there = {"validation": bool(list_validation(run)), "norm": bool(run.steps.curves["grad_norm"])}
    return ["loss", *(name for name, is_there in there.items() if is_there)]


def _finish(run: RunReader, axis: Any) -> None:
    """Give every panel the same range of steps, integer ticks and no frame."""
    pad = max(0.5, 0.01 * run.steps.last_step)
    axis.set_xlim(-pad, run.steps.last_step + pad)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)


def _plot_loss(run: RunReader, axis: Any) -> None:
    steps, losses = run.steps.curves["loss"].points()
    if not run.steps.num_steps:
        why = "; ".join(run.notes) or "nothing has been written yet"
        raise UsageError(f"{run.path} holds no step, so there is nothing to plot: {why}. Name another run.")
    _need(steps, "a loss", run)
    axis.plot(steps, losses, color="#2563c9", linewidth=0.9)
    axis.set_ylabel("loss")
    if min(losses) > 0 and max(losses) / min(losses) > 100:
        axis.set_yscale("log")
    _mark(run, axis)


def _plot_validation(run: RunReader, axis: Any) -> None:
    """Draw the losses of the evaluations over the training loss."""
    known = list_validation(run)
    _need(list(known), "a validation loss (guard.validate records it)", run)
    steps, losses = run.steps.curves["loss"].points()
    axis.plot(steps, losses, color="#9aa3b2", linewidth=0.6, label="training loss")
    for name, (at, values) in known.items():
        axis.plot(at, values, marker=".", linewidth=1.2, label=_spell(name))
        losses = losses + values
    if min(losses) > 0 and max(losses) / min(losses) > 100:
        axis.set_yscale("log")
    axis.set_ylabel("validation loss")
    _mark(run, axis)


def _plot_metrics(run: RunReader, axis: Any) -> None:
    known = list_validation(run, losses=False)
    _need(list(known), "a metric of an evaluation (metrics.jsonl has them)", run)
    for name, (at, values) in known.items():
        axis.plot(at, values, marker=".", linewidth=1.0, label=_spell(name))
    axis.set_ylabel("validation metrics")
    _mark(run, axis)


def _plot_extra(run: RunReader, axis: Any) -> None:
    known = {name: curve.points() for name, curve in run.steps.extra.items() if curve and not is_validation(name)}
    _need(list(known), "a number that the program logged (guard.log records them)", run)
    for name, (steps, values) in known.items():
        axis.plot(steps, values, linewidth=0.9, label=_spell(name))
    lows, highs = zip(*((min(values), max(values)) for _, values in known.values()))
    if min(lows) > 0 and max(highs) / min(lows) > 100:
        axis.set_yscale("log")
    axis.set_ylabel("terms and other numbers")
    _mark(run, axis)
    axis.legend(fontsize=7, loc="upper right", framealpha=0.7)


def _plot_norm(run: RunReader, axis: Any) -> None:
    steps, norms = run.steps.curves["grad_norm"].points()
    _need(steps, "a gradient norm", run)
    axis.plot(steps, norms, color="#2563c9", linewidth=0.9, label="norm")
    clipped_steps, clipped = run.steps.curves["applied_norm"].points()
    if clipped_steps:
        axis.plot(clipped_steps, clipped, ".", color="#c2570c", markersize=2, label="after clipping")
    if run.clip_threshold is not None:
        axis.axhline(run.clip_threshold, color="#c8242f", linewidth=0.9, linestyle="--", label="clip threshold")
    axis.set_ylabel("gradient norm")
    if max(norms) > 0:
        axis.set_yscale("log")
    _mark(run, axis)
    axis.legend(fontsize=7, loc="upper right", framealpha=0.7)


def _plot_rate(run: RunReader, axis: Any) -> None:
    steps, rates = run.steps.curves["learning_rate"].points()
    _need(steps, "a learning rate", run)
    axis.plot(steps, rates, color="#0b8a7d", linewidth=1.1, drawstyle="steps-post")
    axis.set_ylabel("learning rate")
    if min(rates) > 0 and max(rates) / min(rates) > 100:  # on a linear scale one jump would flatten the rest
        axis.set_yscale("log")
    _mark(run, axis)


def _plot_share(run: RunReader, axis: Any) -> None:
    steps, shares = run.steps.clipped.points()
    _need(steps, "a step", run)
    axis.fill_between(steps, shares, step="mid", color="#2563c9", alpha=0.5, label="clipped")
    axis.fill_between(steps, run.steps.skipped.points()[1], step="mid", color="#c2570c", alpha=0.8, label="skipped")
    axis.set_ylabel("share of steps")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=7, loc="upper right", framealpha=0.7)


def _plot_layers(run: RunReader, axis: Any) -> None:
    _need(run.norms.names, "norms by parameter (layers.jsonl)", run)
    _plot_cells(run.norms, axis, "log10 of the gradient norm", None)


def _plot_ratios(run: RunReader, axis: Any) -> None:
    _need(run.ratios.names, "update ratios (MeasureConfig.parameters_every records them)", run)
    _plot_cells(run.ratios, axis, "log10 of update / weight", -3.0)


def _plot_cells(table: LayerMap, axis: Any, label: str, middle: float | None) -> None:
    """Draw parameters as rows, the first on top; a cell with a non-finite value has a purple dot."""
    numpy = import_extra("view", "numpy", what="a plot", error=UsageError)
    rows, bad = table.rows(), table.bad_columns()
    cells = numpy.array([[numpy.nan if z is None else z for z in row] for row in rows.values()], dtype=float)
    known = cells[numpy.isfinite(cells)]
    centre = middle if middle is not None else float(numpy.median(known)) if known.size else 0.0
    edges = [*table.steps, table.steps[-1] + max(1, table.steps[-1] - table.steps[-2] if len(table.steps) > 1 else 1)]
    mesh = axis.pcolormesh(edges, range(len(rows) + 1), cells, cmap="coolwarm", vmin=centre - 4, vmax=centre + 4)
    dots = [
        ((edges[i] + edges[i + 1]) / 2, list(rows).index(row) + 0.5) for row, columns in bad.items() for i in columns
    ]
    if dots:
        axis.plot(*zip(*dots), ".", color="#8b2fc9", markersize=3)
    every = -(-len(rows) // 30)
    names = list(rows)
    axis.set_yticks([i + 0.5 for i in range(0, len(names), every)], [_spell(n) for n in names[::every]], fontsize=6)
    axis.invert_yaxis()
    axis.figure.colorbar(mesh, ax=axis, label=label, pad=0.01)


PANELS: dict[str, Callable[[RunReader, Any], None]] = {
    "loss": _plot_loss,
    "validation": _plot_validation,
    "metrics": _plot_metrics,
    "norm": _plot_norm,
    "rate": _plot_rate,
    "share": _plot_share,
    "layers": _plot_layers,
    "ratios": _plot_ratios,
    "extra": _plot_extra,
}
"""Name -> function that draws the panel."""


def _mark(run: RunReader, axis: Any) -> None:
    """Mark bad steps with ticks at the bottom, and actions with lines."""
    ticks = {"skip": (run.steps.skips, 0.03), "nonfinite": (run.steps.nonfinite, 0.09)}
    for name, (share, height) in ticks.items():
        steps = [step for step, _ in share.hits()]
        if steps:
            place = {"transform": axis.get_xaxis_transform(), "linestyle": "", "markersize": 6, "marker": "|"}
            axis.plot(steps, [height] * len(steps), color=MARKS[name].color, label=MARKS[name].words, **place)
    for action, mark in MARKS.items():
        marks = run.incidents.marks.get(action) if mark.is_turning_point else None
        for i, (step, _) in enumerate(marks.hits()[:60] if marks is not None else ()):
            label = mark.words if i == 0 else None
            axis.axvline(step, color=mark.color, linewidth=0.8, linestyle=":", label=label)
    axis.grid(alpha=0.25, linewidth=0.5)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, loc="upper right", framealpha=0.7)


def _need(values: Sequence[Any], what: str, run: RunReader) -> None:
    if not values:
        raise UsageError(
            f"{run.path} holds no {what.removeprefix('a ')}, so it cannot be plotted. Leave it out of --what."
        )


def _spell(text: str) -> str:
    """Escape a name, since matplotlib reads $...$ as mathematics."""
    return text.replace("$", r"\$")
