"""Draws the README's picture: the two trainings of the demo, unguarded and guarded.

Runs the trainings of `steadygrad demo` (same weights, text and three faults), writes their losses and the Guard's
actions to results/story.json, and draws docs/assets/story.svg from it: every mark is a number of that run.

    python benchmarks/story.py [--quick] [--draw]        --draw: only redraw, from existing results
"""

from __future__ import annotations

import argparse
import html
import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, write_results

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "story.svg"
WIDTH, HEIGHT = 960, 405
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 96, 330
RED, GREEN, GREY, INK = "#c0392b", "#1e8449", "#7f8c8d", "#1b2631"
ROWS = (0, 2, 1)
"""Positions of the fault labels, chosen so that no dashed line crosses one."""
KEEPING = ("skip", "rollback", "scale_lr")
"""Actions shown in the picture."""


class Silence:
    """A Listener that prints nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def write_story(*, quick: bool) -> dict[str, Any]:
    """Run the demo and return what the picture needs."""
    from steadygrad_recipes.demo import DemoSettings, run_demo

    logging.disable(logging.WARNING)
    settings = DemoSettings.quick() if quick else DemoSettings()
    with tempfile.TemporaryDirectory() as folder:
        comparison = run_demo(Path(folder) / "runs", settings, Silence())
    runs = {
        run.name: {
            "losses": [round(loss, 4) if math.isfinite(loss) else None for loss in run.losses],
            "final_loss": run.final_loss if math.isfinite(run.final_loss) else None,
            "first_bad_weight": run.first_bad_weight,
        }
        for run in (comparison.unguarded, comparison.guarded)
    }
    deeds = []
    for incident in comparison.incidents:
        action, cause = incident.outcome.action.value, incident.cause
        if action in KEEPING and not any(deed["step"] == incident.step for deed in deeds):
            where = f"{Path(cause.file).name}:{cause.line}" if cause and cause.file and cause.op else None
            deeds.append({"step": incident.step, "action": action, "op": cause.op if cause else None, "where": where})
    faults = [{"step": fault.step, "what": fault.what} for fault in comparison.faults]
    return {"runs": runs, "faults": faults, "deeds": deeds}


def draw(story: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    losses = {name: run["losses"] for name, run in story["runs"].items()}
    finite = [loss for series in losses.values() for loss in series if loss is not None]
    low, high = math.log(min(finite) * 0.85), math.log(max(finite) * 1.1)
    num = max(len(series) for series in losses.values())

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / (num - 1), 1)

    def y(loss: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (math.log(loss) - low) / (high - low), 1)

    parts = [*draw_axes(num, low, high, x, y)]
    for row, fault in zip(ROWS, story["faults"]):
        at, height = x(fault["step"]), TOP - 46 + 18 * row
        side = "end" if at > WIDTH * 0.75 else "start"
        parts.append(line(at, height + 2, at, BOTTOM, GREY, dash="4 4"))
        said = f"step {fault['step']}: {fault['what']}"
        parts.append(write(at + (-6 if side == "end" else 6), height, said, GREY, anchor=side))
    for name, colour in (("unguarded", RED), ("guarded", GREEN)):
        parts += [curve(points, colour) for points in find_stretches(losses[name], x, y)]
    parts += draw_end(story, losses["unguarded"], x, y)
    parts += draw_deeds(story, x)
    title = "The same training with the same three faults: unguarded, its weights become NaN; guarded, it continues"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13"'
    font = 'font-family="system-ui, sans-serif"'
    box = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    return "\n".join([f"{head} {font}>", f"<title>{title}</title>", box, *parts, "</svg>", ""])


def draw_axes(num: int, low: float, high: float, x: Any, y: Any) -> Iterator[str]:
    """Draw the loss axis on the left and the step axis below."""
    yield line(LEFT, BOTTOM, WIDTH - RIGHT, BOTTOM, INK)
    for exponent in range(-3, 9):
        for digit in (1, 3):
            loss = digit * 10.0**exponent
            if low <= math.log(loss) <= high:
                yield line(LEFT, y(loss), WIDTH - RIGHT, y(loss), "#ecf0f1")
                yield write(LEFT - 8, y(loss) + 4, f"{loss:g}", GREY, anchor="end")
    for step in range(0, num, 100 if num > 250 else 50):
        yield write(x(step), BOTTOM + 18, str(step), GREY, anchor="middle")
    yield write(WIDTH - RIGHT, BOTTOM + 18, "step", GREY, anchor="end")
    yield write(LEFT - 8, TOP - 10, "loss", GREY, anchor="end")


def draw_end(story: dict[str, Any], losses: Sequence[float | None], x: Any, y: Any) -> Iterator[str]:
    """Mark where the unguarded run died, and where the guarded one ended."""
    died, guarded = story["runs"]["unguarded"]["first_bad_weight"], story["runs"]["guarded"]["losses"]
    if died is not None:
        last = next(loss for loss in reversed(losses[: died + 1]) if loss is not None)
        at, height = x(died), y(last)
        for sign in (-1, 1):
            yield line(at - 6, height - 6 * sign, at + 6, height + 6 * sign, RED, width=3)
        yield write(at + 12, height - 8, "unguarded: the weights are NaN from here on", RED, weight="bold")
    final = story["runs"]["guarded"]["final_loss"]
    end = next(loss for loss in reversed(guarded) if loss is not None)
    said = f"guarded: loss {final:.2f} on unseen text"
    yield write(WIDTH - RIGHT, y(end) - 14, said, GREEN, anchor="end", weight="bold")


def draw_deeds(story: dict[str, Any], x: Any) -> Iterator[str]:
    """Mark the Guard's actions below the axis."""
    words = {"skip": "skipped", "rollback": "rolled back", "scale_lr": "learning rate lowered"}
    for i, deed in enumerate(story["deeds"]):
        at, said = x(deed["step"]), words[deed["action"]]
        if deed["where"]:
            said += ", NaN in the batch" if deed["op"] == "input" else f", {deed['op']} at {deed['where']}"
        side = "end" if at > WIDTH * 0.75 else "start"
        yield f'<circle cx="{at}" cy="{BOTTOM}" r="5" fill="{GREEN}"/>'
        yield write(at, BOTTOM + 44 + 18 * (i % 2), f"{deed['step']}: {said}", GREEN, anchor=side)
    yield write(LEFT, BOTTOM + 44, "what the guard did at step", GREEN)


