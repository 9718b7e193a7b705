"""`steadygrad train RECIPE`: the recipe's settings from file and command line, its training, and the report at its end.

The fields are the recipe's own, so its arguments are read here and not by click. The run directory remembers recipe
and settings in `recipe.json`; a resume starts from those.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.cli.recipe_fields import Field, find_field, list_fields, merge, nest, read_value, set_path
from steadygrad.cli.run_folder import find_newest, name_folder
from steadygrad.config.plain import build, read_mapping, to_plain
from steadygrad.errors import ConfigError, SteadygradError, TrainingHalted, UsageError
from steadygrad.recipes.catalogue import RECIPES, Recipe, find_recipe

RUNS = Path("runs")
SETTINGS = "recipe.json"
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
        for line in _describe_recipes():
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
    run_dir = _choose_folder(recipe.name, request, must_exist=uses_run or "resume" in request.options)
    config = make_config(package, request, run_dir)
    if uses_run:
        return _use_run(recipe, package, request, config, run_dir, console)
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {"recipe": recipe.name, "config": to_plain(config)}
    (run_dir / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    console.say(f"Training {recipe.name} in {run_dir}", "bold")
    try:
        code: int = package.train(config, run_dir=run_dir, resume=request.options.get("resume"), console=console)
    except TrainingHalted as halted:
        console.say(f"Training was halted: {halted}", "red")
        code = FAILED
    write_report_of(run_dir, console)
    return code


def _use_run(recipe: Recipe, package: Any, request: Request, config: Any, run_dir: Path, console: Console) -> int:
    verb = "predict" if "predict" in request.options else "sample"
    call = getattr(package, verb, None)
    if call is None:
        raise UsageError(f"the recipe {recipe.name} cannot {verb}. Leave out --{verb}.")
    where = (request.options["predict"],) if verb == "predict" else ()
    return int(call(config, *where, run_dir=run_dir, console=console))


def make_config(package: Any, request: Request, run_dir: Path) -> Any:
    """Defaults, what the run remembers, `--quick`, the file, the fields: what comes later wins."""
    values: dict[str, Any] = {}
    if (run_dir / SETTINGS).is_file():
        values = json.loads((run_dir / SETTINGS).read_text(encoding="utf-8"))["config"]
    if "quick" in request.switches:
        values = merge(values, nest(package.QUICK))
    if "config" in request.options:
        path = Path(request.options["config"])
        try:
            values = merge(values, nest(read_mapping(path)))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return build(package.Config, merge(values, request.values))


def _choose_folder(name: str, request: Request, *, must_exist: bool) -> Path:
    """Where the run is written, or lies."""
    if "run-dir" in request.options:
        return Path(request.options["run-dir"])
    resume = request.options.get("resume")
    if resume not in (None, "latest"):
        return _find_run(Path(str(resume)))
    if not must_exist:
        return name_folder(RUNS, name)
    newest = find_newest(RUNS, name)
    if newest is None:
        raise UsageError(f"there is no run of {name} in {RUNS}/. Train one first, or say where it is with --run-dir.")
    return newest


def _find_run(path: Path) -> Path:
    """The run directory that `path` is, or is a checkpoint of."""
    if not path.exists() and not (path.parent.name == "checkpoints" and path.parent.exists()):
        raise UsageError(f"{path} does not exist, so nothing can be resumed from it. Give a run directory.")
    return path.parent.parent if path.parent.name == "checkpoints" else path


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


# --- help -----------------------------------------------------------------------------------------------------------


def _describe_recipes() -> list[str]:
    width = max(len(recipe.name) for recipe in RECIPES)
    return [
        "Usage: steadygrad train RECIPE [OPTIONS]",
        "",
        "  Run one of the five trainings, guarded, with its record, checkpoints and report.",
        "",
        "Recipes:",
        *(f"  {recipe.name.ljust(width)}  {recipe.summary}" for recipe in RECIPES),
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
    verbs = [verb for verb in ("predict", "sample") if hasattr(package, verb)]
    lines = [f"Usage: steadygrad train {recipe.name} [OPTIONS]", "", f"  {recipe.summary}", "", "Options:"]
    lines += [
        "  --config FILE        fields from a YAML or TOML file",
        "  --resume WHERE       go on exactly: latest, a run directory, or one of its checkpoints",
        "  --run-dir DIR        where the run is written  [default: runs/" + recipe.name + "-<time>]",
        "  --quick              smaller: " + ", ".join(f"{name}={value}" for name, value in package.QUICK.items()),
    ]
    lines += ["  --predict PATH       use the trained model of a run on PATH"] if "predict" in verbs else []
    lines += ["  --sample             draw samples from the trained model of a run"] if "sample" in verbs else []
    lines += ["", "Fields:"]
    for item in fields:
        lines.append(f"  {item.flag} {item.kind}  [default: {item.default}]")
        lines += textwrap.wrap(item.help, 92, initial_indent="      ", subsequent_indent="      ")
    return [*lines, "", "Example:", f"  steadygrad train {recipe.name} --quick"]
