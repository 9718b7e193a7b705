"""A finished tuning -> files: settings as YAML, the picture, and one page with the evidence for each choice."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.tune.ledger import write_text
from steadygrad.tune.picture import draw_tuning
from steadygrad.tune.trial import TrialResult, describe_trial
from steadygrad.tune.tuning import Tuned
from steadygrad.view.render.document import make_head, read_asset, render_foot
from steadygrad.view.render.html import Html, make_table, tag

CONFIG, PICTURE, PAGE = "tuned.yaml", "tune.png", "tune.html"
MAX_ROWS = 200


def write_tuning(tuned: Tuned, run_dir: Path) -> list[Path]:
    """Write all three files, replacing those of an earlier call."""
    config = run_dir / CONFIG
    write_text(config, spell_config(tuned))
    picture = draw_tuning(tuned, run_dir / PICTURE)
    page = run_dir / PAGE
    write_text(page, render_page(tuned, picture.read_bytes()))
    return [config, picture, page]


def spell_config(tuned: Tuned) -> str:
    """Return YAML for `steadygrad train --config`, or the settings of a script, with the guard's under `guard`."""
    yaml = import_extra("yaml", "yaml", what="a config file", error=UsageError)
    target = tuned.target
    head = [f"# {target.name}: {tuned.choice.reason}", *(f"# {n}: {b} -> {a}" for n, b, a, _ in tuned.evidence)]
    body = yaml.safe_dump(target.spell_settings(tuned.choice.settings), sort_keys=False)
    # A line break in a reason would end the YAML comment, and the rest would be read as a setting
    return "\n".join([*(line.replace("\n", " ") for line in head), body])


def describe_share(tuned: Tuned) -> str:
    """Describe the cost of the trials relative to a whole training."""
    whole = tuned.target.tunable.num_steps
    share = "" if not whole else f", {100 * tuned.num_steps / whole:.3g} % of the {whole:,} of a whole training"
    return f"{tuned.num_steps:,} steps were tried{share}"


def render_page(tuned: Tuned, picture: bytes) -> str:
    """Return one self-contained HTML document."""
    title = f"Tuning of {tuned.target.name}"
    # The page loads nothing and runs no script, whatever the names of a user's settings contain
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        *make_head(f"{title} · steadygrad"),
        tag("style", Html(read_asset("page.css"))),
    ]
    image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    body = tag(
        "main",
        tag("h1", title),
        _render_choice(tuned),
        tag("h2", "Evidence"),
        make_table(("setting", "before", "chosen", "why"), tuned.evidence),
        tag("h2", "Range test"),
        make_table(("rate", "at", "what it is"), _list_rates(tuned)),
        tag(
            "img",
            src=image,
            alt="Loss, norm and update ratio over the rate; losses of the trials",
            style="max-width:100%",
        ),
        tag("h2", "Compared"),
        _render_trials(tuned.compared),
        *([tag("h2", "Search"), _render_trials(tuned.searched)] if tuned.searched else []),
        id="main",
    )
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', body, render_foot()), lang='en')}\n"


def _render_choice(tuned: Tuned) -> Html:
    choice = tuned.choice
    word = "Changed" if choice.changed else "Kept" if choice.works else "Nothing works"
    tone = "good" if choice.works else "bad"
    note = f" {tuned.target.note[:1].upper()}{tuned.target.note[1:]}." if tuned.target.note else ""
    text = f"{choice.reason}. {describe_share(tuned)}.{note}"
    return tag("p", tag("strong", f"{word}: ", class_="word"), text, class_=f"headline {tone}", role="status")


def _list_rates(tuned: Tuned) -> list[tuple[str, str, str]]:
    curve = tuned.curve
    return [
        ("suggested", f"{curve.suggested:.3g}", curve.reason),
        ("steepest", "-" if curve.steepest is None else f"{curve.steepest:.3g}", "where the loss fell fastest"),
        ("quiet", f"{curve.largest_quiet:.3g}", "largest rate with no finding at it or below it"),
        ("edge", "-" if curve.edge is None else f"{curve.edge:.3g}", curve.why_ended or "training did not break"),
        ("given", f"{curve.base_rate:.3g}", "the rate before"),
    ]


def _render_trials(results: Sequence[TrialResult]) -> Html:
    described = [result.settings.describe() for result in results]
    known = dict.fromkeys(name for one in described for name in one)
    names = [name for name in known if name == "lr" or len({one.get(name) for one in described}) > 1]
    rows: list[list[Any]] = []
    for number, result in enumerate(results[:MAX_ROWS]):
        words = result.settings.describe()
        cells = [words.get(name, "-") for name in names]
        rows.append([str(number), *cells, str(result.order), describe_trial(result), ", ".join(result.kinds) or "-"])
    return make_table(("trial", *names, "order", "outcome", "found"), rows)
