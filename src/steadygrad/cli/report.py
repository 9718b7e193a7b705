"""`steadygrad report`: runs in, one HTML file out that opens offline."""

from __future__ import annotations

from pathlib import Path

import click

from steadygrad.cli.console import Console
from steadygrad.words import make_printable


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the report.  [default: report.html in the first run's folder]",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write a report of one run, or a comparison of several, as one HTML file.

    A folder of runs means all of them. Other guards or optimizers of the same training (guard-2, optimizer-1 in its
    folder) are shown beside it. The file contains everything: what broke, the charts, the incidents with their causes,
    the configuration. It opens offline and fetches nothing. Exit code 0: the report was written; 2: it was not.

    \b
    Example:
      steadygrad report runs/first -o report.html
      steadygrad report runs/first runs/second -o compared.html
      steadygrad report runs -o compared.html
    """
    from steadygrad.view.headline import judge_run
    from steadygrad.view.render.report import write_report

    target = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    console = Console()
    for run in write_report(runs, target):
        headline = judge_run(run)
        console.say(make_printable(f"{run.name}: {headline.word}. {headline.text}"))
        for note in run.notes:
            console.say(f"  note: {make_printable(note)}", "dim")
    console.say(f"Written: {make_printable(str(target))} ({target.stat().st_size / 1e6:.1f} MB)", "green")
