"""A traced step that raised -> the values that were bad when it did, or the call that refused to compute.

torch's linear algebra refuses NaN, and programs check for it themselves (`assert torch.isfinite(loss)`): then there is
no loss and no gradient to start from. The op that raised is checked first, then the newest bad value. If all was
finite, a call that torch itself refused is named; the program's own exceptions are not ours to explain.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import FrameType

from steadygrad.diagnose.blame import Blame, Hurt
from steadygrad.diagnose.frames import TORCH, Place, StackReader
from steadygrad.diagnose.trace import Event, Read, Trace

CHECK = "aten._linalg_check_errors"
FUNCTIONAL = os.path.join("nn", "functional.py")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that raised, given finite values."""

    op: str
    place: Place
    event: Event | None = None
    """None when torch refused before it called an op."""


def find_failure(trace: Trace, blame: Blame) -> list[Hurt]:
    """Return what the exception was about, as far as values that are not finite go; empty when all were fine."""
    for event in reversed(trace.events):
        if event.failed:
            bad = [read for read in event.reads if blame.find_range(read).is_nonfinite]
            return [Hurt(f"what {event.name} was given", read, blame.find_range(read)) for read in bad]
    # A NaN anywhere before an Inf anywhere: infinities are often meant, as in masks.
    for wants_nan in (True, False):
        for event in reversed(trace.events):
            hurt = _find_bad_output(event, blame, wants_nan=wants_nan)
            if hurt is not None:
                return [hurt]
    return []


def _find_bad_output(event: Event, blame: Blame, *, wants_nan: bool) -> Hurt | None:
    for key in event.written:
        range = blame.find_output(event, key)
        if range.has_nan or (not wants_nan and range.is_nonfinite):
            return Hurt("values of the step", Read(key, (event.index,)), range)
    return None


def find_refusal(trace: Trace, stack: StackReader, error: BaseException) -> Refusal | None:
    """Return the op that raised, or the function of torch that did; None when the program did."""
    events = [event for event in trace.events if event.failed]
    if events:
        event = events[-1]
        if event.name == CHECK:  # it reads what the op that failed said about itself
            event = trace.events[event.reads[0].writers[-1]]
        forward = trace.events[event.forward] if event.in_engine and event.forward is not None else event
        return Refusal(forward.name, forward.place, event)
    frames = _find_frames(error)
    if not frames or not frames[-1].f_code.co_filename.startswith(TORCH):
        return None
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith(FUNCTIONAL)]
    public = [name for name in names if not name.startswith("_")]
    return Refusal(f"aten.{(public or [frames[-1].f_code.co_name])[-1]}", stack.read(frames[-1]))


def _find_frames(error: BaseException) -> list[FrameType]:
    """Return the frames of the traceback, outermost first."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames
