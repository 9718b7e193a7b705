"""An extension of the site's API pages: examples in docstrings become code blocks, as `>>>` means a quotation there.

Also names in single backticks stay as they are: docstrings of this library are Markdown.
"""

from __future__ import annotations

from typing import Any

import griffe


class FenceExamples(griffe.Extension):
    """Puts a fence around each run of lines that begins with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """`text` with its examples fenced; an example ends at the next empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.lstrip().startswith(">>>"):
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.strip() if inside and line.lstrip().startswith((">>>", "...")) else line)
    return "\n".join([*lines, "```"] if inside else lines)
