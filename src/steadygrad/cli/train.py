"""`steadygrad train RECIPE`: the recipe's settings from file and command line, its training, and the report at its end.

The fields are the recipe's own, so its arguments are read here and not by click. The run directory remembers recipe
and settings in `recipe.json`; a resume starts from those.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.cli.recipe_config import Source, build_config, read_source
from steadygrad.cli.recipe_fields import (
    Field,
    find_field,
    list_fields,
    nest,
    read_value,
    set_path,
    spell_flag,
    spell_value,
)
from steadygrad.cli.recipe_folder import (
    choose_folder,
    has_begun,
    is_recorded,
    is_weights,
    name_start,
    read_settings,
    remember_settings,
    require_new,
)
from steadygrad.cli.recipes import Recipe, find_recipe, list_recipes
from steadygrad.config.plain import to_plain
from steadygrad.errors import SteadygradError, TrainingHalted, UsageError

TAKES_VALUE = ("config", "resume", "run-dir", "predict")
SWITCHES = ("quick", "sample")


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE [OPTIONS]")
@click.pass_context
def train(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Run one of the five trainings; `steadygrad train RECIPE --help` lists its fields."""
    console = Console()
    if not arguments or arguments[0] in ("-h", "--help"):
        for line in describe_recipes():
            console.say(line)
        context.exit(DONE if arguments else FAILED)
    recipe = find_recipe(arguments[0])
    package = recipe.load()
    fields = list(list_fields(package.Config))
    if any(argument in ("-h", "--help") for argument in arguments[1:]):
        for line in describe_recipe(recipe, package, fields):
            console.say(line)
        context.exit(DONE)
    request = read_arguments(arguments[1:], fields, getattr(package, "ALIASES", {}), recipe.name)
    context.exit(run_recipe(recipe, package, request, console))


# --- what was asked for ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """What the command line says."""

    options: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    """Nested, of the recipe's fields."""


def read_arguments(
    arguments: Sequence[str], fields: Sequence[Field], aliases: Mapping[str, str], recipe: str
) -> Request:
    """Words -> what is meant; UsageError names the first that means nothing."""
    request, words = Request(), list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"{word!r} stands alone after the recipe {recipe}. Write --field value.")
        name, _, value = word[2:].partition("=")
        given: str | None = value if "=" in word else None
        if name in SWITCHES:
            request.switches.add(name)
        elif name in TAKES_VALUE:
            request.options[name] = given if given is not None else _take(words, word)
        else:
            _read_field(request, name, given, words, fields, aliases, recipe)
    return request


def _read_field(
    request: Request,
    name: str,
    given: str | None,
    words: list[str],
    fields: Sequence[Field],
    aliases: Mapping[str, str],
    recipe: str,
) -> None:
    if name.startswith("no-") and given is None:
        off = next((f for f in fields if f.is_switch and f.flag[2:] in (name[3:], name[3:].replace("_", "-"))), None)
        if off is not None:
            set_path(request.values, off.path, False)
            return
    found = find_field(name, fields, aliases, recipe)
    if given is None and found.is_switch and (not words or words[0].startswith("--")):
        given = "true"
    set_path(request.values, found.path, read_value(found, given if given is not None else _take(words, f"--{name}")))


def _take(words: list[str], flag: str) -> str:
    if not words or (words[0].startswith("--") and len(words[0]) > 2):
        raise UsageError(f"{flag} stands without a value. Write {flag} VALUE.")
    return words.pop(0)


# --- running it -----------------------------------------------------------------------------------------------------


def run_recipe(recipe: Recipe, package: Any, request: Request, console: Console) -> int:
    """Train, predict or sample; the exit code."""
    uses_run = "predict" in request.options or "sample" in request.switches
    if uses_run:
        return _use_run(recipe, package, request, console)
    resume, takes_weights = request.options.get("resume"), getattr(package, "TAKES_WEIGHTS", False)
    run_dir = choose_folder(recipe.name, request.options, uses_run=False, takes_weights=takes_weights)
    goes_on = resume is not None and not (takes_weights and is_weights(resume))
    config = make_config(package, request, read_settings(run_dir, recipe.name) if goes_on else None)
    if not goes_on:
        require_new(run_dir, recipe.name)
    try:
        with remember_settings(run_dir, recipe.name, to_plain(config)):
            console.say(f"Training {recipe.name} in {run_dir}", "bold")
            start = name_start(resume, run_dir)
            code: int = package.train(config, run_dir=run_dir, resume=start, console=console)
    except TrainingHalted as halted:
        console.say(f"Training was halted: {halted}", "red")
        code = FAILED
    except KeyboardInterrupt:
        if has_begun(run_dir):
            console.say(f"To go on: steadygrad train {recipe.name} --resume {run_dir}")
        raise
    if is_recorded(run_dir):
        write_report_of(run_dir, console)
    else:
        console.say("There is no report: nothing was recorded. Without protection nothing is.", "yellow")
    return code


