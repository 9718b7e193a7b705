"""The result of a training step, or a reported value -> a loss or a number, checked; and the result, detached."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.state.tree import remake


def find_loss(result: Any) -> Tensor:
    """Return the loss from a scalar, a dict with `loss`, an object with `.loss`, or a tuple that starts with it."""
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
    """Return `loss` if backward can run from it; raise an error otherwise."""
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


def read_number(value: Any, where: str) -> float:
    """Return a number that a program reports; raise UsageError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{where} was given {value!r:.80}. Give it one number: loss.mean() for example.") from None


def detach(result: Any) -> Any:
    """Return the same structure with every tensor detached; the caller's own objects are left as they are."""
    if isinstance(result, Tensor | Mapping | list | tuple) or not hasattr(result, "loss"):
        return _detach_inside(result)
    return _detach_copy(result)


def _detach_inside(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detach_inside(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        return _detach_copy(value)
    if isinstance(value, list | tuple):
        return remake(value, [_detach_inside(item) for item in value])
    return value


def _detach_copy(thing: Any) -> Any:
    """Return a shallow copy with its contents detached; return what cannot be copied as it is."""
    try:
        copied = copy.copy(thing)
        if copied is thing:
            return thing
        if isinstance(copied, dict):  # through its own item setter: Hugging Face's outputs keep attributes in sync
            for key, item in tuple(copied.items()):
                copied[key] = _detach_inside(item)
        for name, held in _stored_attributes(copied).items():
            object.__setattr__(copied, name, _detach_inside(held))  # frozen dataclasses too: the copy is ours
    except (TypeError, copy.Error):
        return thing
    return copied


def _stored_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes in `__dict__` and in slots; properties are not evaluated."""
    slots = (getattr(base, "__slots__", ()) for base in type(thing).__mro__)
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    in_slots = {name: getattr(thing, name) for name in names if not name.startswith("__") and hasattr(thing, name)}
    return {**in_slots, **getattr(thing, "__dict__", {})}
