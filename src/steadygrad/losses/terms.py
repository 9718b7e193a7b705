"""Named terms -> one loss that says what it is made of.

A training step returns what `Loss` gives: a dict with `loss`, which Guard takes, and every term beside it, unweighted
and detached. When the loss is not finite the terms tell which one did it. A term of weight 0 is left out of the sum: a
product with 0 would let its NaN through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from steadygrad.errors import ConfigError, UsageError
from steadygrad.losses.check import require_tensors


class Loss:
    """A weighted sum of named terms.

    >>> criterion = Loss(text=1.0, latent=0.1)
    >>> result = criterion(text=torch.tensor(2.0), latent=torch.tensor(5.0))
    >>> {name: value.item() for name, value in result.items()}
    {'loss': 2.5, 'text': 2.0, 'latent': 5.0}
    """

    def __init__(self, **weights: float) -> None:
        if not weights:
            raise ConfigError("Loss needs at least one term, got none. Name each with its weight: Loss(text=1.0).")
        for name, weight in weights.items():
            if name == "loss":
                raise ConfigError("Loss cannot have a term named 'loss': that is the sum. Give the term another name.")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(f"Loss: the weight of {name!r} must be a finite number, got {weight!r}.")
        if not any(weights.values()):
            raise ConfigError(f"Loss: every weight is 0, of {', '.join(weights)}. Give at least one term a weight.")
        self.weights: Mapping[str, float] = MappingProxyType(dict(weights))

    def __call__(self, **terms: Tensor) -> dict[str, Tensor]:
        """The weighted sum as `loss`, and the terms by name."""
        self._check(terms)
        weighted = [weight * terms[name].reshape(()) for name, weight in self.weights.items() if weight != 0]
        return {
            "loss": torch.stack(weighted).sum(),
            # Detached: what a caller logs or keeps would otherwise hold the graph and all its activations
            **{name: terms[name].detach().reshape(()) for name in self.weights},
        }

    def __repr__(self) -> str:
        return f"Loss({', '.join(f'{name}={weight}' for name, weight in self.weights.items())})"

    def _check(self, terms: Mapping[str, Tensor]) -> None:
        if terms.keys() != self.weights.keys():
            raise UsageError(
                f"{self!r} was called with the terms {', '.join(terms) or '(none)'}. Give each term once, by name; one "
                "that this batch does not have is a zero."
            )
        for name, term in terms.items():
            if not isinstance(term, Tensor) or term.numel() != 1:
                found = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
                raise UsageError(f"{self!r}: the term {name!r} must be a scalar tensor, got {found}. Reduce it first.")


def find_bad_terms(result: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the terms that are not finite, in the order of the sum. Reads the values: the host waits.

    >>> find_bad_terms(Loss(text=1.0, latent=0.1)(text=torch.tensor(2.0), latent=torch.tensor(float("nan"))))
    ('latent',)
    """
    terms = {name: value for name, value in result.items() if name != "loss"}
    for name, value in terms.items():
        require_tensors("find_bad_terms", **{name: value})
    return tuple(name for name, value in terms.items() if not bool(value.isfinite().all()))
