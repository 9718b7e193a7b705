"""Settings: what a trial trains with, and which settings can be searched. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.config import AutoClip, FixedNorm, ZClip
from steadygrad.config.clip import ClipStrategy
from steadygrad.config.plain import build, to_plain
from steadygrad.errors import UsageError

SEARCHABLE = ("lr", "warmup", "clip", "weight_decay", "betas", "precision", "batch", "accumulation")
CLIP_KINDS = {"fixed_norm": FixedNorm, "zclip": ZClip, "autoclip": AutoClip}
"""Clip strategies that a search tries, besides no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a trial; those that are the same in all trials are None."""

    lr: float
    """Rate of the parameter group with the highest one; the others keep their ratio to it."""
    warmup: float = 0.0
    """Share of the run during which the rate rises."""
    clip: ClipStrategy | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    precision: str | None = None
    batch: int | None = None
    accumulation: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        values: dict[str, Any] = to_plain(self)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Rebuild settings from `to_dict`."""
        made = build(cls, values)
        assert isinstance(made, Settings)
        return made

    def describe(self) -> dict[str, str]:
        """Return name -> value in words, for the settings that are set."""
        words = {"lr": f"{self.lr:.3g}", "warmup": f"{self.warmup:.3g} of the run", "clip": describe_clip(self.clip)}
        for name in ("weight_decay", "beta1", "beta2"):
            if getattr(self, name) is not None:
                words[name] = f"{getattr(self, name):.4g}"
        for name in ("precision", "batch"):
            if getattr(self, name) is not None:
                words[name] = str(getattr(self, name))
        return {**words, "accumulation": str(self.accumulation)}


def describe_clip(clip: ClipStrategy | None) -> str:
    """Format a clip strategy as `norm 0.5`, `zclip` or `none`."""
    if clip is None:
        return "none"
    return f"norm {clip.max_norm:.3g}" if isinstance(clip, FixedNorm) else clip.kind


def read_search(text: str) -> tuple[str, ...]:
    """Split 'lr,clip' into names; raise UsageError for one that cannot be searched."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in SEARCHABLE]
    if unknown or not names:
        raise UsageError(
            f"--search got {', '.join(unknown) or 'nothing'}, which cannot be searched. Use some of: "
            f"{','.join(SEARCHABLE)}."
        )
    return names


def find_changed(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ."""
    a, b = before.to_dict(), after.to_dict()
    return [name for name in a if a[name] != b[name]]


def widen(value: int | None, factors: Sequence[float], most: int | None = None) -> list[int]:
    """Return multiples of a number as integers, including the number itself."""
    if value is None:
        return []
    made = sorted({max(1, round(value * factor)) for factor in (*factors, 1)})
    return [one for one in made if most is None or one <= max(most, value)]
