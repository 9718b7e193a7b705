"""The commands: what each is called, takes and returns. Each imports what it needs when it is called."""

from __future__ import annotations

import click

from steadygrad._version import __version__
from steadygrad.cli.clean import clean
from steadygrad.cli.console import Console
from steadygrad.cli.diagnose import diagnose
from steadygrad.cli.plot import plot
from steadygrad.cli.report import report
from steadygrad.cli.run import run
from steadygrad.cli.scan import scan
from steadygrad.cli.train import train
from steadygrad.cli.tune import tune
from steadygrad.cli.view import view
from steadygrad.cli.watch import watch


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="steadygrad")
def steadygrad() -> None:
    """Keep PyTorch training numerically healthy.

    \b
    Example:
      steadygrad demo        a training that a NaN kills, and the same one guarded
      steadygrad doctor      what this machine and torch offer, and what to choose
      steadygrad scan PATH   what is in a checkpoint, and whether it is finite
    """


@steadygrad.command()
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where the guarded run's record is written.  [default: runs/demo-<time>]",
)
@click.option(
    "--device", metavar="NAME", help="Where to train: cpu, cuda, cuda:1.  [default: cuda where there is one, else cpu]"
)
@click.option("--quick", is_flag=True, help="A smaller model and fewer steps.")
@click.pass_context
def demo(context: click.Context, run_dir: str | None, device: str | None, quick: bool) -> None:
    """Train a small model with faults injected, unguarded and guarded.

    The data is made in the program. Exit code 0: the unguarded run died and the guarded one survived; 2: they did not.

    \b
    Example:
      steadygrad demo --run-dir runs/first
    """
    from steadygrad.cli.demo import tell_demo

    context.exit(tell_demo(Console(), run_dir=run_dir, device=device, quick=quick))


@steadygrad.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what this machine and torch offer, and what to choose.

    Half-precision matmuls are tried in processes of their own: on some virtual CPUs they kill the process. Exit code 0:
    nothing to fix; 1: something was found that should be fixed; 2: torch could not be looked at.

    \b
    Example:
      steadygrad doctor --json
    """
    from steadygrad.cli.doctor import tell_machine

    context.exit(tell_machine(Console(), as_json=as_json))


steadygrad.add_command(scan)
steadygrad.add_command(clean)
steadygrad.add_command(diagnose)
steadygrad.add_command(run)
steadygrad.add_command(train)
steadygrad.add_command(tune)
steadygrad.add_command(report)
steadygrad.add_command(plot)
steadygrad.add_command(watch)
steadygrad.add_command(view)
