"""A title and named lines -> a small table of HTML for a notebook. It takes the notebook's own colours."""

from __future__ import annotations

import html
from collections.abc import Sequence

COLORS = {"info": "#3b82c4", "warning": "#b7791f", "error": "#d0343f", "critical": "#d0343f"}
"""Of the bar at the left; the word stands beside it."""


def show_card(title: str, word: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return the HTML; everything is escaped, and lines without text are left out."""
    cells = "".join(
        f'<tr style="background:none"><td style="text-align:left;vertical-align:top;opacity:.7;padding:1px 12px 1px 0">'
        f'{html.escape(name)}</td><td style="text-align:left;padding:1px 0"><code style="background:none;white-space:'
        f'pre-wrap">{html.escape(text)}</code></td></tr>'
        for name, text in rows
        if text
    )
    color = COLORS.get(word, "#8b2fc9")
    return (
        f'<div style="border-left:4px solid {color};padding:2px 0 2px 12px;margin:4px 0">'
        f"<b>{html.escape(title)}</b> <small>{html.escape(word)}</small><table>{cells}</table></div>"
    )
