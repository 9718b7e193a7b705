"""A run -> its verdict in one sentence, and a few key numbers. The same in every view."""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass

from steadygrad.facts import Severity
from steadygrad.view.read.incident_log import find_step, look
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.validation_log import LOSS
from steadygrad.words import spell_count, spell_number, spell_seconds, spell_share

MANY = 0.05
"""From this share of skipped steps, a run is unwell: one that leaves out a twentieth of its data hides a defect."""
LOST = 10
"""Number of consecutive non-finite losses at the end; as many make the policy roll back."""


class Tone(enum.StrEnum):
    """How a run is doing."""

    EMPTY = "empty"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The sentence and its tone."""

    tone: Tone
    word: str
    text: str


def judge_run(run: RunReader) -> Headline:
    """Return one sentence about the whole run."""
    steps, incidents = run.steps, run.incidents
    if steps.num_steps == 0 and incidents.count == 0:
        return Headline(tone=Tone.EMPTY, word="Empty", text="No step has been written yet.")
    if incidents.halt is not None:
        message = str(look(incidents.halt, "finding", "message") or "the policy ended it")
        where = f"Ended on purpose at step {find_step(incidents.halt)}: {message}."
        return Headline(tone=Tone.BAD, word="Halted", text=f"{where}{_tell_cause(run)}")
    if steps.num_lost >= LOST:
        since = f"since step {steps.last_finite_step}" if steps.last_losses else "at any step"
        text = f"The loss has not been finite {since}.{_tell_cause(run)}"
        return Headline(tone=Tone.BAD, word="Lost", text=text)
    serious = incidents.num_at_least(Severity.WARNING)
    if not serious and not steps.num_skipped and steps.num_nonfinite:
        text = (
            f"{spell_count(steps.num_nonfinite, 'step').capitalize()} of {steps.num_steps:,} not finite, none skipped."
        )
        return Headline(tone=Tone.WARNING, word="Unwell", text=f"{text}{_tell_loss(run)}")
    if not serious and not steps.num_skipped:
        text = f"{spell_count(steps.num_steps, 'step').capitalize()}, none skipped, nothing above info."
        return Headline(tone=Tone.GOOD, word="Healthy", text=f"{text}{_tell_loss(run)}")
    skipped = f"{spell_count(steps.num_skipped, 'step').capitalize()} of {steps.num_steps:,} skipped"
    told = skipped if steps.num_steps else "No step was written"
    num_rollbacks = incidents.num_actions("rollback")
    back = f", {spell_count(num_rollbacks, 'rollback')}" if num_rollbacks else ""
    text = f"{told}{back}, {spell_count(serious, 'incident')}.{_tell_loss(run)}{_tell_cause(run)}"
    if steps.num_skipped > MANY * steps.num_steps or _loss_rose(run):
        return Headline(tone=Tone.BAD, word="Unwell", text=text)
    return Headline(tone=Tone.WARNING, word="Survived", text=text)


def list_numbers(run: RunReader) -> dict[str, str]:
    """Return label -> number, for the tiles of a page and the header of a terminal."""
    steps = run.steps
    applied = steps.num_steps - steps.num_skipped
    numbers = {"steps": f"{steps.num_steps:,}"}
    if steps.last_losses:
        numbers["loss"] = f"{spell_number(first_loss(run), 3)} → {spell_number(last_loss(run), 3)}"
    if steps.best_loss is not None:
        numbers["best loss"] = f"{spell_number(steps.best_loss[0], 3)} at {steps.best_loss[1]:,}"
    for name, (at, values) in run.validation.losses.items():
        if name == LOSS:
            best, where = min(zip(values, at))
            numbers["validation loss"] = spell_number(values[-1], 3)
            numbers["best validation"] = f"{spell_number(best, 3)} at {where:,}"
    if steps.worst_norm is not None:
        numbers["largest norm"] = f"{spell_number(steps.worst_norm[0], 3)} at {steps.worst_norm[1]:,}"
    numbers["skipped"] = f"{steps.num_skipped:,} ({spell_share(steps.num_skipped, steps.num_steps)})"
    numbers["clipped"] = spell_share(steps.num_clipped, applied)
    numbers["incidents"] = f"{run.incidents.count:,}"
    if steps.seconds > 0:
        numbers["time"] = f"{spell_seconds(steps.seconds)}, {steps.num_steps / steps.seconds:.3g}/s"
    return numbers


def first_loss(run: RunReader) -> float | None:
    """Return the median of the first losses: up to a hundred, and at most a tenth of the run."""
    losses = run.steps.first_losses
    return statistics.median(losses[: _edge(run)]) if losses else None


def last_loss(run: RunReader) -> float | None:
    """Return the median of the last losses, as many as for the first."""
    losses = list(run.steps.last_losses)
    return statistics.median(losses[-_edge(run) :]) if losses else None


def _edge(run: RunReader) -> int:
    return max(1, min(100, run.steps.num_steps // 10))


def _tell_loss(run: RunReader) -> str:
    first, last = first_loss(run), last_loss(run)
    if first is None or last is None or run.steps.num_steps < 2:
        return ""
    if first == last:
        return f" The loss stayed at {spell_number(first)}."
    way = "fell" if last < first else "rose"
    return f" The loss {way} from {spell_number(first)} to {spell_number(last)}."


def _loss_rose(run: RunReader) -> bool:
    first, last = first_loss(run), last_loss(run)
    return first is not None and last is not None and run.steps.num_steps >= 20 and last > first + abs(first) * 0.1


def _tell_cause(run: RunReader) -> str:
    incident = run.incidents.first_cause
    if incident is None:
        return ""
    cause = incident["cause"]
    file, line = look(cause, "file"), look(cause, "line")
    what = str(look(cause, "symptom") or look(cause, "kind") or "trouble")
    op = f", born in {cause['op']}" if isinstance(cause.get("op"), str) else ""
    where = f" at {str(file).replace(chr(92), '/').rpartition('/')[2]}:{line}" if file else ""
    return f" First cause, step {find_step(incident)}: {what}{op}{where}."
