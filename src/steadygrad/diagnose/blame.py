"""The events of a traced step and where it hurts -> the Origin: the event where a bad value was born.

From each hurt (a loss, a gradient, a buffer) the way goes back along values that are not finite: a NaN comes from a NaN
if there was one, else from an Inf. An event that made it from finite values is where it was born. Infinities that a
program writes down itself (a mask's -inf, a scalar argument, an observer's first range) are legitimate: a NaN made from
those alone was born where it became NaN. The earliest birth is to blame. Pure: numbers and indices, nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from steadygrad.diagnose.ranges import FINITE, Range, RangeTable
from steadygrad.diagnose.trace import Event, Read

WORKSPACES = ("aten._ctc_loss", "aten._cudnn_ctc_loss", "aten._scaled_dot_product")
"""Ops whose outputs after the first hold infinities by design: log-probabilities, log-sums."""
TAKES_MINUS_INF = ("softmax", "logsumexp", "scaled_dot_product", "sub", "exp", "logcumsumexp", "logaddexp", "rsub")
"""Ops, by a part of their name, that are given -inf on purpose, and fail when nothing else is there."""


MOST_HURTS = 16
"""About how many gradients, and at most how many other hurts, are traced back one by one."""


@dataclass(frozen=True, slots=True)
class Hurt:
    """Something that the step left behind and that is not finite."""

    name: str
    """'loss', 'gradient of fc.weight', 'buffer bn.running_mean'."""
    read: Read
    range: Range


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bad value was born, and its way to where it hurts."""

    event: Event
    range: Range
    """Range of the event's output."""
    hurt: Hurt
    path: tuple[int, ...]
    """Events from the birth to the hurt."""
    source: Event | None = None
    """For a NaN made of legitimate infinities: the event that wrote those."""
    turned: Event | None = None
    """For an Inf that became a NaN later: the event where it did."""


