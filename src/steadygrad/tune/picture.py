"""A tuning's numbers -> one picture: the range test, the compared trials, and the results of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadygrad.tune.trial import TrialResult
from steadygrad.tune.tuning import Tuned
from steadygrad.view.rate_plot import check_format, draw_rates, make_figure

COLORS = ("#c2570c", "#0b8a7d")


def draw_tuning(tuned: Tuned, target: Path) -> Path:
    """Write the picture; its suffix determines the format."""
    check_format(target)
    panels = 5 if tuned.searched else 4
    figure = make_figure(10, 2.6 * panels)
    heights = (3, 1.6, 1.6, 2.6, 2.6)[:panels]
    axes = figure.subplots(panels, 1, height_ratios=heights)
    draw_rates(tuned.curve.to_dict(), axes[:3])
    _draw_losses(axes[3], tuned)
    if tuned.searched:
        _draw_search(axes[4], tuned)
    figure.suptitle(f"tuning of {tuned.target.name}".replace("$", r"\$"), fontsize=11)  # `$` begins a formula
    figure.savefig(target, dpi=130)
    return target


def _draw_losses(axis: Any, tuned: Tuned) -> None:
    """Draw the compared trials; one that broke down is drawn up to that point."""
    given = tuned.target.given
    for result in tuned.compared:
        is_given = result.settings == given
        label = f"{'given' if is_given else 'suggested'} settings, lr {result.settings.lr:.3g}, order {result.order}"
        steps, losses = _finite(result)
        axis.plot(steps, losses, color=COLORS[0 if is_given else 1], alpha=0.55 if result.order else 1.0, label=label)
    highest = _bound(tuned.compared)
    if highest is not None:
        axis.set_ylim(top=highest)
    axis.set_xlabel("step of the trial")
    axis.set_ylabel("training loss")
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=7)


def _draw_search(axis: Any, tuned: Tuned) -> None:
    good = [one for one in tuned.searched if one.is_good]
    axis.plot([one.settings.lr for one in good], [one.score for one in good], "o", color="#2563c9", label="trial")
    for name, color, chosen in (
        ("broke", "#c8242f", [one for one in tuned.searched if one.why_ended]),
        ("given up", "#8a8f98", [one for one in tuned.searched if one.given_up]),
    ):
        top = [0.97] * len(chosen)
        rates = [one.settings.lr for one in chosen]
        axis.plot(rates, top, "x", color=color, transform=axis.get_xaxis_transform(), label=name)
    axis.axvline(tuned.choice.settings.lr, color="#0b8a7d", label=f"chosen {tuned.choice.settings.lr:.3g}")
    axis.set_xscale("log")
    axis.set_xlabel("learning rate")
    axis.set_ylabel("loss at the trial's end")
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=7)


def _finite(result: TrialResult) -> tuple[list[int], list[float]]:
    known = [(i, x) for i, x in enumerate(result.losses) if x is not None and math.isfinite(x)]
    return [i for i, _ in known], [x for _, x in known]


def _bound(results: Sequence[TrialResult]) -> float | None:
    """Return the upper limit of the plot: trials that broke down must not flatten the others."""
    good = [x for one in results if one.is_good for x in _finite(one)[1]]
    every = [x for one in results for x in _finite(one)[1]]
    if not good or max(every) <= max(good) + (max(good) - min(good)):
        return None
    return max(good) + 0.5 * (max(good) - min(good))
