"""A training -> what a notebook shows of it: a card, and a chart that follows it while the cell runs.

`NotebookChart` is a sink: it keeps a bounded number of points, draws them as SVG and replaces its output at most once a
second. It never touches the training; where there is no notebook it draws when it is asked to.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import math
import time
from collections.abc import Sequence
from typing import Any

from steadygrad.facts import Incident, StepRecord
from steadygrad.record.encode import to_plain
from steadygrad.record.sink import Sink
from steadygrad.record.tally import Tally
from steadygrad.view.read.curve import Curve, Share
from steadygrad.view.read.incident_log import IncidentLog
from steadygrad.view.story import describe_problem
from steadygrad.words import spell_count, spell_number

PAUSE_SECONDS = 1.0
"""Least time between two drawings."""
WIDTH, HEIGHT = 640, 150
LEFT, BOTTOM = 56, 20
MAX_BUCKETS = 300
SHOWN = 3
"""Problems listed below the chart."""


class NotebookChart(Sink):
    """Loss and norm of a training, and what broke, kept up to date in the output of a cell."""

    def __init__(self) -> None:
        self._loss, self._norm = Curve(max_buckets=MAX_BUCKETS), Curve(max_buckets=MAX_BUCKETS)
        self._skips = Share(max_buckets=MAX_BUCKETS)
        self._log = IncidentLog()
        self._last: StepRecord | None = None
        self._num_steps = self._num_skipped = 0
        self._is_closed = False
        self._handle: Any = None
        self._shown_at = 0.0

    def display(self) -> None:
        """Show it in the notebook that runs this; elsewhere do nothing."""
        with contextlib.suppress(ImportError):  # IPython is not a dependency
            if importlib.import_module("IPython").get_ipython() is not None:
                self._handle = importlib.import_module("IPython.display").display(self, display_id=True)

    def write_step(self, record: StepRecord) -> None:
        """Add one step."""
        self._last = record
        self._num_steps += 1
        self._num_skipped += record.skipped
        self._loss.extend([record.step], [record.loss])
        self._norm.extend([record.step], [record.grad_norm])
        if record.skipped:
            self._skips.extend([record.step], [True])
        self._refresh()

    def write_incident(self, incident: Incident) -> None:
        """Add one event."""
        self._log.add(to_plain(incident))
        self._refresh()

    def close(self) -> None:
        """Draw the end."""
        self._is_closed = True
        self._refresh(at_once=True)

    def _refresh(self, *, at_once: bool = False) -> None:
        if self._handle is None or (not at_once and time.monotonic() - self._shown_at < PAUSE_SECONDS):
            return
        self._shown_at = time.monotonic()
        self._handle.update(self)

    def _repr_html_(self) -> str:
        word = "ended" if self._is_closed else "running"
        title = f"{word}, {spell_count(self._num_steps, 'step')}, {self._num_skipped:,} skipped"
        if self._last is not None:
            title += f", loss {spell_number(self._last.loss)}, norm {spell_number(self._last.grad_norm)}"
        skips = [step for step, _ in self._skips.hits()]
        charts = draw_curve("loss", *self._loss.points(), skips) + draw_curve(
            "gradient norm", *self._norm.points(), skips
        )
        return f"<div><b>{html.escape(title)}</b><br>{charts}{_list_problems(self._log)}</div>"


def render_guard(tally: Tally, incidents: Sequence[Incident], last: StepRecord | None) -> str:
    """Return a card about a guard: steps, what is current, what broke."""
    log = IncidentLog()
    for incident in incidents:
        log.add(to_plain(incident))
    parts = [spell_count(tally.num_steps, "step"), f"{tally.num_skipped:,} skipped", f"{tally.num_clipped:,} clipped"]
    if last is not None:
        parts += [f"loss {spell_number(last.loss)}", f"gradient norm {spell_number(last.grad_norm)}"]
    return f"<div><b>Guard</b>: {html.escape(', '.join(parts))}{_list_problems(log)}</div>"


def _list_problems(log: IncidentLog) -> str:
    items = []
    for problem in (log.serious_problems() or log.problems)[:SHOWN]:
        parts = describe_problem(problem)
        place = f" <code>{html.escape(parts.place)} {html.escape(parts.source)}</code>" if parts.place else ""
        items.append(
            f"<li>{html.escape(parts.when)}: <b>{html.escape(parts.what)}</b>{place}; {html.escape(parts.did)}</li>"
        )
    return f"<ol style='margin:4px 0'>{''.join(items)}</ol>" if items else ""


def draw_curve(name: str, steps: Sequence[int], values: Sequence[float], skips: Sequence[int] = ()) -> str:
    """Return a small chart as SVG: logarithmic if the values are positive and span two powers of ten."""
    if not steps:
        return ""
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > 100  # a norm of 0 keeps the scale linear
    scale = math.log10 if is_log else float
    bottom, top = scale(low), scale(high)
    span, width = (top - bottom) or 1.0, max(1, steps[-1] - steps[0])

    def x(step: float) -> float:
        return LEFT + (step - steps[0]) / width * (WIDTH - LEFT - 8)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - bottom) / span * (HEIGHT - BOTTOM - 18)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values))
    marks = "".join(
        f'<path d="M{x(step):.1f},{HEIGHT - BOTTOM}v-7" stroke="#d0343f" stroke-width="2"/>' for step in skips
    )
    text = 'fill="currentColor" font-size="11" opacity=".75"'
    label = f"{html.escape(name)}{', logarithmic' if is_log else ''}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} from '
        f'{spell_number(values[0])} to {spell_number(values[-1])}" style="max-width:100%;font-family:sans-serif">'
        f'<text x="{LEFT}" y="11" {text}>{label}{"; red: skipped" if skips else ""}</text>'
        f'<text x="{LEFT - 5}" y="{y(high) + 4:.0f}" text-anchor="end" {text}>{spell_number(high, 3)}</text>'
        f'<text x="{LEFT - 5}" y="{y(low):.0f}" text-anchor="end" {text}>{spell_number(low, 3)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}" {text}>{steps[0]:,}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end" {text}>step {steps[-1]:,}</text>'
        f'<polyline points="{line}" fill="none" stroke="#3b82c4" stroke-width="1.4"/>{marks}</svg>'
    )
