"""LayerMap: one number for each parameter at some steps -> a table, parameter by step bucket, of its logarithm.

A cell is the mean of the logarithms in its bucket, unless one value there is ten times off: then it is that value, so
that a spike of one step shows in a run of a million. Zero, which has no logarithm, is drawn at the bottom of the scale.
A cell in which a value was not finite keeps the number of the others, and is listed apart. Large models are folded: the
parameters of a module become one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import add

MAX_COLUMNS = 240
MAX_ROWS = 160
ZERO_EXPONENT = -12.0
"""Exponent at which zero and anything smaller is drawn: far below fp16's smallest number, 6e-8."""
FAR = 1.0
"""A value this many powers of ten off its bucket's mean is shown instead of the mean."""


class _Column:
    """Cells of one bucket, by position in the list of names; lists, because looping over them is fast."""

    __slots__ = ("bad", "counts", "highs", "lows", "sums")

    def __init__(self, size: int) -> None:
        self.sums, self.counts, self.bad = [0.0] * size, [0] * size, [0] * size
        self.lows, self.highs = [math.inf] * size, [-math.inf] * size

    def grow(self, size: int) -> None:
        if size == len(self.sums):
            return
        more = _Column(size - len(self.sums))
        for name in self.__slots__:
            getattr(self, name).extend(getattr(more, name))

    def add_all(self, exponents: list[float]) -> None:
        """Add one exponent to each cell."""
        # map stops at the shorter list: `exponents` must have one for every position
        self.sums = list(map(add, self.sums, exponents))
        self.counts = [count + 1 for count in self.counts]
        self.lows = list(map(min, self.lows, exponents))
        self.highs = list(map(max, self.highs, exponents))

    def add(self, position: int, value: float) -> None:
        if not math.isfinite(value):
            self.bad[position] += 1
            return
        exponent = _take_log(value)
        self.sums[position] += exponent
        self.counts[position] += 1
        self.lows[position] = min(self.lows[position], exponent)
        self.highs[position] = max(self.highs[position], exponent)

    def join(self, other: _Column) -> None:
        size = max(len(self.sums), len(other.sums))
        self.grow(size)
        other.grow(size)
        self.sums = list(map(add, self.sums, other.sums))
        self.counts = list(map(add, self.counts, other.counts))
        self.bad = list(map(add, self.bad, other.bad))
        self.lows = list(map(min, self.lows, other.lows))
        self.highs = list(map(max, self.highs, other.highs))

    def move(self, places: list[int], size: int) -> _Column:
        """Return a column whose cells stand at other positions."""
        moved = _Column(size)
        for name in self.__slots__:
            for value, place in zip(getattr(self, name), places):
                getattr(moved, name)[place] = value
        return moved

    def show(self, positions: list[int]) -> float | None:
        """Return the number of one cell, or of several folded into one; None if no value was finite."""
        known = [i for i in positions if i < len(self.sums) and self.counts[i]]
        if not known:
            return None
        if len(known) > 1:
            return max(self.highs[i] for i in known)  # their mean would hide one that explodes
        (i,) = known
        mean, low, high = self.sums[i] / self.counts[i], self.lows[i], self.highs[i]
        if max(high - mean, mean - low) <= FAR:
            return mean
        return high if high - mean >= mean - low else low

    def is_bad(self, positions: list[int]) -> bool:
        """Return whether a value of the cell, or of several folded into one, was not finite."""
        return any(i < len(self.bad) and self.bad[i] for i in positions)


