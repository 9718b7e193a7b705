"""`steadygrad tune`: a recipe or a function of a script in; settings, a picture and a page of evidence out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.cli.recipe_config import Source, build_config, read_source
from steadygrad.cli.recipe_fields import FieldCommand
from steadygrad.cli.recipe_folder import name_folder
from steadygrad.cli.recipes import find_recipe, open_recipe
from steadygrad.config.plain import to_plain
from steadygrad.errors import UsageError

RUNS = Path("runs")


@click.command()
@click.argument("target", metavar="RECIPE|SCRIPT:FUNCTION")
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The recipe's fields, from a YAML or TOML file.",
)
@click.option("--quick", is_flag=True, help="The recipe as `steadygrad train RECIPE --quick` runs it.")
@click.option("--set", "fields", multiple=True, metavar="FIELD=VALUE", help="A field of the recipe; may be repeated.")
@click.option(
    "--search",
    metavar="NAMES",
    help="Search these with Optuna: lr,warmup,clip,weight_decay,betas,precision,batch,accumulation.",
)
@click.option(
    "--trials",
    type=int,
    metavar="N",
    help="Number of trials, over all workers.  [default: 20, or fewer, for a tenth of the training]",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Steps of a trial.  [default: so that all trials take a tenth of the training]",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Optuna's storage, shared by all workers: a database, or journal:FILE for a network file system.  "
    "[default: SQLite, tune.db in the run directory]",
)
@click.option("--study", metavar="NAME", help="The search's name in --storage.  [default: steadygrad]")
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write everything.  [default: runs/tune-<target>-<time>]",
)
@click.option("--resume", is_flag=True, help="Continue the search in --run-dir, or join it as another worker.")
@click.pass_context
def tune(context: click.Context, /, **options: Any) -> None:
    """Find settings that train stably.

    First a range test: steps at rising learning rates, watched by the guard's rules. Then the given settings against
    the suggested ones, in two orders of the data, and with --search a search between them. Every trial starts from the
    same weights and random numbers, and ends at the step where it breaks. SCRIPT:FUNCTION is a Python file and a
    function in it that returns (model, optimizer, loss_fn, loader), or a steadygrad.tune.Tunable.

    Several workers share a search: start the command several times with the same --run-dir and --resume, or once with
    torchrun, where rank 0 chooses and writes. Workers on several machines need a --storage that all of them can reach.
    Exit code 0: settings were chosen or kept; 2: nothing that was tried works, or nothing could be tried.

    \b
    Example:
      steadygrad tune seo --quick
      steadygrad tune mmdit --search lr,warmup,clip --trials 30 --run-dir runs/tuned
      steadygrad train mmdit --config runs/tuned/tuned.yaml
      steadygrad tune train.py:make --search lr,batch
      torchrun --nproc-per-node 4 -m steadygrad tune mmdit --search lr,clip --run-dir runs/tuned
    """
    context.exit(run_tuning(Console(), **options))


def run_tuning(
    console: Console,
    *,
    target: str,
    config_file: Path | None,
    quick: bool,
    fields: tuple[str, ...],
    search: str | None,
    trials: int | None,
    steps: int | None,
    storage: str | None,
    study: str | None,
    run_dir: Path | None,
    resume: bool,
) -> int:
    """Tune, report and write; return the exit code."""
    from steadygrad.tune.ledger import Ledger
    from steadygrad.tune.search import Search
    from steadygrad.tune.settings import read_search
    from steadygrad.tune.space import check_search
    from steadygrad.tune.storage import open_study
    from steadygrad.tune.tuning import Tuning, describe_request
    from steadygrad.tune.write import write_tuning

    names = () if search is None else read_search(search)
    # Starts no process group: workers meet in Optuna's storage only
    rank, is_shared = join_ranks(run_dir, storage)
    if rank > 0 and not names:
        return DONE  # only a search has something to share
    folder = choose_folder(target, run_dir, storage, resume=resume)
    resume = resume or is_shared
    subject = open_target(target, config_file, quick=quick, fields=fields)
    # Before a folder is made, so that a wrong name leaves nothing behind
    check_search(subject, names)
    plan = plan_steps(subject.tunable.num_steps, folder, trials=trials if names else 0, steps=steps, resume=resume)
    request = describe_request(target, to_plain(subject.config) if subject.is_recipe else None, plan, names)
    ledger = Ledger(folder if rank == 0 else None, request, resume=resume)  # one writer
    if rank == 0 or storage is None:
        make_folder(folder)
    # A worker that joins must not draw the same trials again
    seed = None if resume else 0
    shared = (
        Search(open_study(storage, folder, request, name=study, resume=resume, seed=seed), names) if names else None
    )
    if rank > 0:
        Tuning(subject, plan, ledger, search=shared, tell=lambda line: console.say(f"Rank {rank}: {line}")).help()
        return DONE
    console.say(f"Tuning {target} in {folder}", "bold")
    if subject.note:
        console.say(f"It is {subject.note}.")
    tuned = Tuning(subject, plan, ledger, search=shared, tell=console.say, track=console.track).run()
    print_choice(console, tuned, write_tuning(tuned, folder))
    return DONE if tuned.choice.works else FAILED


def choose_folder(target: str, run_dir: Path | None, storage: str | None, *, resume: bool) -> Path:
    """Return the folder to write to: the requested one, or a new one."""
    if run_dir is not None:
        return run_dir
    if resume and storage is None:
        raise UsageError("--resume continues an earlier search, and none was named. Give its folder with --run-dir.")
    return name_folder(RUNS, f"tune-{Path(target.partition(':')[0]).stem}")


def make_folder(folder: Path) -> None:
    """Create the folder, so that one that cannot be written is reported before anything is tried."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}. Choose another folder with --run-dir.") from None
    # mkdir succeeds on a folder that exists and is read-only
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written by this user. Change that, or choose another with --run-dir.")


