"""Lines of steps.jsonl as the recorder writes them -> columns of numbers, without building an object for each line.

Half the time of reading a million steps as JSON. A line in any other form, with numbers of the program for example,
makes the whole batch None: then JSON reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Numbers = list[float | None]

_NUMBER = rb'"?([^,"\]}]+)"?'
_LINE = re.compile(
    rb'\{"step":(\d{1,15}),"loss":'
    + _NUMBER
    + rb',"grad_norm":'
    + _NUMBER
    + rb',"clip_coefficient":'
    + _NUMBER
    + rb',"clipped":(true|false),"skipped":(true|false),"num_nonfinite":\d+,"learning_rates":\['
    + _NUMBER
    + rb'\],"loss_scale":'
    + _NUMBER
    + rb',"num_microbatches":\d+,"num_dropped_microbatches":(\d+),"time_seconds":'
    + _NUMBER
    + rb'(?:,"run":"[^"]*")?\}\n'
)
_NULL = b"null"


@dataclass(frozen=True, slots=True)
class StepLines:
    """Some steps, column by column."""

    steps: list[int]
    loss: Numbers
    grad_norm: Numbers
    clip_coefficient: Numbers
    clipped: list[bool]
    skipped: list[bool]
    learning_rate: Numbers
    loss_scale: Numbers
    num_dropped: list[int]
    time_seconds: Numbers

    def __len__(self) -> int:
        return len(self.steps)


def read_step_lines(text: bytes) -> StepLines | None:
    """Return the columns of complete lines; None unless every line has the usual form, with one learning rate."""
    rows = _LINE.findall(text)
    # findall skips what does not match: only the count shows that a line was left out
    if not rows or len(rows) != text.count(b"\n"):
        return None
    steps, loss, norm, clip, clipped, skipped, rate, scale, dropped, time = zip(*rows)
    try:
        return StepLines(
            steps=list(map(int, steps)),
            loss=_read(loss),
            grad_norm=_read(norm),
            clip_coefficient=_read(clip),
            clipped=[one == b"true" for one in clipped],
            skipped=[one == b"true" for one in skipped],
            learning_rate=_read(rate),
            loss_scale=_read(scale),
            num_dropped=[0] if set(dropped) == {b"0"} else list(map(int, dropped)),  # only ever summed
            time_seconds=_read(time),
        )
    except ValueError:  # a word where a number belongs
        return None


def _read(column: tuple[bytes, ...]) -> Numbers:
    """Return the numbers of a column; most hold no null, or nothing else."""
    if _NULL in column:
        return [None if one == _NULL else float(one) for one in column]
    if column.count(column[0]) == len(column):
        return [float(column[0])] * len(column)
    return list(map(float, column))
