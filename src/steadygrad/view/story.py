"""A run -> what broke, in order: what happened, the line of code, what was done, and since when it is healthy.

The same words for the page, the terminal and the report's command. Problems with the same cause are shown once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steadygrad.facts.kinds import find_kind
from steadygrad.view.headline import EXPLODED, LOST, name_cause, spell_place
from steadygrad.view.marks import find_mark
from steadygrad.view.read.incident_log import Problem, look
from steadygrad.view.read.run import RunReader
from steadygrad.words import spell_count


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One thing that went wrong."""

    when: str
    """'step 240', or '108 times, steps 60 to 2,180'."""
    what: str
    why: str
    """Explanation of the cause; empty if it is unknown."""
    place: str
    """'model.py:41'; empty if it is unknown."""
    source: str
    did: str
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that went wrong, and how the run went on."""

    episodes: list[Episode]
    since: str
    """'Healthy since step 311: 89 steps.'; empty if nothing went wrong, or nothing is healthy again."""


def write_story(run: RunReader) -> Story:
    """Return the story of a run; without a serious problem there is none."""
    problems = run.incidents.serious_problems()
    episodes = [describe_problem(one) for one in problems if not _find_diagnosed(one, problems)]
    complete = [_add_unexplained(one, problems) for one in episodes]
    return Story(episodes=complete, since=_format_since(run) if episodes else "")


def _find_diagnosed(problem: Problem, problems: Sequence[Problem]) -> Problem | None:
    """Return the diagnosed problem of which an undiagnosed one is most likely more: later steps are seldom replayed."""
    if problem.cause is not None or not find_kind(problem.kind).about_step:
        return None
    return next((one for one in problems if one.cause is not None and one.kind == problem.kind), None)


def _add_unexplained(episode: Episode, problems: Sequence[Problem]) -> Episode:
    same = [one for one in problems if _find_diagnosed(one, problems) is episode.problem]
    count = sum(one.count for one in same)
    return replace(episode, when=f"{episode.when}; {count:,} more of this kind were not replayed") if count else episode


def describe_problem(problem: Problem) -> Episode:
    """Return one problem in words."""
    cause = problem.cause
    message = str(look(problem.incident, "finding", "message") or problem.kind)
    return Episode(
        when=_format_when(problem),
        what=message if cause is None else name_cause(cause) or message,
        why=str(look(cause, "explanation") or ""),
        place=spell_place(cause),
        source=str(look(cause, "source") or ""),
        did=_format_done(problem),
        problem=problem,
    )


def _format_when(problem: Problem) -> str:
    if problem.count == 1:
        return f"step {problem.noticed:,}"
    return f"{problem.count:,} times, steps {problem.noticed:,} to {problem.last_noticed:,}"


def _format_done(problem: Problem) -> str:
    """Return what was done: in the words of the one incident, or counted over all of them."""
    if problem.count == 1:
        message = look(problem.incident, "outcome", "message")
        if message and any(action != "none" for action in problem.actions):
            return str(message)
    done = [f"{find_mark(action).words} {count:,}×" for action, count in problem.actions.items() if action != "none"]
    return ", ".join(done) or "reported only"


def _format_since(run: RunReader) -> str:
    """Return since when nothing serious happened; a run that ended with it, or is lost, has not recovered.

    Nor has one that began by exploding: quiet steps from ruined weights are not healthy ones.
    """
    steps = run.steps
    last = max(steps.last_bad_step, run.incidents.last_serious_step)
    num_healthy = steps.last_step - last
    if steps.num_lost >= LOST or num_healthy < 1 or run.incidents.halt is not None or EXPLODED in run.incidents.kinds:
        return ""
    return f"Healthy since step {last + 1:,}: {spell_count(num_healthy, 'step')}."
