"""A run -> the parts of its page: headline, tiles, notes, charts, advice, pictures, ranks, incidents, settings.

Report and live page share them; the live page resends a part when its text changes.
"""

from __future__ import annotations

import base64

from steadygrad.view.advice import advise, see_run
from steadygrad.view.headline import judge_run, list_numbers
from steadygrad.view.read.pictures import Picture, Pictures
from steadygrad.view.read.rank_log import RankLog, RankLogs
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.about import render_about
from steadygrad.view.render.charts import ABOUT, CHARTS, summarise_chart
from steadygrad.view.render.html import Html, join, make_table, tag
from steadygrad.view.render.incidents import render_incidents
from steadygrad.words import spell_number

WIDE = ("loss", "validation", "metrics", "extra", "norm", "layers", "ratios")


def render_parts(run: RunReader) -> dict[str, Html]:
    """Return part -> its HTML, for the parts that change while a run goes on."""
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
    """Render everything about one run; `key` links its parts to its numbers."""
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
    """Render the charts that show all runs together."""
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
    """Render the frame of a chart, hidden until the script has numbers to draw in it."""
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


# --- advice -------------------------------------------------------------------------------------------------------
# Advice for the next run -> a list; nothing if there is no advice.


def render_advice(run: RunReader) -> Html:
    """Render a line for each setting, with its reason."""
    found = advise(see_run(run))
    if not found:
        return Html("")
    lines = (tag("li", tag("strong", str(one).partition(": ")[0]), f": {one.reason}") for one in found)
    return tag("section", tag("h3", "For the next run"), tag("ul", *lines, class_="notes"))


# --- pictures -----------------------------------------------------------------------------------------------------
# The pictures of a run -> HTML, embedded as data so that a report stays one file. Without pictures, no section.


def render_pictures(pictures: Pictures) -> Html:
    """Render heading and figures; empty if there is nothing to show."""
    if not pictures.shown and not pictures.left_out:
        return Html("")
    notes = tag("ul", *(tag("li", text) for text in pictures.left_out), class_="notes") if pictures.left_out else None
    figures = tag("div", *map(_render_picture, pictures.shown), class_="pictures")
    return join([tag("h3", "Pictures"), notes, figures])


def _render_picture(picture: Picture) -> Html:
    source = f"data:image/png;base64,{base64.b64encode(picture.data).decode()}"
    image = tag("img", src=source, alt=picture.caption, loading="lazy")
    return tag("figure", image, tag("figcaption", picture.caption), class_="picture")


# --- ranks --------------------------------------------------------------------------------------------------------
# The ranks of a run -> a table: where each runs, and when it was last seen. A stalled rank is marked.


BEHIND = 100
"""A rank this many steps behind the others counts as stalled; ranks write at least once a second."""


def render_ranks(ranks: RankLogs) -> Html:
    """Render the table of ranks; empty for a single process."""
    if not len(ranks):
        return Html("")
    newest = max((log.last_step for log in ranks if log.last_step is not None), default=0)
    header = ("rank", "machine", "process", "starts", "last step", "its own loss", "last seen", "told alone")
    table = make_table(header, [_list_rank(log, newest) for log in ranks])
    return tag("section", tag("h3", "Ranks"), table, class_="ranks")


def _list_rank(log: RankLog, newest: int) -> list[str | Html]:
    step: str | Html = "-" if log.last_step is None else f"{log.last_step:,}"
    if newest - (log.last_step or 0) >= BEHIND:
        step = tag("span", f"{step}, behind", class_="badge warning")
    return [
        f"rank {log.rank}",
        log.node or "-",
        "-" if log.process is None else str(log.process),
        str(log.num_starts),
        step,
        spell_number(log.last_loss),
        log.last_time or "-",
        str(log.num_own),
    ]
