"""`steadygrad train RECIPE`: the recipe's settings from file and command line, its training, and the report at its end.

Each recipe is a command with an option for each of its fields. The run directory remembers recipe and settings in
`recipe.json`; a resume starts from those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED, FOUND
from steadygrad.cli.recipe_config import Source, build_config, read_source
from steadygrad.cli.recipe_fields import FieldCommand, check_path, spell_flag, spell_value
from steadygrad.cli.recipe_folder import (
    choose_folder,
    has_begun,
    is_recorded,
    is_weights,
    name_start,
    read_settings,
    remember_settings,
    require_new,
    require_same,
)
from steadygrad.cli.recipe_ranks import choose_together, end_rank, is_first, is_launched, on_first_rank, quiet_others
from steadygrad.cli.recipes import Recipe, find_recipe, list_recipes
from steadygrad.config.plain import to_plain
from steadygrad.errors import SteadygradError, TrainingHalted, UsageError


class RecipeGroup(click.Group):
    """The installed recipes, each a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Called by click."""
        return [recipe.name for recipe in list_recipes()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:  # noqa: ARG002
        """Called by click for the first word."""
        return RecipeCommand(find_recipe(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Called by click for --help; a recipe that cannot be loaded is listed with the reason."""
        with formatter.section("Recipes"):
            formatter.write_dl([(recipe.name, recipe.summary) for recipe in list_recipes()])


@click.group(cls=RecipeGroup, invoke_without_command=True, options_metavar="", subcommand_metavar="RECIPE [OPTIONS]")
@click.pass_context
def train(context: click.Context) -> None:
    """Run one of the five trainings, guarded, with its record, checkpoints and report.

    `steadygrad train RECIPE --help` lists the fields of one.

    \b
    Example:
      steadygrad train seo --quick
      steadygrad train seo --config my.yaml --learning-rate 1e-4 --run-dir runs/mine
      steadygrad train seo --resume latest
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(FAILED)


# --- what was asked for ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line says."""

    config: str | None = None
    resume: str | None = None
    run_dir: str | None = None
    predict: str | None = None
    quick: bool = False
    sample: bool = False
    check: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    """Path -> value, of the recipe's fields."""


