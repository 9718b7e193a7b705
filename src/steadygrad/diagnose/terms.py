"""A loss that is a sum -> its terms, and which of them went bad.

Named losses that the step returned are the terms. Otherwise the events behind the loss are followed through
additions and scalings of single numbers: what is left are the terms. Pure: nothing is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import CodeType
from typing import Any

from torch import Tensor

from steadygrad.diagnose.blame import Blame
from steadygrad.diagnose.expressions import read_expression
from steadygrad.diagnose.frames import read_source, spell_place
from steadygrad.diagnose.ranges import Range, RangeTable
from steadygrad.diagnose.trace import Event, Read, Trace

SUMS = ("aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub")
SCALINGS = ("aten.mul", "aten.div", "aten.neg", "aten.mul_", "aten.div_", "aten.clone", "aten._to_copy")
GATHERS = ("aten.stack", "aten.cat", "aten.sum")
MAX_TERMS = 12


def describe_named_terms(result: Any) -> tuple[str, ...]:
    """Return the scalars in a dict, tuple or object that the step returned, when there are several; bad ones first."""
    named = _name_scalars(result)
    if len(named) < 2:
        return ()
    table = RangeTable()
    slots = {name: table.add(tensor) for name, tensor in named.items()}
    table.read()
    bad_first = sorted(slots, key=lambda name: not table[slots[name]].is_nonfinite)
    return tuple(f"{name} {_spell(table[slots[name]])}" for name in bad_first)[:MAX_TERMS]


def _name_scalars(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Mapping):
        items = [(str(name), value) for name, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        items = list(zip(result._fields, result))
    elif isinstance(result, tuple | list):
        items = [(str(place), value) for place, value in enumerate(result)]
        if len(result) == 2 and isinstance(result[1], Mapping):
            items = [("loss", result[0]), *((str(name), value) for name, value in result[1].items())]
    else:
        return {}
    return {
        name: value.detach()
        for name, value in items
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    }


def describe_summed_terms(trace: Trace, blame: Blame, loss: Read) -> tuple[str, ...]:
    """Return the terms of a loss that is a sum; empty if it is not one."""
    terms = _expand(trace, blame, loss, depth=16)
    if len(terms) < 2:
        return ()
    ordered = sorted(terms, key=lambda term: not term[1].is_nonfinite)[:MAX_TERMS]
    lines = Counter(_find_line(event) for event, _ in terms)
    return tuple(f"{_spell_event(event, lines[_find_line(event)])} {_spell(range)}" for event, range in ordered)


def _expand(trace: Trace, blame: Blame, read: Read, *, depth: int) -> list[tuple[Event, Range]]:
    event = trace.events[read.writers[-1]]
    scalars = [one for one in event.reads if _is_single(trace, one)]
    if depth and event.is_scalar and scalars:
        is_sum = event.name in SUMS and len(scalars) == 2
        if is_sum or (event.name in GATHERS and len(scalars) == len(event.reads)):
            terms = [term for one in scalars for term in _expand(trace, blame, one, depth=depth - 1)]
            if not any(_is_same_call(event, term) for term, _ in terms):
                return terms
            return [(event, blame.find_range(read))]
        if event.name in SUMS or (event.name in SCALINGS and len(scalars) == 1):
            return _expand(trace, blame, scalars[0], depth=depth - 1)
    return [(event, blame.find_range(read))]


def _is_same_call(event: Event, term: Event) -> bool:
    """Whether one call of the program made both: a sum inside a library function, as cross entropy's smoothing."""
    place, other = event.place, term.place
    return place.code is not None and (place.code, place.instruction) == (other.code, other.instruction)


def _is_single(trace: Trace, read: Read) -> bool:
    event = trace.events[read.writers[-1]]
    return event.is_scalar and not event.is_given


def _find_line(event: Event) -> tuple[CodeType | None, int | None]:
    return event.place.code, event.place.line


def _spell_event(event: Event, num_on_line: int) -> str:
    place = event.place
    if place.code is None:
        return event.name
    source = read_source(place.code, place.line)
    if num_on_line > 1:  # the whole line would not tell its terms apart
        source = read_expression(place.code, place.instruction) or source
    return f"{spell_place(place.code, place.line)} {source}" if source else event.name


def _spell(range: Range) -> str:
    if range.has_nan:
        return "NaN"
    return "Inf" if range.is_nonfinite else f"{range.high:.4g}"
