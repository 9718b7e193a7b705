"""Kept: whatever a replay does, everything is restored afterwards, bit for bit.

Random generators, gradients, training flags, `requires_grad`, hooks that act on gradients and the tensors that stand in
the model's modules are put back; so is every storage that existed before and that an op changed in place (a buffer, a
weight, a queue, an optimizer's moment, the batch): it is copied when the first such op comes. What Python code does to
its own objects `effects.py` undoes, as far as it can be seen.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from steadygrad.diagnose.calls import find_tensors, read_signature
from steadygrad.diagnose.lineage import find_storages
from steadygrad.state.muted_warnings import warnings_muted
from steadygrad.state.random_state import capture_random, restore_random

GATHERING = "fsdp"
"""Where the ops live that fill FSDP2's gathered weights. It empties them itself: a copy would double the model."""


class StorageKeeper:
    """Sees each call before and after it is made; copies what the call will change."""

    def __init__(self) -> None:
        self._fresh: dict[int, StorageWeakRef] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the storages from before the replay that this call changes."""
        signature = read_signature(func)
        # Most ops change nothing, and this runs for each of them.
        if not signature.is_mutable or func.namespace == GATHERING:
            return
        for argument, value in signature.name_arguments(args, kwargs):
            if argument.is_written:
                for tensor in find_tensors(value):
                    self._keep(tensor)

    def after(self, func: Any, result: Any) -> None:
        """Remember what the call created; a view belongs to something older."""
        if read_signature(func).is_view:
            return
        for tensor in find_tensors(result):
            for storage in find_storages(tensor):
                key = storage._cdata
                if key not in self._fresh and key not in self._copies:
                    self._fresh[key] = StorageWeakRef(storage)  # held, so that no other storage gets this address

    def _keep(self, tensor: Tensor) -> None:
        for storage in find_storages(tensor):
            key = storage._cdata
            if key not in self._fresh and key not in self._copies:
                # The storage is held too, so that its address stays its own.
                self._copies[key] = (storage, storage.clone())

    def changed_beside(self, known: Collection[int]) -> bool:
        """Whether the replay changed a tensor other than those whose storages are `known`."""
        return any(key not in known for key in self._copies)

    def find_copy(self, tensor: Tensor) -> Tensor | None:
        """Return a contiguous `tensor` as it was before the replay; None when the replay left it alone."""
        for storage in find_storages(tensor):
            if storage._cdata in self._copies:
                copy = self._copies[storage._cdata][1]
                fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                return fresh.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        return None

    def restore(self) -> None:
        """Put every changed storage back."""
        for storage, copy in self._copies.values():
            # The op may have resized it, as `resize_` does.
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies.clear()
        self._fresh.clear()


@dataclass(slots=True)
class _Leaf:
    """What a replay changes of a leaf besides its values."""

    tensor: Tensor
    grad: Tensor | None
    requires_grad: bool
    version: int | None
    hooks: dict[int, Any]

    @classmethod
    def take(cls, tensor: Tensor) -> _Leaf:
        """Note it, and clear the gradient: one of an earlier step would be taken for this one's."""
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
        leaf = cls(tensor, tensor.grad, tensor.requires_grad, _version(tensor), dict(hooks))
        # Set aside, not zeroed: backward adds to `grad` in place, and this tensor is the program's.
        tensor.grad = None
        hooks.clear()  # an optimizer that steps inside of backward must not step in a replay
        return leaf

    def restore(self) -> None:
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        self.tensor.grad = self.grad
        if self.hooks:
            self.tensor._post_accumulate_grad_hooks.update(self.hooks)
        if self.version is not None and self.tensor._version != self.version:
            _set_version(self.tensor, self.version)


