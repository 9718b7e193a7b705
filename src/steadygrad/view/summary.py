"""Totals and incidents -> ten lines of text for the end of a run."""

from __future__ import annotations

import html
from collections.abc import Sequence

from steadygrad.facts import Action, Incident
from steadygrad.record.encode import to_plain
from steadygrad.record.tally import Tally
from steadygrad.view.advice import advise, see_tally
from steadygrad.view.read.incident_log import IncidentLog
from steadygrad.view.story import describe_problem
from steadygrad.words import spell_count, spell_number

MAX_LINES = 10
"""Lines of a summary: one look at the end of a run. The report has the rest."""

GRAVE = {Action.HALT.value, Action.ROLLBACK.value}
"""Actions whose problems are listed even where there is room for few."""


def summarise(
    tally: Tally,
    incidents: Sequence[Incident],
    *,
    max_norm: float | None = None,
    rate: float | None = None,
    extra: Sequence[str] = (),
    run_dir: str | None = None,
) -> SummaryText:
    """Summarise the run in ten lines: steps and actions, loss, norm, clipping, worst layers, advice, incidents.

    `rate` is the current learning rate, `run_dir` the folder of which a report can be written.
    """
    lines = [_format_steps(tally), *_format_loss(tally), _format_norm(tally), _format_clipping(tally, max_norm)]
    if tally.nonfinite:
        worst = ", ".join(f"{name} ({count}x)" for name, count in tally.nonfinite.most_common(3))
        lines.append(f"non-finite {worst}")
    lines += extra
    last = [] if run_dir is None else [f"report     steadygrad report {run_dir}"]
    room = MAX_LINES - len(lines) - len(last) - 1
    seen = see_tally(tally, incidents, max_norm=max_norm, rate=rate)
    advice = [f"next run   {one}" for one in advise(seen)][: max(1, room - (2 if incidents else 0))]
    lines += [*advice, *_list_incidents(incidents, max(1, room - len(advice))), *last]
    return SummaryText("\n".join(lines))


def _format_steps(tally: Tally) -> str:
    share = tally.num_skipped / max(1, tally.num_steps)
    dropped = f", {tally.num_dropped_microbatches} microbatches dropped" if tally.num_dropped_microbatches else ""
    actions = "".join(f", {one}" for one in _list_actions(tally))
    return f"steps      {tally.num_steps}, {tally.num_skipped} skipped ({share:.1%}){dropped}{actions}"


def _format_loss(tally: Tally) -> list[str]:
    if tally.best_loss is None:
        return []
    best, step = tally.best_loss
    ends = f"first {spell_number(tally.first_loss)}, last {spell_number(tally.last_loss)}"
    return [f"loss       {ends}, best {spell_number(best)} at step {step:,}"]


def _format_norm(tally: Tally) -> str:
    return (
        f"norm       mean {tally.norm_mean:.4g}, median {tally.norm_quantile(0.5):.4g}, "
        f"95 % below {tally.norm_quantile(0.95):.4g}, max {tally.norm_max:.4g}"
    )


def _format_clipping(tally: Tally, max_norm: float | None) -> str:
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


def _list_actions(tally: Tally) -> list[str]:
    """List how often something was done beyond skipping and clipping."""
    names = {
        Action.SCALE_LR: "learning-rate change",
        Action.SCALE_WEIGHT_DECAY: "weight-decay change",
        Action.TIGHTEN_CLIP: "clip-threshold change",
        Action.ROLLBACK: "rollback",
        Action.SANITIZE: "sanitised step",
    }
    counts = {name: tally.actions[action.value] for action, name in names.items()}
    return [spell_count(count, name) for name, count in counts.items() if count]


def _list_incidents(incidents: Sequence[Incident], num_shown: int) -> list[str]:
    """List what went wrong, the same cause once: what, where, and what was done."""
    if not incidents:
        return ["incidents  none"]
    log = IncidentLog()
    for incident in incidents:
        log.add(to_plain(incident))
    found = log.serious_problems() or log.problems
    gravest = sorted(found, key=lambda one: (not GRAVE.intersection(one.actions), one.cause is None))[:num_shown]
    # The gravest are chosen, then shown in the order in which they happened
    problems = [one for one in found if one in gravest]
    first = "" if len(problems) == len(log.problems) else f", {len(problems)} of them here"
    lines = [f"incidents  {len(incidents)} in {spell_count(len(log.problems), 'problem')}{first}"]
    for problem in problems:
        episode = describe_problem(problem)
        place = f" at {episode.place}" if episode.place else ""
        lines.append(f"  {episode.when}: {episode.what}{place} ({problem.severity}); {episode.did}")
    return lines


class SummaryText(str):
    """The summary of a run: a string that a notebook shows with its lines aligned."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.45;margin:0">{html.escape(self)}</pre>'
