"""A model -> the same model, with the activations of some of its modules recomputed in backward instead of kept.

Non-reentrant checkpoints, with random state and autocast as in the forward. Of modules that match one inside the other
only the innermost is wrapped: everything is computed twice, nothing three times, and the pieces stay small. Recomputing
starts from the buffers that the forward started from and leaves those of the model alone, as often as backward runs, so
that BatchNorm counts a batch once and spectral norm's vectors agree. Names, parameters, `state_dict` and deep copies of
the model are as before.
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
    matches stands for its members; what has no forward is never called and matches nothing. Modules that are wrapped
    already, and what is around or inside them, stay as they are.
    """
    wanted = (modules_to_checkpoint,) if isinstance(modules_to_checkpoint, str) else modules_to_checkpoint
    wanted = DEFAULT_MODULES if wanted is None else tuple(wanted)
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise UsageError(
                f"modules_to_checkpoint must hold names, got {type(pattern).__name__} {str(pattern)[:80]!r}. "
                "Give names of modules, as named_modules() lists them, or of their classes."
            )
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
    """Replaces the forward of a wrapped module.

    A bound method, so that a deep copy of the module runs the copy; and of this name, so that a pickled one finds the
    forward of its class.
    """
    names = tuple(kwargs)

    def original(*values: Any) -> Any:
        num = len(values) - len(names)
        own = self.__dict__.get(ORIGINAL)
        named = dict(zip(names, values[num:]))
        return type(self).forward(self, *values[:num], **named) if own is None else own(*values[:num], **named)

    # All go by position. By name torch takes some for its own (`debug`), does not see that one was changed in place
    # before backward, and does not keep the random state of the device that they are on.
    inputs = (*args, *kwargs.values())
    # Without gradients nothing is saved, so nothing need be recomputed.
    if not torch.is_grad_enabled():
        return original(*inputs)
    if torch.compiler.is_compiling():  # it takes no contexts of ours
        return checkpoint(original, *inputs, use_reentrant=False)

    def make_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # One list for each call: a module that is called twice before backward starts from two states.
        before: list[_OldBuffers] = []
        return _remember_buffers(self, before), _LentBuffers(before)

    return checkpoint(original, *inputs, use_reentrant=False, context_fn=make_contexts)


class _OldBuffers:
    """The buffers of one module as they were before the forward."""

    def __init__(self, owner: nn.Module, buffers: dict[str, Tensor | None], copies: dict[int, Tensor]) -> None:
        self.owner = owner
        # Holds the tensors until keep_changed: `copies` goes by id, which is a tensor's own only while it lives.
        self.seen = {name: (tensor, _count_writes(tensor)) for name, tensor in buffers.items()}
        self.values = {name: _copy_once(tensor, copies) for name, tensor in buffers.items()}
        self.has_changed = False

    def keep_changed(self) -> None:
        """After the forward: drop what it cannot have changed.

        The kernel of `batch_norm` writes running statistics without advancing the version counter, so floating vectors
        are always kept; large tensors, such as a causal mask, are not.
        """
        now, seen = self.owner._buffers, self.seen
        # Let go of the model's tensors, which this object would otherwise keep until backward.
        self.seen = {}
        self.has_changed = now.keys() != seen.keys() or any(
            now[name] is not tensor or _count_writes(tensor) != writes for name, (tensor, writes) in seen.items()
        )
        if not self.has_changed:
            self.values = {name: value for name, value in self.values.items() if _is_vector(value)}

    def lend(self, copies: dict[int, Tensor]) -> dict[str, Tensor | None]:
        """Put copies of the old values in place of the buffers, and return what was there."""
        # The dict is copied, its tensors are not: the very same objects go back.
        now = dict(self.owner._buffers)
        old = {name: _copy_once(value, copies) for name, value in self.values.items()}
        self.put(old if self.has_changed else now | old)  # a buffer that the forward made was not there before it
        return now

    def put(self, buffers: dict[str, Tensor | None]) -> None:
        self.owner._buffers.clear()
        self.owner._buffers.update(buffers)


@contextlib.contextmanager
def _remember_buffers(module: nn.Module, before: list[_OldBuffers]) -> Iterator[None]:
    """Around the forward: keep the old buffers of those modules of which it changes one."""
    copies: dict[int, Tensor] = {}
    parts = list(module.modules())
    held = [_OldBuffers(part, part._buffers, copies) for part in parts if part._buffers]
    bare = [part for part in parts if not part._buffers]
    try:
        yield
    finally:
        held.extend(_OldBuffers(part, {}, copies) for part in bare if part._buffers)  # the forward made one
        for buffers in held:
            buffers.keep_changed()
        before.extend(buffers for buffers in held if buffers.has_changed or buffers.values)


class _LentBuffers(AbstractContextManager[None]):
    """Around the recomputation: copies of the old values in place of the buffers, and the buffers back afterwards.

    Torch enters the same one at each backward through a graph that is kept.
    """

    def __init__(self, before: list[_OldBuffers]) -> None:
        self.before = before
        self.taken: list[list[dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        copies: dict[int, Tensor] = {}
        self.taken.append([buffers.lend(copies) for buffers in self.before])

    def __exit__(self, *error: object) -> None:
        # Also when torch ends the recomputation early, which it does by raising once it has what it needs.
        for buffers, own in zip(self.before, self.taken.pop()):
            buffers.put(own)


def _copy_once(tensor: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    """Copy a tensor; modules that share it share one copy."""
    if tensor is None:
        return None
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().clone()
    return copies[id(tensor)]


def _count_writes(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # inference tensors have no counter


def _is_vector(value: Tensor | None) -> bool:
    return value is not None and value.is_floating_point() and value.dim() <= 1


def _find_matching(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """Return full name -> module, for every module but the model itself that a name matches."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not name or not any(_matches(name, module, pattern) for pattern in wanted):
            continue
        found.update(_list_members(name, module))
    return found


def _list_members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module itself, or of a list its members; nothing that has no forward and so is never called."""
    if isinstance(module, nn.ModuleList):
        for key, member in module.named_children():
            yield from _list_members(f"{name}.{key}", member)
    elif "forward" in module.__dict__ or type(module).forward is not nn.Module.forward:
        yield name, module


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
    # A deep copy binds the same function to the copied module, and so counts as wrapped.
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _has_wrapped_parent(model: nn.Module, name: str) -> bool:
    parents = name.split(".")[:-1]
    return any(_is_wrapped(model.get_submodule(".".join(parents[: i + 1]))) for i in range(len(parents)))
