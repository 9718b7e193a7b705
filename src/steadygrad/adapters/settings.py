"""The user's GuardConfig and the framework's own settings -> the GuardConfig of the run.

Gradients are clipped once, by the Guard. Epochs, checkpoints and signals stay with the framework.
"""

from __future__ import annotations

import dataclasses
import logging

from steadygrad.config import ClipStrategy, ClipValue, FixedNorm, GuardConfig, Interval

logger = logging.getLogger("steadygrad")


def read_clipping(limit: float | None, *, by_value: bool = False) -> ClipStrategy | None:
    """Return the strategy that clips as a framework does with this limit; None and 0 mean no clipping."""
    if not limit:
        return None
    return ClipValue(value=float(limit)) if by_value else FixedNorm(max_norm=float(limit))


def adopt_settings(config: GuardConfig | None, theirs: ClipStrategy | None) -> GuardConfig:
    """Return the run's config. The framework's clipping applies unless `config` has a clip other than the default."""
    if config is None:
        config = GuardConfig(clip=theirs)
    elif theirs is not None and config.clip == GuardConfig().clip:
        config = dataclasses.replace(config, clip=theirs)
    elif theirs is not None and config.clip != theirs:
        logger.info("GuardConfig.clip %r replaces the trainer's %r.", config.clip, theirs)
    no_signals = dataclasses.replace(config.checkpoint, signals=False)
    return dataclasses.replace(config, scheduler_interval=Interval.STEP, checkpoint=no_signals)
