"""Rules about number formats that lose what is computed: facts measured on this run's own numbers.

Cost: none on Readings beyond the first steps and the periodic scans.
"""

from __future__ import annotations

from steadygrad.detect.memory import Streak
from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import OnceRule
from steadygrad.facts import Finding, PrecisionScan

STUCK = 0.9
"""Share of the weights that must stand still. Where updates arrive it is near 0; stochastic rounding moves a few
percent of the elements with each step."""
PATIENCE = 50
"""Steps after which an optimizer that is not torch's must have moved them: it may add up what rounding left."""
FLUSHED = 0.5
"""Median share of zeros in the gradients from which float16 has flushed them: an embedding or dead units alone do not
bring the median there."""
NUM_STEPS = 3
"""Steps in a row that must show flushed gradients."""


class LostUpdate(OnceRule[PrecisionScan]):
    """Updates are smaller than the spacing of the weights' format, so nearly all of them round to nothing."""

    name = "lost_updates"
    hears = (PrecisionScan,)

    def judge(self, fact: PrecisionScan) -> Finding | None:
        """Return the finding at a learning rate of the usual size."""
        if fact.stuck_share is None or not fact.is_full_rate:
            return None
        if fact.stuck_share < STUCK or (not fact.is_own_optimizer and fact.num_steps < PATIENCE):
            return None
        return self.report(
            step=fact.step - fact.num_steps + 1,
            message=f"{fact.num_steps} steps left {fact.stuck_share:.0%} of the {fact.dtype} weights bit for bit as "
            "they were, although they have gradients: the updates are lost to rounding",
            advice="Keep the weights in float32 and compute under torch.autocast; or use an optimizer that rounds "
            "stochastically; or raise the learning rate.",
            evidence={"share": fact.stuck_share, "num_steps": fact.num_steps, "dtype": fact.dtype},
        )


class UnheededAutocast(OnceRule[PrecisionScan]):
    """The model is called under autocast, but none of its layers runs in that format."""

    name = "unheeded_autocast"
    hears = (PrecisionScan,)

    def judge(self, fact: PrecisionScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not fact.unheeded_autocast:
            return None
        return self.report(
            step=fact.step,
            message=f"the model is called under autocast to {fact.unheeded_autocast}, and all its layers compute in "
            "float32",
            advice="Look for autocast(enabled=False) or a custom_fwd(cast_inputs=torch.float32) inside the model, and "
            "for custom matrix products: autocast only covers torch's.",
            evidence={"dtype": fact.unheeded_autocast},
        )


def is_flushed(scan: PrecisionScan) -> bool:
    """Whether most of a step's gradient is 0, and float16 without a loss scale explains it."""
    return scan.is_float16 and not scan.has_scale and scan.zero_share > FLUSHED


class FlushedGradient(OnceRule[PrecisionScan]):
    """The forward runs in float16 without a loss scale, and most of the gradient is exactly zero."""

    name = "flushed_gradient"
    hears = (PrecisionScan,)
    memory = ("_streak", "_told")

    def __init__(self) -> None:
        self._streak = Streak()

    def judge(self, fact: PrecisionScan) -> Finding | None:
        """Return the finding after `NUM_STEPS` steps in a row."""
        if self._streak.feed(fact.step, is_flushed(fact)) < NUM_STEPS:
            return None
        return self.report(
            step=self._streak.start,
            message=f"layers run in float16 without a loss scale, and {fact.zero_share:.0%} of the median parameter's "
            "gradient is exactly 0: it is too small for float16",
            advice="Scale the loss with torch.amp.GradScaler and pass it to the Guard (scaler=...), or use bfloat16.",
            evidence={"zero_share": fact.zero_share},
        )


class Redrawn(OnceRule[PrecisionScan]):
    """Activation checkpointing recomputes a forward with new random numbers: its gradients belong to another mask."""

    name = "redrawn_noise"
    hears = (PrecisionScan,)

    def judge(self, fact: PrecisionScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not fact.redrawn:
            return None
        return self.report(
            step=fact.step,
            message=f"backward recomputes {show(list(fact.redrawn))} with different random numbers than the forward, "
            "so the gradients belong to a different dropout mask",
            advice="Use checkpoint(..., preserve_rng_state=True), its default, and seed no generator of your own "
            "inside.",
            evidence={"modules": list(fact.redrawn[:SHOWN])},
        )
