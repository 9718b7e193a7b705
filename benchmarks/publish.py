"""Writes the results into README.md and docs/benchmarks.md. No number there is typed by hand.

README.md: the text between `<!-- numbers -->` and `<!-- /numbers -->` (tables.py). docs/benchmarks.md: the same, and
the text between the marks of `results` (sections.py). A test fails when a page shows anything else.

    python benchmarks/publish.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from sections import render_sections
from tables import render_headline, render_numbers

ROOT = Path(__file__).parent.parent
PLACES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "numbers", render_headline),
    ("docs/benchmarks.md", "numbers", render_numbers),
    ("docs/benchmarks.md", "results", render_sections),
)
"""The page, the name of its marks, and the function that renders the text between them."""


def fill(text: str, mark: str, content: str) -> str:
    """Return `text` with `content` between its marks."""
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    filled, num_places = marked.subn(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)
    if num_places != 1:
        raise ValueError(f"{num_places} places are marked with <!-- {mark} -->; there must be one. Add the marks.")
    return filled


def main() -> int:
    """Write the pages; with --check, only report whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file is out of date")
    arguments = parser.parse_args()
    stale = []
    for name, mark, render in PLACES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = fill(before, mark, render())
        if after != before:
            stale.append(f"{name} ({mark})")
            if not arguments.check:
                path.write_text(after, encoding="utf-8")
    word = "out of date" if arguments.check else "written"
    print(f"{word}: {', '.join(stale)}" if stale else "up to date")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
