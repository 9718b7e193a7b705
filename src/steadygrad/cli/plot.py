"""`steadygrad plot`: runs, or a bare log, in; a picture out."""

from __future__ import annotations

from pathlib import Path

import click

from steadygrad.cli.console import Console


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--what",
    metavar="LIST",
    help="What to draw, one below the other: loss, validation, metrics, norm, rate, share, layers, ratios, "
    "extra.  [default: loss, and validation and norm where there are any]",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the picture; the suffix selects the format: .png, .svg or .pdf.",
)
def plot(runs: tuple[Path, ...], what: str | None, output: Path) -> None:
    """Draw a run, or several in the same panels, as a PNG, SVG or PDF picture.

    RUN is a run directory, a folder of them, or a file of JSON lines with `loss` in each. Several runs are compared by
    loss, validation, norm and rate. Exit code 0: the picture was written; 2: it was not.

    \b
    Example:
      steadygrad plot runs/first --what loss,norm,layers -o first.png
      steadygrad plot runs/first runs/second -o compared.png
      steadygrad plot training_log.jsonl -o loss.svg
    """
    from steadygrad.view.plot import choose_panels, plot_runs

    names = choose_panels(runs) if what is None else [name.strip() for name in what.split(",") if name.strip()]
    Console().say(f"Written: {plot_runs(runs, names, output)}", "green")
