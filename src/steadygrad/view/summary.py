"""Totals and incidents -> one screen of text for the end of a run."""

from __future__ import annotations

import html
from collections.abc import Sequence

from steadygrad.facts import Action, Incident
from steadygrad.record.encode import to_plain
from steadygrad.record.tally import Tally
from steadygrad.view.advice import advise, see_tally
from steadygrad.view.read.incident_log import IncidentLog
from steadygrad.view.story import tell_problem
from steadygrad.words import spell_count

SHOWN = 4
"""Number of problems listed; the rest are only counted."""


def summarise(
    tally: Tally,
    incidents: Sequence[Incident],
    *,
    max_norm: float | None = None,
    rate: float | None = None,
    extra: Sequence[str] = (),
) -> SummaryText:
    """Summarise the run in about ten lines: steps, clipping, actions, worst layers, advice, incidents.

    `rate` is the current learning rate.
    """
    steps = max(1, tally.num_steps)
    lines = [
        f"steps      {tally.num_steps}, {tally.num_skipped} skipped ({tally.num_skipped / steps:.1%})"
        + (f", {tally.num_dropped_microbatches} microbatches dropped" if tally.num_dropped_microbatches else ""),
        f"norm       mean {tally.norm_mean:.4g}, median {tally.norm_quantile(0.5):.4g}, "
        f"95 % below {tally.norm_quantile(0.95):.4g}, max {tally.norm_max:.4g}",
        _tell_clipping(tally, max_norm),
        _tell_actions(tally),
    ]
    if tally.nonfinite:
        worst = ", ".join(f"{name} ({count}x)" for name, count in tally.nonfinite.most_common(3))
        lines.append(f"non-finite {worst}")
    lines += extra
    seen = see_tally(tally, incidents, max_norm=max_norm, rate=rate)
    lines += [f"next run   {advice}" for advice in advise(seen)]
    lines += _list_incidents(incidents)
    return SummaryText("\n".join(lines))


def _tell_clipping(tally: Tally, max_norm: float | None) -> str:
    share = tally.num_clipped / max(1, tally.num_steps - tally.num_skipped)
    line = f"clipped    {tally.num_clipped} steps ({share:.1%})"
    if tally.dominated:
        name, count = tally.dominated.most_common(1)[0]
        line += f", led by {name} in {count}"
    suggestion = tally.norm_quantile(0.95)
    if suggestion > 0:
        now = "" if max_norm is None else f" (now {max_norm:g})"
        line += f"; a threshold of {suggestion:.2g}{now} would have clipped one step in twenty"
    return line


def _tell_actions(tally: Tally) -> str:
    names = {
        Action.SCALE_LR: "learning-rate changes",
        Action.SCALE_WEIGHT_DECAY: "weight-decay changes",
        Action.TIGHTEN_CLIP: "clip-threshold changes",
        Action.ROLLBACK: "rollbacks",
        Action.SANITIZE: "sanitised steps",
    }
    done = [f"{tally.actions[action.value]} {name}" for action, name in names.items() if tally.actions[action.value]]
    return "actions    " + (", ".join(done) if done else "none beyond skipping and clipping")


def _list_incidents(incidents: Sequence[Incident]) -> list[str]:
    """List what went wrong, the same cause once: what, where, and what was done."""
    if not incidents:
        return ["incidents  none"]
    log = IncidentLog()
    for incident in incidents:
        log.add(to_plain(incident))
    problems = log.serious_problems() or log.problems
    lines = [f"incidents  {len(incidents)} in {spell_count(len(log.problems), 'problem')}"]
    for problem in problems[:SHOWN]:
        told = tell_problem(problem)
        place = f" at {told.place}" if told.place else ""
        lines.append(f"  {told.when}: {told.what}{place} ({problem.severity}); {told.did}")
    if len(log.problems) > len(problems[:SHOWN]):
        lines.append(f"  and {spell_count(len(log.problems) - len(problems[:SHOWN]), 'other problem')}")
    return lines


class SummaryText(str):
    """The summary of a run: a string that a notebook shows with its lines aligned."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.45;margin:0">{html.escape(self)}</pre>'
