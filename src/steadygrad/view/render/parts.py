"""A run -> the parts of its page: headline, what broke, tiles, charts, incidents, advice, pictures, ranks, settings.

Report and live page share them; the live page resends a part when its text changes.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping, Sequence

from steadygrad.view.advice import advise, see_run
from steadygrad.view.headline import judge_run, list_numbers
from steadygrad.view.read.pictures import Picture, Pictures
from steadygrad.view.read.rank_log import RankLog, RankLogs
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.state import State
from steadygrad.view.render.about import render_about
from steadygrad.view.render.charts import ABOUT, CHARTS, summarise_chart
from steadygrad.view.render.html import Html, join, make_table, tag
from steadygrad.view.render.incidents import render_incidents
from steadygrad.view.story import Episode, write_story
from steadygrad.words import spell_count, spell_number

FIRST = ("loss", "validation", "norm")
"""Charts above the incidents; the others are below."""
MAPS = ("layers", "ratios")
COMPARED = {
    "compare_loss": "Loss of all runs",
    "compare_validation": "Validation loss of all runs",
    "compare_norm": "Gradient norm of all runs",
    "compare_rate": "Learning rate of all runs",
}
MAX_EPISODES = 3
"""Problems shown at the top of the page."""
MOVES = (
    ("ArrowLeft", "◂", "earlier"),
    ("ArrowRight", "▸", "later"),
    ("+", "+", "closer"),
    ("-", "−", "wider"),
    ("0", "all", "show all"),
)
"""Key, sign and words of the buttons that move a chart."""
SIGNS = {
    State.RUNNING: "▶",
    State.STALLED: "…",
    State.FINISHED: "■",
    State.HALTED: "◼",
    State.STOPPED: "■",
    State.FAILED: "✕",
    State.KILLED: "✕",
}
WIDE = ("loss", "validation", "metrics", "extra", "norm", "layers", "ratios")


def render_parts(run: RunReader, key: str = "run0") -> dict[str, Html]:
    """Return part -> its HTML, for the parts that change while a run goes on; `key` makes their ids unique."""
    return {
        "headline": _render_headline(run),
        "story": render_story(run, key),
        "tiles": _render_tiles(run),
        "notes": _render_notes(run),
        "advice": render_advice(run),
        "pictures": render_pictures(run.pictures),
        "ranks": render_ranks(run.ranks),
        "incidents": _render_incidents(run, key),
        "about": render_about(run),
    }


def render_run(run: RunReader, key: str, *, has_controls: bool = True, made: float | None = None) -> Html:
    """Render everything about one run, what broke first; `key` links its parts to its numbers.

    `made` is the time of a report, which says of a run that has not ended what it was then.
    """
    parts = render_parts(run, key)
    if made is not None and run.state.is_open:
        parts["headline"] = _render_headline(run, made)

    def place(name: str) -> Html:
        return tag("div", parts[name], data_part=name)

    def draw(charts: Sequence[str]) -> Html:
        return tag("div", *(_render_chart(run, key, chart) for chart in charts), class_="charts")

    return tag(
        "article",
        tag("h2", run.name),
        place("headline"),
        place("story"),
        place("tiles"),
        place("notes"),
        render_controls() if has_controls else None,
        draw(FIRST),
        tag("section", tag("h3", "Incidents"), place("incidents"), id=f"{key}-incidents", tabindex="-1"),
        draw([chart for chart in CHARTS if chart not in FIRST]),
        place("advice"),
        place("pictures"),
        place("ranks"),
        tag("section", tag("h3", "Configuration and machine"), place("about"), id=f"{key}-about", tabindex="-1"),
        class_="run",
        id=key,
        data_run=key,
    )


def render_compared_charts() -> Html:
    """Render the charts that show all runs together."""
    figures = (_frame(name, title, "", f"{title}.", wide=True) for name, title in COMPARED.items())
    return tag("div", *figures, class_="charts")


def render_controls() -> Html:
    """Render the buttons that change every chart: smoothing, scale, axis. They work by mouse, touch and keyboard."""
    return tag(
        "div",
        _render_choice("smooth", "Smoothing", {"0": "off", "0.6": "some", "0.9": "more", "0.98": "most"}),
        _render_choice("scale", "Loss scale", {"auto": "auto", "linear": "linear", "log": "log"}),
        _render_choice("across", "Axis", {"step": "steps", "time": "time"}),
        class_="controls",
        role="toolbar",
        aria_label="Charts",
    )


def _render_choice(name: str, label: str, options: Mapping[str, str]) -> Html:
    buttons = [
        tag("button", text, type="button", data_set=name, data_value=value, aria_pressed="true" if i == 0 else "false")
        for i, (value, text) in enumerate(options.items())
    ]
    return tag("div", tag("span", label, class_="label"), *buttons, class_="choice", role="group", aria_label=label)


def render_story(run: RunReader, key: str) -> Html:
    """Render what broke, the line of code, what was done, and since when it is healthy."""
    story = write_story(run)
    if not story.episodes:
        return Html("")
    # By id(), because problems have no hash; in the order in which render_incidents numbers its targets
    numbers = {id(problem): i for i, problem in enumerate(run.incidents.problems)}
    shown = story.episodes[:MAX_EPISODES]
    episodes = [_render_episode(one, f"{key}-incident-{numbers[id(one.problem)]}") for one in shown]
    left_out = len(story.episodes) - len(episodes)
    more = tag("p", f"and {spell_count(left_out, 'more problem')} below", class_="note") if left_out else None
    since = tag("p", story.since, class_="since") if story.since else None
    return tag("section", tag("h3", "What broke"), tag("ol", *episodes), more, since, class_="story")


def _render_episode(episode: Episode, target: str) -> Html:
    place = None
    if episode.place or episode.source:
        source = tag("code", episode.source, class_="line") if episode.source else None
        place = tag("p", tag("code", episode.place, class_="place"), " ", source, class_="where")
    why = tag("p", episode.why, class_="why") if episode.why else None
    title = tag("a", episode.what, href=f"#{target}")
    return tag(
        "li",
        tag("p", tag("span", episode.when, class_="step"), " ", tag("strong", title)),
        place,
        why,
        tag("p", tag("span", "Done: ", class_="label"), episode.did, class_="done"),
    )


def _render_chart(run: RunReader, key: str, chart: str) -> Html:
    summary = summarise_chart(run, chart)
    return _frame(chart, CHARTS[chart], ABOUT[chart], summary, wide=chart in WIDE, run=key)


def _frame(chart: str, title: str, about: str, summary: str, *, wide: bool, run: str | None = None) -> Html:
    """Render the frame of a chart, hidden until the script has numbers to draw in it."""
    help_text = "Arrow keys move, plus and minus zoom, 0 shows all."
    find = _render_finder(title) if chart in MAPS else None
    moves = [
        tag("button", sign, type="button", data_move=key, title=words, aria_label=f"{title}: {words}")
        for key, sign, words in MOVES
    ]
    saves = [
        tag("button", kind.upper(), type="button", data_save=kind, title=f"save as {kind.upper()}")
        for kind in ("svg", "png", "csv")
    ]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", tag("span", about), find, tag("div", *moves, *saves, class_="tools")),
        tag("div", class_="legend"),
        tag("div", class_="plot", tabindex="0", role="img", aria_label=f"{summary} {help_text}"),
        class_="chart wide" if wide else "chart",
        data_chart=chart,
        data_run=run,
        hidden=True,
    )


def _render_finder(title: str) -> Html:
    """Render what chooses and orders the rows of a map."""
    orders = {"model": "as in the model", "largest": "largest first", "bad": "NaN first", "name": "by name"}
    options = [tag("option", text, value=value) for value, text in orders.items()]
    box = tag("input", type="search", placeholder="find a parameter", aria_label=f"Find in {title}", class_="find")
    return tag("div", box, tag("select", *options, class_="order", aria_label=f"Order of {title}"), class_="finder")


def _render_headline(run: RunReader, made: float | None = None) -> Html:
    headline = judge_run(run)
    word = tag("strong", f"{headline.word}.", class_="word")
    return join(
        [
            tag("p", word, " ", headline.text, class_=f"headline {headline.tone}", role="status"),
            tag("p", render_state(run.state), " ", _render_written(run.written, made), class_="state-line"),
        ]
    )


def render_state(state: State) -> Html | None:
    """Render a state as a badge: a sign and a word, so that colour is not needed."""
    if state is State.UNKNOWN:
        return None
    return tag("span", f"{SIGNS[state]} {state}", class_=f"badge state {state}")


def _render_written(written: float | None, made: float | None) -> Html | None:
    when, then = render_time(written), render_time(made)
    if when is None:
        return None
    shown = () if then is None else ("when this report was made, ", then, "; ")
    return tag("span", *shown, "last written ", when, class_="note")


def render_time(when: float | None) -> Html | None:
    """Render a time in seconds since 1970; the script adds how long ago that is."""
    if when is None:
        return None
    at = datetime.datetime.fromtimestamp(when, datetime.UTC)
    text = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return tag("time", text, datetime=at.isoformat(timespec="seconds"), data_value=str(int(when)))


def _render_tiles(run: RunReader) -> Html:
    tiles = (tag("div", tag("dt", name), _render_number(value)) for name, value in list_numbers(run).items())
    return tag("dl", *tiles, class_="tiles")


def _render_number(value: str) -> Html:
    """Render a number, and smaller where it was reached: '0.262 at 391'."""
    number, at, step = value.partition(" at ")
    return tag("dd", number, *([" ", tag("small", f"at {step}")] if at else []))


def _render_incidents(run: RunReader, key: str) -> Html:
    if run.steps.num_nonfinite and not run.incidents.count:
        return tag("p", "Some steps were not finite, and there was no guard to find the cause.", class_="note")
    return render_incidents(run.incidents, key)


def _render_notes(run: RunReader) -> Html:
    return tag("ul", *(tag("li", note) for note in run.notes), class_="notes") if run.notes else Html("")


# --- advice -------------------------------------------------------------------------------------------------------
# Advice for the next run -> a list; nothing if there is no advice.


def render_advice(run: RunReader) -> Html:
    """Render a line for each setting, with its reason."""
    found = [(str(one).partition(": ")[0], one.reason) for one in advise(see_run(run))]
    if run.norms and not run.ratios:
        found.append(
            ("update ratios", "not recorded; MeasureConfig(parameters_every=10) measures them every ten steps")
        )
    if not found:
        return Html("")
    lines = (tag("li", tag("strong", setting), f": {reason}") for setting, reason in found)
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
    header = ("rank", "machine", "process", "starts", "last step", "its own loss", "last seen", "findings of its own")
    table = make_table(header, [_list_rank(log, newest) for log in ranks])
    return tag("section", tag("h3", "Ranks"), table, class_="ranks")


def _list_rank(log: RankLog, newest: int) -> list[str | Html]:
    step: str | Html = "-" if log.last_step is None else f"{log.last_step:,}"
    if newest - (log.last_step or 0) >= BEHIND:  # a rank that never wrote a step counts as at 0
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
