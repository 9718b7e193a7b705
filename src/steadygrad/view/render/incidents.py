"""Incidents -> HTML: a table of kinds, and a fold-out for each: what, why, where, what was done, what to change.

Every recorded field of a cause is shown, even one that this version does not know.
"""

from __future__ import annotations

import ast
from typing import Any

from steadygrad.view.marks import find_mark
from steadygrad.view.read.incident_log import (
    IncidentLog,
    KindTotal,
    find_acted,
    find_action,
    find_noticed,
    find_step,
    look,
)
from steadygrad.view.read.rank_log import find_rank
from steadygrad.view.read.tail import Row
from steadygrad.view.render.html import Html, join, make_pairs, make_table, tag
from steadygrad.words import spell_value

MAX_SHOWN = 300
LABELS = {
    "symptom": "seen",
    "phase": "phase",
    "op": "operation",
    "module": "module",
    "node": "autograd node",
    "caller": "called from",
    "name": "explanation",
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


def render_incidents(log: IncidentLog) -> Html:
    """Render all incidents: counts, and those kept in full."""
    if not log.count:
        return tag("p", "Nothing happened that is worth a line.", class_="calm")
    shown = _keep_ends(log.shown())
    left_out = log.count - len(shown)
    note = (
        f"{left_out:,} more are in incidents.jsonl: of each kind the first and the last are shown." if left_out else ""
    )
    kinds = make_table(
        ("kind", "severity", "times", "steps", "what was done"), [_list_kind(total) for total in _sort(log)]
    )
    listed = tag("div", *(render_incident(one, i) for i, one in enumerate(shown)), class_="incidents")
    return join([kinds, listed, tag("p", note, class_="note") if note else None])


def _keep_ends(incidents: list[Row]) -> list[Row]:
    """Keep at most MAX_SHOWN, from the beginning and from the end: readers want to see how a run ended."""
    half = MAX_SHOWN // 2
    return incidents if len(incidents) <= MAX_SHOWN else [*incidents[:half], *incidents[-half:]]


def render_incident(incident: Row, number: int) -> Html:
    """Render one incident, collapsed; opens by click or keyboard."""
    severity = str(look(incident, "finding", "severity") or "unknown")
    kind = str(look(incident, "finding", "kind") or "unknown")
    step, action, rank = find_step(incident), find_action(incident), find_rank(incident)
    summary = tag(
        "summary",
        tag("span", severity, class_=f"badge {_as_class(severity)}"),
        tag("span", f"step {find_noticed(incident):,}", class_="step"),
        None if rank is None else tag("span", f"rank {rank}", class_="badge rank"),
        tag("strong", kind),
        tag("span", str(look(incident, "finding", "message") or ""), class_="message"),
        tag("span", find_mark(action).words, class_="did") if action != "none" else None,
    )
    cause = incident.get("cause")
    body = tag(
        "div",
        _render_cause(cause) if isinstance(cause, dict) else None,
        make_pairs(_list_facts(incident)),
        class_="body",
    )
    return tag("details", summary, body, class_="incident", id=f"incident-{number}", data_step=str(step))


def _list_facts(incident: Row) -> list[tuple[str, str | Html]]:
    facts: list[tuple[str, str | Html]] = _list_steps(incident)
    outcome, verdict = incident.get("outcome"), incident.get("verdict")
    done = look(outcome, "message")
    if done:
        facts.append(("what was done", str(done)))
    if look(verdict, "reason"):
        facts.append(("why that", str(look(verdict, "reason"))))
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
        if key in cause and _is_told(key, cause[key])
    ]
    return tag(
        "section",
        tag("h4", "Cause"),
        _render_place(cause),
        tag("p", str(cause["explanation"]), class_="explanation") if cause.get("explanation") else None,
        _render_fixes(cause.get("fixes")),
        _render_list("Its inputs", cause.get("inputs"), "ul"),
        _render_list("Terms of the loss", cause.get("terms"), "ul"),
        _render_list("From where it was born to where it hurts", cause.get("chain"), "ol"),
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


def _is_told(key: str, value: Any) -> bool:
    """Return whether a field is worth showing; an empty module name is: it means the model itself."""
    return value is not None and value != [] and (value != "" or key == "module")


def _spell_field(key: str, value: Any) -> str:
    return "(the model itself)" if key == "module" and value == "" else spell_value(value)


def _list_kind(total: KindTotal) -> list[str | Html]:
    steps = f"{total.first_step:,}"
    if total.last_step != total.first_step:
        steps += f" to {total.last_step:,}"
    done = ", ".join(f"{find_mark(action).words} {n:,}×" for action, n in total.actions.items() if action != "none")
    badge = tag("span", total.severity or "unknown", class_=f"badge {_as_class(total.severity)}")
    return [total.kind, badge, f"{total.count:,}", steps, done or "told only"]


def _sort(log: IncidentLog) -> list[KindTotal]:
    return sorted(log.kinds.values(), key=lambda total: total.first_step)


def _as_class(severity: str) -> str:
    return severity if severity in ("info", "warning", "error", "critical") else "unknown"
