"""`steadygrad scan`: what is in checkpoints, as sentences and tables or as one JSON object.

Exit code 2 wins over 1: a file that could not be read may hold worse than what was found elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED, FOUND
from steadygrad.cli.scan_words import MIB, advising, print_changes, print_checkpoint
from steadygrad.words import make_printable

if TYPE_CHECKING:
    from steadygrad.scan.checkpoint_scan import CheckpointScan


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--diff", "as_diff", is_flag=True, help="Show what changed between two checkpoints.")
@click.option("--all", "show_all", is_flag=True, help="Show every tensor, not only the noteworthy ones.")
@click.option("--trust", is_flag=True, help="Run the code in a pickle: only for files that you trust.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.pass_context
def scan(
    context: click.Context, paths: tuple[Path, ...], as_diff: bool, show_all: bool, trust: bool, as_json: bool
) -> None:
    """Show what checkpoints hold: NaN and Inf, ranges, norms, zeros, tied weights, and whether hashes agree.

    PATH is a .safetensors, .pt, .pth, .ckpt or .bin file, a Hugging Face folder, a distributed checkpoint or a run
    directory; folders are searched recursively. No code in it is run (without --trust), and little of it is in memory
    at a time. Objects of a program's own classes are left out and named. Exit code 0: clean (with --diff: equal); 1:
    something was found; 2: something could not be read, or was refused.

    \b
    Example:
      steadygrad scan model.safetensors
      steadygrad scan --diff before.pt after.pt
    """
    console = Console()
    if as_diff:
        if len(paths) != 2:
            raise click.UsageError(f"--diff compares two checkpoints, got {len(paths)}.")
        if trust:
            raise click.UsageError("--trust is for scanning. Leave it out with --diff.")
        context.exit(report_diff(console, *paths, show_all=show_all, as_json=as_json))
    context.exit(report_scan(console, paths, show_all=show_all, as_json=as_json, trust=trust))


def report_scan(console: Console, paths: Sequence[Path], *, show_all: bool, as_json: bool, trust: bool = False) -> int:
    """Scan, report, and return the exit code."""
    scans, refused = _scan_all(console, paths, quiet=as_json, trust=trust)
    if as_json:
        _print_json(
            {
                "clean": not refused and all(one.is_clean for one in scans),
                "checkpoints": [_describe_scan(one) for one in scans],
                "refused": [{"path": path, "reason": reason} for path, reason in refused],
            }
        )
    else:
        for one in scans:
            print_checkpoint(console, one, show_all=show_all)
        for _, reason in refused:
            click.echo(f"Error: {make_printable(reason)}", err=True)
    if refused:
        return FAILED
    return DONE if all(one.is_clean for one in scans) else FOUND


def _scan_all(
    console: Console, paths: Sequence[Path], *, quiet: bool, trust: bool
) -> tuple[list[CheckpointScan], list[tuple[str, str]]]:
    """Return the scans, and (path, reason) for each refused path; a refused one does not stop the others."""
    from steadygrad.errors import SteadygradError
    from steadygrad.scan.readers.formats import find_checkpoints

    scans, refused = [], []
    for path in paths:
        try:
            with advising():
                sources = find_checkpoints(path)
        except SteadygradError as error:
            refused.append((str(path), str(error)))
            continue
        for source in sources:
            try:
                with advising():
                    scans.append(_scan_one(console, source, quiet=quiet, trust=trust))
            # A checkpoint may vanish or be unreadable between the search and here
            except (SteadygradError, OSError) as error:
                refused.append((str(source), str(error)))
    return scans, refused


def _scan_one(console: Console, source: Path, *, quiet: bool, trust: bool) -> CheckpointScan:
    from steadygrad.scan.checkpoint_scan import scan_contents
    from steadygrad.scan.readers.formats import read_contents
    from steadygrad.scan.trusted import unpickled_copy

    # Only --trust runs the pickle; every other way reads its bytes inertly
    with unpickled_copy(source) if trust else contextlib.nullcontext(source) as path:
        contents = read_contents(path)
        with _track(console, f"scanning {source.name}", _sum_bytes(contents.tensors), quiet=quiet) as advance:
            return dataclasses.replace(scan_contents(contents, advance), path=source)


def report_diff(console: Console, first: Path, second: Path, *, show_all: bool, as_json: bool) -> int:
    """Compare, report, and return the exit code."""
    from steadygrad.scan.diff import diff_checkpoints
    from steadygrad.scan.readers.formats import read_tensors

    with advising():
        total = _sum_bytes(read_tensors(first))
    with advising(), _track(console, "comparing", total, quiet=as_json) as advance:
        diff = diff_checkpoints(first, second, advance)
    if as_json:
        from steadygrad.record.encode import to_plain

        _print_json({"equal": diff.is_empty, **to_plain(diff)})
    else:
        print_changes(console, diff, show_all=show_all)
    return DONE if diff.is_empty else FOUND


# --- JSON and the bar ---------------------------------------------------------------------------------------------


def _describe_scan(scan: CheckpointScan) -> dict[str, Any]:
    from steadygrad.record.encode import to_plain

    return {"clean": scan.is_clean, "num_bad_tensors": len(scan.bad_tensors), **to_plain(scan)}


def _print_json(value: Any) -> None:
    from steadygrad.record.encode import to_json

    click.echo(to_json(value))


@contextlib.contextmanager
def _track(console: Console, title: str, num_bytes: int, *, quiet: bool) -> Iterator[Callable[[int, str], None]]:
    """Show a bar in MiB, advanced by a number of bytes."""
    if quiet:
        yield lambda *_: None
        return
    with console.track(make_printable(title), max(1, num_bytes // MIB)) as advance:
        yield lambda done, name: advance(done // MIB, f"MiB {make_printable(name)}")


def _sum_bytes(tensors: Sequence[Any]) -> int:
    # Tied tensors have one place and are read once
    return sum({tensor.place: tensor.num_bytes for tensor in tensors}.values())