def find_stretches(losses: Sequence[float | None], x: Any, y: Any) -> list[list[str]]:
    """Return the points of each unbroken stretch of finite losses."""
    stretches: list[list[str]] = [[]]
    for step, loss in enumerate(losses):
        if loss is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{x(step)},{y(loss)}")
    return [stretch for stretch in stretches if len(stretch) > 1]


def curve(points: Sequence[str], colour: str) -> str:
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def write(x: float, y: float, text: str, colour: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{round(x, 1)}" y="{round(y, 1)}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    halo = 'paint-order="stroke" stroke="#ffffff" stroke-width="4"'  # keeps it legible where a line crosses
    return f"<text {place} {halo}>{html.escape(text)}</text>"


def main() -> int:
    """Run, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small demo; nothing is written")
    parser.add_argument("--draw", action="store_true", help="draw the picture again from results/story.json")
    arguments = parser.parse_args()
    if arguments.draw:
        story = json.loads((RESULTS / "story.json").read_text(encoding="utf-8"))["results"]
    else:
        story = write_story(quick=arguments.quick)
        print("written:", write_results("story", story, quick=arguments.quick))
    for name, run in story["runs"].items():
        died, final = run["first_bad_weight"], run["final_loss"]
        end = f"weights NaN from step {died} on" if died is not None else "weights finite to the end"
        print(f"{name:<10} {end}, loss on unseen text {'NaN' if final is None else f'{final:.3f}'}")
    for deed in story["deeds"]:
        print(f"step {deed['step']}: {deed['action']}", f"{deed['op']} at {deed['where']}" if deed["where"] else "")
    picture = draw(story)
    if not arguments.quick:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(picture, encoding="utf-8")
        print("drawn:", PICTURE.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
