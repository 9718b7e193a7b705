"""How messages and views spell numbers and counts."""

from __future__ import annotations

import pytest

from steadygrad.words import spell_count, spell_share


@pytest.mark.parametrize(
    ("count", "spelled"), [(0, "no step"), (1, "1 step"), (2, "2 steps"), (999, "999 steps"), (12_000, "12,000 steps")]
)
def test_a_count_agrees_with_its_noun(count: int, spelled: str) -> None:
    assert spell_count(count, "step") == spelled


def test_a_nonzero_share_is_never_shown_as_zero() -> None:
    assert [spell_share(part, 100_000) for part in (0, 1, 50_000)] == ["0 %", "<0.1 %", "50 %"]
