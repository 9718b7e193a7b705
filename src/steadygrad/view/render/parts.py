"""A run -> the parts of its page: headline, tiles, notes, charts, advice, pictures, ranks, incidents, settings.

Report and live page share them; the live page sends a part again when its text has changed.
"""

from __future__ import annotations

from steadygrad.view.headline import judge_run, list_numbers
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.about import render_about
from steadygrad.view.render.advice import render_advice
from steadygrad.view.render.charts import ABOUT, CHARTS, summarise_chart
from steadygrad.view.render.html import Html, join, tag
from steadygrad.view.render.incidents import render_incidents
from steadygrad.view.render.pictures import render_pictures
from steadygrad.view.render.ranks import render_ranks

WIDE = ("loss", "validation", "metrics", "extra", "norm", "layers", "ratios")


def render_parts(run: RunReader) -> dict[str, Html]:
    """Part -> its HTML; these are what changes while a run goes on."""
    return {
        "headline": _render_headline(run),
        "tiles": _render_tiles(run),
        "notes": _render_notes(run),
        "advice": render_advice(run),
        "pictures": render_pictures(run.pictures),
        "ranks": render_ranks(run.ranks),
        "incidents": _render_incidents(run),
        "about": render_about(run),
    }


def render_run(run: RunReader, key: str, *, level: str = "h2") -> Html:
    """All of one run; `key` ties its parts to its numbers."""
    parts = render_parts(run)

    def place(name: str) -> Html:
        return tag("div", parts[name], data_part=name)

    return tag(
        "article",
        tag(level, run.name),
        place("headline"),
        place("tiles"),
        place("notes"),
        tag("div", *(_render_chart(run, key, chart) for chart in CHARTS), class_="charts"),
        place("advice"),
        place("pictures"),
        place("ranks"),
        tag("section", tag("h3", "Incidents"), place("incidents"), id=f"{key}-incidents", tabindex="-1"),
        tag("section", tag("h3", "Configuration and machine"), place("about"), id=f"{key}-about", tabindex="-1"),
        class_="run",
        id=key,
        data_run=key,
    )


def render_compared_charts() -> Html:
    """The charts in which all runs are drawn together."""
    charts = (
        ("compare_loss", "Loss of all runs"),
        ("compare_validation", "Validation loss of all runs"),
        ("compare_norm", "Gradient norm of all runs"),
    )
    return tag("div", *(_frame(name, title, "", f"{title}.", wide=True) for name, title in charts), class_="charts")


def _render_chart(run: RunReader, key: str, chart: str) -> Html:
    summary = summarise_chart(run, chart)
    return _frame(chart, CHARTS[chart], ABOUT[chart], summary, wide=chart in WIDE, run=key)


def _frame(chart: str, title: str, about: str, summary: str, *, wide: bool, run: str | None = None) -> Html:
    """Hidden until the script finds numbers to draw in it."""
    help_text = "Arrow keys move, plus and minus zoom, 0 shows all."
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", tag("span", about)),
        tag("div", class_="plot", tabindex="0", role="img", aria_label=f"{summary} {help_text}"),
        class_="chart wide" if wide else "chart",
        data_chart=chart,
        data_run=run,
        hidden=True,
    )


def _render_headline(run: RunReader) -> Html:
    headline = judge_run(run)
    word = tag("strong", f"{headline.word}.", class_="word")
    return tag("p", word, " ", headline.text, class_=f"headline {headline.tone}", role="status")


def _render_tiles(run: RunReader) -> Html:
    tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in list_numbers(run).items())
    return tag("dl", *tiles, class_="tiles")


def _render_incidents(run: RunReader) -> Html:
    if run.steps.num_nonfinite and not run.incidents.count:
        return tag("p", "Steps were not finite, and no guard was there to say why.", class_="note")
    return render_incidents(run.incidents)


def _render_notes(run: RunReader) -> Html:
    notes = list(run.notes)
    if run.norms and not run.ratios:
        notes.append("update ratios were not recorded (MeasureConfig.parameters_every switches them on)")
    if not notes:
        return Html("")
    return join([tag("ul", *(tag("li", note) for note in notes), class_="notes")])
