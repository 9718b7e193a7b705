"""Readings -> clip coefficient, on the device. One file per strategy; `build_clipper` builds one from its settings."""

from collections.abc import Callable
from typing import Any

from steadygrad.clip.adagc import AdaGCClipper
from steadygrad.clip.adaptive_unit import AdaptiveUnitClipper
from steadygrad.clip.autoclip import AutoClipper
from steadygrad.clip.base import Clipper
from steadygrad.clip.fixed_norm import FixedNormClipper
from steadygrad.clip.outliers import OutlierClipper
from steadygrad.clip.value import ValueClipper
from steadygrad.clip.zclip import ZClipper
from steadygrad.config import AdaGC, AdaptiveUnitClip, AutoClip, ClipStrategy, ClipValue, FixedNorm, OutlierClip, ZClip

__all__ = ["Clipper", "build_clipper"]

_CLIPPERS: dict[type, Callable[[Any], Clipper]] = {
    FixedNorm: FixedNormClipper,
    OutlierClip: OutlierClipper,
    ClipValue: ValueClipper,
    ZClip: ZClipper,
    AutoClip: AutoClipper,
    AdaptiveUnitClip: AdaptiveUnitClipper,
    AdaGC: AdaGCClipper,
}


def build_clipper(settings: ClipStrategy) -> Clipper:
    """Build the device state that carries out `settings`."""
    try:
        build = _CLIPPERS[type(settings)]
    except KeyError:
        known = ", ".join(kind.__name__ for kind in _CLIPPERS)
        raise TypeError(f"no clipper for {type(settings).__name__}. Use one of {known}.") from None
    return build(settings)
