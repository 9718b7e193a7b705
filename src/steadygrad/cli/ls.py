"""`steadygrad ls`: the runs of a folder, one line each."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import click

from steadygrad.cli.console import Console
from steadygrad.errors import UsageError
from steadygrad.words import make_printable, spell_duration, spell_number

STYLES = {
    "running": "green",
    "stalled": "yellow",
    "stopped": "yellow",
    "halted": "red",
    "failed": "red",
    "killed": "red",
}


@click.command("ls")
@click.argument("runs_dir", default="runs", type=click.Path(path_type=Path))
@click.option(
    "--sort",
    type=click.Choice(["written", "name", "loss", "steps", "state"]),
    default="written",
    show_default=True,
    help="Sort by: newest, name, smallest loss, most steps, or running first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def ls(runs_dir: Path, sort: str, as_json: bool) -> None:
    """List the runs in RUNS_DIR: state, last step, its loss, incidents, when each last wrote something.

    RUNS_DIR defaults to `runs`. Only the ends of the files are read, so a hundred runs take a moment. Exit code 0:
    success, even if there are no runs; 2: there is no such folder.

    \b
    Example:
      steadygrad ls runs
      steadygrad ls runs --sort loss
    """
    from steadygrad.view.read.glance import SORTS, list_glances

    if not runs_dir.is_dir():
        raise UsageError(f"There is no folder {runs_dir}. Name the folder that holds your run directories.")
    # Resolved: list_glances compares real paths with this one
    found = sorted(list_glances(runs_dir.resolve()), key=SORTS[sort])
    console = Console()
    if as_json:
        rows = [
            {
                "name": one.name,
                "state": one.state,
                "last_step": one.last_step,
                "loss": one.loss if one.loss is None or math.isfinite(one.loss) else str(one.loss),
                "num_incidents": one.num_incidents,
                "written": one.written,
            }
            for one in found
        ]
        console.say(json.dumps({"runs": rows}))
        return
    if not found:
        console.say(f"No runs in {runs_dir} yet.")
        return
    now = time.time()
    lines = [
        (
            make_printable(one.name if one.name != "." else runs_dir.resolve().name),
            str(one.state),
            "-" if one.last_step is None else f"{one.last_step:,}",
            spell_number(one.loss),
            f"{one.num_incidents:,}" if one.num_incidents else "none",
            spell_duration(one.written, now),
        )
        for one in found
    ]
    header = ("run", "state", "last step", "last loss", "incidents", "last written")
    console.show_table(header, lines, [STYLES.get(one.state, "") for one in found])
