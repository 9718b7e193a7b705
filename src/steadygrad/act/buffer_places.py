"""A model's buffers, one by one and in packs: the original tensor, a copy of its values, and how to restore them.

A buffer that a forward wrote into is written back; one that it replaced gets the original tensor back: the replacement
may be the user's own batch and is never written to. Writes go through `.data`, so that no live graph sees a version
change.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.measure.states import is_statistic
from steadygrad.state.collect import has_values
from steadygrad.state.shards import is_dtensor

Where = tuple[nn.Module, str]
Key = tuple[int, str]
"""A module's id and a buffer's name."""
find_kind = operator.attrgetter("shape", "dtype", "device")
MOST_BYTES = 64 << 20
"""Limit for copying large buffers not yet seen to change; beyond it they are frozen tables and quantized weights."""
LARGE = 1 << 16
"""Elements from which a buffer counts as large."""


def walk(
    model: nn.Module, odd: Set[Key]
) -> tuple[set[nn.Module], list[Where], list[Tensor], list[tuple[Where, Tensor | None]]]:
    """Return a model's modules and its current buffers: places, tensors, and separately the `odd` or absent ones.

    Runs at every step; `named_buffers()` would take three times as long.
    """
    where, tensors, apart = [], [], []
    stack: list[nn.Module | None] = [model]
    seen: set[nn.Module] = set()
    while stack:
        module = stack.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        stack.extend(module._modules.values())
        for name, buffer in module._buffers.items():
            if buffer is None or (odd and (id(module), name) in odd):
                apart.append(((module, name), buffer))
            else:
                where.append((module, name))
                tensors.append(buffer)
    return seen, where, tensors, apart


def look_up(module: nn.Module, name: str) -> Tensor | None:
    """Return the buffer of that name. The `_buffers` of a scripted module is not a dict."""
    buffers = module._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401


class Place(NamedTuple):
    """One buffer: where it lives, the tensor that was there, and a copy of its values."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    copy: Tensor | None

    @property
    def now(self) -> Tensor | None:
        """Return the tensor that is there now."""
        return look_up(self.module, self.name)

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Place:
        """Capture the place as it is now."""
        tensor = look_up(module, name)
        return cls(module, name, tensor, None if tensor is None or is_lazy(tensor) else tensor.detach().clone())

    def put_back(self) -> None:
        """Restore the buffer: put the original tensor back if it was replaced, and write in place otherwise."""
        now, tensor, copy = self.now, self.tensor, self.copy
        if now is not None and now is tensor and copy is None:
            if not is_lazy(now):  # the forward has made it
                now.data.copy_(self._find_first())
        elif now is None or tensor is None or copy is None:
            setattr(self.module, self.name, tensor)
        elif now is not tensor:
            # A cache that has only grown may stay. The clone: `copy` may be a view into a pack, which the next step
            # overwrites.
            if not (is_cache(self.module, self.name) and now.shape != copy.shape and is_finite(now)):
                self.module._buffers[self.name] = tensor if are_equal(tensor, copy) else copy.clone()
        elif find_kind(tensor) != find_kind(copy):
            tensor.data = copy.clone()  # resized, or given another storage
        elif is_writable(tensor):
            tensor.data.copy_(copy)
        elif not are_equal(tensor, copy):
            self.module._buffers[self.name] = copy.clone()

    def _find_first(self) -> Tensor:
        """Return what a buffer that was lazy before the forward held when it was made: torch has lazy norms only."""
        norm: Any = copy.copy(self.module)
        norm._buffers = {name: None if one is None else one.clone() for name, one in self.module._buffers.items()}
        if hasattr(norm, "reset_running_stats"):
            norm.reset_running_stats()
        first: Tensor = norm._buffers[self.name]
        return first

    def select(self, found: Tensor) -> None:
        """Restore the buffer if `found` is 1; decided on the device where possible."""
        now, tensor, copy = self.now, self.tensor, self.copy
        if (now is None and tensor is None) or (now is not None and is_lazy(now)):
            return
        if (
            now is None
            or copy is None
            or now.requires_grad
            or find_kind(now) != find_kind(copy)
            or not is_writable(now)
        ):
            # Rare: a buffer that no kernel can select costs a wait for the device.
            if bool(found):
                self.put_back()
            return
        # A select, not a product: `now` holds NaN exactly when it matters.
        chosen = torch.where(found.to(copy.device).bool(), copy, now)
        if now is tensor:
            tensor.data.copy_(chosen)
        else:
            self.module._buffers[self.name] = chosen  # never written into: it may be the user's own batch


