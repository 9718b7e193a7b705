"""Console: lines, a table and a progress bar; with rich on a terminal, as plain text everywhere else.

NO_COLOR is honoured. On a terminal a long line is wrapped between words, with a hanging indent.
Plain text has no escape codes and no bar, and is never wrapped, so that it can be searched. A character that the
terminal cannot show is replaced, not raised.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


Advance = Callable[[int, str], None]
"""Moves a progress bar to the given number of steps, with a text next to it."""


class Console:
    """Where a command writes to; standard output unless given."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self._rich = _open_rich(self._file)

    @property
    def is_terminal(self) -> bool:
        """Whether a person is looking: bars move, and colours may show."""
        return self._rich is not None

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None in plain text, which is never wrapped."""
        return None if self._rich is None else self._rich.width

    def say(self, text: str = "", style: str = "", hang: int | None = None) -> None:
        """Print one line; `style` is rich's ('bold', 'red') and shows on a terminal only.

        `hang`: indentation of wrapped lines; by default that of the line itself.
        """
        if self._rich is not None:
            from rich.text import Text

            shown = _break_lines(text, self._rich.width, hang)
            plain = bool(os.environ.get("NO_COLOR"))  # rich would still send bold and dim
            # As Text: in a plain string rich would read [...] as markup
            self._rich.print(Text(shown, style="" if plain else style), soft_wrap=True)
            return
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        # flush: a pipe is block-buffered, and its reader follows a training by these lines
        print(text.encode(encoding, "replace").decode(encoding), file=self._file, flush=True)

    def show_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        """Print aligned columns: the first to the left, the others to the right; one style per row."""
        widths = [max(map(len, column)) for column in zip(header, *rows)]
        for row, style in zip([header, *rows], ["bold", *styles]):
            cells = [cell.rjust(width) for cell, width in zip(row, widths)]
            self.say("  ".join([row[0].ljust(widths[0]), *cells[1:]]), style)

    @contextlib.contextmanager
    def track(self, title: str, total: int) -> Iterator[Advance]:
        """Show a progress bar that disappears when done; nothing in plain text."""
        if self._rich is None:
            yield lambda *_: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        # Names come through the task: a column's own text is a format string, and is read as markup by default
        name, text = (TextColumn(field, markup=False) for field in ("{task.fields[title]}", "{task.description}"))
        columns = (name, BarColumn(), MofNCompleteColumn(), text)
        with Progress(*columns, console=self._rich, transient=True) as progress:
            task = progress.add_task("", total=total, title=title)
            yield lambda done, text: progress.update(task, completed=done, description=text)


def _break_lines(text: str, width: int, hang: int | None) -> str:
    """Wrap every line of `text` between words; a path or another long word stays whole, so that it can be copied."""
    shown: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) if hang is None else hang)
        wrapped = textwrap.wrap(
            line, max(len(indent) + 20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        shown += wrapped if len(line) > width else [line]
    return "\n".join(shown)


def replace_unencodable(file: TextIO) -> None:
    """Have `file` print a question mark for what its encoding lacks, as rich itself would raise an error."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")


def _open_rich(file: TextIO) -> RichConsole | None:
    if not file.isatty():
        return None
    try:
        from rich.console import Console as Rich
    except ImportError:
        return None
    replace_unencodable(file)
    return Rich(file=file)
