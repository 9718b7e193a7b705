"""The commands: their names, arguments and exit codes. Each imports what it needs when it is called."""

from __future__ import annotations

import difflib

import click

from steadygrad._version import __version__
from steadygrad.cli.bench import bench
from steadygrad.cli.clean import clean
from steadygrad.cli.console import Console
from steadygrad.cli.diagnose import diagnose
from steadygrad.cli.ls import ls
from steadygrad.cli.new import new
from steadygrad.cli.plot import plot
from steadygrad.cli.report import report
from steadygrad.cli.run import run
from steadygrad.cli.scan import scan
from steadygrad.cli.train import train
from steadygrad.cli.tune import tune
from steadygrad.cli.view import view
from steadygrad.cli.watch import watch

SECTIONS = {
    "Begin": {
        "demo": "train a model that a NaN kills, and the same one guarded",
        "doctor": "report what this machine supports, or what is wrong with a script",
    },
    "Train": {
        "run": "guard any training script without editing it",
        "train": "run one of the five recipes: data, model, record, report",
        "tune": "find settings that train stably",
        "new": "write a small training project to start from",
    },
    "Look": {
        "ls": "list the runs of a folder: state, last step, loss, incidents",
        "watch": "follow a run in the terminal",
        "view": "serve a page that lists the runs and follows them live",
        "report": "write a run, or a comparison of several, as one HTML file",
        "plot": "draw a run as a PNG, SVG or PDF picture",
    },
    "Find and fix": {
        "diagnose": "replay the batch of an incident, and name the line at fault",
        "scan": "show what is in a checkpoint, and whether it is finite",
        "clean": "copy a checkpoint with every NaN and Inf replaced",
    },
    "Measure": {"bench": "run the benchmarks of a source checkout"},
}
"""What a newcomer sees first: each command in one line of an 80-column terminal."""


class Sections(click.Group):
    """Lists the commands by what they are for; one that no section names comes last, under its own help."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Called by click for the first word; an unknown command is reported with the closest known one."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(self.commands)}."
            raise click.UsageError(f"there is no command {args[0]!r}. {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Called by click for --help."""
        named = {name for texts in SECTIONS.values() for name in texts}
        others = {name: one.get_short_help_str() for name, one in self.commands.items() if name not in named}
        width = max(map(len, self.commands))
        for title, texts in {**SECTIONS, "Others": others}.items():
            rows = [(name.ljust(width), text) for name, text in texts.items() if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="steadygrad")
def steadygrad() -> None:
    """Keep PyTorch training numerically healthy.

    \b
    Example:
      steadygrad demo
      steadygrad run train.py
      steadygrad report runs/first

    `steadygrad COMMAND --help` shows the rest. Exit code 0: it did its job; 1: it found something; 2: it could not.
    """


@steadygrad.command()
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where to write both runs and their report.  [default: runs/demo-<time>]",
)
@click.option(
    "--device", metavar="NAME", help="Where to train: cpu, cuda, cuda:1.  [default: cuda if there is one, else cpu]"
)
@click.option("--quick", is_flag=True, help="A smaller model and fewer steps.")
@click.pass_context
def demo(context: click.Context, run_dir: str | None, device: str | None, quick: bool) -> None:
    """Train a small model with faults injected, unguarded and guarded.

    The program generates its own data. Exit code 0: the unguarded run died and the guarded one survived; 2: otherwise.

    \b
    Example:
      steadygrad demo --run-dir runs/first
    """
    from steadygrad.cli.recipes import load_demo

    context.exit(load_demo().narrate_demo(Console(), run_dir=run_dir, device=device, quick=quick))


@steadygrad.command(context_settings={"allow_interspersed_args": False})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.option(
    "--steps", "num_steps", type=click.IntRange(min=1), default=64, show_default=True, help="Steps of SCRIPT to check."
)
@click.argument("script", required=False, metavar="[SCRIPT]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def doctor(
    context: click.Context, as_json: bool, num_steps: int, script: str | None, arguments: tuple[str, ...]
) -> None:
    """Report what this machine and torch support, or what is wrong with the first steps of a training script.

    Without a script, half-precision matmuls are tried in separate processes: on some virtual CPUs they kill the
    process. A script runs unedited, with every check on, and is ended after N steps (--steps N). Exit code 0: nothing
    to fix; 1: something should be fixed; 2: torch could not be examined, or the script took no step.

    \b
    Example:
      steadygrad doctor
      steadygrad doctor --json
      steadygrad doctor --steps 100 train.py --epochs 3
    """
    if script is not None:
        from steadygrad.cli.check import check_script

        console = Console()
        context.exit(check_script(console, script, arguments, num_steps=num_steps, as_json=as_json))
    from steadygrad.cli.doctor import report_machine

    context.exit(report_machine(Console(), as_json=as_json))


steadygrad.add_command(scan)
steadygrad.add_command(clean)
steadygrad.add_command(diagnose)
steadygrad.add_command(run)
steadygrad.add_command(train)
steadygrad.add_command(tune)
steadygrad.add_command(ls)
steadygrad.add_command(new)
steadygrad.add_command(report)
steadygrad.add_command(plot)
steadygrad.add_command(watch)
steadygrad.add_command(view)
steadygrad.add_command(bench)