def _use_run(recipe: Recipe, package: Any, request: Request, console: Console) -> int:
    verb = "predict" if "predict" in request.options else "sample"
    call = getattr(package, verb, None)
    if call is None:
        raise UsageError(f"the recipe {recipe.name} cannot {verb}. Leave out --{verb}.")
    run_dir = choose_folder(recipe.name, request.options, uses_run=True)
    config = make_config(package, request, read_settings(run_dir, recipe.name))
    where = (request.options["predict"],) if verb == "predict" else ()
    return int(call(config, *where, run_dir=run_dir, console=console))


def make_config(package: Any, request: Request, remembered: Source | None = None) -> Any:
    """Defaults, what the run remembers, `--quick`, the file, the fields: what comes later wins."""
    sources = [] if remembered is None else [remembered]
    if "quick" in request.switches:
        sources.append(Source(values=nest(package.QUICK)))
    if "config" in request.options:
        sources.append(read_source(Path(request.options["config"])))
    return build_config(package.Config, [*sources, Source(values=request.values)], spell_flag)


def write_report_of(run_dir: Path, console: Console) -> None:
    """The report, as far as there is something to report and something to draw it with."""
    from steadygrad.view.render.report import write_report

    target = run_dir / "report.html"
    try:
        write_report([run_dir], target)
    except (SteadygradError, ImportError, OSError) as error:
        console.say(f"No report was written: {error}", "yellow")
        return
    console.say(f"The report is in {target}", "bold")


# --- help ---------------------------------------------------------------------------------------------------------
# The recipes, and one recipe with its fields -> the lines of `steadygrad train --help`. Imports no torch.


WIDTH = 92
INDENT = " " * 23
"""Where the text of an option begins."""


def describe_recipes() -> list[str]:
    """Which there are, and how one is run."""
    recipes = list_recipes()
    width = max((len(recipe.name) for recipe in recipes), default=0)
    return [
        "Usage: steadygrad train RECIPE [OPTIONS]",
        "",
        "  Run one of the five trainings, guarded, with its record, checkpoints and report.",
        "",
        "Recipes:",
        *(f"  {recipe.name.ljust(width)}  {recipe.summary}" for recipe in recipes),
        "",
        "steadygrad train RECIPE --help lists the fields of one.",
        "",
        "Example:",
        "  steadygrad train seo --quick",
        "  steadygrad train seo --config my.yaml --learning-rate 1e-4 --run-dir runs/mine",
        "  steadygrad train seo --resume latest",
    ]


def describe_recipe(recipe: Recipe, package: Any, fields: Sequence[Field]) -> list[str]:
    """The help of one recipe: how it is called, and every field with type and default."""
    lines = [f"Usage: steadygrad train {recipe.name} [OPTIONS]", "", f"  {recipe.summary}", "", "Options:"]
    quick = ", ".join(f"{name}={spell_value(value)}" for name, value in package.QUICK.items())
    lines += [
        "  --config FILE        fields from a YAML or TOML file",
        "  --resume WHERE       go on exactly: latest, best, a run directory, or one of its checkpoints",
        "  --run-dir DIR        where the run is written  [default: runs/" + recipe.name + "-<time>]",
        *_wrap(f"smaller: {quick}", "  --quick".ljust(len(INDENT)), INDENT),
    ]
    if hasattr(package, "predict"):
        what = getattr(package, "PREDICT", "use the trained model of a run on PATH")
        lines += _wrap(what, "  --predict PATH".ljust(len(INDENT)), INDENT)
    if hasattr(package, "sample"):
        lines.append("  --sample             draw samples from the trained model of a run")
    lines += ["", "Fields:"]
    for item in fields:
        lines.append(f"  {item.flag} {item.kind}  [default: {spell_value(item.default)}]")
        lines += _wrap(item.help, "      ", "      ")
    return [*lines, "", "Example:", f"  steadygrad train {recipe.name} --quick"]


def _wrap(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
