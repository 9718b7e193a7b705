"""Readings -> clip coefficient, on the device. One file a strategy; `build_clipper` finds the one for its settings."""

from steadygrad.clip.base import Clipper
from steadygrad.clip.fixed_norm import FixedNormClipper
from steadygrad.config import ClipStrategy, FixedNorm

__all__ = ["Clipper", "build_clipper"]


def build_clipper(settings: ClipStrategy) -> Clipper:
    """The device state that carries out `settings`."""
    if isinstance(settings, FixedNorm):
        return FixedNormClipper(settings)
    raise TypeError(f"no clipper for {type(settings).__name__}")