class Pack:
    """Buffers of one device and dtype. Their copies are views into one flat tensor, so that a select is one launch."""

    def __init__(self, where: list[Where], tensors: list[Tensor]) -> None:
        self._where, self.tensors, self._shapes = where, tensors, [tensor.shape for tensor in tensors]
        self.saved = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.fresh = torch.empty_like(self.saved)
        sizes = [tensor.numel() for tensor in tensors]
        self.saved_views = [v.view(t.shape) for v, t in zip(self.saved.split(sizes), tensors)]
        self.fresh_views = [v.view(t.shape) for v, t in zip(self.fresh.split(sizes), tensors)]
        self.places = [Place(*at, t, v) for at, t, v in zip(where, tensors, self.saved_views)]

    @property
    def is_whole(self) -> bool:
        """Whether the same tensors are still there, in the same shapes."""
        is_same = all(look_up(*at) is tensor for at, tensor in zip(self._where, self.tensors))
        return is_same and [tensor.shape for tensor in self.tensors] == self._shapes

    def read(self, into: list[Tensor]) -> None:
        """Copy the buffers into these tensors."""
        with torch.no_grad():
            torch._foreach_copy_(into, self.tensors)

    def is_finite(self) -> bool:
        """Whether the same tensors are still there and hold only finite numbers. Waits for the device."""
        if not self.is_whole:
            return False
        self.read(self.fresh_views)
        # One NaN or Inf makes the sum one; a sum that is too large for its dtype may do so without.
        return math.isfinite(self.fresh.sum().item()) or bool(self.fresh.isfinite().all())

    def write(self, values: list[Tensor]) -> None:
        """Write these values into the buffers."""
        torch._foreach_copy_([tensor.data for tensor in self.tensors], values)


class FrozenTables:
    """Large buffers beyond `MOST_BYTES`: each is copied only once it was seen to change."""

    def __init__(self) -> None:
        self._unchanged: dict[Key, tuple[int, int]] = {}  # identity and version

    def set_apart(self, where: Iterable[Where], tensors: Iterable[Tensor]) -> set[Key]:
        """Return the buffers that no pack can hold: these tables, and what cannot be written element by element."""
        apart, budget = set(), MOST_BYTES
        for (module, name), tensor in zip(where, tensors):
            key, is_plain = (id(module), name), is_writable(tensor) and tensor.numel() > 0
            if is_plain and tensor.numel() > LARGE:
                budget -= tensor.numel() * tensor.element_size()
                if budget < 0:
                    # No version shows what F.batch_norm writes, but its statistics are far smaller than this.
                    self._unchanged[key] = (id(tensor), find_version(tensor))
            if not is_plain or key in self._unchanged:
                apart.add(key)
        return apart

    def must_copy(self, at: Where, buffer: Tensor | None) -> bool:
        """Whether this buffer must be copied, or noted as absent or not made yet."""
        if buffer is None or not has_values(buffer):
            return buffer is None or is_lazy(buffer)
        key = (id(at[0]), at[1])
        if self._unchanged.get(key) == (id(buffer), find_version(buffer)):
            return False
        self._unchanged.pop(key, None)
        return True


def drop_new(modules: Iterable[nn.Module], known: Set[Where], odd: Set[Key]) -> None:
    """Remove buffers that a forward has registered; a cache of finite numbers may stay."""
    for module in modules:
        for name, buffer in list(module._buffers.items()):
            may_stay = buffer is None or (is_cache(module, name) and is_finite(buffer))
            if not may_stay and (module, name) not in known and (id(module), name) not in odd:
                delattr(module, name)


def name_bad(model: nn.Module, places: Sequence[Place]) -> dict[str, tuple[Place, int]]:
    """Map the name of each buffer that was finite and no longer is to its place and number of bad elements.

    Host memory only.
    """
    bad = [(place, num) for place in places if (num := _count_bad(place))]
    return {
        f"{prefix}.{place.name}" if prefix else place.name: (place, num)
        for prefix, module in (model.named_modules() if bad else ())
        for place, num in bad
        if place.module is module
    }


def _count_bad(place: Place) -> int:
    """Count bad elements. Inf counts only in the statistics of a norm: elsewhere masks and log-priors contain it."""
    now, before = place.now, place.copy
    if now is None or before is None or not now.is_floating_point() or now.device.type != "cpu":
        return 0
    if not is_finite(before):
        return 0
    return int((~now.isfinite() if is_statistic(place.name) else now.isnan()).sum())


def is_cache(module: nn.Module, name: str) -> bool:
    """Whether the buffer can be recomputed, such as rotary tables that grow with the longest sequence."""
    return name in module._non_persistent_buffers_set


def is_writable(tensor: Tensor) -> bool:
    """Whether each element can be written separately."""
    if is_lazy(tensor):
        return False
    plain = tensor.layout is torch.strided and not is_dtensor(tensor) and not tensor.is_meta
    # 1: elements share memory, as after expand(); 0: they do not; 2: unknown.
    return plain and not tensor.is_inference() and torch._debug_has_internal_overlap(tensor) != 1


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite. Waits for the device."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether both have the same kind and the same elements. Waits for the device."""
    return (
        find_kind(left) == find_kind(right)
        and left.layout == right.layout == torch.strided
        and torch.equal(left, right)
    )


def find_version(tensor: Tensor) -> int:
    """Return how often the tensor was changed, as far as torch counts; inference tensors are not counted."""
    return -1 if tensor.is_inference() else tensor._version
