"""Problems -> HTML: a fold-out for each, cause first: what, why, where, what was done, what to change, at which steps.

Incidents with the same cause are one problem, so a fault that strikes a hundred times is read once. Every recorded
field of a cause is shown, even one that this version does not know.
"""

from __future__ import annotations

import ast
from typing import Any

from steadygrad.view.marks import find_mark
from steadygrad.view.read.incident_log import (
    IncidentLog,
    Problem,
    find_acted,
    find_action,
    find_noticed,
    find_step,
    look,
)
from steadygrad.view.read.rank_log import find_rank
from steadygrad.view.read.tail import Row
from steadygrad.view.render.html import Html, join, make_pairs, make_table, tag
from steadygrad.view.story import describe_problem
from steadygrad.words import spell_count, spell_value

MAX_OPEN = 12
"""Problems listed at once; the others are one click away."""
LABELS = {
    "symptom": "seen",
    "phase": "phase",
    "op": "operation",
    "in_custom_backward": "in a custom backward or hook",
    "module": "module",
    "node": "autograd node",
    "caller": "called from",
    "name": "known as",
    "samples": "samples of the batch",
    "samples_note": "about the samples",
    "reproducible": "second replay",
    "growth": "factor a layer",
    "batch": "batch kept in",
    "note": "limits",
}
"""Fields of a cause that get a line each, in this order."""
OWN_PLACE = ("explanation", "fixes", "chain", "inputs", "terms", "file", "line", "source", "kind", "step")
"""Fields of a cause that are shown elsewhere."""


def render_incidents(log: IncidentLog, key: str) -> Html:
    """Render every problem, in the order in which they were noticed; `key` makes their ids unique on the page."""
    if not log.count:
        return tag("p", "No incidents.", class_="calm")
    problems = log.problems
    rendered = [render_problem(one, f"{key}-incident-{i}") for i, one in enumerate(problems)]
    shown, rest = rendered[:MAX_OPEN], rendered[MAX_OPEN:]
    more = [
        tag("details", tag("summary", f"{len(rest)} more problems"), tag("div", *rest, class_="body"), class_="more")
    ]
    left_out = log.count - sum(one.count for one in problems)
    note = f"{left_out:,} more incidents are in incidents.jsonl." if left_out else ""
    counts = f"{spell_count(log.count, 'incident')}, {spell_count(len(problems), 'problem')}."
    return join(
        [
            tag("p", counts[0].upper() + counts[1:], class_="note"),
            tag("div", *shown, *(more if rest else ()), class_="incidents"),
            tag("p", note, class_="note") if note else None,
        ]
    )


def render_problem(problem: Problem, name: str) -> Html:
    """Render one problem, collapsed; opens by click or keyboard."""
    episode = describe_problem(problem)
    severity = problem.severity or str(look(problem.incident, "finding", "severity") or "unknown")
    rank = find_rank(problem.incident)
    steps = [step for step, _ in problem.steps.hits()]
    summary = tag(
        "summary",
        tag("span", severity, class_=f"badge {_as_class(severity)}"),
        tag("span", episode.when, class_="step"),
        None if rank is None else tag("span", f"rank {rank}", class_="badge rank"),
        tag("strong", episode.what, class_="what"),
        tag("code", episode.place, class_="place") if episode.place else None,
        tag("span", episode.did, class_="did"),
    )
    body = tag(
        "div",
        _render_cause(problem.cause) if problem.cause is not None else None,
        make_pairs(_list_facts(problem.incident)),
        _render_occurrences(problem),
        class_="body",
    )
    return tag(
        "details",
        summary,
        body,
        class_="incident",
        id=name,
        data_step=str(find_step(problem.incident)),
        data_steps=" ".join(map(str, steps)),
    )


def _render_occurrences(problem: Problem) -> Html | None:
    """Render the steps of a problem that occurred several times: the first, and the newest."""
    if problem.count < 2:
        return None
    kept = [*problem.first, *problem.last]
    left_out = problem.count - len(kept)
    table = make_table(
        ("step", "kinds", "what was done", "message", "batch kept in"), [_list_occurrence(one) for one in kept]
    )
    title = f"All {problem.count:,} times" if not left_out else f"{len(kept)} of {problem.count:,} times"
    return tag("details", tag("summary", title), tag("div", table, class_="body"), class_="more")


def _list_occurrence(incident: Row) -> list[str | Html]:
    others = incident.get("also")
    kinds = [look(one, "kind") for one in [incident.get("finding"), *(others if isinstance(others, list) else [])]]
    return [
        f"{find_noticed(incident):,}",
        ", ".join(str(kind) for kind in kinds if kind),
        str(look(incident, "outcome", "message") or find_mark(find_action(incident)).words),
        str(look(incident, "finding", "message") or ""),
        str(look(incident, "cause", "batch") or "-"),
    ]


