"""Faulty traces for the rules about a program's calls, its model, its ranks and its number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadygrad.facts import CallScan, Fact, Load, Misspelt, ModelScan, PrecisionScan, RankScan
from steadygrad.facts.program import IdleLoad, PixelScan, Restored, SplitScan
from steadygrad.facts.program_scans import PartialSave

SCALED = {"scale": 65536.0, "norm_after_backward": 9e4, "norm_at_step": 9e4}
CLEARED = {"norm_after_backward": 1.5, "norm_at_step": 0.0}
HALVES = {"dtype": "bfloat16", "num_steps": 8, "is_full_rate": True}


def calls(**seen: Any) -> Callable[[], list[Fact]]:
    """Four identical steps."""
    return lambda: [CallScan(step=t, **seen) for t in range(4)]


def model(step: int = -1, **seen: Any) -> Callable[[], list[Fact]]:
    """A healthy scan, then two identical ones."""
    return lambda: [ModelScan(step=-1), ModelScan(step=step, **seen), ModelScan(step=step + 100, **seen)]


def ranks(**seen: Any) -> Callable[[], list[Fact]]:
    """Four comparisons; batches differ from step to step."""
    return lambda: [
        RankScan(step=t, rank=1, other=0, gradients_are_averaged=True, **(seen | batch(t))) for t in (1, 2, 3, 4)
    ]


def batch(step: int) -> dict[str, Any]:
    """A batch with a unique checksum."""
    return {"batch": f"b{step}"}


def precision(**seen: Any) -> Callable[[], list[Fact]]:
    """Four identical steps."""
    return lambda: [PrecisionScan(step=7 + t, **seen) for t in range(4)]


LOAD = Load(where="train.py:9", module="", num_given=4, num_matched=0, example="module.a", wanted="a")
PARTIAL = PartialSave(where="train.py:40", parameters=("trunk.weight",), was_trained=True)
MISSPELT = Misspelt(group=0, name="learning_rate", meant="lr", value=1e-5, used=1e-3)
PROGRAM_TROUBLE: dict[str, tuple[Callable[[], list[Fact]], int]] = {
    "divided_twice": (calls(num_backwards=4, divisors=((4.0, 4.0),) * 4), 0),
    "scaled_gradient": (calls(num_backwards=1, **SCALED), 0),
    "cleared_gradient": (calls(num_backwards=1, **CLEARED), 0),
    "useless_clip": (calls(num_backwards=1, clip_is_spent=True, where_clip="train.py:5"), 0),
    "out_of_reach": (model(8, unfrozen=("trunk.weight",)), 8),
    "untied_weights": (model(8, came_apart=(("embedding.weight", "head.weight"),)), 8),
    "not_frozen": (model(not_frozen=("backbone (frozen_stages=1)",)), 0),
    "frozen_head": (model(frozen_head="head", frozen_share=0.9), 0),
    "lost_weights": (model(loads=(LOAD,)), 0),
    "stale_save": (model(8, stale_save="train.py:30", num_steps=100), 8),
    "restored_weights": (lambda: [Restored(step=t, is_restored=True, where="train.py:7") for t in (17, 129)], 17),
    "partial_save": (model(8, partial_save=PARTIAL, num_steps=100), 8),
    "stale_statistics": (model(8, stale_statistics=("ema", "a.py:3"), num_steps=100), 8),
    "equal_units": (model(8, equal_units=("0.weight",), num_steps=8), 0),
    "idle_load": (lambda: [IdleLoad(step=9, where="train.py:7", module="Net", is_earlier=True)], 9),
    "wrong_group": (model(8, misspelt=(MISSPELT,)), 0),
    "pixel_scale": (lambda: [PixelScan(step=1, tensor="0", statistics="ImageNet", pattern="not_divided")], 1),
    "wrong_split": (lambda: [SplitScan(step=1, num_samples=100, num_evaluated=20, num_shared=16)], 1),
    "idle_average": (model(8, idle_average=True, num_steps=100), 8),
    "ranks_differ": (ranks(differing=("head.weight",), num_compared=4), 1),
    "same_batch": (ranks(same_batch=True), 1),
    "zero_input": (ranks(zero_input="0"), 1),
    "lost_updates": (precision(stuck_share=0.97, **HALVES), 0),
    "unheeded_autocast": (precision(unheeded_autocast="bfloat16"), 7),
    "flushed_gradient": (precision(is_float16=True, zero_share=0.8), 7),
    "redrawn_noise": (precision(redrawn=("block.drop",)), 7),
}
"""Rule -> facts that it must report, and the step that it must report."""