class _Members:
    """The tensors of one module, and the memory that each has: a forward may replace either."""

    def __init__(self, module: nn.Module) -> None:
        dicts: tuple[Any, ...] = (module._parameters, module._buffers)
        self._dicts = [(held, dict(held)) for held in dicts if isinstance(held, dict)]
        tensors = [tensor for _, before in self._dicts for tensor in before.values() if tensor is not None]
        plain = [t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
        # An alias of the memory: where a forward assigns `p.data = ...`, this still has the old one.
        self._memory = [(tensor, tensor.data) for tensor in plain]

    def restore(self) -> None:
        for tensor, data in self._memory:
            if (tensor.data_ptr(), tensor.shape) != (data.data_ptr(), data.shape):
                tensor.data = data
        for held, before in self._dicts:
            # The dict itself stands for `absent`: None is a value that a module may hold.
            if len(held) != len(before) or any(held.get(name, held) is not value for name, value in before.items()):
                held.clear()
                held.update(before)


class Kept:
    """Enter it around one replay. `leaves` are the tensors whose gradients it may touch."""

    def __init__(self, model: nn.Module | None, leaves: Iterable[Tensor], random: Mapping[str, Any] | None) -> None:
        self.storages = StorageKeeper()
        self._modules = [] if model is None else list(model.modules())
        # Only leaves get a `grad`, and torch warns when that of another tensor is read.
        self._leaves = {id(leaf): leaf for leaf in leaves if leaf.is_leaf}
        self._random = random

    @contextlib.contextmanager
    def __call__(self) -> Iterator[StorageKeeper]:
        """Inside, gradients are cleared and the generators stand where the step began; afterwards all is as before."""
        now = capture_random(_find_devices(self._leaves.values()))
        training = [(module, module.training) for module in self._modules]
        members = [_Members(module) for module in self._modules]
        # Last, since it already changes the leaves: nothing that may raise belongs between this and `try`.
        leaves = [_Leaf.take(leaf) for leaf in self._leaves.values()]
        try:
            if self._random is not None:
                restore_random(self._random)
            # Casts in the cache belong to the step's own graph, and would be reused without an op to observe.
            torch.clear_autocast_cache()
            # The step itself has given its warnings; a part of a batch gives false ones.
            with _eagerly(), _without_collector(), torch.enable_grad(), warnings_muted():
                yield self.storages
        finally:
            # Those of the replay belong to its graph, which backward has freed: the program's next forward must not
            # reuse them.
            torch.clear_autocast_cache()
            for module, flag in training:
                module.training = flag
            self.storages.restore()
            for one in members:
                one.restore()
            for leaf in leaves:
                leaf.restore()
            restore_random(now)

    def add_leaf(self, tensor: Tensor) -> None:
        """Add a leaf; not allowed while entered."""
        self._leaves.setdefault(id(tensor), tensor)


@contextlib.contextmanager
def undone(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Undo what steps taken inside change in the optimizers' own state."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_undone(optimizer))
        yield


@contextlib.contextmanager
def _undone(optimizer: Optimizer) -> Iterator[None]:
    """Remove entries that a step adds to the state and restore numbers; the replay itself restores tensors."""
    before: dict[Any, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()
    }
    names = set(vars(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int)}
    try:
        yield
    finally:
        # The dict itself stays: schedulers and the program may refer to it.
        optimizer.state.clear()
        optimizer.state.update(before)
        for name in [name for name in vars(optimizer) if name not in names]:  # a scheduler's mark that it stepped
            delattr(optimizer, name)
        for name, value in attributes.items():
            setattr(optimizer, name, value)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Run compiled code eagerly: a dispatch mode cannot see inside a compiled graph."""
    # Nothing was compiled yet, and set_stance would import the compiler, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection: a replay creates thousands of objects, and collecting would take longer than it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _find_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return sorted(devices, key=str)


def _version(tensor: Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return None


def _set_version(tensor: Tensor, version: int) -> None:
    """Reset the version: the values are as before, so a live graph may continue to use them."""
    setter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if setter is None:
        return
    try:
        setter((tensor,), (version,))
    except TypeError:  # the signature of older versions
        setter(tensor, version)
