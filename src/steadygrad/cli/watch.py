"""`steadygrad watch`: a run, live, in this terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one screen and exit; without a terminal this is the default.")
def watch(run: Path, once: bool) -> None:
    """Follow a run on the full screen: loss, norm, incidents; q quits.

    It also shows the largest gradients. It only reads the run directory, from any terminal, during the run or long
    after. Exit code 0: success; 2: there is no such run.

    \b
    Example:
      steadygrad watch runs/first
      steadygrad watch runs/first --once
    """
    from steadygrad.cli.console import replace_unencodable
    from steadygrad.view.watch import watch_run

    replace_unencodable(sys.stdout)
    watch_run(run, once=once)
