"""`steadygrad view`: a folder of runs as a page on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from steadygrad.cli.console import Console


@click.command()
@click.argument("runs_dir", default="runs", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where to listen. Any address except the default needs the token that is printed.",
)
@click.option(
    "--port",
    default=8765,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="The port; 0 takes any free one.",
)
def view(runs_dir: Path, host: str, port: int) -> None:
    """Serve a page that lists the runs in RUNS_DIR and follows them live.

    RUNS_DIR defaults to `runs`. The page listens on this machine only, never writes, and reads nothing outside the
    folder. Press Ctrl-C to stop.

    \b
    Example:
      steadygrad view runs
      steadygrad view runs --port 0
    """
    from steadygrad.view.serve.listen import PageServer

    server = PageServer(runs_dir, host=host, port=port)
    console = Console()
    console.say(f"Open {server.link}", "bold")
    if server.token is not None:
        console.say("Anyone with this address can see the runs. The connection is not encrypted.", "yellow")
    console.say("Press Ctrl-C to stop.", "dim")
    server.run()
