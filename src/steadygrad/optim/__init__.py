"""Optimizers: torch's own, where a kernel of ours is faster or keeps what torch's loses."""

from steadygrad.optim.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW"]
