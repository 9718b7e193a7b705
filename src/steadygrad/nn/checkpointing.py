"""A model -> the same model, with the activations of some of its modules recomputed in backward instead of kept.

Non-reentrant checkpoints, with random state and autocast as in the forward. Of modules that match one inside the other
only the innermost is wrapped: everything is computed twice, nothing three times, and the pieces stay small. Recomputing
starts from the buffers that the forward started from and leaves those of the model alone, so that BatchNorm counts a
batch once and spectral norm's vectors agree. Names, parameters, `state_dict` and copies of the model are as before.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad.errors import UsageError

DEFAULT_MODULES = ("transformer", "EncoderLayer", "DecoderLayer", "TransformerBlock", "ResidualAttentionBlock")

ORIGINAL = "_forward_before_checkpointing"
"""Where a forward that stood on the instance, not the class, is kept."""


def add_gradient_checkpointing(model: nn.Module, modules_to_checkpoint: Sequence[str] | None = None) -> tuple[str, ...]:
    """Checkpoint every module that a name matches, and return the names of those that were wrapped now.

    A name matches a module whose full name it is, or whose own name or class name contains it. A list of modules that
    matches stands for its members. Modules that are wrapped already, and what is around or inside them, stay as they
    are.
    """
    wanted = (modules_to_checkpoint,) if isinstance(modules_to_checkpoint, str) else modules_to_checkpoint
    wanted = DEFAULT_MODULES if wanted is None else tuple(wanted)
    matching = _find_matching(model, wanted)
    if not matching:
        classes = ", ".join(sorted({type(module).__name__ for _, module in model.named_modules()}))
        names = ", ".join(map(repr, wanted)) or "(no name)"
        raise UsageError(
            f"no module inside {type(model).__name__} matches {names}. Its classes are: {classes}. "
            "Name some of those, or modules by their names."
        )
    wrapped = []
    for name, module in _keep_innermost(matching):
        if not any(_is_wrapped(part) for part in module.modules()) and not _has_wrapped_parent(model, name):
            _wrap(module)
            wrapped.append(name)
    return tuple(wrapped)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What stands in for the forward of a wrapped module.

    A bound method, so that a deep copy of the module runs the copy; and of this name, so that a pickled one finds the
    forward of its class.
    """

    def original(*args: Any, **kwargs: Any) -> Any:
        own = self.__dict__.get(ORIGINAL)
        return type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if torch.compiler.is_compiling() or next(self.buffers(), None) is None:  # the compiler takes no contexts of ours
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    def make_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before: list[_Buffer] = []
        return _remember_buffers(self, before), _lend_buffers(before)

    return checkpoint(original, *args, use_reentrant=False, context_fn=make_contexts, **kwargs)


class _Buffer:
    """One buffer of a module as it was before the forward."""

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self.owner, self.name, self.tensor = owner, name, tensor
        self.version = tensor._version
        self.value = tensor.detach().clone()

    def has_changed(self) -> bool:
        now = self.owner._buffers.get(self.name)
        return now is not self.tensor or now._version != self.version

    def is_vector(self) -> bool:
        return self.value.is_floating_point() and self.value.dim() <= 1


@contextlib.contextmanager
def _remember_buffers(module: nn.Module, before: list[_Buffer]) -> Iterator[None]:
    """Around the forward: keep the old buffers of those modules, and only those, of which it changes one.

    The kernel of `batch_norm` writes running statistics without telling, so floating vectors are kept in any case; what
    is large, such as a causal mask, is not.
    """
    held = [_Buffer(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        changed = {id(buffer.owner) for buffer in held if buffer.has_changed()}
        before.extend(b for b in held if id(b.owner) in changed or b.is_vector())


@contextlib.contextmanager
def _lend_buffers(before: list[_Buffer]) -> Iterator[None]:
    """Around the recomputation: copies of the old values in place of the buffers, and the buffers back afterwards."""
    now = [buffer.owner._buffers.get(buffer.name) for buffer in before]
    for buffer in before:
        buffer.owner._buffers[buffer.name] = buffer.value.clone()
    try:
        yield
    finally:
        for buffer, tensor in zip(before, now):
            buffer.owner._buffers[buffer.name] = tensor


def _find_matching(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """Full name -> module, for every module but the model itself that a name matches."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not name or not any(_matches(name, module, pattern) for pattern in wanted):
            continue
        if isinstance(module, nn.ModuleList):
            found.update({f"{name}.{key}": member for key, member in module.named_children()})
        elif not isinstance(module, nn.ModuleDict):
            found[name] = module
    return found


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    return bool(pattern) and (name == pattern or pattern in name.rpartition(".")[2] or pattern in type(module).__name__)


def _keep_innermost(matching: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    found = set(matching.values())
    return [
        (name, module)
        for name, module in matching.items()
        if not any(inner in found for inner in module.modules() if inner is not module)
    ]


def _wrap(module: nn.Module) -> None:
    if "forward" in module.__dict__:
        object.__setattr__(module, ORIGINAL, module.__dict__["forward"])
    object.__setattr__(module, "forward", types.MethodType(forward, module))


def _is_wrapped(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _has_wrapped_parent(model: nn.Module, name: str) -> bool:
    parents = name.split(".")[:-1]
    return any(_is_wrapped(model.get_submodule(".".join(parents[: i + 1]))) for i in range(len(parents)))
