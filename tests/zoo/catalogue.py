"""Renders the entries of the library as the tables of docs/explanations.md; run it to update them."""

from __future__ import annotations

import re
from pathlib import Path

from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, NONFINITE, STEP, Entry
from steadygrad.diagnose.explanations.library import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "explanations.md"
PHASES = {FORWARD: "forward", BACKWARD: "backward", STEP: "forward, backward"}
SHOWN = 4
"""Ops per cell; the rest are counted."""


def render_catalogue() -> str:
    """Return a heading and a table for each family."""
    return "\n".join(render_family(family) for family in FAMILIES)


def render_family(family: object) -> str:
    title = family.__name__.rpartition(".")[2].replace("_", " ").capitalize()
    rows = [render_entry(entry) for entry in family.ENTRIES]
    return "\n".join(
        [f"### {title}", "", family.__doc__, "", "| entry | ops | why | fixes |", "|---|---|---|---|", *rows, ""]
    )


def render_entry(entry: Entry) -> str:
    why = entry.why.replace("*", r"\*")  # two of them would make text bold
    fixes = "<br>".join(f"`{fix}`" for fix in entry.fixes)
    return f"| {entry.name} | {render_ops(entry)} | {why} | {fixes} |"


def render_ops(entry: Entry) -> str:
    ops = ", ".join(f"`{op}`" for op in entry.ops[:SHOWN]) or "any"
    if len(entry.ops) > SHOWN:
        ops += f" and {len(entry.ops) - SHOWN} more"
    phase = PHASES.get(entry.phases, ", ".join(entry.phases))
    kind = "" if set(NONFINITE) <= set(entry.kinds) else f"; {', '.join(entry.kinds)}"
    return f"{ops} ({phase}{kind})"


def write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    new = f"<!-- catalogue -->\n\n{render_catalogue()}\n<!-- /catalogue -->"
    PAGE.write_text(
        re.sub(r"<!-- catalogue -->.*<!-- /catalogue -->", lambda _: new, text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    write_page()
