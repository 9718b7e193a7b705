"""The seam of the rules: a Reading comes in, Findings go out. Pure Python, no torch, no clock, no side effect.

A rule never sees the tensors, never changes training and must not be blinded by what it looks for: histories live in
`stats.Baseline`, which admits finite values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from steadygrad.facts import Finding, Reading


class Rule(Protocol):
    """One rule. `name` keys its state in a checkpoint."""

    name: str

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """What there is to say about this step; Readings come in order of their steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The history, as plain numbers and lists."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the history of `state_dict()`."""
        ...
