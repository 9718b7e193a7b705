"""StepLog: lines of steps.jsonl -> totals and curves. A bare log with `loss` in each line is read the same way.

Works on a batch of lines at a time, column by column, with the interpreter's built-in loops if a column is all finite:
a million steps are read in seconds. Nothing is kept per step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from steadygrad.view.read.curve import MAX_BUCKETS, Clock, Curve, Share
from steadygrad.view.read.step_lines import Numbers, StepLines
from steadygrad.view.read.tail import Row, as_number

EDGE = 100
"""Number of losses kept from the beginning and from the end, for medians."""
SHARE_BUCKETS = 120
MAX_EXTRA = 24
"""Most numbers logged by the user that get a curve; the first ones do."""
RATE_JUMP = 3.0
"""A learning rate that changes by this factor from one step to the next is marked; a linear warm-up doubles at most."""
MAX_UNKNOWN = 1000
"""Most names without a curve to count."""
OURS = (
    "step",
    "loss",
    "grad_norm",
    "clip_coefficient",
    "clipped",
    "skipped",
    "learning_rates",
    "loss_scale",
    "num_dropped_microbatches",
    "time_seconds",
)
FOREIGN = {
    "loss": ("train_loss", "training_loss"),
    "grad_norm": ("gradient_norm", "norm"),
    "learning_rates": ("learning_rate", "lr"),
}
"""Names that logs of other programs use."""


class StepLog:
    """Totals and curves over the steps."""

    CURVES = ("loss", "grad_norm", "applied_norm", "learning_rate", "loss_scale")

    def __init__(self, *, max_buckets: int = MAX_BUCKETS) -> None:
        self.curves = {name: Curve(max_buckets=max_buckets) for name in self.CURVES}
        self.clipped, self.skipped = (Share(max_buckets=SHARE_BUCKETS, width=8) for _ in range(2))
        self.skips, self.nonfinite = Share(max_buckets=400), Share(max_buckets=400)
        self.rate_jumps = Share(max_buckets=400)
        """Where the learning rate jumped."""
        self.num_steps = self.num_skipped = self.num_clipped = self.num_nonfinite = self.num_dropped = 0
        self.first_step = self.last_step = -1
        self.first_rate: float | None = None
        self.first_time: float | None = None
        """Learning rate and time of the first line, with which a part of a run begins."""
        self.num_returns = 0
        """How often the step number went back because the run was resumed from an earlier step."""
        self.first_losses: list[float] = []
        self.last_losses: deque[float] = deque(maxlen=EDGE)
        self.best_loss: tuple[float, int] | None = None
        """The smallest loss, and its step."""
        self.worst_norm: tuple[float, int] | None = None
        self.first_loss: float | None = None
        """The loss of the first step that has a finite one."""
        self.last_loss: float | None = None
        """The newest finite loss."""
        self.last_finite_step = -1
        """Step of the last finite loss."""
        self.first_lost_step: int | None = None
        """Step of the first loss after it, which was not finite; None if there is none."""
        self.last_bad_step = -1
        """The newest step that was skipped or not finite."""
        self.clock = Clock()
        """Seconds since the start at some steps."""
        self.num_lost = 0
        """Number of non-finite losses since then."""
        self.last: dict[str, float | None] = {}
        """The newest number of each column."""
        self.extra: dict[str, Curve] = {}
        """Numbers that the program logged beside the loss, by name."""
        self.last_extra: dict[str, float] = {}
        self._max_buckets = max_buckets
        self._unknown: set[str] = set()
        self.seconds = 0.0
        self._last_time = 0.0

    def extend(self, rows: Sequence[Row] | StepLines) -> None:
        """Add a batch of lines."""
        if not rows:
            return
        lines = rows if isinstance(rows, StepLines) else self._read_rows(rows)
        is_first = not self.num_steps
        steps, skipped, clipped = self._number(lines.steps), lines.skipped, lines.clipped
        if is_first:
            self.first_step, self.first_rate = steps[0], lines.learning_rate[0]
        columns = {"loss": lines.loss, "grad_norm": lines.grad_norm, "loss_scale": lines.loss_scale}
        if any(skipped):
            columns["grad_norm"] = _drop_unmeasured(columns["grad_norm"], skipped)
        columns["learning_rate"] = lines.learning_rate
        columns["applied_norm"] = _multiply(columns["grad_norm"], lines.clip_coefficient, clipped)
        self._mark_rate_jumps(steps, columns["learning_rate"])
        self._draw(steps, columns)
        self._count(steps, skipped, clipped, lines.num_dropped)
        self._follow_time(steps, lines.time_seconds)
        self.last = {name: column[-1] for name, column in columns.items()}
        if not isinstance(rows, StepLines):
            self._follow_extra(steps, [row.get("extra") for row in rows])

    def _read_rows(self, rows: Sequence[Row]) -> StepLines:
        """Return the columns of lines in any form."""
        found = _split_columns(rows)
        return StepLines(
            # 0.0 and False equal 0: only what is an int may pass for the number of a step
            steps=[step if type(step) is int else -1 for step in found["step"]],
            loss=_as_numbers(found["loss"]),
            grad_norm=_as_numbers(found["grad_norm"]),
            clip_coefficient=_as_numbers(found["clip_coefficient"]),
            clipped=[value is True for value in found["clipped"]],
            skipped=[value is True for value in found["skipped"]],
            learning_rate=_take_largest(found["learning_rates"]),
            loss_scale=_as_numbers(found["loss_scale"]),
            num_dropped=[number for number in found["num_dropped_microbatches"] if type(number) is int],
            time_seconds=_as_numbers(found["time_seconds"]),
        )

    def join(self, later: StepLog) -> None:
        """Add the steps that follow, read by another process."""
        if not later.num_steps:
            return
        # Before `last_step` is replaced below
        border = later.first_step <= self.last_step
        self.num_returns += later.num_returns + (border and self.num_steps > 0)
        self._join_rates(later)
        for name, curve in later.curves.items():
            self.curves[name].join(curve)
        for name in ("clipped", "skipped", "skips", "nonfinite", "rate_jumps"):
            getattr(self, name).join(getattr(later, name))
        self._join_losses(later)
        if later.worst_norm is not None:
            self._follow_norm(*later.worst_norm)
        for name, curve in later.extra.items():
            if self._may_draw(name):
                self.extra[name].join(curve)
                self.last_extra[name] = later.last_extra[name]
        for name in ("num_steps", "num_skipped", "num_clipped", "num_nonfinite", "num_dropped"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.last_bad_step = max(self.last_bad_step, later.last_bad_step)
        self.first_step = later.first_step if self.first_step < 0 else self.first_step
        self.last_step, self.last = later.last_step, later.last
        if later.first_time is not None:
            goes_on = later.first_time >= self._last_time
            # `later` counted from 0 to its first time stamp: where the run merely goes on, that time is in ours already
            offset = self.seconds - (self._last_time if goes_on else 0.0)
            self.clock.join(later.clock, offset)
            self.first_time = later.first_time if self.first_time is None else self.first_time
            self.seconds, self._last_time = offset + later.seconds, later._last_time

    def _join_rates(self, later: StepLog) -> None:
        before, after = self.last.get("learning_rate"), later.first_rate
        if before is None or after is None or not min(before, after) > 0:
            self.first_rate = after if not self.num_steps else self.first_rate
        elif max(before, after) >= RATE_JUMP * min(before, after):
            self.rate_jumps.extend([later.first_step], [True])

    def _join_losses(self, later: StepLog) -> None:
        if later.last_loss is None:
            if self.first_lost_step is None:
                self.first_lost_step = later.first_lost_step
            self.num_lost += later.num_lost
            return
        self.first_loss = later.first_loss if self.first_loss is None else self.first_loss
        self.last_loss, self.last_finite_step = later.last_loss, later.last_finite_step
        self.first_lost_step, self.num_lost = later.first_lost_step, later.num_lost
        self.first_losses += later.first_losses[: EDGE - len(self.first_losses)]
        self.last_losses.extend(later.last_losses)
        if later.best_loss is not None:
            self.best_loss = min(self.best_loss or (math.inf, 0), later.best_loss)

    def _number(self, found: Sequence[int]) -> list[int]:
        """Return the step of each line; a line without one (-1) follows the line before."""
        if list(found) == list(range(self.last_step + 1, self.last_step + 1 + len(found))):
            self.last_step += len(found)
            return list(found)
        steps = []
        last = self.last_step
        for step in found:
            # Larger numbers are not exact as a float, which is all that the page's script has
            known = step if 0 <= step < 1 << 53 else last + 1
            self.num_returns += known <= last
            steps.append(known)
            last = known
        self.last_step = last
        return steps

    def _mark_rate_jumps(self, steps: list[int], rates: Numbers) -> None:
        at, known, _ = _split_finite(steps, rates)
        last = self.last.get("learning_rate")
        before = known[:1] if last is None or not math.isfinite(last) else [last]
        # Saves the loop below at nearly every batch
        if not known or max(before[0], max(known)) < RATE_JUMP * min(before[0], min(known)):
            return
        for step, (old, new) in zip(at, pairwise((*before, *known))):
            if min(old, new) > 0 and max(old, new) >= RATE_JUMP * min(old, new):
                self.rate_jumps.extend([step], [True])

    def _draw(self, steps: list[int], columns: dict[str, Numbers]) -> None:
        bad: set[int] = set()
        for name, curve in self.curves.items():
            finite_steps, values, bad_steps = _split_finite(steps, columns[name])
            if values:
                curve.extend_finite(finite_steps, values)
            if name == "loss":
                self._follow_losses(finite_steps, values, _find_lost(steps, columns[name]) if bad_steps else [])
            if name == "grad_norm" and values:
                high = max(values)
                self._follow_norm(high, finite_steps[values.index(high)])
            if name in ("loss", "grad_norm"):
                bad |= bad_steps
        self.num_nonfinite += len(bad)  # a step with a bad loss and a bad norm counts once
        self.last_bad_step = max(self.last_bad_step, *bad) if bad else self.last_bad_step
        self.nonfinite.extend(sorted(bad), [True] * len(bad))

    def _follow_norm(self, norm: float, step: int) -> None:
        if self.worst_norm is None or norm > self.worst_norm[0]:  # of equal ones the first
            self.worst_norm = (norm, step)

    def _follow_losses(self, steps: list[int], losses: list[float], lost: list[int]) -> None:
        if losses:
            self.first_loss = losses[0] if self.first_loss is None else self.first_loss
            self.last_loss, self.last_finite_step = losses[-1], steps[-1]
            self.first_losses += losses[: EDGE - len(self.first_losses)]
            self.last_losses.extend(losses[-EDGE:])
            low = min(losses)
            self.best_loss = min(self.best_loss or (math.inf, 0), (low, steps[losses.index(low)]))
            self.first_lost_step, self.num_lost = None, 0
        if lost:
            self.first_lost_step = lost[0] if self.first_lost_step is None else self.first_lost_step
            self.num_lost += len(lost)

    def _count(self, steps: list[int], skipped: list[bool], clipped: list[bool], dropped: list[int]) -> None:
        self.num_steps += len(steps)
        self.num_skipped += sum(skipped)
        self.num_clipped += sum(clipped)
        self.num_dropped += sum(dropped)
        self.skipped.extend(steps, skipped)
        self.clipped.extend(steps, clipped)
        where = [step for step, hit in zip(steps, skipped) if hit]
        self.skips.extend(where, [True] * len(where))
        self.last_bad_step = max(self.last_bad_step, *where) if where else self.last_bad_step

    def _follow_extra(self, steps: list[int], extras: list[Any]) -> None:
        """Follow numbers such as the terms of a loss; most runs have none, and pay for one check per line."""
        if not any(extras):
            return
        for step, numbers in zip(steps, extras):
            if not isinstance(numbers, dict):
                continue
            for name, value in numbers.items():
                number = as_number(value)
                if number is None or not self._may_draw(name):
                    continue
                self.last_extra[name] = number
                self.extra[name].extend([step], [number])

    def _may_draw(self, name: str) -> bool:
        if name not in self.extra and len(self.extra) >= MAX_EXTRA:
            if len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(name)
            return False
        self.extra.setdefault(name, Curve(max_buckets=self._max_buckets))
        return True

    @property
    def num_extra_left_out(self) -> int:
        """Number of names without a curve."""
        return len(self._unknown)

    def _follow_time(self, steps: list[int], times: Numbers) -> None:
        """Sum the wall clock over the starts of a resumed run: each begins at zero."""
        at, known, _ = _split_finite(steps, times)
        if not known:
            return
        if known[0] >= self._last_time and known == sorted(known):
            offset = self.seconds - self._last_time
            totals = [offset + time for time in known]
        else:
            totals = []
            for before, time in pairwise((self._last_time, *known)):
                passed = time - before if time >= before else max(0.0, time)  # the clock went back: a start from 0
                totals.append((totals[-1] if totals else self.seconds) + passed)
        self.clock.extend(at, totals)
        self.first_time = known[0] if self.first_time is None else self.first_time
        self.seconds, self._last_time = totals[-1], known[-1]


def _split_columns(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    """Return name -> one value per line, None where a line has none."""
    try:
        return dict(zip(OURS, zip(*map(itemgetter(*OURS), rows))))
    except KeyError:
        return {name: _find_column(rows, name) for name in OURS}


def _find_column(rows: Sequence[Row], name: str) -> list[Any]:
    names = (name, *FOREIGN.get(name, ()))
    used = next((one for one in names if any(one in row for row in rows)), name)
    return [row.get(used) for row in rows]


def _as_numbers(values: Sequence[Any]) -> Numbers:
    if set(map(type, values)) <= {float, type(None)}:
        return list(values)
    return [as_number(value) for value in values]


def _take_largest(values: Sequence[Any]) -> Numbers:
    """Return the largest learning rate of each line, which is drawn; our lines hold one for each group."""
    if all(type(value) is list and len(value) == 1 for value in values):
        return _as_numbers([value[0] for value in values])
    several = (value if type(value) is list else [value] for value in values)
    known = ([rate for one in rates if (rate := as_number(one)) is not None] for rates in several)
    return [max(rates, default=None) for rates in known]


def _drop_unmeasured(norms: Numbers, skipped: list[bool]) -> Numbers:
    """Drop the norm of a batch left out after a rollback: without a backward, its 0 is not a measurement."""
    return [None if is_skipped and norm == 0 else norm for norm, is_skipped in zip(norms, skipped)]


def _multiply(norms: Numbers, coefficients: Numbers, where: list[bool]) -> Numbers:
    if not any(where):
        return [None] * len(where)
    return [
        norm * by if hit and norm is not None and by is not None else None
        for norm, by, hit in zip(norms, coefficients, where)
    ]


def _find_lost(steps: list[int], losses: Numbers) -> list[int]:
    """Return the steps since the last finite loss; by their place in the file, because a resume goes back in steps."""
    lost: list[int] = []
    for step, loss in zip(reversed(steps), reversed(losses)):
        if loss is not None:
            if math.isfinite(loss):
                break
            lost.append(step)
    return lost[::-1]


def _split_finite(steps: list[int], values: Numbers) -> tuple[list[int], list[float], set[int]]:
    """Return the finite values with their steps, and the steps whose value is not finite."""
    try:
        # One pass in C: a NaN or an Inf survives the sum; finite values that overflow it only take the slow way
        if math.isfinite(sum(values)):  # type: ignore[arg-type]
            return steps, values, set()  # type: ignore[return-value]
    except TypeError:  # some are None
        pass
    pairs = [(step, value) for step, value in zip(steps, values) if value is not None]
    finite = [(step, value) for step, value in pairs if math.isfinite(value)]
    bad = {step for step, value in pairs if not math.isfinite(value)}
    return [step for step, _ in finite], [value for _, value in finite], bad
