"""Settings, versions and machine of a run, and what differs between several runs -> HTML tables."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.view.headline import judge_run, list_numbers
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.html import Html, join, make_pairs, make_table, tag
from steadygrad.words import spell_value

MAX_NAMES = 400
MAX_SETTINGS = 4
"""Settings that differ, as columns beside the numbers; a table of its own has all of them."""
MAX_OPEN_ROWS = 12
"""A table with more rows is collapsed at first."""


def render_about(run: RunReader) -> Html:
    """Render settings and machine, collapsed at first."""
    parts = []
    for key, title in (("config", "Configuration"), ("machine", "Machine"), ("versions", "Versions")):
        values = run.about.get(key)
        if isinstance(values, dict) and values:
            pairs = [(name, spell_value(value)) for name, value in flatten(values).items()]
            parts.append(_fold(title, make_pairs(pairs)))
    names = run.about.get("parameters")
    if isinstance(names, list) and names:
        shown = [tag("code", str(name)) for name in names[:MAX_NAMES]]
        more = [f"and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
        listed = tag("p", *itertools.chain.from_iterable((one, " ") for one in (*shown, *more)), class_="names")
        parts.append(_fold(f"{len(names)} parameters", listed))
    started = run.about.get("started")
    when = tag("p", f"Started {_spell_start(started)}", _format_resumed(run), class_="note") if started else None
    return join([when, *parts]) if parts or when else tag("p", "run.json does not describe the run.", class_="note")


def render_comparison(runs: Sequence[RunReader], keys: Sequence[str], links: Sequence[str | None]) -> Html:
    """Render several runs side by side, the settings that differ first; a check box takes one out of the charts."""
    differing = find_differences([flatten(run.config) for run in runs]) if all(run.config for run in runs) else {}
    rates = find_differences([{"learning rate": find_rate(run)} for run in runs])  # the optimizer's, so not in run.json
    complete = {name: found for name, found in rates.items() if None not in found}
    settings = {**complete, **dict(list(differing.items())[:MAX_SETTINGS])}
    numbers = [list_numbers(run) for run in runs]
    labels = list(dict.fromkeys(label for one in numbers for label in one))
    rows = []
    for i, (run, key, link, known) in enumerate(zip(runs, keys, links, numbers)):
        headline = judge_run(run)
        word = tag("span", headline.word, class_=f"badge {headline.tone}")
        state = tag("span", str(run.state), class_=f"badge state {run.state}")
        name = join([_render_box(run.name, key), " ", tag("a", run.name, href=link) if link else run.name])
        values = [spell_value(found[i]) for found in settings.values()]
        rows.append([name, *values, word, state, *(known.get(label, "-") for label in labels)])
    header = ("run", *settings, "verdict", "state", *labels)
    table = make_table(header, rows, label="Runs compared", class_="compared", sortable=True)
    return join([table, _render_differences(runs)])


def render_search() -> Html:
    """Render the box that leaves rows out of the table below it."""
    return tag("input", type="search", placeholder="find a run", aria_label="Find a run", class_="find", data_find=True)


def find_rate(run: RunReader) -> float | None:
    """Return the highest learning rate of a run."""
    return max(run.steps.curves["learning_rate"].points()[1], default=None)


def _render_box(name: str, key: str) -> Html:
    """Render the box that shows or hides a run in the charts, beside the line that stands for it there."""
    box = tag("input", type="checkbox", checked=True, data_show=key, aria_label=f"Show {name} in the charts")
    return join([box, tag("span", class_="swatch", data_swatch=key)])


def _render_differences(runs: Sequence[RunReader]) -> Html | None:
    """Render the settings that differ between the runs that record theirs; a run without any is left out."""
    complete = [run for run in runs if run.config]
    if len(complete) < 2:
        return None
    differing = find_differences([flatten(run.config) for run in complete])
    if not differing:
        return tag("p", "The settings of their guards are the same.", class_="note")
    settings = [[name, *map(spell_value, values)] for name, values in differing.items()]
    table = make_table(("setting that differs", *(run.name for run in complete)), settings)
    return table if len(settings) <= MAX_OPEN_ROWS else _fold(f"{len(settings)} settings that differ", table)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to 'clip.max_norm': 1.0."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def find_differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return setting -> its value in each run, for settings that differ."""
    names = dict.fromkeys(name for one in settings for name in one)
    values = {name: [one.get(name) for one in settings] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _fold(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), tag("div", content, class_="body"), class_="about")


def _spell_start(started: object) -> str:
    """Return '2026-01-31 10:15:00 UTC' for the time in run.json; anything else as it is."""
    text = str(started)
    with contextlib.suppress(ValueError, OverflowError):
        at = datetime.datetime.fromisoformat(text)
        return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC" if at.tzinfo is not None else text
    return text


def _format_resumed(run: RunReader) -> str:
    resumed = run.about.get("resumed")
    if not isinstance(resumed, list):
        return ""
    starts = [run.about, *(one for one in resumed if isinstance(one, dict))]
    # A training in stages starts again within one process; that is not a resume.
    processes = [start.get("process") for start in starts]
    num = sum(now is None or now != before for before, now in itertools.pairwise(processes))
    return f", resumed {'once' if num == 1 else f'{num} times'}" if num else ""
