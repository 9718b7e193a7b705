"""Shipped for users' own tests: faults that can be injected into any training."""

from steadygrad.testing.faults import corrupt_weight, poison_batches, poison_gradient, poison_loss

__all__ = ["corrupt_weight", "poison_batches", "poison_gradient", "poison_loss"]
