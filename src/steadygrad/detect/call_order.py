"""Rules about the order of calls in a step, from the first steps of a run: they need the same sign in two of them.

All compare norms of the same gradients at two points of the program, or constants that the loss was divided by, so
nothing here depends on the size of a model or of its loss. Cost: none beyond the first four steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import CallScan, Finding

NUM_SIGNS = 2
"""Steps that must show the same."""
SAME = 0.01
"""Relative difference of two norms that count as equal: sums in another order, or another precision."""
MEAN_LOSSES = ("NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "CrossEntropyLoss")
"""Losses whose division by 2 is never a convention; half of a squared error is."""


class CallRule(OnceRule[CallScan]):
    """Reports once, when `NUM_SIGNS` steps have shown the same."""

    hears = (CallScan,)
    memory = ("_num_signs", "_first", "_told")
    advice: ClassVar[str]

    def __init__(self) -> None:
        self._num_signs = self._first = 0

    def judge(self, fact: CallScan) -> Finding | None:
        """Return the finding at the last of these steps."""
        message = self.describe(fact)
        if not message:
            return None
        self._first = self._first if self._num_signs else fact.step
        self._num_signs += 1
        if self._num_signs < NUM_SIGNS:
            return None
        return self.report(step=self._first, message=message, advice=self.advice, evidence=self.list_evidence(fact))

    @abstractmethod
    def describe(self, scan: CallScan) -> str:
        """Return what is wrong with this step; empty if nothing is."""

    def list_evidence(self, scan: CallScan) -> dict[str, float | str]:
        """Return the numbers behind it."""
        found = {"norm_after_backward": scan.norm_after_backward, "norm_at_step": scan.norm_at_step}
        return {"where": scan.where_backward, **{name: value for name, value in found.items() if value is not None}}


class DividedTwice(CallRule):
    """The loss is divided twice by the number of microbatches, or by that of the ranks, which DDP does anyway.

    Both make the gradients too small by a constant factor. AdamW hides it, SGD learns that much more slowly.
    """

    name = "divided_twice"
    advice = "Divide once: by the number of microbatches in the loop or in the framework; DDP averages over the ranks."

    def describe(self, scan: CallScan) -> str:
        """Compare the divisors of the loss with the number of microbatches and of ranks."""
        num, ranks = scan.num_backwards, scan.num_averaging
        # There is one entry for each backward, so `all` is never over nothing here
        if num > 1 and all(divisors.count(float(num)) > 1 for divisors in scan.divisors):
            return f"the loss of each of {num} microbatches is divided by {num} twice{at(scan.where_backward)}"
        # Unscaling before the step also makes its norm smaller than the one after backward, hence only without a scale
        if _is_accumulated(scan) and scan.scale == 1.0 and _are_same(scan.norm_at_step, scan.norm_after_backward, num):
            return (
                f"the loss of each of {num} microbatches is divided by {num}{at(scan.where_backward)}, and so are the "
                "gradients before the step"
            )
        is_divided = bool(scan.divisors) and all(float(ranks) in divisors for divisors in scan.divisors)
        # With as many microbatches as ranks the divisor may be theirs, and then it is right
        if is_divided and ranks > 1 and num != ranks and scan.end in MEAN_LOSSES:
            return (
                f"the loss is divided by {ranks}, the number of ranks, and DistributedDataParallel averages the "
                f"gradients over them as well{at(scan.where_backward)}"
            )
        return ""

    def list_evidence(self, scan: CallScan) -> dict[str, float | str]:
        """Return the divisors too."""
        divisors = ", ".join(f"{divisor:g}" for divisor in scan.divisors[-1])
        return {**super().list_evidence(scan), "divisors": divisors, "num_microbatches": scan.num_backwards}


class ScaledGradient(CallRule):
    """The loss was scaled for float16, but the optimizer or a clip gets gradients that still have that scale."""

    name = "scaled_gradient"
    advice = (
        "Call scaler.step(optimizer) instead of optimizer.step(), and scaler.unscale_(optimizer) before clipping; with "
        "a Guard pass it the scaler: Guard(model, optimizer, scaler=scaler)."
    )

    def describe(self, scan: CallScan) -> str:
        """Compare the norms at the clip and at the step with the one that backward left."""
        if scan.scale == 1.0:
            return ""
        scaled = f"the loss was multiplied by {scan.scale:g}{at(scan.where_backward)}"
        # A step that divides by the scale itself is rightly given gradients that still carry it
        if not scan.scale_is_known and _are_same(scan.norm_at_step, scan.norm_after_backward):
            return f"{scaled}, and the optimizer steps with gradients that were not divided by it"
        if _are_same(scan.norm_at_clip, scan.norm_after_backward):
            return f"{scaled}, and the gradients are clipped with that scale{at(scan.where_clip)}"
        return ""


class ClearedGradient(CallRule):
    """The gradients that backward made were zeroed before the optimizer stepped, or before the next microbatch."""

    name = "cleared_gradient"
    advice = "Call optimizer.zero_grad() before the first backward of a step or after the step, not in between."

    def describe(self, scan: CallScan) -> str:
        """Compare the norm that backward left with the one at the step; see whether microbatches were added up."""
        # A program may take each microbatch's gradients aside and combine them: then the step gets more than the last.
        is_last = _are_same(scan.norm_at_step, scan.norm_after_backward, scan.scale)
        if _is_accumulated(scan) and scan.num_cleared == scan.num_backwards - 1 and is_last:
            return (
                f"the loss is divided by {scan.num_backwards}, the number of microbatches{at(scan.where_backward)}, "
                "and the gradients are cleared between them: only the last one counts"
            )
        # Unknown, or zeros that backward itself made: nothing was cleared
        if not scan.norm_after_backward or scan.norm_at_step != 0.0:
            return ""
        return (
            f"backward{at(scan.where_backward)} made gradients of norm {scan.norm_after_backward:.3g}, and they "
            "are all 0 when the optimizer steps"
        )


class UselessClip(CallRule):
    """The program clips gradients, but not the ones that the optimizer uses.

    A generator that is used up, a clip before the last backward or after the step, or one of copies of the parameters:
    they have no gradients, or the same ones, which a clip would shrink and which reach the optimizer as they were.
    """

    name = "useless_clip"
    advice = "Clip model.parameters() after the last backward and before the step."

    def describe(self, scan: CallScan) -> str:
        """Look at what the clip was given, and when."""
        if scan.clip_is_spent:
            return f"{scan.clip}{at(scan.where_clip)} got a generator that was already exhausted, so nothing is clipped"
        # A limit of infinity clips nothing, and is how the norm of one microbatch is measured
        if scan.clip_is_early and not (scan.clip == "clip_grad_norm_" and math.isinf(scan.max_norm)):
            return (
                f"{scan.clip}{at(scan.where_clip)} runs before backward{at(scan.where_backward)}, so the "
                "gradients of the step are not clipped"
            )
        if scan.clip_is_of_copy and _leaves_gradients(scan):
            return (
                f"{scan.clip}{at(scan.where_clip)} got copies of the parameters, which no optimizer holds, so the "
                "gradients of the step are not clipped"
            )
        return ""


def _leaves_gradients(scan: CallScan) -> bool:
    """Return whether a clip of copies found nothing to clip, or should have shrunk gradients that it did not change."""
    if not scan.norm_of_copy:
        return True
    is_same = _are_same(scan.norm_of_copy, scan.norm_after_backward) and _are_same(
        scan.norm_at_step, scan.norm_after_backward
    )
    return is_same and scan.norm_of_copy > (1 + SAME) * scan.max_norm


def _is_accumulated(scan: CallScan) -> bool:
    """Return whether the step has several backwards, and each loss is divided by their number."""
    num = scan.num_backwards
    return num > 1 and all(float(num) in divisors for divisors in scan.divisors)


def _are_same(one: float | None, other: float | None, factor: float = 1.0) -> bool:
    """Return whether the first norm is the second one, divided by `factor`."""
    # Two norms of 0 would be equal up to any factor, and prove nothing
    return one is not None and other is not None and other > 0 and abs(factor * one - other) <= SAME * other
