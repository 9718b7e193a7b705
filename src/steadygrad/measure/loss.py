"""What a training step returned -> its loss, checked; and the same thing detached, to hand back to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygrad.errors import UsageError


def find_loss(result: Any) -> Tensor:
    """The loss in a scalar, a dict with `loss`, an object with `.loss`, or a tuple that starts with it."""
    loss = result
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise UsageError(f"the training step returned a dict without 'loss' (keys: {', '.join(map(str, result))}).")
        loss = result["loss"]
    elif isinstance(result, tuple | list) and result:
        loss = result[0]
    elif not isinstance(result, Tensor) and hasattr(result, "loss"):
        loss = result.loss
    return check_loss(loss)


def check_loss(loss: Any) -> Tensor:
    """`loss`, if backward can run from it."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the loss must be a tensor, got {type(loss).__name__}. Return the loss itself, not loss.item() or None."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"the loss must be a scalar, got shape {tuple(loss.shape)}. Reduce it, for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no graph: nothing that led to it requires a gradient. Was it detached, made under "
            "torch.no_grad(), or are all parameters frozen?"
        )
    return loss if loss.dim() == 0 else loss.squeeze()


def detach(result: Any) -> Any:
    """The same structure with every tensor detached."""
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, dict):
        return {key: detach(value) for key, value in result.items()}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(detach(value) for value in result))
    if isinstance(result, list | tuple):
        return type(result)(detach(value) for value in result)
    return result
