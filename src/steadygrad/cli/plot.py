"""`steadygrad plot`: a run, or a bare log, in; a picture out."""

from __future__ import annotations

from pathlib import Path

import click

from steadygrad.cli.console import Console


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
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
    help="Where the picture is written; its ending says as what: .png, .svg or .pdf.",
)
def plot(run: Path, what: str | None, output: Path) -> None:
    """Draw a run as a PNG, SVG or PDF picture.

    RUN is a run directory, or a file of JSON lines with `loss` in each. Exit code 0: it is written; 2: it is not.

    \b
    Example:
      steadygrad plot runs/first --what loss,norm,layers -o first.png
      steadygrad plot training_log.jsonl -o loss.svg
    """
    from steadygrad.view.plot import choose_panels, plot_run

    names = choose_panels(run) if what is None else [name.strip() for name in what.split(",") if name.strip()]
    Console().say(f"Written: {plot_run(run, names, output)}", "green")
