"""`steadygrad bench`: the benchmark programs of a source checkout, listed, run one after the other, and summed up.

A program is a file of benchmarks/ that takes `--quick`. Each runs in a separate process and writes its results into a
scratch folder; they are moved to benchmarks/results only if the program succeeded and was not quick, so that an
aborted or shortened run never replaces a measured one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.errors import UsageError

SOURCE = Path(__file__).parents[2]
"""The folder that contains this package; in a checkout its src/."""
MARK = '"--quick"'
"""Text that identifies a benchmark program's source."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One benchmark: its name, and what it measures."""

    name: str
    path: Path
    about: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of running one program."""

    name: str
    exit_code: int
    seconds: float
    results: dict[str, Any]
    """What it wrote, by the file's name."""


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="Only list the benchmarks.")
@click.option("--quick", is_flag=True, help="Small sizes, minutes in all; changes nothing in benchmarks/results.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the programs' own output goes to stderr.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the programs are.  [default: benchmarks/ of the checkout]",
)
@click.pass_context
def bench(
    context: click.Context, names: tuple[str, ...], only_list: bool, quick: bool, as_json: bool, folder: Path | None
) -> None:
    """List and run the benchmarks of a source checkout.

    Each prints its own table, and a last table shows which succeeded. Without --quick, results go to
    benchmarks/results. Exit code 0: all succeeded; 2: at least one failed.

    \b
    Example:
      steadygrad bench --list
      steadygrad bench --quick
      steadygrad bench detectors zoo
    """
    folder = find_folder(folder)
    programs = choose(find_programs(folder), names)
    if only_list:
        print_programs(Console(), programs, as_json=as_json)
        return
    console = Console(sys.stderr if as_json else None)
    runs = list(run_programs(programs, folder, console, quick=quick))
    if as_json:
        print(json.dumps({"quick": quick, "programs": [asdict(run) for run in runs]}))
    else:
        print_runs(console, runs)
        if not quick:
            console.say("The results are new: python benchmarks/publish.py puts them into README.md and docs.")
    context.exit(FAILED if any(run.exit_code for run in runs) else DONE)


def find_folder(given: Path | None) -> Path:
    """Return the programs' folder: the given one, else that of the checkout that contains this package."""
    folder = given or SOURCE.parent / "benchmarks"
    if not (folder / "machine.py").is_file():
        raise UsageError(
            f"there are no benchmarks in {folder}: they are part of the source, not of the installed package. "
            "Clone the repository and run `steadygrad bench` there, or say where they are: --folder DIR."
        )
    return folder


def find_programs(folder: Path) -> list[Program]:
    """Return every program by name; for one with its own folder, that is its compare.py."""
    found = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/compare.py")]):
        source = path.read_text(encoding="utf-8")
        if MARK in source:
            name = path.relative_to(folder).with_suffix("").as_posix().removesuffix("/compare")
            about = source.lstrip("'\"").partition("\n")[0].rstrip("'\"")
            found[name] = Program(name=name, path=path, about=about)
    return list(found.values())


def choose(programs: Sequence[Program], names: Sequence[str]) -> Sequence[Program]:
    """Return the named programs, in that order; all if none is named."""
    known = {program.name: program for program in programs}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no benchmark {', '.join(map(repr, unknown))}. Use one of {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)] or programs


def run_programs(programs: Sequence[Program], folder: Path, console: Console, *, quick: bool) -> Iterator[Run]:
    """Run one after the other, passing their output through."""
    for number, program in enumerate(programs, 1):
        console.say(f"\n[{number}/{len(programs)}] {program.name}: {program.about}", "bold")
        # The scratch folder is gone afterwards: results are copied inside the block
        with tempfile.TemporaryDirectory() as scratch:
            run = run_program(program, folder, Path(scratch), console, quick=quick)
            if not quick and run.exit_code == DONE:
                (folder / "results").mkdir(exist_ok=True)
                for name in run.results:
                    shutil.copy(Path(scratch) / f"{name}.json", folder / "results")
        console.say(f"{program.name}: {describe(run)}", "red" if run.exit_code else "green")
        yield run


def run_program(program: Program, folder: Path, scratch: Path, console: Console, *, quick: bool) -> Run:
    """Run one program in a separate process, with its results in `scratch`."""
    paths = [str(folder), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OUT": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if quick:  # small sizes gain nothing from threads, and lose much when other processes use the cores too
        environment.setdefault("OMP_NUM_THREADS", "1")
    # -u: without it the lines of a long benchmark arrive only at its end
    command = [sys.executable, "-u", str(program.path), *(["--quick"] if quick else [])]
    start = time.perf_counter()
    # One pipe for both: two would need two readers, or one fills up and the program hangs
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.say(f"  {line.rstrip()}")
    seconds = round(time.perf_counter() - start, 1)
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(scratch.glob("*.json"))}
    return Run(name=program.name, exit_code=process.returncode, seconds=seconds, results=results)


def print_programs(console: Console, programs: Sequence[Program], *, as_json: bool) -> None:
    """Print the available programs."""
    if as_json:
        print(json.dumps([{"name": program.name, "about": program.about} for program in programs]))
        return
    width = max(len(program.name) for program in programs)
    for program in programs:
        console.say(f"{program.name:<{width}}  {program.about}")


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Print the final table."""
    rows = [(run.name, f"{run.seconds:.0f} s", "FAILED" if run.exit_code else "done") for run in runs]
    console.say()
    console.show_table(("benchmark", "time", ""), rows, ["red" if run.exit_code else "" for run in runs])
    console.say(f"{sum(run.seconds for run in runs):.0f} s in all")


def describe(run: Run) -> str:
    """Format the result of a run: 'done in 12 s'."""
    return f"{f'FAILED with exit code {run.exit_code}' if run.exit_code else 'done'} in {run.seconds:.0f} s"
