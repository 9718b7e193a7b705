"""Shipped for users' own tests: faults that can be injected into any training, and ranks to run it on."""

from steadygrad.testing.faults import (
    corrupt_weight,
    jump_lr,
    poison_batches,
    poison_gradient,
    poison_loss,
    scale_batches,
)

__all__ = ["corrupt_weight", "jump_lr", "poison_batches", "poison_gradient", "poison_loss", "scale_batches"]