class RecipeCommand(FieldCommand):
    """One recipe as a command."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.package = recipe, recipe.load()
        self.own = make_options(recipe.name, self.package)
        super().__init__(
            recipe.name,
            self.package.Config,
            aliases=getattr(self.package, "ALIASES", {}),
            options=self.own,
            help=self.package.SUMMARY,
            epilog=f"\b\nExample:\n  {recipe.command} --quick",
        )

    def invoke(self, ctx: click.Context) -> None:
        """Called by click."""
        code = run_recipe(self.recipe, self.package, self.read_request(ctx), Console())
        if is_launched():
            end_rank(code)
        ctx.exit(code)

    def read_request(self, ctx: click.Context) -> Request:
        """Return the request from the arguments that click has parsed."""
        own = {str(option.name): ctx.params[str(option.name)] for option in self.own}
        return Request(**own, values=self.read_fields(ctx))


def make_options(name: str, package: Any) -> list[click.Option]:
    """Return the options besides the fields. One that the recipe does not support is hidden, and refused if given."""
    quick = ", ".join(f"{name}={spell_value(value)}" for name, value in package.QUICK.items())
    predict = getattr(package, "PREDICT", "use the trained model of a run on PATH")
    resume = "resume exactly: latest, best, a run directory, or one of its checkpoints"
    where = f"where the run is written  [default: runs/{name}-<time>]"
    cannot_predict, cannot_sample = not hasattr(package, "predict"), not hasattr(package, "sample")
    return [
        click.Option(["--config"], callback=check_path, metavar="FILE", help="fields from a YAML or TOML file"),
        click.Option(["--resume"], callback=check_path, metavar="WHERE", help=resume),
        click.Option(["--run-dir"], callback=check_path, metavar="DIR", help=where),
        click.Option(["--quick"], is_flag=True, help=f"smaller: {quick}"),
        click.Option(["--predict"], callback=check_path, metavar="PATH", help=predict, hidden=cannot_predict),
        click.Option(["--sample"], is_flag=True, help="draw samples from the trained model", hidden=cannot_sample),
        click.Option(
            ["--check"], is_flag=True, help="check in seconds that it works here", hidden=not hasattr(package, "check")
        ),
    ]


# --- running it -----------------------------------------------------------------------------------------------------


def run_recipe(recipe: Recipe, package: Any, request: Request, console: Console) -> int:
    """Train, predict or sample; return the exit code."""
    if request.check:
        return _check(recipe, package, console)
    if request.predict is not None or request.sample:
        return _use_run(recipe, package, request, console)
    console = quiet_others(console)
    # On rank 0 alone: the name of a new folder holds the time, and two ranks may read different seconds
    run_dir, config = choose_together(lambda: _choose(recipe, package, request))
    try:
        files = getattr(package, "DESCRIBED_IN", ())
        with on_first_rank(remember_settings(run_dir, recipe.name, to_plain(config), files)):
            console.say(f"Training {recipe.name} in {run_dir}", "bold")
            start = name_start(request.resume, run_dir)
            code: int = package.train(config, run_dir=run_dir, resume=start, console=console)
    except TrainingHalted as halted:
        console.say(f"Training was halted: {halted}", "red")
        code = FAILED
    # Raised again: the exit code must say that it did not finish
    except KeyboardInterrupt:
        if has_begun(run_dir):
            console.say(f"To continue: {recipe.command} --resume {run_dir}")
        raise
    if is_first() and is_recorded(run_dir):
        write_report_of(run_dir, console)
    elif is_first():
        console.say("No report: without protection nothing is recorded.", "yellow")
    return code


def _choose(recipe: Recipe, package: Any, request: Request) -> tuple[Path, Any]:
    """Return the run directory and the settings; a new training needs a directory without one."""
    resume, takes_weights = request.resume, getattr(package, "TAKES_WEIGHTS", False)
    run_dir = choose_folder(recipe.name, request.run_dir, resume, takes_weights=takes_weights)
    goes_on = resume is not None and not (takes_weights and is_weights(resume))
    remembered = read_settings(run_dir, recipe.name) if goes_on else None
    config = make_config(package, request, remembered)
    if remembered is not None and has_begun(run_dir):
        require_same(getattr(package, "FIXED", ()), remembered, Source(values=to_plain(config)), run_dir)
    if not goes_on:
        require_new(run_dir, recipe.command)
    return run_dir, config


def _check(recipe: Recipe, package: Any, console: Console) -> int:
    if not hasattr(package, "check"):
        raise UsageError(f"the recipe {recipe.name} has no checks. Leave out --check.")
    return FOUND if package.check(console=console) else DONE


def _use_run(recipe: Recipe, package: Any, request: Request, console: Console) -> int:
    verb = "sample" if request.predict is None else "predict"
    call = getattr(package, verb, None)
    if call is None:
        raise UsageError(f"the recipe {recipe.name} cannot {verb}. Leave out --{verb}.")
    run_dir = choose_folder(recipe.name, request.run_dir, request.resume, uses_run=True)
    config = make_config(package, request, read_settings(run_dir, recipe.name))
    where = () if request.predict is None else (request.predict,)
    return int(call(config, *where, run_dir=run_dir, console=console))


def make_config(package: Any, request: Request, remembered: Source | None = None) -> Any:
    """Merge defaults, what the run remembers, `--quick`, the file and the fields: later ones win."""
    sources = [] if remembered is None else [remembered]
    if request.quick:
        sources.append(Source(values=package.QUICK))
    if request.config is not None:
        sources.append(read_source(Path(request.config)))
    return build_config(package.Config, [*sources, Source(values=request.values)], spell_flag)


def write_report_of(run_dir: Path, console: Console) -> None:
    """Write the report, if there is something to report and something to draw it with."""
    from steadygrad.view.render.report import write_report

    target = run_dir / "report.html"
    try:
        write_report([run_dir], target)
    # The training is over and saved: a report that fails must not change its exit code
    except (SteadygradError, ImportError, OSError) as error:
        console.say(f"No report was written: {error}", "yellow")
        return
    console.say(f"The report is in {target}", "bold")
