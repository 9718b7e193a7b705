"""`steadygrad new NAME`: a name -> a small project on Trainer and Guard, with a command line, a record and a resume.

The files lie beside this one, in `template`; the name is all that changes in them. Nothing that exists is overwritten.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from steadygrad.cli.console import Console
from steadygrad.errors import UsageError

NAME = "my_training"
"""Stands for the project's name in the template."""
ENDING = ".tmpl"
SPELLING = re.compile(r"[A-Za-z](\w*[A-Za-z0-9])?", re.ASCII)
"""What is at once the name of a package in Python, of a project in its pyproject.toml, and of a key there."""
TAKEN = ("steadygrad", "steadygrad_recipes", "test", "torch")


@click.command()
@click.argument("name")
@click.option("--into", type=click.Path(file_okay=False), metavar="DIR", help="Folder to write to.  [default: NAME]")
@click.pass_context
def new(context: click.Context, name: str, into: str | None) -> None:
    """Write a small training project that runs at once.

    It has the command line, record, resume and report of the recipes, runs under torchrun, and includes tests. Add your
    data, your model and your loss.

    \b
    Example:
      steadygrad new my_training
      cd my_training
      python -m my_training --quick
    """
    check_spelling(name)
    folder = Path(name if into is None else into)
    require_free(folder)
    check_taken(name)
    write_project(name, folder)
    console = Console()
    console.say(f"Wrote {folder}. To run it:", "bold")
    console.say(f"  cd {folder}")
    console.say(f"  {Path(sys.executable).name} -m {name} --quick")
    context.exit(0)


def check_spelling(name: str) -> None:
    """Raise UsageError for a name that no Python package and project can have."""
    if not _can_be_a_name(name):
        wanted = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or NAME
        wanted = wanted if _can_be_a_name(wanted) else f"train_{wanted}"
        raise UsageError(f"{name!r} cannot be the name of a Python package. Use letters, digits and _: {wanted}.")


def _can_be_a_name(name: str) -> bool:
    return SPELLING.fullmatch(name) is not None and not keyword.iskeyword(name)


def check_taken(name: str) -> None:
    """Raise UsageError for a name that another package has."""
    # The project's folder comes first on sys.path: its name would hide the other package from its own imports
    if name in TAKEN or name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise UsageError(f"{name!r} is the name of an existing package, which it would hide. Choose another.")


def require_free(folder: Path) -> None:
    """Raise UsageError for a folder with something in it, or a file of that name."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty. Choose another name, or another folder with --into.")


def write_project(name: str, folder: Path) -> None:
    """Write every file of the template."""
    _write(files("steadygrad.cli") / "template", folder, name)


def _write(source: Traversable, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _write(entry, folder / entry.name.replace("package", name), name)
        elif entry.name.endswith(ENDING):
            target = folder / entry.name.removesuffix(ENDING).replace("package", name)
            target.write_text(entry.read_text(encoding="utf-8").replace(NAME, name), encoding="utf-8")