def open_target(target: str, config_file: Path | None, *, quick: bool, fields: tuple[str, ...]) -> Any:
    """Return what is to be tuned; raise UsageError if it cannot be."""
    from steadygrad.tune.target import open_script

    if ":" in target:
        if config_file is not None or quick or fields:
            raise UsageError(
                f"--config, --quick and --set are for recipes, and {target} is a script. Set it up inside."
            )
        return open_script(target)
    if target.endswith(".py"):
        raise UsageError(f"{target} names no function. Write {target}:FUNCTION, one that returns what is trained.")
    recipe = find_recipe(target)
    package = recipe.load()
    sources = [Source(values=package.QUICK)] if quick else []
    if config_file is not None:
        sources.append(read_source(config_file))
    for item in fields:
        if "=" not in item:
            raise UsageError(f"--set got {item!r}, which has no value. Write --set FIELD=VALUE.")
    command = FieldCommand(recipe.name, package.Config, aliases=getattr(package, "ALIASES", {}))
    given = command.make_context(f"steadygrad train {recipe.name}", [f"--{item}" for item in fields])
    config = build_config(
        package.Config, [*sources, Source(values=command.read_fields(given))], lambda path: f"--set {path}"
    )
    return open_recipe(recipe.name, config)


def plan_steps(num_steps: int | None, folder: Path, *, trials: int | None, steps: int | None, resume: bool) -> Any:
    """Plan how much is tried; a resumed tuning keeps its original steps, so that trials can be compared."""
    import dataclasses

    from steadygrad.tune.ledger import read_steps
    from steadygrad.tune.plan import make_plan

    plan = make_plan(num_steps, trials=trials, steps=steps)
    before = read_steps(folder) if resume else None
    if before is None:
        return plan
    return dataclasses.replace(plan, range_steps=before[0], trial_steps=steps or before[1])


def join_ranks(run_dir: Path | None, storage: str | None) -> tuple[int, bool]:
    """Return this worker's number, and whether torchrun started several; each takes a separate device."""
    rank, num = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num == 1:
        return 0, False
    if run_dir is None:
        raise UsageError(f"{num} workers were started and must share a folder. Name it with --run-dir.")
    num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if num_machines > 1 and storage is None:
        raise UsageError(
            f"workers were started on {num_machines} machines, and SQLite in the run directory is for one. Give a "
            "--storage that all reach: journal:FILE on a file system that they share, or the URL of a database."
        )
    import torch

    if torch.cuda.is_available():
        # Modulo: more workers than GPUs share them
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return rank, True


def print_choice(console: Console, tuned: Any, files: list[Path]) -> None:
    """Print what was chosen, and where it was written."""
    from steadygrad.tune.write import describe_share

    choice = tuned.choice
    for name, before, after, _ in tuned.evidence:
        line = f"{name}: {before} -> {after}" if before != after else f"{name}: {before}, kept"
        console.say(line, "green" if before != after else "")
    console.say(f"{choice.reason[:1].upper()}{choice.reason[1:]}.", "" if choice.works else "red")
    console.say(f"{describe_share(tuned)}.")
    console.say(f"Written: {', '.join(map(str, files))}")
    if tuned.target.is_recipe and choice.works:
        console.say(f"Train with: steadygrad train {tuned.target.name} --config {files[0]}", "bold")
