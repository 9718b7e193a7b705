"""One page of the library: which failures it is about, why they happen, and code that cures them.

An `Entry` matches a `Situation` when op, phase and kind are among its own and the numbers refute no condition. `why`
holds for every match, `evidence` adds this one's numbers; together they are the text of the `Explanation`. Fixes are
Python expressions over x, eps and the like, so that a test can run them as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steadygrad.diagnose.situation import Situation

Condition = Callable[[Situation], bool]
Evidence = Callable[[Situation], str]

FORWARD = ("forward", "loss")
BACKWARD = ("backward",)
STEP = FORWARD + BACKWARD
OPTIMIZER = ("optimizer",)

NONFINITE = ("nan", "inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why it happened and what to write instead."""

    name: str
    """The entry's name: 'sqrt_at_zero'."""
    text: str
    fixes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """The fixes in words, for a tensor that the program has no name for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known about one way to fail."""

    name: str
    why: str
    """A clause that is true whatever the numbers are."""
    fixes: tuple[str, ...]
    ops: tuple[str, ...] = ()
    """Plain names as `plain_name` gives them; empty: any op."""
    phases: tuple[str, ...] = STEP
    kinds: tuple[str, ...] = NONFINITE
    """What was born first; 'error' where torch refuses to compute."""
    conditions: tuple[Condition, ...] = ()
    """All must hold. The entry with more of them is the more specific one."""
    evidence: Evidence | None = None
    advice: tuple[str, ...] = ()
    """The fixes in words; only for what was bad before any op ran."""

    @property
    def rank(self) -> tuple[bool, int]:
        """Larger is more specific: one that names the op wins, then one that asks for more."""
        # Adding a condition to an entry raises its rank: it may then win over entries that it lost to before.
        return bool(self.ops), len(self.conditions) + (len(self.kinds) == 1)

    def matches(self, situation: Situation) -> bool:
        """Whether it is about this failure."""
        if situation.phase not in self.phases or situation.kind not in self.kinds:
            return False
        if self.ops and plain_name(situation.op) not in self.ops:
            return False
        return all(holds(situation) for holds in self.conditions)

    def explain(self, situation: Situation) -> Explanation:
        """Return the reason with this failure's numbers."""
        found = self.evidence(situation) if self.evidence else ""
        text = f"{self.why} ({found})" if found else self.why
        return Explanation(name=self.name, text=text, fixes=self.fixes, advice=self.advice)


def plain_name(op: str) -> str:
    """'aten._log_softmax.default' -> 'log_softmax', 'aten.sqrt_' -> 'sqrt', 'aten._foreach_sqrt' -> 'sqrt'."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.strip("_").removeprefix("foreach_")
