"""What rules remember, and how it is saved: every part goes into a checkpoint as plain numbers and lists.

`Remembering` saves the attributes that a class names. `Episode` keeps an ongoing condition from being reported at every
step, `Streak` counts how long it has lasted and where it began, `Keyed` holds one history per name.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from steadygrad.facts import Reading


class HasState(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict()`."""
        ...


T = TypeVar("T", bound=HasState)
PLAIN = frozenset({float, int, bool, str, type(None)})
"""What needs no conversion."""


class Remembering:
    """Base class for anything with a history: `memory` names its attributes. Not for use by itself."""

    memory: ClassVar[tuple[str, ...]] = ()
    _keys: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Each of those attributes, and the key that it is saved under."""
    hears: ClassVar[tuple[type, ...]] = ()
    """For a rule: the kinds of Fact that it takes; empty means all."""
    hears_plain: ClassVar[bool] = True
    """For a rule: whether a Reading that `is_plain` can matter to it. Nearly all are, so this is most of the cost."""

    def passes(self, _reading: Reading) -> bool:
        """For a rule: take in a plain Reading that it has nothing to say about, as `observe` would, only quicker.

        Return False, having taken in nothing, wherever that is not certain at once: `observe` then gets the Reading.
        """
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "observe" in vars(cls) and "passes" not in vars(cls):
            cls.passes = Remembering.passes  # type: ignore[method-assign]  # a base's quick way belongs to its observe
        keys: dict[str, str] = {}
        for name in cls.memory:
            other = keys.setdefault(name.lstrip("_"), name)
            if other != name:
                raise TypeError(
                    f"{other} and {name} in {cls.__qualname__}.memory would be saved under one key, "
                    f"{name.lstrip('_')!r}, and one of them lost. Rename one."
                )
        cls._keys = tuple((name, key) for key, name in keys.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the history, as plain numbers and lists, none of which the rule goes on using."""
        # Every snapshot saves some four hundred of them, nearly all plain.
        return {key: value if type(value := getattr(self, name)) in PLAIN else _save(value) for name, key in self._keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned. Attributes that an earlier version did not save stay as they are."""
        for name in self.memory:
            if name.lstrip("_") in state:
                setattr(self, name, _load(getattr(self, name), state[name.lstrip("_")]))


def _save(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, set):
        return sorted(value)  # the order of a set of str differs from process to process
    if isinstance(value, list | tuple | deque):
        # Most are thousands of numbers, and every snapshot saves them.
        return list(value) if PLAIN.issuperset(map(type, value)) else [_save(item) for item in value]
    if isinstance(value, dict):
        return {key: _save(item) for key, item in value.items()}
    return value


def _load(current: Any, saved: Any) -> Any:
    if hasattr(current, "load_state_dict"):
        # In place: the rule built this part with its configuration, which is not saved
        current.load_state_dict(saved)
        return current
    if isinstance(current, deque):
        return deque(saved, current.maxlen)  # the length of the present configuration, not of the saved one
    if isinstance(current, set | list | dict):
        # Rules change these in place, and a snapshot may be loaded more than once
        return type(current)(copy.deepcopy(saved))
    return saved


class Episode(Remembering):
    """Decides whether to report a condition now: once when it begins, and again every `repeat_after` steps.

    A condition that comes back within `quiet` steps has not ended. Steps may be any number that only grows.
    """

    memory = ("_told", "_last")

    def __init__(self, repeat_after: int, *, quiet: int = 0) -> None:
        self._repeat_after, self._quiet = repeat_after, quiet
        self._told: int | None = None
        self._last: int | None = None

    def is_due(self, step: int, active: bool) -> bool:
        """Return whether to report the condition at this step, given whether it holds."""
        if not active:
            return False
        # Consecutive steps differ by 1, which is not a gap
        begins = self._last is None or step - self._last > self._quiet + 1
        self._last = step
        if begins or self._told is None or step - self._told >= self._repeat_after:
            self._told = step
            return True
        return False


class Streak(Remembering):
    """How many times in a row a condition has held, and the step at which it began."""

    memory = ("length", "start")

    def __init__(self) -> None:
        self.length = 0
        self.start = 0

    def feed(self, step: int, active: bool) -> int:
        """Count this step, and return how long the condition has held."""
        if not active:
            self.length = 0
            return 0
        if self.length == 0:
            self.start = step
        self.length += 1
        return self.length


class Keyed(Generic[T]):
    """One history per name, created on first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._parts: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            self._parts[name] = self._make()
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return each name's history."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the histories of `state_dict()`, and forget others."""
        self._parts = {}
        for name, part in state.items():
            self[name].load_state_dict(part)
