"""Saved weights and a model -> what does not fit, tensor by tensor; and the loading of what does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.errors import MismatchError

logger = logging.getLogger("steadygrad")


def find_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict's tensors, without those that have no shape yet (lazy) or no memory (meta)."""
    state = model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if not is_lazy(value) and not value.is_meta}


def compare_weights(own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> list[str]:
    """Describe briefly each tensor that is missing, unexpected or has a different shape."""
    problems = [f"missing {name}" for name in own if name not in saved]
    problems += [f"unexpected {name}" for name, value in saved.items() if name not in own and isinstance(value, Tensor)]
    return problems + [
        f"{name} has shape {tuple(own[name].shape)}, the saved one {tuple(value.shape)}"
        for name, value in saved.items()
        if name in own and own[name].shape != value.shape
    ]


def load_weights(model: nn.Module, saved: Mapping[str, Any], *, where: str, strict: bool) -> list[str]:
    """Load a state_dict. Name what does not fit in an error or, with `strict=False`, in the returned list."""
    own = find_weights(model)
    problems = compare_weights(own, saved)
    if problems and strict:
        raise MismatchError(f"{where} does not fit the model: {'; '.join(problems)}. strict=False loads what fits.")
    fits = {k: v for k, v in saved.items() if not isinstance(v, Tensor) or (k in own and own[k].shape == v.shape)}
    # Names were compared above; shapes that differ, which torch refuses even with strict=False, are left out
    model.load_state_dict(fits, strict=False)
    for problem in problems:
        logger.warning("%s: %s", where, problem)
    return problems
