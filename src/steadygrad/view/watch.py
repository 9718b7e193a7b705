"""A run -> a full-screen view in another terminal: loss and norm, worst layers, incidents. Reads only.

On a terminal it follows the run until q or Ctrl-C; elsewhere, or with `once`, it prints one screen. The run is never
touched, so any number of viewers may watch it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad.view.headline import Tone, judge_run, list_numbers, spell_place
from steadygrad.view.marks import find_mark
from steadygrad.view.read.incident_log import Problem, look
from steadygrad.view.read.rank_log import find_rank
from steadygrad.view.read.run import RunReader, open_run
from steadygrad.view.read.state import State
from steadygrad.view.sparkline import draw_bars
from steadygrad.view.story import describe_problem
from steadygrad.words import make_printable, spell_count, spell_duration, spell_number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PAUSE_SECONDS = 0.5
SLICE_SECONDS = 0.4
MAX_EXTRA = 6
"""Most numbers logged by the program to show."""
MAX_NOTES = 2
"""Most notes about unreadable files to show; the report has all of them."""
WIDE = 90
"""Least width, in characters, to show the two tables side by side."""
BORDER = 2
"""Number of lines that a frame takes."""
GAP = "   "
"""Separator between two numbers."""
INDENT = " " * 10
"""Start of a line that continues a problem, below its step."""
STYLES = {Tone.GOOD: "green", Tone.WARNING: "yellow", Tone.BAD: "bold red", Tone.EMPTY: "dim"}
SEVERITY_STYLES = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}


def watch_run(path: str | Path, *, once: bool = False, console: Console | None = None) -> None:
    """Show a run until q is pressed; print it once if there is no terminal."""
    from rich.live import Live

    console = console or _open_console()
    run = open_run(path)
    if once or not console.is_terminal:
        run.read_all()
        console.print(draw_screen(run, console.width, 40, keys=""))
        return
    screen = Live(console=console, screen=True, auto_refresh=False)
    # In this order: the screen is left first, then the terminal's mode is restored, and only then is Ctrl-C swallowed
    with contextlib.suppress(KeyboardInterrupt), _read_keys() as pressed, screen as live:
        key = ""
        while key not in ("q", "\x03", "\x04"):
            run.update(budget_seconds=SLICE_SECONDS)
            live.update(draw_screen(run, console.width, console.height), refresh=True)
            key = pressed(PAUSE_SECONDS if run.progress >= 1 else 0.0)


def draw_screen(run: RunReader, width: int, height: int, *, keys: str = " · q quits") -> RenderableType:
    """Draw the whole screen, as large as the terminal; `keys` is shown in a corner."""
    from rich.console import Group

    inner = max(20, width - 4)
    head = _write_head(run, inner)
    bars = max(2, (height - 20) // 3)
    left = height - 1 - (len(head.wrap(_plain_console(inner), inner)) + BORDER) - 2 * (bars + BORDER)
    return Group(
        _frame_head(run, head, keys),
        _draw_curve(run, "loss", inner, bars),
        _draw_curve(run, "grad_norm", inner, bars),
        _draw_tables(run, left, wide=width >= WIDE),
    )


def _write_head(run: RunReader, width: int) -> Text:
    """Format the verdict and the numbers, with line breaks only between numbers."""
    from rich.text import Text

    headline = judge_run(run)
    text = Text.assemble((f"{headline.word}. ", STYLES[headline.tone]), make_printable(headline.text))
    numbers = {**list_numbers(run), "lr": spell_number(run.steps.last.get("learning_rate"))}
    extra = list(run.steps.last_extra.items())[:MAX_EXTRA]
    for pairs in (numbers, {make_printable(name): spell_number(number) for name, number in extra}):
        room = 0
        for name, value in pairs.items():
            is_first = len(name) + len(value) + 1 + len(GAP) > room
            room = (width if is_first else room - len(GAP)) - len(name) - len(value) - 1
            text.append("\n" if is_first else GAP)
            text.append(f"{name} ", style="dim")
            text.append(value)
    for note in run.notes[:MAX_NOTES]:
        text.append(f"\n{make_printable(note)}", style="yellow")
    return text


def _frame_head(run: RunReader, head: Text, keys: str) -> RenderableType:
    from rich.panel import Panel

    reading = "" if run.progress >= 1 else f", reading {run.progress:.0%}"
    state = "" if run.state is State.UNKNOWN else f"{run.state}, "
    foot = f"{state}last written {spell_duration(run.written, time.time())}{reading}{keys}"
    return Panel(head, title=make_printable(run.name), title_align="left", subtitle=foot, subtitle_align="right")


def _open_console() -> Console:
    """Open standard output. Query the window for its size: COLUMNS and LINES of a shell may be out of date."""
    from rich.console import Console

    sizes = ("COLUMNS", "LINES") if sys.stdout.isatty() else ()
    # `_environ` is a private parameter of rich's Console
    return Console(_environ={name: value for name, value in os.environ.items() if name not in sizes})


def _plain_console(width: int) -> Console:
    """Return a console for measuring how many lines a text takes."""
    from rich.console import Console

    return Console(width=width, file=io.StringIO())


def _draw_curve(run: RunReader, name: str, width: int, height: int) -> RenderableType:
    """Draw a curve; logarithmic for norms, and for a loss whose maximum would flatten the rest."""
    from rich.panel import Panel
    from rich.text import Text

    spans = run.steps.curves[name].spans()
    low, high = min((one for one, _ in spans), default=0.0), max((one for _, one in spans), default=0.0)
    log = name == "grad_norm" or (low > 0 and high / low > 100)
    label = "loss" if name == "loss" else "gradient norm"
    title = f"{label}{' (log)' if log else ''}   now {spell_number(run.steps.last.get(name))}"
    if spans:
        title += f"   {spell_number(low)} to {spell_number(high)}"
    rows = draw_bars([one for _, one in spans], width, height, log=log) or ["nothing yet"]
    style = "blue" if name == "loss" else "magenta"
    return Panel(Text("\n".join(rows), style=style, no_wrap=True), title=title, title_align="left")


def _draw_tables(run: RunReader, height: int, *, wide: bool) -> RenderableType:
    """Draw the tables side by side if there is room; otherwise the incidents on top, with up to two thirds."""
    from rich.console import Group
    from rich.table import Table

    if not wide:
        rows = max(2, height - 2 * BORDER)
        num_incidents = max(1, min(2 * len(run.incidents.problems) + 1, rows * 2 // 3))
        return Group(_draw_incidents(run, num_incidents, wide=False), _draw_layers(run, max(1, rows - num_incidents)))
    rows = max(3, height - BORDER)
    side_by_side = Table.grid(expand=True)
    side_by_side.add_column(ratio=2)
    side_by_side.add_column(ratio=3)
    side_by_side.add_row(_draw_layers(run, rows), _draw_incidents(run, rows, wide=True))
    return side_by_side


def _draw_layers(run: RunReader, rows: int) -> RenderableType:
    from rich.panel import Panel
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for name, exponent in run.norms.worst(rows):
        bad = exponent == float("inf")
        text.append("   NaN/Inf" if bad else f"{10**exponent:10.3g}", style="bold red" if bad else "magenta")
        text.append(f"  {make_printable(name)}\n")
    text.rstrip()
    # Layers are recorded every few steps, and at a bad one: what is shown here may be from a while ago.
    since = "step" if run.norms.width == 1 else "from step"
    title = f"largest gradients, {since} {run.norms.steps[-1]:,}" if run.norms.steps else "largest gradients"
    return Panel(text or Text("not recorded", style="dim"), title=title, title_align="left")


def _draw_incidents(run: RunReader, rows: int, *, wide: bool) -> RenderableType:
    """Draw the problems, the newest on top, each once; the newest that was diagnosed with its line of code."""
    from rich.panel import Panel
    from rich.text import Text

    newest = sorted(run.incidents.problems, key=lambda one: -one.last_noticed)
    diagnosed = next((one for one in newest if spell_place(one.cause)), None)
    lines: list[Text] = []
    for problem in newest:
        lines += _write_problem(problem, wide=wide)
        if problem is diagnosed:
            place = Text.assemble(INDENT, (make_printable(spell_place(problem.cause)), "bold"))
            lines.append(place.append(f"  {make_printable(str(look(problem.cause, 'source') or ''))}"))
    text = Text("\n", no_wrap=True, overflow="ellipsis").join(lines[:rows])
    text.no_wrap, text.overflow = True, "ellipsis"
    num_problems = len(newest)
    counted = "" if num_problems == run.incidents.count else f" in {spell_count(num_problems, 'problem')}"
    title = f"incidents: {run.incidents.count:,}{counted}"
    return Panel(text or Text("none", style="green"), title=title, title_align="left")


def _write_problem(problem: Problem, *, wide: bool) -> list[Text]:
    """Format what happened and what was done: on one line, or on two where that would be cut off."""
    from rich.text import Text

    head = Text.assemble((f"{problem.last_noticed:>8}  ", "dim"))
    rank = find_rank(problem.incident)
    if rank is not None:
        head.append(f"rank {rank} ", style="bold")
    head.append(make_printable(problem.kind), style=SEVERITY_STYLES.get(problem.severity, ""))
    if problem.count > 1:
        head.append(f" {problem.count:,}×", style="bold")
    done = [find_mark(action).words for action in problem.actions if action != "none"]
    if done:  # before the message, so that the action is not cut off
        head.append(f"  {make_printable(', '.join(done))}", style="green")
    what = make_printable(describe_problem(problem).what)
    return [head.append(f"  {what}")] if wide else [head, Text(f"{INDENT}{what}")]


@contextlib.contextmanager
def _read_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key and returns it, '' on timeout; restore the terminal at the end."""
    try:
        import select
        import termios
        import tty

        number = sys.stdin.fileno()
        before: list[Any] = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):  # no POSIX terminal: only Ctrl-C works
        yield _wait
        return
    tty.setcbreak(number)  # cbreak, not raw: Ctrl-C still sends its signal
    try:
        yield (
            lambda seconds: os.read(number, 1).decode("latin-1") if select.select([number], [], [], seconds)[0] else ""
        )
    finally:
        # Without it the user's shell is left without echo
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
