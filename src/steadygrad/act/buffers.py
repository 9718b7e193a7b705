"""BufferKeeper: the model's buffers as they were before the forward, to put back when the step is bad.

BatchNorm statistics, spectral norm's vectors and the like change in the forward pass, before anybody can know that the
step is bad. A copy from before the forward is kept for every buffer that moves; after a bad step it is put back, on
the host's word (`restore`) or by a select on the device (`select`). Writes go through `.data`, so that no graph that
is still alive sees a version change. Buffers that a forward never touches cost nothing.

`_version` alone is not enough to see that a buffer moved: BatchNorm changes its running statistics without touching
it. So a module's buffers count as moved together, and the first step compares values once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.measure.states import is_statistic

LARGE = 1 << 16
"""Elements above which a buffer that did not move in the first step is no longer copied: masks, tables."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One buffer: where it lives, its copy (None: given up as constant), and its version at the time of the copy."""

    module: nn.Module
    name: str
    path: str
    """Its name in the model."""
    copy: Tensor | None
    version: int
    moves: bool = False

    @property
    def live(self) -> Tensor | None:
        """The buffer as it is now; None when the module has dropped it or changed its shape."""
        buffer = self.module._buffers.get(self.name)
        if buffer is None or self.copy is None or buffer.shape != self.copy.shape or buffer.dtype != self.copy.dtype:
            return None
        return buffer