class Blame:
    """Finds Origins among the events of one trace."""

    def __init__(self, events: Sequence[Event], ranges: RangeTable) -> None:
        self._events, self._ranges = events, ranges
        self._of_reads: dict[int, Range] = {}  # what was merged once; reads and events live as long as the trace
        self._of_events: dict[int, Range] = {}

    def find_origin(self, hurts: Iterable[Hurt], accepts: Callable[[Origin], bool] = lambda _: True) -> Origin | None:
        """Return the earliest birth that reached one of `hurts`, of those that `accepts` is true for."""
        origins = [origin for hurt in _choose_hurts(list(hurts)) if (origin := self._trace_back(hurt)) is not None]
        return min(filter(accepts, origins), key=self._rank, default=None)

    def find_range(self, read: Read) -> Range:
        """Return the range of what was read."""
        if read.slot is not None:
            return self._ranges[read.slot]
        found = self._of_reads.get(id(read))
        if found is None:
            found = merge_ranges(self.find_output(self._events[writer], read.key) for writer in read.writers)
            self._of_reads[id(read)] = found
        return found

    def find_output(self, event: Event, key: int | None = None) -> Range:
        """Return the range of what an event wrote to one storage, or to all of them."""
        if key is not None:
            return self._ranges[event.written[key]] if key in event.written else FINITE
        found = self._of_events.get(event.index)
        if found is None:
            found = self._of_events[event.index] = merge_ranges(self._ranges[slot] for slot in event.written.values())
        return found

    def is_birth(self, event: Event) -> bool:
        """Whether it made a value that is not finite from finite ones."""
        made = self.find_output(event)
        return made.is_nonfinite and not event.constant and not self._find_parents(event, made)

    @staticmethod
    def _rank(origin: Origin) -> tuple[int, int]:
        """Rank an origin: a NaN from before the step explains everything; an Inf may be intended, so it comes last."""
        given = 0 if origin.range.has_nan else 2
        return (given if origin.event.is_given else 1, origin.event.index)

    def _trace_back(self, hurt: Hurt) -> Origin | None:
        """Walk from `hurt` to every birth that fed it; the earliest one that is not legitimate."""
        births: list[Origin] = []
        later: dict[int, int | None] = {}
        waiting: list[tuple[Read, int | None, bool]] = [(hurt.read, None, hurt.range.has_nan)]
        while waiting:
            read, taker, wants_nan = waiting.pop()
            for writer in self._find_bad_writers(read, wants_nan=wants_nan):
                # The first visit counts, so paths are trees and the walk ends, however often a bad value was read.
                if writer in later:
                    continue
                later[writer] = taker
                event = self._events[writer]
                made = self._find_made(event, read)
                parents = self._find_parents(event, made)
                if parents:
                    waiting += [(parent, writer, self.find_range(parent).has_nan) for parent in parents]
                else:
                    births.append(self._describe(event, made, hurt, later))
        return self._choose(births, later, hurt)

    def _find_bad_writers(self, read: Read, *, wants_nan: bool) -> list[int]:
        """Return the writers that made a value bad; all of them if none can be singled out."""
        bad = [w for w in read.writers if self._is_as_bad(self.find_output(self._events[w], read.key), wants_nan)]
        if bad or not (read.slot is None or self._ranges[read.slot].is_nonfinite):
            return bad
        unmeasured = [w for w in read.writers if self._is_unmeasured(self._events[w], read.key)]
        return unmeasured or list(read.writers[-1:])

    def _find_made(self, event: Event, read: Read) -> Range:
        """Return the range of what an event wrote, as far as it was read."""
        return self.find_range(read) if self._is_unmeasured(event, read.key) else self.find_output(event, read.key)

    @staticmethod
    def _is_unmeasured(event: Event, key: int) -> bool:
        """Whether a tensor from outside was never read whole: a batch that is a slice of the dataset's memory."""
        return event.is_given and key not in event.written

    @staticmethod
    def _is_as_bad(range: Range, wants_nan: bool) -> bool:
        return range.has_nan if wants_nan else range.is_nonfinite

    def _find_parents(self, event: Event, made: Range) -> list[Read]:
        """Return the reads that can have made this output bad; empty if it was born here."""
        bad = [read for read in event.reads if self.find_range(read).is_nonfinite]
        # The Inf is the number that the program wrote: it was born here, whatever else went in.
        if event.constant and not made.has_nan:
            return []
        with_nan = [read for read in bad if self.find_range(read).has_nan]
        if made.has_nan:
            # Without a NaN among them, two infinities made it: inf - inf, 0 * inf.
            return with_nan or bad
        return [read for read in bad if not self.find_range(read).has_nan] or bad

    def _describe(self, event: Event, made: Range, hurt: Hurt, later: dict[int, int | None]) -> Origin:
        return Origin(event, made, hurt, self._follow(event.index, later), turned=self._find_turn(event, made, later))

    def _choose(self, births: list[Origin], later: dict[int, int | None], hurt: Hurt) -> Origin | None:
        """Choose the earliest unintended birth; if all were intended, the event that turned them into a NaN."""
        unmeant = [birth for birth in births if not self._is_legitimate(birth)]
        if unmeant:
            return min(unmeant, key=self._rank)
        if not births:
            return None
        first = min(births, key=lambda birth: birth.event.index)
        turn = first.turned or self._find_reduction(first)
        if turn is None:
            return first
        return Origin(turn, self.find_output(turn), hurt, self._follow(turn.index, later), source=first.event)

    def _is_legitimate(self, birth: Origin) -> bool:
        """Whether infinities were written down on purpose, or are an op's own workspace."""
        event, made = birth.event, birth.range
        if made.has_nan:
            return False
        # Not so what a custom backward or a hook makes of Python numbers: gradients have no masks.
        if event.constant and not (event.is_given and event.place.in_backward):
            return True
        if event.is_given or self._is_log_of_mask(event):
            # The log of a mask is meant for softmax, logsumexp and attention; elsewhere a log(0) is a mistake.
            parts = TAKES_MINUS_INF if event.is_given else TAKES_MINUS_INF[:3]
            turned = "" if birth.turned is None else birth.turned.name
            return made.has_only_minus_inf and any(part in turned for part in parts)
        is_workspace = event.name.startswith(WORKSPACES) and len(event.written) > 1
        return is_workspace and not self._is_first_output_bad(event)

    def _is_log_of_mask(self, event: Event) -> bool:
        """log of zeros and ones: 0 keeps, -inf hides."""
        ranges = [self.find_range(read) for read in event.reads]
        return event.name == "aten.log" and all(one.low == 0 and one.high in (0, 1) for one in ranges)

    def _is_first_output_bad(self, event: Event) -> bool:
        return self._ranges[next(iter(event.written.values()))].is_nonfinite

    def _find_turn(self, event: Event, made: Range, later: dict[int, int | None]) -> Event | None:
        """Return where, on the way to the hurt, an Inf became a NaN."""
        if made.has_nan:
            return None
        for index in self._follow(event.index, later)[1:]:
            if self.find_output(self._events[index]).has_nan:
                return self._events[index]
        return None

    def _find_reduction(self, birth: Origin) -> Event | None:
        """Return where a value that was meant to be left out went into the loss."""
        events = (self._events[index] for index in birth.path)
        return next((event for event in events if event.is_scalar and not event.is_given), None)

    @staticmethod
    def _follow(index: int, later: dict[int, int | None]) -> tuple[int, ...]:
        path = [index]
        following = later.get(index)
        while following is not None:
            path.append(following)
            following = later.get(following)
        return tuple(path)


def _choose_hurts(hurts: list[Hurt]) -> list[Hurt]:
    """Choose a few hurts: a NaN in backward reaches hundreds of gradients along one path, so some are enough.

    The first bad ones are closest to the birth; a few of the others, evenly spaced, cover separate births.
    """
    if len(hurts) <= MOST_HURTS:
        return hurts
    gradients = [hurt for hurt in hurts if hurt.name.startswith("gradient")]
    others = [hurt for hurt in hurts if not hurt.name.startswith("gradient")]
    # Backward writes the gradient next to the birth first, so the lowest event is the closest.
    ordered = sorted(gradients, key=lambda hurt: max(hurt.read.writers, default=-1))
    half = MOST_HURTS // 2
    rest = ordered[half:]
    return [*others[:MOST_HURTS], *ordered[:half], *rest[:: max(1, len(rest) // half)]]


def merge_ranges(ranges: Iterable[Range]) -> Range:
    """Return the range of several tensors together; NaN wins."""
    low, high = float("inf"), float("-inf")
    for one in ranges:
        if one.has_nan:  # before min() and max(), which keep or drop a NaN by its place
            return one
        low, high = min(low, one.low), max(high, one.high)
    return Range(low, high) if low <= high else FINITE
