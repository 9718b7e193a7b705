"""BufferKeeper: the model's buffers as they were before the first forward of a step, to restore when the step is bad.

BatchNorm statistics, spectral norm's vectors and the like change in the forward pass, before the step is known to be
bad. `begin` walks the model again and copies every buffer: a hook calls it at the first forward after a step, and the
function form calls it before the function. Versions would not help: `F.batch_norm` changes its statistics without
touching `_version`. Where no hook fires (a compiled function, a part of the model called on its own), the copy is the
state after the last step or the last `load_state_dict`. `buffer_places.py` defines how a buffer is restored.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.buffer_places import FrozenTables, Key, Pack, Place, Where, drop_new, find_kind, name_bad, walk
from steadygrad.act.call_listener import CallListener, CallListeners
from steadygrad.measure.states import is_statistic
from steadygrad.state.finite import count_nonfinite

# Asked of each module before every step: maps over these take a tenth of a loop's time.
_own_modules, _own_buffers = operator.itemgetter("_modules"), operator.itemgetter("_buffers")
_list_values, _list_names = operator.methodcaller("values"), operator.methodcaller("keys")
_read_version = operator.attrgetter("_version")
_keepers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[BufferKeeper]] = weakref.WeakKeyDictionary()
USUAL_STEPS = 50
"""Steps between two edits by the program that make the second one a decision, and not a part of each step."""


class BufferKeeper:
    """Keeps the buffers of `model` as they were when the step began."""

    def __init__(
        self,
        model: nn.Module,
        *,
        watch: bool = False,
        wrappers: Sequence[nn.Module] = (),
        root: nn.Module | None = None,
    ) -> None:
        """Copy the buffers. `watch`: listen for calls of the model, directly or through one of its `wrappers`.

        `root`: of which it is a part; keepers of its other parts hear of each step.
        """
        self._model, self._paused, self._may_have_begun = model, False, False
        self._modules: list[nn.Module] = []
        self._held: tuple[list[Any], ...] = ()
        """What these modules held when they were last walked."""
        self._where: list[Where] = []
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []
        self._packs: list[Pack] = []
        self._singles: list[Place] = []
        self._odd: set[Key] = set()  # does not fit a pack, or is replaced by a forward
        self._tables = FrozenTables()
        self._doubtful: dict[str, tuple[Place, Tensor]] = {}
        """Buffers other than a norm's statistics that the last finite step has made NaN, and what they held before."""
        self._meant: set[str] = set()
        """Those whose NaN no step reads: the step after it was finite."""
        self.has_begun = False
        """Whether a forward of the current step was seen."""
        self.num_edits = 0
        """How often the program has changed buffers between two steps, which it does not usually do: gates, masks."""
        self._versions: list[int] | None = None
        self._num_steps, self._edited_at = 0, -USUAL_STEPS
        self._beside = _keepers.setdefault(model if root is None else root, weakref.WeakSet())
        self._beside.add(self)
        self._heard = (model, *wrappers)
        self._listeners = CallListeners(self._heard, self.hear) if watch else None
        self._loads = (
            nn.Module.register_load_state_dict_post_hook(model, CallListener(self.hear_load, num_arguments=2))
            if watch
            else None
        )
        self._copy()

    def close(self) -> None:
        """Stop listening to the model."""
        if self._listeners is not None and self._loads is not None:
            self._listeners.close()
            self._loads.remove()

    # --- before the forward -----------------------------------------------------------------------------------------

    def hear(self, model: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        """Called when the model is called. Without gradients that is a validation, `update_bn`, or part of a step."""
        # A shallow copy shares the model's hooks: the replicas of DataParallel are such copies.
        if self.has_begun or not any(model is one for one in self._heard):
            return
        if torch.is_grad_enabled():
            self.begin()
        elif self._model.training and not (self.has_begun or self._may_have_begun or self._paused):
            self._may_have_begun = True
            self._copy()

    def hear_load(self, model: nn.Module, _: Any) -> None:
        """Called when another state was loaded, which the next forward may not reveal."""
        if model is self._model and not (self.has_begun or self._may_have_begun or self._paused):
            self._copy()

    def begin(self, *, anew: bool = False) -> None:
        """Prepare for a forward: copy the buffers if it is the first since the last step, or if `anew`."""
        if (anew or not self.has_begun) and not self._paused:
            self.has_begun = True
            # A NaN from a forward without gradients (a target network's, on the same batch) belongs to this step.
            if anew or not (self._may_have_begun and self._list_spoilt()):
                self._copy()

    def forget(self) -> None:
        """Forget what happened to the buffers before: another state was loaded."""
        self.has_begun = self._may_have_begun = False
        self._doubtful, self._versions = {}, None
        self._copy()

    def _note_edit(self) -> None:
        """Note whether the buffers have been changed since the last step ended."""
        versions, self._versions = self._versions, None
        if versions is not None and versions != list(map(_read_version, self._tensors)):
            self.num_edits += self._num_steps - self._edited_at >= USUAL_STEPS
            self._edited_at = self._num_steps

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Leave out of the program's edits what we change inside this, and put back."""
        is_between_steps = self._versions is not None
        self._note_edit()
        try:
            yield
        finally:
            if is_between_steps:
                self._versions = list(map(_read_version, self._tensors))

    def _copy(self) -> None:
        self._note_edit()
        # Runs before each step's first forward: for the same tensors, one foreach copy for each device and dtype.
        if self._is_as_walked() and list(map(find_kind, self._tensors)) == self._kinds:
            for pack in self._packs:
                pack.read(pack.saved_views)
            return
        modules, where, tensors, odd = walk(self._model, self._odd)
        self._modules = list(modules)
        self._held = _list_held(self._modules)
        is_same = where == self._where and all(map(operator.is_, tensors, self._tensors))
        if is_same and list(map(find_kind, tensors)) == self._kinds:
            for pack in self._packs:
                pack.read(pack.saved_views)
        else:
            self._sort_out(where, tensors)
            _, self._where, self._tensors, odd = walk(self._model, self._odd)
            self._kinds = list(map(find_kind, self._tensors))
            groups: dict[Any, list[int]] = {}
            for i, (_, dtype, device) in enumerate(self._kinds):
                groups.setdefault((dtype, device), []).append(i)
            self._packs = [Pack([self._where[i] for i in g], [self._tensors[i] for i in g]) for g in groups.values()]
        self._singles = [Place.of(*at) for at, buffer in odd if self._tables.must_copy(at, buffer)]

    def _is_as_walked(self) -> bool:
        """Whether the model holds what it held when it was last walked, and nothing odd; cheaper than a walk."""
        if self._odd or self._singles or not self._held:
            return False
        (*before, names), (*held, names_now) = self._held, _list_held(self._modules)
        return names == names_now and all(
            len(old) == len(now) and all(map(operator.is_, old, now)) for old, now in zip(before, held)
        )

    def _sort_out(self, where: list[Where], tensors: list[Tensor]) -> None:
        """Find the odd ones: if a few tensors are new, a forward replaced them; if all are, `.to()` did."""
        before = dict(zip(self._where, self._tensors))
        replaced = [at for at, tensor in zip(where, tensors) if before.get(at, tensor) is not tensor]
        self._odd |= self._tables.set_apart(where, tensors)
        if len(replaced) <= len(where) // 2:
            self._odd |= {(id(module), name) for module, name in replaced}

    # --- after the step ---------------------------------------------------------------------------------------------

    def _split(self) -> tuple[list[Pack], list[Place]]:
        """Return the packs whose tensors are all still in place, and every other place."""
        whole = [pack for pack in self._packs if pack.is_whole]
        return whole, [*self._singles, *(p for pack in self._packs if pack not in whole for p in pack.places)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore every buffer to its value before the forward; the step continues."""
        whole, single = self._split()
        for pack in whole:
            pack.write(pack.saved_views)
        for place in single:
            place.put_back()
        drop_new(self._modules, {*self._where, *((p.module, p.name) for p in self._singles)}, self._odd)

    def restore(self) -> None:
        """Undo the forward's changes after a step that the host knows to be bad."""
        self.put_back()
        for keeper in self._beside:  # one loss trains several parts, whose optimizers need not step each time
            if keeper._model is not self._model and keeper.has_begun and keeper._has_bad_gradients():
                keeper.put_back()
        with torch.no_grad():
            for place, before in self._doubtful.values():
                if place.now is not None and place.now.shape == before.shape:
                    place.now.copy_(before)  # it was read, and made this step bad
        self._doubtful = {}
        self.accept()

    def _has_bad_gradients(self) -> bool:
        gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
        return bool(count_nonfinite({str(number): gradient for number, gradient in enumerate(gradients)}))

    @torch.no_grad()
    def select(self, found: Tensor) -> None:
        """Decide on the device: keep the forward's values when `found` is 0, restore the copies when it is 1."""
        whole, single = self._split()
        for pack in whole:
            pack.read(pack.fresh_views)
            torch.where(found.to(pack.saved.device).bool(), pack.saved, pack.fresh, out=pack.fresh)
            pack.write(pack.fresh_views)
        for place in single:
            place.select(found)
        self.accept()

    def accept(self) -> None:
        """End the step; the next forward begins a new one. Other guards of the same model continue from here too."""
        if not self.has_begun:  # no hook fired, so none will fire in the next step's forward
            self._copy()
        if self._listeners is not None:
            self._listeners.follow()
        self.has_begun = self._may_have_begun = False
        # Where nothing is kept there is nothing to compare; inference tensors, which have no version, are kept apart.
        self._versions, self._num_steps = list(map(_read_version, self._tensors)) or None, self._num_steps + 1
        if len(self._beside) > 1:
            for keeper in self._beside:
                if keeper is not self and keeper.has_begun:
                    keeper._copy()

    # --- in between -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def as_saved(self) -> Iterator[None]:
        """Inside, the buffers hold their values from before the current forward; on exit the present ones return."""
        paused, self._paused = self._paused, True  # a replay's forward does not begin a step
        # Nested: the buffers hold the saved values already.
        whole, single = self._split() if self.has_begun and not paused else ([], [])
        present = [Place.of(place.module, place.name) for place in single]
        with torch.no_grad():
            for pack in whole:
                # `fresh` holds the present values until the end: neither select() nor find_spoilt(), which write to it,
                # may be called inside.
                pack.read(pack.fresh_views)
                pack.write(pack.saved_views)
            for place in single:
                place.put_back()
        try:
            yield
        finally:
            self._paused = paused
            with torch.no_grad():
                for pack in whole:
                    pack.write(pack.fresh_views)
                for place in present:
                    place.put_back()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the buffers' present values on exit, whatever a replay does to them inside."""
        # Copies every buffer once more, on its device: only while a step is replayed or tested.
        present, paused, self._paused = BufferKeeper(self._model), self._paused, True
        with self._aside():
            try:
                yield
            finally:
                present.put_back()
                self._paused = paused

    def find_spoilt(self) -> dict[str, int]:
        """Return the buffers that were finite before this forward and no longer are, with their number of bad elements.

        Only evaluation reads the statistics of a norm; whether a step reads another buffer shows in the next one, so
        that is waited for: a metric may be 0/0 for a class that did not occur, a table NaN where nothing was seen yet.
        A loop that hides a NaN from its loss (`nan_to_num`, its own skip) still runs it through BatchNorm. Only
        buffers in host memory are checked: on a device this would cost a second host read per step, and the periodic
        scan finds them there.
        """
        if not self._packs and not self._singles:
            return {}
        places = self._list_spoilt()
        bad = {name: num for name, (_, num) in places.items() if is_statistic(name)}
        self._meant |= self._doubtful.keys()  # this step was finite, whatever it read
        self._doubtful = {
            name: (place, place.copy.clone())
            for name, (place, _) in places.items()
            if name not in bad and name not in self._meant and place.copy is not None
        }
        return bad

    @property
    def meant_nonfinite(self) -> frozenset[str]:
        """Buffers in host memory that became NaN, and that no step reads."""
        return frozenset(self._meant)

    def _list_spoilt(self) -> dict[str, tuple[Place, int]]:
        """Return the place of each such buffer, and its number of bad elements."""
        suspects = list(self._singles)
        with torch.no_grad():
            for pack in self._packs:
                if pack.saved.is_floating_point() and pack.saved.device.type == "cpu":
                    suspects += [] if pack.is_finite() else pack.places
            return name_bad(self._model, suspects) if suspects else {}


def _list_held(modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """Return the children, the buffers and the names of the buffers of these modules."""
    parts = list(map(vars, modules))
    try:
        # Most modules are leaves without buffers: what is empty is left out before anything is made of it.
        children = list(filter(None, map(_own_modules, parts)))
        buffers = list(filter(None, map(_own_buffers, parts)))
    except KeyError:  # a scripted or traced module has them elsewhere, in what is not a dict
        children, buffers = [one._modules for one in modules], [one._buffers for one in modules]
    return (
        list(chain.from_iterable(map(_list_values, children))),
        list(chain.from_iterable(map(_list_values, buffers))),
        list(chain.from_iterable(map(_list_names, buffers))),  # what a scripted module has cannot be iterated over
    )
