"""A progress bar around an iterable, on a terminal only. Uses rich if it is installed; otherwise shows nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from steadygrad.facts import StepRecord
from steadygrad.view.terminal import share_with_bar
from steadygrad.words import spell_number

T = TypeVar("T")


def count_items(items: Iterable[Any]) -> int | None:
    """Return the number of items if known: len() of a DataLoader raises an error if its data has no length."""
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        return None


def track(items: Iterable[T], *, describe: Callable[[], str], total: int | None = None) -> Iterator[T]:
    """Yield `items`; `describe()` is called after each item and returns the text beside the bar."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield from items
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress, share_with_bar(console):
        task = progress.add_task("", total=total)
        for item in items:
            yield item
            progress.update(task, advance=1, description=describe())


def describe_step(record: StepRecord | None, num_skipped: int) -> str:
    """Format the text beside the bar: loss, norm, learning rate, skipped steps."""
    if record is None:
        return ""
    loss = "" if record.loss is None else f"loss={spell_number(record.loss)}, "
    rate = max(record.learning_rates, default=None)
    skipped = f", skipped={num_skipped}" if num_skipped else ""
    return f"{loss}grad={spell_number(record.grad_norm)}, lr={spell_number(rate)}{skipped}"
