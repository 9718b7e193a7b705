"""Format what `steadygrad scan` found, as text and tables. Names come from untrusted files and are escaped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from steadygrad.cli.console import Console
from steadygrad.words import make_printable, spell_count, spell_number

if TYPE_CHECKING:
    from steadygrad.scan.checkpoint_scan import CheckpointScan, TensorScan
    from steadygrad.scan.diff import CheckpointDiff, TensorDiff

MAX_ROWS = 20
MIB = 1 << 20


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Give errors about unreadable files advice that suits the command line: there may be no run to resume."""
    from steadygrad.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

    try:
        yield
    except DamagedCheckpoint as error:
        if isinstance(error, NoCheckpoint):
            what, advice = (
                "is not a checkpoint",
                "Name a .safetensors, .pt, .pth, .ckpt or .bin file, or a folder of them",
            )
        else:
            what, advice = "cannot be used", "It is truncated or corrupt: copy it again, or use an older one"
        raise CheckpointError(f"{error.folder} {what}: {error.reason}. {advice}.") from error


def print_checkpoint(console: Console, scan: CheckpointScan, *, show_all: bool) -> None:
    size = f"{spell_count(len(scan.tensors), 'tensor')}, {scan.num_bytes / MIB:.1f} MiB"
    console.say(f"{make_printable(str(scan.path))}: {scan.format}, {size}", "bold")
    bad = scan.bad_tensors
    rows = scan.tensors if show_all else bad[:MAX_ROWS]
    if rows:
        header = ("tensor", "dtype", "shape", "nan", "inf", "zeros", "min", "max", "norm")
        console.show_table(header, [_make_row(one) for one in rows], ["red" if one.is_bad else "" for one in rows])
    if len(bad) > len(rows):
        console.say(f"... and {len(bad) - len(rows)} more; --all shows every tensor.", "red")
    for problem in scan.problems:
        console.say(f"  {make_printable(problem)}", "red")
    for name, value in scan.bad_numbers:
        console.say(
            f"  {make_printable(name)} is the plain number {spell_number(value)}", "red" if value != value else "yellow"
        )
    for group in scan.duplicates:
        console.say(f"  the same tensor: {make_printable(' = '.join(group))}", "dim")
    for note in (*scan.notes, *(f"{one.name} holds NaN or Inf on purpose" for one in scan.tensors if one.is_allowed)):
        console.say(f"  {make_printable(note)}", "dim")
    _print_verdict(console, scan)


def _print_verdict(console: Console, scan: CheckpointScan) -> None:
    if scan.is_clean:
        console.say("  Clean: every tensor is finite.", "green")
        return
    bad = scan.bad_tensors
    if bad:
        count = sum(one.num_nonfinite for one in bad)
        where = f"{len(bad)} of {spell_count(len(scan.tensors), 'tensor')}"
        console.say(f"  Not clean: NaN or Inf in {spell_count(count, 'element')} of {where}.", "red")
        console.say("  Go back to an earlier checkpoint, or write a repaired copy: steadygrad clean SOURCE TARGET")
    else:
        console.say("  Not clean: see above.", "red")


def _make_row(one: TensorScan) -> tuple[str, ...]:
    ends = ("-" if value is None else f"{value:.4g}" for value in (one.min, one.max, one.norm))
    shape = "x".join(map(str, one.shape)) or "scalar"
    return (make_printable(one.name), one.dtype, shape, str(one.num_nan), str(one.num_inf), str(one.num_zeros), *ends)


def print_changes(console: Console, diff: CheckpointDiff, *, show_all: bool) -> None:
    for names, sign, style in ((diff.removed, "-", "red"), (diff.added, "+", "green")):
        for name in names if show_all else names[:MAX_ROWS]:
            console.say(f"{sign} {make_printable(name)}", style)
        if len(names) > MAX_ROWS and not show_all:
            console.say(f"{sign} ... and {len(names) - MAX_ROWS} more; --all shows them", style)
    most = sorted(diff.changed, key=_how_far, reverse=True)
    rows = most if show_all else most[:MAX_ROWS]
    if rows:
        header = ("tensor", "changed", "new nan/inf", "max change", "relative")
        console.show_table(header, [_make_change(one) for one in rows], [""] * len(rows))
    counts = (
        f"{diff.num_equal} equal, {len(diff.changed)} changed, {len(diff.added)} added, {len(diff.removed)} removed"
    )
    console.say(f"{counts}.", "green" if diff.is_empty else "yellow")


def _how_far(one: TensorDiff) -> tuple[bool, int, float]:
    return one.num_changed is None, one.num_new_nonfinite, one.relative_change


def _make_change(one: TensorDiff) -> tuple[str, ...]:
    name = make_printable(one.name)
    if one.dtypes[0] != one.dtypes[1]:
        name += f" ({one.dtypes[0]} -> {one.dtypes[1]})"
    if one.num_changed is None:
        return name, f"{list(one.shapes[0])} -> {list(one.shapes[1])}", "-", "-", "-"
    ends = f"{one.max_change:.3g}", f"{one.relative_change:.3g}"
    return name, str(one.num_changed), str(one.num_new_nonfinite), *ends
