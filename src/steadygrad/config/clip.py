"""Clip strategies: the settings. `steadygrad.clip` builds the state on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steadygrad.config.checks import (
    is_number,
    require,
    require_whole,
    set_names,
)


@dataclass(frozen=True, kw_only=True)
class FixedNorm:
    """Scale all gradients by min(1, max_norm / norm), as `clip_grad_norm_` does."""

    kind: ClassVar[str] = "fixed_norm"

    max_norm: float = 1.0
    """Largest global L2 norm that reaches the optimizer."""

    def __post_init__(self) -> None:
        require(
            is_number(self.max_norm) and self.max_norm > 0,
            self,
            "max_norm",
            "be above 0",
            "Use 1.0, or clip=None for no clipping.",
        )


@dataclass(frozen=True, kw_only=True)
class OutlierClip:
    """Scale the gradients of a step whose norm is `ratio` times what is usual in this run; leave all others alone."""

    kind: ClassVar[str] = "outliers"

    ratio: float = 100.0
    """Multiple of the usual norm that a step is clipped to when above it. Usual: all but 1 in 32 norms were smaller, at
    any time of the run so far."""
    window: int = 128
    """Healthy steps whose norms define what is usual."""
    warmup: int = 32
    """Healthy steps before anything is clipped."""

    def __post_init__(self) -> None:
        require(is_number(self.ratio) and self.ratio > 1, self, "ratio", "be above 1", "Use 100.0.")
        require_whole(self, "window", least=8, hint="Use 128.")
        require_whole(self, "warmup", least=1, hint="Use 32.")
        require(self.warmup <= self.window, self, "warmup", "not be above the window", "Use 32.")


@dataclass(frozen=True, kw_only=True)
class ClipValue:
    """Clamp each gradient element to [-value, value]."""

    kind: ClassVar[str] = "value"

    value: float = 1.0
    """Largest absolute value of one element."""

    def __post_init__(self) -> None:
        require(is_number(self.value) and self.value > 0, self, "value", "be above 0", "Use 1.0.")


@dataclass(frozen=True, kw_only=True)
class ZClip:
    """Clip a norm that lies more than `z` standard deviations above its moving average (arXiv 2504.02507)."""

    kind: ClassVar[str] = "zclip"

    alpha: float = 0.97
    """Decay of the moving mean and variance of the norm."""
    z: float = 2.5
    """Score above which a norm is a spike."""
    warmup: int = 25
    """Healthy steps that only collect statistics; `max_norm` still applies."""
    max_norm: float | None = 1.0
    """Upper bound that always applies; None for none."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        require(
            is_number(self.alpha) and 0 < self.alpha < 1, self, "alpha", "lie between 0 and 1", "The paper uses 0.97."
        )
        require(is_number(self.z) and self.z > 0, self, "z", "be above 0", "The paper uses 2.5.")
        require_whole(self, "warmup", least=2, why=", a variance needs two values", hint="The paper uses 25.")
        require(
            self.max_norm is None or (is_number(self.max_norm) and self.max_norm > 0),
            self,
            "max_norm",
            "be above 0, or None",
            "Use 1.0.",
        )
        require(is_number(self.eps) and self.eps > 0, self, "eps", "be above 0", "Use 1e-6.")


@dataclass(frozen=True, kw_only=True)
class AutoClip:
    """Clip at a percentile of the norms seen so far (Seetharaman et al. 2020), over a bounded history."""

    kind: ClassVar[str] = "autoclip"

    percentile: float = 10.0
    """Percentile of the past norms that becomes the threshold."""
    window: int = 4096
    """Norms remembered; the original keeps all of them, without bound."""

    def __post_init__(self) -> None:
        require(
            is_number(self.percentile) and 0 <= self.percentile <= 100,
            self,
            "percentile",
            "lie between 0 and 100",
            "The paper uses 10.",
        )
        require_whole(self, "window", least=2, hint="Use 4096.")


@dataclass(frozen=True, kw_only=True)
class AdaptiveUnitClip:
    """Clip each unit's gradient to a share of that unit's weight norm (AGC of the NFNet paper, arXiv 2102.06171)."""

    kind: ClassVar[str] = "adaptive_unit"

    ratio: float = 0.01
    """lambda: largest gradient norm of a unit relative to its weight norm."""
    eps: float = 1e-3
    """Floor under the weight norm, so that a unit that starts at zero can still move."""
    exclude: tuple[str, ...] = ()
    """Parameter names, or parts of them, to leave alone; the paper leaves out the last layer."""

    def __post_init__(self) -> None:
        require(is_number(self.ratio) and self.ratio > 0, self, "ratio", "be above 0", "The paper uses 0.01.")
        require(is_number(self.eps) and self.eps > 0, self, "eps", "be above 0", "The paper uses 1e-3.")
        set_names(self, "exclude", "head")


@dataclass(frozen=True, kw_only=True)
class AdaGC:
    """Clip each tensor against its own moving norm (arXiv 2502.11034), and globally while that is being collected."""

    kind: ClassVar[str] = "adagc"

    relative: float = 1.05
    """lambda_rel: how far above its own average a tensor's norm may go."""
    beta: float = 0.98
    """Decay of the moving norm of each tensor."""
    warmup: int = 100
    """Healthy steps with the global clip, during which the smallest norm of each tensor is kept."""
    max_norm: float = 1.0
    """lambda_abs: the global norm allowed during the warm-up."""

    def __post_init__(self) -> None:
        require(is_number(self.relative) and self.relative > 0, self, "relative", "be above 0", "Use 1.05.")
        require(is_number(self.beta) and 0 < self.beta < 1, self, "beta", "lie between 0 and 1", "Use 0.98.")
        require_whole(self, "warmup", least=1, hint="Use 100.")
        require(is_number(self.max_norm) and self.max_norm > 0, self, "max_norm", "be above 0", "Use 1.0.")


ClipStrategy = FixedNorm | OutlierClip | ClipValue | ZClip | AutoClip | AdaptiveUnitClip | AdaGC