class _Pack:
    """Moving buffers of one device and dtype: copies are views into one flat tensor, so that a select is one launch."""

    def __init__(self, entries: list[_Entry]) -> None:
        self.entries = entries
        copies = [entry.copy for entry in entries if entry.copy is not None]
        self.saved = torch.cat([copy.reshape(-1) for copy in copies])
        self.fresh = torch.empty_like(self.saved)
        sizes = [copy.numel() for copy in copies]
        self.saved_views = [v.view(c.shape) for v, c in zip(self.saved.split(sizes), copies)]
        self.fresh_views = [v.view(c.shape) for v, c in zip(self.fresh.split(sizes), copies)]
        for entry, view in zip(entries, self.saved_views):
            entry.copy = view

    def live(self, views: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers that still are what they were, beside their views."""
        pairs = [(b.data, view) for entry, view in zip(self.entries, views) if (b := entry.live) is not None]
        return [b for b, _ in pairs], [view for _, view in pairs]


class BufferKeeper:
    """Keeps the buffers of `model` as they were at the last `save`."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._entries: list[_Entry] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_lazy(buffer) and id(buffer) not in seen:
                    seen.add(id(buffer))
                    path = f"{prefix}.{name}" if prefix else name
                    self._entries.append(_Entry(module, name, path, buffer.detach().clone(), _version(buffer)))
        self._packs: list[_Pack] = []
        self._settled = False

    @torch.no_grad()
    def refresh(self, *, everything: bool = False) -> None:
        """Copy again what was changed since the last copy, by somebody else: a loaded checkpoint, a user's edit."""
        changed = {
            id(entry.module)
            for entry in self._entries
            if (live := entry.live) is not None and _version(live) != entry.version
        }
        for entry in self._entries:
            live = entry.live
            if live is not None and entry.copy is not None and (everything or id(entry.module) in changed):
                entry.copy.copy_(live)
                entry.version = _version(live)

    @torch.no_grad()
    def save(self) -> None:
        """The step was good: what the forward made of the buffers is the new state to come back to."""
        self._adopt_late_movers()
        self._find_moved()
        for pack in self._packs:
            live, views = pack.live(pack.saved_views)
            if live:
                torch._foreach_copy_(views, live)
        self._note_versions()

    @torch.no_grad()
    def find_spoilt(self) -> dict[str, int]:
        """Buffers that were finite before this forward and are not now, with the number of their bad elements.

        An infinity counts only among the statistics of a norm: elsewhere it is what masks and log-priors are made of.
        A loop that hides a NaN from its loss (`nan_to_num`, a skip of its own) still runs it through BatchNorm. Only
        for buffers in host memory: on a device it would be a second host read a step, and the scan finds them there.
        """
        self._find_moved()
        spoilt: dict[str, int] = {}
        for pack in self._packs:
            live, fresh = pack.live(pack.fresh_views)
            if not live or not pack.saved.is_floating_point() or pack.saved.device.type != "cpu":
                continue
            torch._foreach_copy_(fresh, live)
            if bool(pack.fresh.isfinite().all()):
                continue
            for entry in pack.entries:
                now = entry.live
                if now is not None and entry.copy is not None and bool(entry.copy.isfinite().all()):
                    num_bad = int((~now.isfinite() if is_statistic(entry.name) else now.isnan()).sum())
                    spoilt |= {entry.path: num_bad} if num_bad else {}
        return spoilt

    @torch.no_grad()
    def restore(self) -> None:
        """The step was bad, and the host knows it: every buffer as it was before the forward."""
        self._find_moved()
        for pack in self._packs:
            live, views = pack.live(pack.saved_views)
            if live:
                torch._foreach_copy_(live, views)
        self._note_versions()

    @torch.no_grad()
    def select(self, found: Tensor) -> None:
        """The same on the device: keep the forward's values when `found` is 0, put the copies back when it is 1."""
        self._adopt_late_movers()
        self._find_moved()
        for pack in self._packs:
            live, fresh = pack.live(pack.fresh_views)
            if not live:
                continue
            torch._foreach_copy_(fresh, live)
            torch.where(found.to(pack.saved.device).bool(), pack.saved, pack.fresh, out=pack.saved)
            live, saved = pack.live(pack.saved_views)
            torch._foreach_copy_(live, saved)
        self._note_versions()

    @contextlib.contextmanager
    def as_saved(self) -> Iterator[None]:
        """Inside, the buffers are as they were at the last `save` or `select`; afterwards as they are now."""
        with torch.no_grad():
            for pack in self._packs:
                for views, source in ((pack.fresh_views, None), (pack.saved_views, "saved")):
                    live, chosen = pack.live(views)
                    if live and source is None:
                        torch._foreach_copy_(chosen, live)
                    elif live:
                        torch._foreach_copy_(live, chosen)
        try:
            yield
        finally:
            with torch.no_grad():
                for pack in self._packs:
                    live, fresh = pack.live(pack.fresh_views)
                    if live:
                        torch._foreach_copy_(live, fresh)

    def _find_moved(self) -> None:
        """Mark the buffers that this forward moved; on the first step by value, later by version."""
        moved = {
            id(entry.module)
            for entry in self._entries
            if not entry.moves and (live := entry.live) is not None and self._differs(entry, live)
        }
        fresh = [
            entry for entry in self._entries if id(entry.module) in moved and not entry.moves and entry.live is not None
        ]
        for entry in fresh:
            entry.moves = True
        if not self._settled:
            self._settled = True
            self._drop_constants()
        if fresh:
            self._repack()

    def _adopt_late_movers(self) -> None:
        """A large buffer that was given up as constant has moved after all: it is copied from now on."""
        for entry in self._entries:
            buffer = entry.module._buffers.get(entry.name)
            if entry.copy is None and buffer is not None and _version(buffer) != entry.version:
                entry.copy, entry.version = buffer.detach().clone(), -2

    def _differs(self, entry: _Entry, live: Tensor) -> bool:
        if _version(live) != entry.version:
            return True
        return not self._settled and entry.copy is not None and not torch.equal(live, entry.copy)

    def _drop_constants(self) -> None:
        for entry in self._entries:
            if not entry.moves and entry.copy is not None and entry.copy.numel() > LARGE:
                entry.copy = None

    def _repack(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[_Entry]] = {}
        for entry in self._entries:
            if entry.moves and entry.copy is not None:
                groups.setdefault((entry.copy.device, entry.copy.dtype), []).append(entry)
        self._packs = [_Pack(entries) for entries in groups.values()]

    def _note_versions(self) -> None:
        for entry in self._entries:
            live = entry.live
            if live is not None:
                entry.version = _version(live)


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return -1
