"""`steadygrad clean`: writes a repaired copy of a checkpoint and says what was replaced."""

from __future__ import annotations

import math
from pathlib import Path

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE
from steadygrad.cli.scan_words import MAX_ROWS, advising
from steadygrad.words import make_printable, spell_count, spell_number


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--value", type=float, default=0.0, show_default=True, help="The value that replaces every NaN and Inf.")
@click.option("--force", is_flag=True, help="Overwrite TARGET if the file exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.pass_context
def clean(context: click.Context, source: Path, target: Path, value: float, force: bool, as_json: bool) -> None:
    """Write a copy of SOURCE to TARGET in which every NaN and Inf is replaced.

    SOURCE is not changed, and the copy differs only in the replaced values. Whatever the replaced weights had learned
    is lost: prefer an earlier checkpoint if there is one. Exit code 0: the copy was written; 2: it was not.

    \b
    Example:
      steadygrad clean broken.safetensors repaired.safetensors
    """
    context.exit(report_clean(Console(), source, target, value=value, force=force, as_json=as_json))


def report_clean(console: Console, source: Path, target: Path, *, value: float, force: bool, as_json: bool) -> int:
    """Clean, report, and return the exit code."""
    from steadygrad.record.encode import to_json
    from steadygrad.scan.clean import clean_checkpoint

    if not math.isfinite(value):  # float() of click takes nan and inf
        raise click.UsageError(f"--value must be a finite number, got {spell_number(value)}. Use 0.")
    with advising():
        report = clean_checkpoint(source, target, value=value, force=force)
    if as_json:
        click.echo(to_json(report))
        return DONE
    for name, count in list(report.replaced.items())[:MAX_ROWS]:
        console.say(f"  {make_printable(name)}: {count:,} replaced by {value:g}")
    if len(report.replaced) > MAX_ROWS:
        console.say(f"  ... and {len(report.replaced) - MAX_ROWS} more tensors")
    for name in report.left:
        console.say(f"  {make_printable(name)} is a plain non-finite number; it was left as it is", "yellow")
    total = sum(report.replaced.values())
    where = f" of {spell_count(len(report.replaced), 'tensor')}" if total else ""
    console.say(f"{target}: written, {spell_count(total, 'element')}{where} replaced.", "green")
    return DONE
