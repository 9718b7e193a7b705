"""`steadygrad demo` as it prints -> docs/assets/demo.svg, a recording whose lines appear as they came.

    python docs/_site/recording.py [--full]      the quick demo, or the one of a minute

Runs the demo for real and takes down each line, its style and its time; pauses are shortened, words are not. A viewer
that wants no motion sees the last picture at once.
"""

from __future__ import annotations

import html
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from steadygrad.cli.console import Console, _break_lines
from steadygrad_recipes.demo.narration import narrate_demo

PICTURE = Path(__file__).parent.parent / "assets" / "demo.svg"
WIDTH, LINE, LEFT, TOP, CHARACTER = 96, 17, 16, 44, 7.83
PACE, MOST_SECONDS = 0.5, 1.2
"""Time in the picture for time in the run, and the longest pause."""
COLOURS = {"red": "#ff7b72", "green": "#7ee787", "yellow": "#e3b341", "magenta": "#d2a8ff", "dim": "#8b949e"}


class Recorder(Console):
    """A terminal that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, float]] = []
        self._start = time.perf_counter()

    @property
    def width(self) -> int:
        return WIDTH

    def say(self, text: str = "", style: str = "", hang: int | None = None) -> None:
        for line in _break_lines(text, WIDTH, hang).splitlines() or [""]:
            self.lines.append((line, style, time.perf_counter() - self._start))


def draw(lines: list[tuple[str, str, float]]) -> str:
    """The picture of a terminal."""
    height = TOP + LINE * len(lines) + 12
    width = LEFT * 2 + int(WIDTH * CHARACTER)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>What steadygrad demo prints: the unguarded training dies, the guarded one keeps learning</title>",
        "<style>text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3;white-space:pre}"
        "@media (prefers-reduced-motion:no-preference){text{animation:show .01s both}}"
        "@keyframes show{from{opacity:0}to{opacity:1}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        *(f'<circle cx="{18 + 18 * i}" cy="18" r="5" fill="#484f58"/>' for i in range(3)),
    ]
    shown_at = before = 0.0
    for number, (line, style, at) in enumerate(lines):
        shown_at += min((at - before) * PACE, MOST_SECONDS)
        before = at
        if not line:
            continue
        look = f"animation-delay:{shown_at:.2f}s{spell_style(style)}"
        place = f'x="{LEFT}" y="{TOP + LINE * number}"'
        parts.append(f'<text {place} style="{look}" xml:space="preserve">{html.escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def spell_style(style: str) -> str:
    """A style of rich's in CSS."""
    colour = next((f";fill:{colour}" for word, colour in COLOURS.items() if word in style), "")
    return f"{colour};font-weight:bold" if "bold" in style else colour


def record(*, quick: bool) -> list[tuple[str, str, float]]:
    """Run the demo; its lines, without the folder's name."""
    recorder: Any = Recorder()
    recorder.say("$ steadygrad demo --quick" if quick else "$ steadygrad demo", "bold")
    with tempfile.TemporaryDirectory() as folder:
        narrate_demo(recorder, run_dir=f"{folder}/runs/demo", device="cpu", quick=quick)
        return [(line.replace(f"{folder}/", ""), style, at) for line, style, at in recorder.lines]


if __name__ == "__main__":
    PICTURE.write_text(draw(record(quick="--full" not in sys.argv)), encoding="utf-8")
