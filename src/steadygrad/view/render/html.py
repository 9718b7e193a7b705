"""Text -> HTML that is safe against injection. `Html` is finished; any other string is escaped when it is inserted.

So a parameter named `<script>` is shown as `<script>`: there is no place where escaping could be forgotten.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from steadygrad.record.encode import to_plain

VOID = ("meta", "br", "img", "link", "input")


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str | Html | None, **attributes: str | bool | None) -> Html:
    """Return an element. Attribute names drop a trailing underscore and turn inner ones into dashes; skip None."""
    spelled = "".join(
        f" {_spell_name(key)}" if value is True else f' {_spell_name(key)}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{spelled}>")
    return Html(f"<{name}{spelled}>{join(children)}</{name}>")


def join(children: Iterable[str | Html | None]) -> Html:
    """Join several pieces; escape plain strings, skip None."""
    # str methods return plain str: what was cut or formatted from an Html is escaped again, which is safe
    pieces = (one if isinstance(one, Html) else html.escape(one) for one in children if one is not None)
    return Html("".join(pieces))


def make_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Html]],
    *,
    label: str = "",
    class_: str | None = None,
    sortable: bool = False,
) -> Html:
    """Return a table that scrolls on its own if it is too wide; `sortable` lets the script sort and search it."""
    head = tag("tr", *(tag("th", one, scope="col") for one in header))
    body = join(tag("tr", tag("th", row[0], scope="row"), *(tag("td", one) for one in row[1:])) for row in rows)
    table = tag("table", tag("thead", head), tag("tbody", body), class_=class_, data_sortable=sortable)
    label = label or f"Table of {header[0]}"
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def make_pairs(pairs: Iterable[tuple[str, str | Html]]) -> Html:
    """Return a list of names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def to_script_json(value: Any) -> Html:
    """Return JSON for a script element, escaped so that it cannot end that element or begin a comment."""
    # NaN is not JSON: JSON.parse would refuse the whole page
    text = json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _spell_name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
