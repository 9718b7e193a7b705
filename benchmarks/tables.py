"""The results -> the number tables in README.md, between `<!-- numbers -->` and `<!-- /numbers -->`.

Reads benchmarks/results/*.json and rounds; it computes nothing that a benchmark has not written. A test fails when the
README shows other numbers than the results.

    python benchmarks/tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.DOTALL)
STOCK = "clip_grad_norm_ + step"
TRAINED = {
    "cuda": "GPT-2 124M, 1024 tokens, bf16 autocast, eager, fused AdamW, CUDA, B sequences a batch",
    "cpu": "a GPT of 10M parameters, 128 tokens, fp32, fused AdamW, CPU, B sequences a batch",
}
"""What whole_step.py trains on each device."""


def render_numbers(results: Path = RESULTS) -> str:
    """All tables, as Markdown."""
    sections = []
    for device in ("cuda", "cpu"):
        for name, render in (("guarded_step", render_guarded_step), ("whole_step", render_whole_step)):
            path = results / f"{name}_{device}.json"
            if path.is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                command = f"python benchmarks/{name}.py --device {device}"
                source = describe(found["machine"], command)
                sections.append(f"{render(found['results'], device)}\n\n{source}\n")
    return "\n".join(sections)


def render_guarded_step(results: Mapping[str, Any], device: str) -> str:
    """Everything between backward() and the end of optimizer.step()."""
    ways = list(next(iter(results.values()))["milliseconds"])
    rows = [[way, *(show(model["milliseconds"], way, STOCK) for model in results.values())] for way in ways]
    title = f"**From `backward()` to the end of `optimizer.step()`**, fp32 gradients, fused AdamW, {device.upper()}: "
    table = render_table(["", *results], rows)
    held = [model["memory"]["held_bytes"] for model in results.values() if model["memory"]]
    memory = f"\n\nDevice memory that a Guard holds: at most {max(held) / 2**20:.2f} MiB." if held else ""
    return f"{title}milliseconds (ratio to `{STOCK}`)\n\n{table}{memory}"


def render_whole_step(results: Mapping[str, Any], device: str) -> str:
    """Forward, backward and optimizer."""
    first = next(iter(results.values()))
    rows = [
        [way, *(show(one["milliseconds"], way, one["base"]) for one in results.values())]
        for way in first["milliseconds"]
    ]
    title = f"**A whole training step**, {TRAINED[device]}: milliseconds (ratio to `{first['base']}`)"
    return f"{title}\n\n{render_table(['', *results], rows)}"


def show(milliseconds: Mapping[str, float], way: str, base: str) -> str:
    """'8.14 (0.56)'."""
    return f"{milliseconds[way]:.2f} ({milliseconds[way] / milliseconds[base]:.2f})"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(machine: Mapping[str, Any], command: str) -> str:
    """Where the numbers come from, and how to get them."""
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['num_cpus']} cores"
    return f"{place}, torch {machine['torch']}, Python {machine['python']}: `{command}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README.md is out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after, num_places = MARKED.subn(lambda match: f"{match[1]}\n{render_numbers()}\n{match[2]}", before)
    if num_places != 1:
        print(f"README.md has {num_places} places marked for the numbers, there must be one.", file=sys.stderr)
        return 2
    if arguments.check:
        return int(after != before)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
