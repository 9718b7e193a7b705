"""Rates: factors on learning rate and weight decay that apply only while the optimizer steps.

Just before `optimizer.step()` the rate of every group is multiplied; just after it, even if the step raises, the
original number is restored. So `param_groups` always shows the user's own numbers, and code that changes them, a
scheduler or `group["lr"] *= 0.999` by hand, never sees the factor. With a factor of 1 nothing is touched.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.facts import Action, Outcome

Rate = float | Tensor


@dataclass(slots=True)
class _Held:
    """One rate while it is multiplied."""

    group: dict[str, Any]
    key: str
    factor: float
    own: Rate
    scaled: Rate
    version: int

    def put_back(self) -> None:
        """Restore the user's number, bit for bit. If the optimizer wrote its own rate, keep that, unscaled."""
        now = self.group.get(self.key)
        if now is not self.scaled or _version(now) != self.version:
            _assign(self.group, self.key, None if now is None else now / self.factor)
        else:
            _assign(self.group, self.key, self.own)


@dataclass(slots=True)
class _Knob:
    """One key of the groups and its factor."""

    key: str
    optimizers: Sequence[torch.optim.Optimizer]
    factor: float = 1.0

    def groups(self) -> list[dict[str, Any]]:
        """Return every group that has the key; some optimizers choose their rate themselves."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [group for group in groups if group.get(self.key) is not None]

    @torch.no_grad()
    def hold(self) -> Iterator[_Held]:
        """Multiply the rates. Tensors are changed in place: captured graphs may use them, and groups may share them."""
        seen: set[int] = set()
        for group in self.groups():
            rate = group[self.key]
            if isinstance(rate, Tensor) and id(rate) in seen:
                continue
            seen.add(id(rate))
            # A clone: dividing by the factor later would not give back the same bits.
            own = rate.detach().clone() if isinstance(rate, Tensor) else rate
            _assign(group, self.key, rate * self.factor)
            yield _Held(group, self.key, self.factor, own, group[self.key], _version(group[self.key]))

    def numbers(self) -> dict[str, float]:
        """Return the next step's rates for the record: one number if all groups agree. Tensor rates are read."""
        values = [float(group[self.key] * self.factor) for group in self.groups()]
        if len(set(values)) <= 1:
            return dict.fromkeys([self.key], values[0]) if values else {}
        return {f"{self.key}.{i}": value for i, value in enumerate(values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the factor. Older checkpoints hold scaled groups, with the user's own numbers next to the factor."""
        own, groups = state.get("raw") or [], self.groups()
        if own and len(own) != len(groups):
            raise UsageError(
                f"the saved state has the {self.key} of {len(own)} parameter groups, the optimizers have "
                f"{len(groups)}. Create the optimizers with the groups that they were saved with, and load them first."
            )
        self.factor = float(state["factor"])
        for group, rate in zip(groups, own):
            _assign(group, self.key, rate)


@dataclass(slots=True)
class _Climb:
    """A gradual return to a factor of 1 in equal increments."""

    num_steps: int
    start: float
    done: int = 0

    @property
    def factor(self) -> float:
        """The current factor; exactly 1 at the end."""
        return 1.0 if self.done >= self.num_steps else self.start + (1.0 - self.start) * (self.done / self.num_steps)


class _HeldRates:
    """The time of one `optimizer.step()`. Not a generator: it is made at every step, and mostly holds nothing."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], knobs: Sequence[_Knob], owner: Rates) -> None:
        self._optimizers, self._knobs, self._owner = optimizers, knobs, owner
        self._held: list[_Held] = []
        self._before: list[tuple[torch.optim.Optimizer, dict[str, Any], Any]] = []

    def __enter__(self) -> None:
        try:
            for knob in self._knobs:
                # extend() keeps what the generator gave before an error, so that is put back too.
                self._held.extend(knob.hold())
        except BaseException:
            self._put_back()
            raise
        self._before = [(o, group, group.get("lr")) for o in self._optimizers for group in o.param_groups]

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            # By identity, and before the rates are put back: an optimizer that writes its rate leaves another object.
            writers = [optimizer for optimizer, group, rate in self._before if group.get("lr") is not rate]
            if writers:
                self._owner.note_writers(writers)
        if self._held:
            self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        for one in self._held:
            one.put_back()


class Rates:
    """Scales learning rate and weight decay of these optimizers.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> rates = Rates([optimizer])
    >>> rates.scale_lr(0.5).after
    {'lr': 0.05}
    >>> with rates.held():
    ...     optimizer.param_groups[0]["lr"]
    0.05
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._lr = _Knob("lr", self._optimizers)
        self._decay = _Knob("weight_decay", self._optimizers)
        self._ramp_steps: int | None = None
        self._climb: _Climb | None = None
        self._own_writers: set[int] = set()

    @property
    def factor(self) -> float:
        """What the user's learning rate is multiplied by."""
        return self._lr.factor

    @property
    def weight_decay_factor(self) -> float:
        """What the weight decay is multiplied by."""
        return self._decay.factor

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rate of each group as the next step uses it; NaN for a group without one."""
        rates = [group.get("lr") for optimizer in self._optimizers for group in optimizer.param_groups]
        factor = self._lr.factor
        # At every step: float() waits for the device if a rate is a tensor there.
        return tuple([math.nan if rate is None else float(rate * factor) for rate in rates])

    def find_bad(self, rates: Sequence[float]) -> dict[int, float]:
        """Return those of `learning_rates()` that are NaN or Inf, by the position of their group."""
        if all(map(math.isfinite, rates)):  # nearly always
            return {}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        given = [(place, rate) for place, rate in enumerate(rates) if groups[place].get("lr") is not None]
        return {place: rate for place, rate in given if not math.isfinite(rate)}

    def list_settings(self) -> tuple[tuple[float, float], ...]:
        """Return learning rate and weight decay of every group, as a step would use them now."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        decays = [float(group.get("weight_decay") or 0.0) * self.weight_decay_factor for group in groups]
        return tuple((0.0 if math.isnan(rate) else rate, decay) for rate, decay in zip(self.learning_rates(), decays))

    def held(self) -> _HeldRates:
        """Wrap around `optimizer.step()`: inside, the groups hold the user's numbers times the factors."""
        is_scaled = self._lr.factor != 1.0 or self._decay.factor != 1.0
        knobs = [knob for knob in (self._lr, self._decay) if knob.factor != 1.0] if is_scaled else ()
        return _HeldRates(self._optimizers, knobs, self)

    def note_writers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Remember optimizers that were seen writing their own learning rate."""
        self._own_writers.update(map(id, optimizers))

    def is_written_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer was seen writing its own learning rate, which is then part of its state."""
        return id(optimizer) in self._own_writers

    def scale_lr(self, factor: float) -> Outcome:
        """Multiply the learning rate, on top of the current factor. A gradual return restarts from here."""
        return self.set_lr_factor(self._lr.factor * _check_factor(factor))

    def set_lr_factor(self, factor: float) -> Outcome:
        """Make the learning rate `factor` times the user's, whatever the factor was before."""
        before = self._lr.numbers()
        self._lr.factor = _check_factor(factor)
        self.ramp_back(self._ramp_steps)
        message = f"the learning rate is now {self._lr.factor:.6g} times its schedule"
        return Outcome(action=Action.SCALE_LR, message=message, before=before, after=self._lr.numbers())

    def scale_weight_decay(self, factor: float) -> Outcome:
        """Multiply the weight decay; a weight decay of 0 stays 0, and the outcome says so."""
        before = self._decay.numbers()
        if not any(before.values()):
            message = "nothing was changed: the weight decay is 0, and stays 0 whatever it is multiplied by"
            return Outcome(action=Action.SCALE_WEIGHT_DECAY, message=message, before=before, after=before)
        self._decay.factor *= _check_factor(factor)
        message = f"the weight decay is now {self._decay.factor:.6g} times what it was set to"
        return Outcome(action=Action.SCALE_WEIGHT_DECAY, message=message, before=before, after=self._decay.numbers())

    def undo(self) -> None:
        """Reset both factors to 1."""
        self._lr.factor = self._decay.factor = 1.0
        self._climb = None

    def ramp_back(self, num_steps: int | None) -> None:
        """Return a lowered learning rate to its schedule over the next `num_steps` healthy steps; None: keep it low."""
        if num_steps is not None and num_steps < 1:
            raise UsageError(f"ramp_back needs at least one step, got {num_steps}. Use None to keep the rate lowered.")
        self._ramp_steps = num_steps
        self._climb = None if num_steps is None or self.factor == 1.0 else _Climb(num_steps, self.factor)

    def healthy_step(self) -> None:
        """Count a healthy step: a gradual return advances by one increment, and ends exactly at 1."""
        if self._climb is None:
            return
        self._climb.done += 1
        self._lr.factor = self._climb.factor
        if self._lr.factor == 1.0:
            self._climb = None

    @contextlib.contextmanager
    def keep_factors(self) -> Iterator[None]:
        """Keep the factors across a rollback that loads an older state of these rates."""
        kept = self._lr.factor, self._decay.factor, self._climb
        yield
        self._lr.factor, self._decay.factor, self._climb = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the factors and the progress of a gradual return."""
        climb = self._climb
        return {
            "lr": {"factor": self._lr.factor},
            "weight_decay": {"factor": self._decay.factor},
            "climb": None if climb is None else (climb.num_steps, climb.start, climb.done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned. Load the optimizers first."""
        self._lr.load_state_dict(state["lr"])
        self._decay.load_state_dict(state["weight_decay"])
        self._climb = None if state["climb"] is None else _Climb(*state["climb"])


def _assign(group: dict[str, Any], key: str, value: Rate | None) -> None:
    """Write a rate; a tensor is filled without a host read."""
    if not isinstance(group.get(key), Tensor):
        group[key] = float(value) if isinstance(value, Tensor) else value
    elif value is not None:
        group[key].copy_(value) if isinstance(value, Tensor) else group[key].fill_(value)


def _version(rate: Any) -> int:
    return int(rate._version) if isinstance(rate, Tensor) else 0


def _check_factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"a rate can be multiplied by a finite number above 0, got {factor}. 0.5 halves it.")
    return float(factor)