def _list_facts(incident: Row) -> list[tuple[str, str | Html]]:
    kind = look(incident, "finding", "kind")
    facts: list[tuple[str, str | Html]] = [("kind", str(kind))] if kind else []
    if incident.get("cause") and look(incident, "finding", "message"):  # without a cause it is the title
        facts.append(("seen", str(look(incident, "finding", "message"))))
    facts += _list_steps(incident)
    outcome, verdict = incident.get("outcome"), incident.get("verdict")
    done = look(outcome, "message")
    if done:
        facts.append(("what was done", str(done)))
    if look(verdict, "reason"):
        facts.append(("reason", str(look(verdict, "reason"))))
    facts += [(name, spell_value(numbers)) for name in ("before", "after") if (numbers := look(outcome, name))]
    facts += _list_others(incident)
    advice = look(incident, "finding", "advice")
    if advice:
        facts.append(("what to change", tag("strong", str(advice))))
    evidence = look(incident, "finding", "evidence")
    if isinstance(evidence, dict):
        facts += [(str(name).replace("_", " "), spell_value(value)) for name, value in evidence.items()]
    return facts


def _list_steps(incident: Row) -> list[tuple[str, str | Html]]:
    """List where it began, was noticed and was acted on, unless all are the same step."""
    began, noticed, acted = find_step(incident), find_noticed(incident), find_acted(incident)
    if began == noticed == acted:
        return []
    did = [] if find_action(incident) == "none" else [f"acted on at step {acted:,}"]
    return [("when", ", ".join([f"began at step {began:,}", f"noticed at step {noticed:,}", *did]))]


def _list_others(incident: Row) -> list[tuple[str, str | Html]]:
    """List what else was found at the same step."""
    others = incident.get("also")
    rows = [one for one in others if isinstance(one, dict)] if isinstance(others, list) else []
    return [("also", f"{one.get('kind')}: {one.get('message')}") for one in rows]


def _render_cause(cause: dict[str, Any]) -> Html:
    others = [key for key in cause if key not in LABELS and key not in OWN_PLACE]
    pairs: list[tuple[str, str | Html]] = [
        (LABELS.get(key, key.replace("_", " ")), _spell_field(key, cause[key]))
        for key in (*LABELS, *others)
        if key in cause and _is_shown(key, cause[key])
    ]
    return tag(
        "section",
        tag("h4", "Cause"),
        _render_place(cause),
        tag("p", str(cause["explanation"]), class_="explanation") if cause.get("explanation") else None,
        _render_fixes(cause.get("fixes")),
        _render_list("Its inputs", cause.get("inputs"), "ul"),
        _render_list("Terms of the loss", cause.get("terms"), "ul"),
        _render_list("From its origin to where it was noticed", cause.get("chain"), "ol"),
        make_pairs(pairs),
        class_="cause",
    )


def _render_place(cause: dict[str, Any]) -> Html | None:
    """Render file, line and source text."""
    if not cause.get("file") and not cause.get("source"):
        return None
    line = "" if cause.get("line") is None else f":{cause['line']}"
    place = tag("figcaption", f"{cause.get('file') or ''}{line}")
    return tag("figure", place, tag("pre", tag("code", str(cause.get("source") or ""))), class_="source")


def _render_list(title: str, items: Any, kind: str) -> Html | None:
    if not items:
        return None
    lines = items if isinstance(items, list) else [items]
    return join([tag("h5", title), tag(kind, *(tag("li", spell_value(one)) for one in lines))])


def _render_fixes(fixes: Any) -> Html | None:
    """Render the fixes, with code formatted as code."""
    if not isinstance(fixes, list) or not fixes:
        return _render_list("What to change", fixes, "ul")
    items = (tag("li", tag("code", str(one)) if is_code(str(one)) else str(one)) for one in fixes)
    return join([tag("h5", "What to change"), tag("ul", *items)])


def is_code(text: str) -> bool:
    """Return whether a text is code: an expression that is more than a word."""
    try:
        return not isinstance(ast.parse(text, mode="eval").body, ast.Name | ast.Constant)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # prose, or a malicious file
        return False


def _is_shown(key: str, value: Any) -> bool:
    """Return whether a field is worth showing; an empty module name is: it means the model itself."""
    return value is not None and value is not False and value != [] and (value != "" or key == "module")


def _spell_field(key: str, value: Any) -> str:
    return "(the model itself)" if key == "module" and value == "" else spell_value(value)


def _as_class(severity: str) -> str:
    return severity if severity in ("info", "warning", "error", "critical") else "unknown"
