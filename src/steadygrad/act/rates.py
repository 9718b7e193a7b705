"""Rates: factors on learning rate and weight decay that hold whatever schedule runs, and are undone exactly.

A scheduler computes the next rate from its base or from the last one, so a plain `group["lr"] *= 0.5` is either gone at
its next step or counted twice. Here the schedule's own value is kept apart: `param_group["lr"]` always shows schedule x
factor, and while a scheduler steps it sees its own values again. Schedules that assign `group["lr"]` themselves are
noticed before the step. With a factor of 1 nothing is touched. One loop cannot be told apart: `group["lr"] *= 0.9` by
hand reads the scaled rate and writes it as if it were the schedule's.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from steadygrad.errors import UsageError
from steadygrad.facts import Action, Outcome

Rate = float | Tensor


@dataclass(slots=True)
class _Entry:
    """One group's rate: the schedule's own value, and what was written over it."""

    raw: Rate
    written: Rate
    version: int

    def is_ours(self, rate: Rate) -> bool:
        """Whether `rate` is the very object that was written, and nobody has changed it since.

        By identity, not by value: a schedule that halves the rate writes just what a factor of 0.5 had written.
        """
        return rate is self.written and (not isinstance(rate, Tensor) or rate._version == self.version)


@dataclass(slots=True)
class _Knob:
    """One key of the groups, multiplied by `factor`; empty `entries` mean that nothing is held."""

    key: str
    optimizers: Sequence[torch.optim.Optimizer]
    factor: float = 1.0
    entries: dict[tuple[int, int], _Entry] = field(default_factory=dict)

    def groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """Every group that has the key, under its place."""
        for o, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                if group.get(self.key) is not None:  # an optimizer may find its rate itself
                    yield (o, g), group

    def apply(self) -> None:
        """Write schedule x factor where something else stands; a factor of 1 gives the schedule's values back."""
        if self.factor == 1.0:
            self.release()
            return
        for place, group in self.groups():
            entry = self.entries.get(place)
            if entry is None or not entry.is_ours(group[self.key]):
                entry = self.entries[place] = _Entry(_copy(group[self.key]), group[self.key], -1)
                self._write(entry, group)

    def rewrite(self, factor: float) -> None:
        """Take another factor."""
        self.show_raw()
        self.factor = factor
        self.apply()

    def show_raw(self) -> None:
        """Put the schedule's own values back for the moment; `apply()` scales whatever stands there then."""
        for place, group in self.groups():
            entry = self.entries.pop(place, None)
            if entry is not None and entry.is_ours(group[self.key]):
                _assign(group, self.key, entry.raw)
        self.entries.clear()

    def release(self) -> None:
        """Undo: the schedule's own values, bit for bit."""
        self.show_raw()
        self.factor = 1.0

    def _write(self, entry: _Entry, group: dict[str, Any]) -> None:
        _assign(group, self.key, entry.raw * self.factor)
        entry.written = group[self.key]
        entry.version = entry.written._version if isinstance(entry.written, Tensor) else -1

    def numbers(self) -> dict[str, float]:
        """The rates as they stand, for the record: one number when all groups agree. Reads tensor rates."""
        values = [float(group[self.key]) for _, group in self.groups()]
        if len(set(values)) <= 1:
            return dict.fromkeys([self.key], values[0]) if values else {}
        return {f"{self.key}.{i}": value for i, value in enumerate(values)}

    def state_dict(self) -> dict[str, Any]:
        """The factor and the schedule's own values, in the order of the groups."""
        self.apply()
        return {"factor": self.factor, "raw": [_copy(self.entries[p].raw) for p, _ in self.groups() if self.entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the optimizers have already loaded the scaled values."""
        groups = list(self.groups())
        self.entries.clear()
        self.factor = float(state["factor"])
        if self.factor == 1.0:
            return
        if len(state["raw"]) != len(groups):
            raise UsageError(
                f"the saved state has the {self.key} of {len(state['raw'])} parameter groups, the optimizers have "
                f"{len(groups)}. Make the optimizers with the groups that they were saved with, and load them first."
            )
        for (_, group), raw in zip(groups, state["raw"]):
            _assign(group, self.key, raw)
        self.apply()


@dataclass(slots=True)
class _Climb:
    """A way back to a factor of 1 in equal strides."""

    num_steps: int
    start: float
    done: int = 0

    @property
    def factor(self) -> float:
        """Where the climb is now; exactly 1 at its end."""
        return 1.0 if self.done >= self.num_steps else self.start + (1.0 - self.start) * (self.done / self.num_steps)


class Rates:
    """Scales learning rate and weight decay of these optimizers.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> rates = Rates([optimizer])
    >>> rates.scale_lr(0.5).after
    {'lr': 0.05}
    >>> rates.undo()
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._lr = _Knob("lr", self._optimizers)
        self._decay = _Knob("weight_decay", self._optimizers)
        self._ramp_steps: int | None = None
        self._climb: _Climb | None = None
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._depth = 0  # schedulers that are stepping now, one inside the other
        self._searched = False

    # --- what is asked for ------------------------------------------------------------------------------------------

    @property
    def factor(self) -> float:
        """What the schedule's learning rate is multiplied by."""
        return self._lr.factor

    @property
    def weight_decay_factor(self) -> float:
        """What the weight decay is multiplied by."""
        return self._decay.factor

    def scale_lr(self, factor: float) -> Outcome:
        """Multiply the learning rate, on top of the factor that holds already. A climb back starts anew from here."""
        return self.set_lr_factor(self._lr.factor * _check_factor(factor))

    def set_lr_factor(self, factor: float) -> Outcome:
        """Make the learning rate `factor` times the schedule's, whatever held before."""
        before = self._lr.numbers()
        self._change(self._lr, _check_factor(factor))
        self.ramp_back(self._ramp_steps)
        message = f"the learning rate is now {self._lr.factor:.6g} times its schedule"
        return Outcome(action=Action.SCALE_LR, message=message, before=before, after=self._lr.numbers())

    def scale_weight_decay(self, factor: float) -> Outcome:
        """Multiply the weight decay; a weight decay of 0 stays 0, and that is told."""
        before = self._decay.numbers()
        if not any(before.values()):
            message = "nothing was changed: the weight decay is 0, and stays 0 whatever it is multiplied by"
            return Outcome(action=Action.SCALE_WEIGHT_DECAY, message=message, before=before, after=before)
        self._change(self._decay, self._decay.factor * _check_factor(factor))
        message = f"the weight decay is now {self._decay.factor:.6g} times what it was set to"
        return Outcome(action=Action.SCALE_WEIGHT_DECAY, message=message, before=before, after=self._decay.numbers())

    def undo(self) -> None:
        """Both factors back to 1: the rates are the schedule's own again, bit for bit."""
        self._lr.release()
        self._decay.release()
        self._climb = None
        self._let_go()

    def close(self) -> None:
        """Leave the rates as they stand and let go of the schedulers: from here on they are the user's alone."""
        self._lr.entries.clear()
        self._decay.entries.clear()
        self._lr.factor = self._decay.factor = 1.0
        self._climb = None
        self._let_go()

    # --- as training goes -------------------------------------------------------------------------------------------

    def ramp_back(self, num_steps: int | None) -> None:
        """From now on a lowered learning rate climbs back over `num_steps` healthy steps; None: it stays."""
        if num_steps is not None and num_steps < 1:
            raise UsageError(f"ramp_back needs at least one step, got {num_steps}. Use None to keep the rate lowered.")
        self._ramp_steps = num_steps
        self._climb = None if num_steps is None or self.factor == 1.0 else _Climb(num_steps, self.factor)

    def healthy_step(self) -> None:
        """A step went well: a climb goes one stride on, and ends exactly at the schedule."""
        if self._climb is None:
            return
        self._climb.done += 1
        self._lr.rewrite(self._climb.factor)
        if self._lr.factor == 1.0:
            self._climb = None
            if not self._active:
                self._let_go()

    def before_step(self) -> None:
        """Right before an optimizer step: a rate that somebody assigned is the schedule's new value, and is scaled."""
        if not self._active:
            return
        if not self._searched and not all(self._is_untouched(knob) for knob in (self._lr, self._decay)):
            self._searched = True  # once: a loop that assigns its rates does it at every step
            self._find_schedulers()  # perhaps one that was made after the factor
        for knob in (self._lr, self._decay):
            if knob.factor != 1.0:
                knob.apply()

    @contextlib.contextmanager
    def around_scheduler(self) -> Iterator[None]:
        """Inside, the groups hold the schedule's own values; afterwards what it made of them, scaled."""
        if self._depth == 0:
            self._lr.show_raw()
            self._decay.show_raw()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._lr.apply()
                self._decay.apply()

    @contextlib.contextmanager
    def keep_factors(self) -> Iterator[None]:
        """Around a rollback that loads an older state of these rates: the schedule goes back, the factors stay."""
        lr, decay, climb = self._lr.factor, self._decay.factor, self._climb
        yield
        self._change(self._lr, lr)
        self._change(self._decay, decay)
        self._climb = climb

    def state_dict(self) -> dict[str, Any]:
        """Factors, the schedule's own values, and how far a climb is. The optimizers hold the scaled values."""
        climb = self._climb
        return {
            "lr": self._lr.state_dict(),
            "weight_decay": self._decay.state_dict(),
            "climb": None if climb is None else (climb.num_steps, climb.start, climb.done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict()`. Load the optimizers and schedulers first."""
        self._lr.load_state_dict(state["lr"])
        self._decay.load_state_dict(state["weight_decay"])
        self._climb = None if state["climb"] is None else _Climb(*state["climb"])
        if self._active:
            self._find_schedulers()
        else:
            self._let_go()

    # --- schedulers that were not handed over -----------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return self._lr.factor != 1.0 or self._decay.factor != 1.0

    def _change(self, knob: _Knob, factor: float) -> None:
        knob.rewrite(factor)
        if self._active:
            self._searched = False
            self._find_schedulers()
        else:
            self._let_go()

    @staticmethod
    def _is_untouched(knob: _Knob) -> bool:
        return all(p in knob.entries and knob.entries[p].is_ours(g[knob.key]) for p, g in knob.groups() if knob.entries)

    def _find_schedulers(self) -> None:
        """Wrap the `step` of every torch scheduler of our optimizers. Walks all live objects: on incidents only."""
        self._schedulers = [ref for ref in self._schedulers if ref() is not None]
        for scheduler in _schedulers_of(self._optimizers):
            if not issubclass(type(scheduler), _Wrapped):
                _wrap(scheduler, self.around_scheduler)
                self._schedulers.append(weakref.ref(scheduler))

    def _let_go(self) -> None:
        for ref in self._schedulers:
            scheduler = ref()
            if scheduler is not None and issubclass(type(scheduler), _Wrapped):
                scheduler.__class__ = type(scheduler).__mro__[2]
        self._schedulers = []


def _schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """The torch schedulers that refer to these optimizers, by themselves or through their attributes' dict."""
    holders = gc.get_referrers(*optimizers)
    attributes = [holder for holder in holders if type(holder) is dict and "optimizer" in holder]
    if attributes:
        holders += gc.get_referrers(*attributes)
    # type(), since isinstance() asks an object for its __class__, which runs the code of lazy proxies
    found = [holder for holder in holders if issubclass(type(holder), LRScheduler)]
    ours = {id(optimizer) for optimizer in optimizers}
    return [scheduler for scheduler in found if id(scheduler.optimizer) in ours]


class _Wrapped:
    """Marks the class of a scheduler whose step is wrapped."""


def _wrap(scheduler: LRScheduler, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Give one scheduler a class of its own whose `step` runs inside `around()`.

    An attribute on the instance would go into its state_dict, and from there into checkpoints. Copies and pickles are
    of the original class.
    """
    original = type(scheduler)

    @functools.wraps(original.step)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        with around():
            original.step(self, *args, **kwargs)

    def reduce(self: LRScheduler, _protocol: int) -> tuple[Any, ...]:
        return copyreg.__newobj__, (original,), dict(self.__dict__)  # type: ignore[attr-defined]

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    body = {**names, "step": step, "__reduce_ex__": reduce}
    scheduler.__class__ = type(original.__name__, (_Wrapped, original), body)


def _assign(group: dict[str, Any], key: str, value: Rate) -> None:
    """Tensor rates stay the tensor that a captured graph may know, and are filled without a host read."""
    if isinstance(group[key], Tensor):
        group[key].copy_(value) if isinstance(value, Tensor) else group[key].fill_(value)
    else:
        group[key] = float(value) if isinstance(value, Tensor) else value


def _copy(rate: Rate) -> Rate:
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _check_factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"a rate can be multiplied by a finite number above 0, got {factor}. 0.5 halves it.")
    return float(factor)
