"""A range test's numbers -> one picture, PNG, SVG or PDF, with matplotlib. Drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.view.plot import FORMATS

MARKS = (
    ("edge", "#c8242f", "-", "broke at"),
    ("largest_quiet", "#c2570c", ":", "no finding up to"),
    ("steepest", "#2563c9", "--", "steepest at"),
    ("suggested", "#0b8a7d", "-", "suggested"),
)


def plot_rates(curve: Mapping[str, Any], target: str | Path) -> Path:
    """Draw a `RateCurve.to_dict()`."""
    target = Path(target)
    check_format(target)
    figure = make_figure(10, 7.4)
    draw_rates(curve, figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.6, 1.6)))
    figure.savefig(target, dpi=150)
    return target


def check_format(target: Path) -> None:
    """Raise UsageError for a suffix whose format cannot be written."""
    if target.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"{target} has no suffix that selects a format. Use one of: .{', .'.join(FORMATS)}.")


def make_figure(width: float, height: float) -> Any:
    """Return an empty figure."""
    figure_class = import_extra("view", "matplotlib.figure", what="a plot", error=UsageError).Figure
    return figure_class(figsize=(width, height), layout="constrained")


def draw_rates(curve: Mapping[str, Any], axes: Sequence[Any]) -> None:
    """Draw loss, norm and update ratio over the rate, with the rates that matter."""
    points = curve["points"]
    rates = [point["rate"] for point in points]
    loss, norm, ratio = axes
    fair = _list_losses(curve)
    _draw(loss, rates, fair, "loss, less its noise", color="#9db8e8", linewidth=0.8)
    _draw(loss, rates, curve["smoothed"], "loss, less its noise", color="#2563c9", linewidth=1.6)
    _bound(loss, fair[:-1])
    _draw(norm, rates, [point["grad_norm"] for point in points], "gradient norm", color="#2563c9", linewidth=0.9)
    _draw(ratio, rates, [point["update_ratio"] for point in points], "update / weight", color="#2563c9", linewidth=0.9)
    for axis in (norm, ratio):
        axis.set_yscale("log")
    for axis in axes:
        axis.set_xscale("log")
        axis.grid(alpha=0.25, linewidth=0.5)
        _mark(axis, curve, points)
    loss.legend(fontsize=8, loc="lower left", framealpha=0.7)
    ratio.set_xlabel("learning rate")


def _list_losses(curve: Mapping[str, Any]) -> list[float | None]:
    """Return the starting level plus each point's change; the loss itself if no start is known."""
    points, start = curve["points"], curve["start"]
    if start is None:
        return [None if point["loss"] is None else float(point["loss"]) for point in points]
    return [None if point["change"] is None else float(start[0]) + float(point["change"]) for point in points]


def _draw(axis: Any, rates: Sequence[float], values: Sequence[Any], label: str, **style: Any) -> None:
    known = [(rate, float(v)) for rate, v in zip(rates, values) if v is not None and math.isfinite(float(v))]
    if known:
        axis.plot(*zip(*known), **style)
    axis.set_ylabel(label)


def _bound(axis: Any, losses: Sequence[Any]) -> None:
    """Limit the axis, so that losses at the edge do not flatten those before it."""
    known = [float(x) for x in losses if x is not None and math.isfinite(float(x))]
    if len(known) > 2:
        low, high = min(known), max(known[: max(5, len(known) // 2)])
        room = 0.3 * (high - low) or 1.0
        axis.set_ylim(low - room, high + 2 * room)


def _mark(axis: Any, curve: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
    for name, color, line, label in MARKS:
        if curve[name] is not None:
            axis.axvline(curve[name], color=color, linestyle=line, linewidth=1.2, label=f"{label} {curve[name]:.3g}")
    loud = [point["rate"] for point in points if point["kinds"]]
    axis.plot(loud, [0.02] * len(loud), "|", color="#c8242f", transform=axis.get_xaxis_transform(), markersize=8)
