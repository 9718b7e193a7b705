"""The interface of the rules: a Fact comes in, Findings go out. Pure Python, no torch, no clock, no side effect.

A rule never sees the tensors, never changes training and must not be blinded by what it looks for: histories live in
`stats.Baseline` and similar classes, which admit finite values only. A rule handles the kinds of Fact that it knows and
ignores the others. `rule` makes one out of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, Reading, Severity


class Rule(Protocol):
    """One rule. `name` keys its state in a checkpoint, and is the kind of its Findings."""

    @property
    def name(self) -> str:
        """The rule's name."""
        ...

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return the Findings about this Fact; Readings come in order of their steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the history, as plain numbers and lists."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        ...


Judgement = Callable[[Reading], "Finding | str | None"]


class FunctionRule(Remembering):
    """A rule made of a function that looks at one Reading."""

    def __init__(self, name: str, function: Judgement, *, severity: Severity, advice: str) -> None:
        self.name, self._function, self._severity, self._advice = name, function, severity, advice

    def __call__(self, reading: Reading) -> Finding | str | None:
        """The function itself, still callable by its name."""
        return self._function(reading)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return the function's Finding, or one made from the message that it returned."""
        said = self._function(fact) if isinstance(fact, Reading) else None
        if isinstance(said, Finding):
            yield said
        elif said and isinstance(fact, Reading):
            yield Finding(kind=self.name, severity=self._severity, step=fact.step, message=said, advice=self._advice)


def rule(name: str, *, severity: Severity = Severity.WARNING, advice: str = "") -> Callable[[Judgement], FunctionRule]:
    """Turn a function from a Reading to a message, a Finding or None into a rule.

    >>> @rule("tiny_learning_rate")
    ... def tiny_learning_rate(reading):
    ...     if max(reading.learning_rates) < 1e-9:
    ...         return f"the learning rate is {max(reading.learning_rates):g}"
    >>> tiny_learning_rate.name
    'tiny_learning_rate'
    """
    return lambda function: FunctionRule(name, function, severity=severity, advice=advice)
