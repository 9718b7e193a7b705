"""The ranks of a run -> a table: where each runs, and when it was last seen. A rank that stands still is marked."""

from __future__ import annotations

from steadygrad.view.read.rank_log import RankLog, RankLogs
from steadygrad.view.render.html import Html, make_table, tag
from steadygrad.words import spell_number

BEHIND = 100
"""Steps behind the others from which a rank is said to stand still; they are written at least once a second."""


def render_ranks(ranks: RankLogs) -> Html:
    """Nothing for a run of one."""
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
