"""A progress bar around an iterable, on a terminal only. Uses rich when it is there, and nothing when it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], *, describe: Callable[[], str], total: int | None = None) -> Iterator[T]:
    """Yield `items`; `describe()` gives the text beside the bar, asked after each item."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield from items
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        for item in items:
            yield item
            progress.update(task, advance=1, description=describe())