class LayerMap:
    """Sums, extremes and bad values of each cell, widened like a Curve."""

    def __init__(self, *, max_columns: int = MAX_COLUMNS) -> None:
        self._max_columns = max_columns
        self.width = 1
        self._columns: dict[int, _Column] = {}
        self._positions: dict[str, int] = {}
        self._usual: Sequence[str] | None = None  # the list that was last seen to hold exactly these names

    def add(self, step: int, names: Sequence[str], values: Sequence[float]) -> None:
        """Add the numbers of one step; NaN and Inf mean that something was not finite there."""
        # Identity is safe because `_usual` keeps the list alive, so that no other one can have its address
        if names is not self._usual:
            for name in names:
                self._positions.setdefault(name, len(self._positions))
            self._usual = names if list(names) == list(self._positions) else None
        column = self._columns.get(step // self.width)
        if column is None:
            column = self._columns[step // self.width] = _Column(len(self._positions))
        column.grow(len(self._positions))
        # min() may miss a NaN, the sum cannot; a sum that overflows only takes the slow way
        if self._usual is not None and min(values, default=0.0) > 0 and math.isfinite(sum(values)):
            column.add_all([max(ZERO_EXPONENT, exponent) for exponent in map(math.log10, values)])
        else:
            for name, value in zip(names, values):
                column.add(self._positions[name], value)
        while len(self._columns) > self._max_columns:
            self._widen()

    def _widen(self) -> None:
        joined: dict[int, _Column] = {}
        for key, column in self._columns.items():
            other = joined.setdefault(key >> 1, column)
            if other is not column:
                other.join(column)
        self._columns = joined
        self.width *= 2

    def join(self, other: LayerMap) -> None:
        """Add all that another map holds, whatever the order of its names."""
        while self.width != other.width:
            (self if self.width < other.width else other)._widen()
        self._usual = None  # positions change below
        places = [self._positions.setdefault(name, len(self._positions)) for name in other.names]
        for key, column in other._columns.items():
            moved = column if places == list(range(len(places))) else column.move(places, len(self._positions))
            mine = self._columns.setdefault(key, moved)  # may be the other map's own column: that map is used up here
            if mine is not moved:
                mine.join(moved)
        while len(self._columns) > self._max_columns:
            self._widen()

    @property
    def names(self) -> list[str]:
        """Every parameter, in the order of the model."""
        return list(self._positions)

    @property
    def steps(self) -> list[int]:
        """The first step of each column."""
        return [key * self.width for key in sorted(self._columns)]

    def rows(self, *, max_rows: int = MAX_ROWS) -> dict[str, list[float | None]]:
        """Return row name -> its exponents by column: None without a finite value."""
        return {row: [column.show(several) for column in columns] for row, several, columns in self._fold(max_rows)}

    def bad_columns(self, *, max_rows: int = MAX_ROWS) -> dict[str, list[int]]:
        """Return row name -> the columns in which a value was not finite, for rows that have any."""
        found = (
            (row, [i for i, column in enumerate(columns) if column.is_bad(several)])
            for row, several, columns in self._fold(max_rows)
        )
        return {row: bad for row, bad in found if bad}

    def _fold(self, max_rows: int) -> Iterator[tuple[str, list[int], list[_Column]]]:
        columns = [self._columns[key] for key in sorted(self._columns)]
        for row, names in fold_names(self.names, max_rows).items():
            yield row, [self._positions[name] for name in names], columns

    def worst(self, count: int) -> list[tuple[str, float]]:
        """Return the parameters with the largest exponents in the last column, non-finite ones first."""
        if not self._columns:
            return []
        last = self._columns[max(self._columns)]
        shown = (
            (name, math.inf if last.is_bad([position]) else last.show([position]))
            for name, position in self._positions.items()
        )
        known = [(name, exponent) for name, exponent in shown if exponent is not None]
        return sorted(known, key=lambda pair: -pair[1])[:count]

    def __bool__(self) -> bool:
        return bool(self._positions)


def fold_names(names: list[str], max_rows: int) -> dict[str, list[str]]:
    """Return row name -> its parameters: a row for each, or for as much of their path as `max_rows` allows."""
    folds = {name: [name] for name in names}
    depth = max((name.count(".") for name in names), default=0)
    while len(folds) > max_rows and depth > 0:
        folds = {}
        for name in names:
            folds.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        depth -= 1
    if len(folds) <= max_rows:
        return folds
    size = math.ceil(len(names) / max_rows)  # their names offer nothing to fold by
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    return {group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}": group for group in groups}


def _take_log(value: float) -> float:
    return max(ZERO_EXPONENT, math.log10(value)) if value > 0 else ZERO_EXPONENT
