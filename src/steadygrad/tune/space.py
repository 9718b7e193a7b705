"""Space: where a search looks, bounded by the results of the range test. Pure; a trial draws its settings from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from steadygrad.config import FixedNorm
from steadygrad.errors import UsageError
from steadygrad.guard.rate_curve import RateCurve
from steadygrad.tune.settings import CLIP_KINDS, Settings, widen
from steadygrad.tune.target import Target

WARMUPS = (0.0, 0.02, 0.05, 0.1, 0.2)
BETA1 = (0.8, 0.9, 0.95)
BETA2 = (0.9, 0.95, 0.98, 0.99, 0.999)
DECAYS = (1e-5, 0.3)
LOWER = 10.0
"""The lowest rate is the suggested one divided by this. None above the suggested one is tried: what wins a short
trial is too high for a long run, and the suggested rate is already corrected for that."""


class Drawer(Protocol):
    """The part of Optuna's Trial that is used."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Draw a number from a range."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Draw one of several values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bounds and choices of each searched setting."""

    names: tuple[str, ...]
    given: Settings
    rates: tuple[float, float]
    norms: tuple[float, float]
    clips: tuple[str, ...]
    precisions: tuple[str, ...]
    batches: tuple[int, ...]
    accumulations: tuple[int, ...]
    has_beta1: bool

    def draw(self, drawer: Drawer) -> Settings:
        """Draw the settings of one trial."""
        values: dict[str, Any] = {}
        for name in self.names:
            values |= getattr(self, f"_draw_{name}")(drawer)
        return dataclasses.replace(self.given, **values)

    def place(self, settings: Settings) -> dict[str, Any]:
        """Return what a trial must draw to get these settings, as far as they are inside the space."""
        wanted: dict[str, Any] = {}
        if "lr" in self.names:
            wanted["lr"] = min(max(settings.lr, self.rates[0]), self.rates[1])
        for name in ("warmup", "precision", "batch", "accumulation"):
            if name in self.names:
                wanted[name] = getattr(settings, name)
        if "weight_decay" in self.names:
            wanted["weight_decay"] = min(max(settings.weight_decay or 0.0, DECAYS[0]), DECAYS[1])
        if "clip" in self.names:
            wanted |= self._place_clip(settings)
        if "betas" in self.names:
            wanted |= {"beta2": settings.beta2, **({"beta1": settings.beta1} if self.has_beta1 else {})}
        return wanted

    def _place_clip(self, settings: Settings) -> dict[str, Any]:
        kind = "none" if settings.clip is None else settings.clip.kind
        if kind not in self.clips:
            return {}
        norm = settings.clip.max_norm if isinstance(settings.clip, FixedNorm) else None
        placed = {} if norm is None else {"clip_norm": min(max(norm, self.norms[0]), self.norms[1])}
        return {"clip": kind, **placed} if len(self.clips) > 1 else placed

    def _draw_lr(self, drawer: Drawer) -> dict[str, Any]:
        return {"lr": drawer.suggest_float("lr", *self.rates, log=True)}

    def _draw_warmup(self, drawer: Drawer) -> dict[str, Any]:
        # The given value is among the choices, so that `place` can queue it
        return {"warmup": drawer.suggest_categorical("warmup", sorted({*WARMUPS, self.given.warmup}))}

    def _draw_clip(self, drawer: Drawer) -> dict[str, Any]:
        kind = drawer.suggest_categorical("clip", self.clips) if len(self.clips) > 1 else self.clips[0]
        if kind == "none":
            return {"clip": None}
        if kind != FixedNorm.kind:
            return {"clip": CLIP_KINDS[kind]()}
        return {"clip": FixedNorm(max_norm=drawer.suggest_float("clip_norm", *self.norms, log=True))}

    def _draw_weight_decay(self, drawer: Drawer) -> dict[str, Any]:
        return {"weight_decay": drawer.suggest_float("weight_decay", *DECAYS, log=True)}

    def _draw_betas(self, drawer: Drawer) -> dict[str, Any]:
        beta2 = {"beta2": drawer.suggest_categorical("beta2", sorted({*BETA2, self.given.beta2 or 0.999}))}
        if not self.has_beta1:
            return beta2
        return {"beta1": drawer.suggest_categorical("beta1", sorted({*BETA1, self.given.beta1 or 0.9})), **beta2}

    def _draw_precision(self, drawer: Drawer) -> dict[str, Any]:
        return {"precision": drawer.suggest_categorical("precision", self.precisions)}

    def _draw_batch(self, drawer: Drawer) -> dict[str, Any]:
        return {"batch": drawer.suggest_categorical("batch", self.batches)}

    def _draw_accumulation(self, drawer: Drawer) -> dict[str, Any]:
        return {"accumulation": drawer.suggest_categorical("accumulation", self.accumulations)}


def make_space(target: Target, names: Sequence[str], curve: RateCurve) -> Space:
    """Build the space of a target; raise UsageError for a setting that it does not have."""
    given, tunable = target.given, target.tunable
    check_search(target, names)
    norms = sorted(point.grad_norm for point in curve.points if not point.skipped) or [1.0]
    middle = statistics.median(norms)
    precisions = tunable.list_precisions()
    return Space(
        names=tuple(names),
        given=given,
        # A given rate above the suggested one is still searched if it was quiet in the range test
        rates=(curve.suggested / LOWER, max(curve.suggested, given.lr if given.lr <= curve.largest_quiet else 0.0)),
        norms=(max(middle / 10, 1e-6), max(middle * 4, 1e-5)),
        clips=("fixed_norm",) if target.is_recipe else ("fixed_norm", "zclip", "autoclip", "none"),
        precisions=tuple(dict.fromkeys([*precisions, given.precision or "fp32"])),
        batches=tuple(widen(given.batch, (0.5, 2, 4), tunable.num_samples)),
        accumulations=tuple(widen(given.accumulation, (0.5, 2, 4))),
        has_beta1=target.can_write("beta1"),
    )


def check_search(target: Target, names: Sequence[str]) -> None:
    """Raise UsageError for a setting that the target does not have."""
    given = target.given
    missing = {
        "betas": given.beta2 is None or not target.can_write("beta2"),
        "weight_decay": given.weight_decay is None or not target.can_write("weight_decay"),
        "batch": given.batch is None or not target.can_write("batch"),
    }
    wrong = [name for name in names if missing.get(name, not target.can_write("beta2" if name == "betas" else name))]
    if wrong:
        raise UsageError(
            f"--search names {', '.join(wrong)}, and {target.name} has no setting of that kind that could be written "
            "down. Leave it out."
        )
