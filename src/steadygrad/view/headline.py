"""A run -> its verdict in one sentence, and a few key numbers. The same in every view.

The word says how the run is doing, and for one that has not ended by itself, what became of it: a training that still
runs has not survived yet, and one that was killed is not healthy.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steadygrad.facts import Severity, name_birthplace, name_holder
from steadygrad.view.read.incident_log import find_step, look
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.state import State, find_end
from steadygrad.view.read.validation_log import LOSS
from steadygrad.words import spell_count, spell_number, spell_seconds, spell_share

MANY = 0.05
"""From this share of skipped steps, a run is unwell: one that leaves out a twentieth of its data hides a defect."""
GUESSING = "no_better_than_guessing"
"""Kind of the finding that a run has learned nothing, made at its last step."""
EXPLODED = "exploded_start"
"""Kind of the finding that the first losses exploded: no part of such a run is called healthy."""
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
    return _add_state(run, _judge_health(run))


def _judge_health(run: RunReader) -> Headline:
    steps, incidents = run.steps, run.incidents
    if steps.num_steps == 0 and incidents.count == 0:
        return Headline(tone=Tone.EMPTY, word="Empty", text="No step has been written yet.")
    if incidents.halt is not None and (run.state is State.HALTED or run.path.is_file()):
        message = str(look(incidents.halt, "finding", "message") or "no reason was recorded")
        where = f"Ended by the policy at step {find_step(incidents.halt):,}: {message}."
        return Headline(tone=Tone.BAD, word="Halted", text=f"{where}{_format_cause(run)}")
    if steps.num_lost >= LOST:
        text = f"The loss has not been finite {_format_since(run)}.{_format_cause(run)}"
        return Headline(tone=Tone.BAD, word="Lost", text=text)
    serious = incidents.num_at_least(Severity.WARNING)
    if not serious and not steps.num_skipped and steps.num_nonfinite:
        text = (
            f"{spell_count(steps.num_nonfinite, 'step').capitalize()} of {steps.num_steps:,} not finite, none skipped."
        )
        return Headline(tone=Tone.WARNING, word="Unwell", text=f"{text}{_format_loss(run)}")
    if not serious and not steps.num_skipped:
        text = f"{spell_count(steps.num_steps, 'step').capitalize()}, none skipped, no warnings."
        return Headline(tone=Tone.GOOD, word="Healthy", text=f"{text}{_format_loss(run)}")
    skipped = f"{spell_count(steps.num_skipped, 'step').capitalize()} of {steps.num_steps:,} skipped"
    sentence = skipped if steps.num_steps else "No step was written"
    num_rollbacks = incidents.num_actions("rollback")
    back = f", {spell_count(num_rollbacks, 'rollback')}" if num_rollbacks else ""
    guess = _format_guess(run)
    text = f"{sentence}{back}, {spell_count(serious, 'incident')}.{_format_loss(run)}{guess}{_format_cause(run)}"
    if guess or steps.num_skipped > MANY * steps.num_steps or _loss_rose(run):
        return Headline(tone=Tone.BAD, word="Unwell", text=text)
    return Headline(tone=Tone.WARNING, word="Survived", text=text)


def _add_state(run: RunReader, headline: Headline) -> Headline:
    """Add what became of a run that has not ended by itself; only an end makes it healthy or a survivor."""
    state = run.state
    is_well = headline.word in ("Healthy", "Survived", "Empty")
    if state is State.RUNNING:
        return replace(headline, word="Running") if is_well else headline
    last = "" if run.steps.last_step < 0 else f" after step {run.steps.last_step:,}"
    if state is State.KILLED:
        sentence = f"Its process disappeared{last}: kill -9, out of memory, or the machine went down."
    elif state is State.FAILED:
        sentence = f"Ended by an error{last}: {find_end(run.about).get('error') or 'unknown'}."
    elif state is State.STOPPED:
        sentence = f"Ended by a signal or by Ctrl-C{last}."
    elif state is State.STALLED:
        sentence = (
            f"Its process has not ended, but nothing has been written{last.replace('after', 'since')} for a long time."
        )
    else:
        return headline
    tone = Tone.BAD if state in (State.KILLED, State.FAILED) or headline.tone is Tone.BAD else Tone.WARNING
    return Headline(
        tone=tone, word=state.capitalize() if is_well else headline.word, text=f"{sentence} {headline.text}"
    )


def list_numbers(run: RunReader) -> dict[str, str]:
    """Return label -> number, for the tiles of a page and the header of a terminal."""
    steps = run.steps
    applied = steps.num_steps - steps.num_skipped
    numbers = {"steps": f"{steps.num_steps:,}"}
    if steps.last_loss is not None:
        last = f"{spell_number(steps.first_loss, 3)} → {spell_number(steps.last_loss, 3)}"
        numbers["loss"] = f"{last} → {spell_number(steps.last.get('loss'))}" if steps.num_lost else last
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


def _format_since(run: RunReader) -> str:
    steps = run.steps
    if steps.last_loss is None:
        return "at any step"
    first, last = spell_number(steps.first_loss), spell_number(steps.last_loss)
    return (
        f"since step {steps.first_lost_step:,}: it began at {first}, and was {last} at step {steps.last_finite_step:,}"
    )


def _format_loss(run: RunReader) -> str:
    first, last = run.steps.first_loss, run.steps.last_loss
    if first is None or last is None or run.steps.num_steps < 2:
        return ""
    if first == last:
        return f" The loss stayed at {spell_number(first)}."
    way = "fell" if last < first else "rose"
    return f" The loss {way} from {spell_number(first)} to {spell_number(last)}."


def _format_guess(run: RunReader) -> str:
    """Return what the run has not learned; nothing if it went on after that was found."""
    found = run.incidents.kinds.get(GUESSING)
    if found is None or found.last_step < run.steps.last_step:
        return ""
    return f" But {look((found.last or found.first)[-1], 'finding', 'message')}."


def _loss_rose(run: RunReader) -> bool:
    """Compare medians at both ends, up to a hundred losses and a tenth of the run: one noisy step must not decide."""
    steps = run.steps
    edge = max(1, min(100, steps.num_steps // 10))
    if not steps.first_losses or steps.num_steps < 20:
        return False
    first = statistics.median(steps.first_losses[:edge])
    return statistics.median(list(steps.last_losses)[-edge:]) > first + abs(first) * 0.1


def _format_cause(run: RunReader) -> str:
    incident = run.incidents.first_cause
    if incident is None:
        return ""
    cause = incident["cause"]
    what = name_cause(cause) or str(look(cause, "symptom") or look(cause, "kind") or "trouble")
    place = spell_place(cause)
    return f" First cause, step {find_step(incident):,}: {what}{f' at {place}' if place else ''}."


def name_cause(cause: Mapping[str, Any]) -> str:
    """Return 'NaN gradient, born in the backward of aten.sqrt'; empty if the cause names no place."""
    what = str(cause.get("symptom") or cause.get("kind") or "trouble")
    if cause.get("phase") in ("input", "parameter"):
        return f"{what}, already in {name_holder(str(cause['phase']), str(cause.get('name') or ''))}"
    if not isinstance(cause.get("op"), str):
        return ""
    birthplace = name_birthplace(str(cause.get("phase")), cause["op"], cause.get("in_custom_backward"))
    return f"{what}, born in {birthplace}"


def spell_place(cause: object) -> str:
    """Return 'model.py:41' for a cause; empty if its file is unknown."""
    file, line = look(cause, "file"), look(cause, "line")
    return f"{str(file).replace(chr(92), '/').rpartition('/')[2]}:{line}" if file else ""
