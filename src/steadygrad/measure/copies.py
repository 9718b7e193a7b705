"""CopyWatch: evaluations of a copy of the model -> the average that was made by hand and never moves, or half of it.

Copies are modules of the model's own type, with parameters of the same names and shapes. They are looked up among all
live objects, which takes 10 to 100 ms, when the watch is made; and once more after the first steps, but only if the
type is referred to more often than before, since each new module refers to it. Then their calls are heard, without a
trace in what the program saves. A copy that is called with gradients, in steps close together (a reference or a target
network), or with other weights than the first ones is left alone from then on. So is one whose name does not say that
it is an average: a teacher may stay as it is. Where the weights of a copy move, the statistics of its BatchNorm layers
must do so as well, if the model's do: from one evaluation to the next both are compared. Costs one small host read in
each of the first evaluations of a copy, none in a step.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.measure.quiet_hook import QuietHook
from steadygrad.measure.rows import is_readable
from steadygrad.measure.suspicious_ops import OUR_FOLDERS, find_caller
from steadygrad.state.calls import hear_calls, stop_hearing
from steadygrad.state.live_objects import is_affordable, list_live

MOST_COPIES, MOST_SEEN = 8, 512
"""Copies that are heard, and modules of the model's type that are compared with it."""
APART = 10
"""Steps between two evaluations from which they look like validations, not like parts of a step."""
NUM_EVALUATIONS = 3
"""Evaluations with the first weights after which an average is idle: it may begin later than the training."""
MOST_FRAMES, MOST_NORMS = 32, 4
AVERAGES = frozenset(("ema", "swa", "avg", "average", "averaged", "shadow", "polyak"))
"""Words in the name of an average."""


@dataclass(frozen=True, slots=True)
class _Sample:
    weights: list[Tensor]
    statistics: list[Tensor]
    """Means and variances of BatchNorm layers."""
    own: list[Tensor]
    """Those of the model at that time."""


@dataclass(slots=True)
class _Calls:
    last: int = 0
    """Number of steps made at its last call."""
    num_apart: int = 0
    num_close: int = 0
    num_stale: int = 0
    """Evaluations in a row for which the weights moved and the statistics did not."""
    seen: _Sample | None = None
    """What it held at its last evaluation."""


class CopyWatch:
    """Call `search` once, a few steps into the training; `idle` is what was found since."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: Mapping[str, Tensor] = {}
        self._calls: weakref.WeakKeyDictionary[nn.Module, _Calls] = weakref.WeakKeyDictionary()
        """The copies; the program may drop them."""
        self._listener = QuietHook(self._hear, num_arguments=3)
        self._has_searched = False
        self._copies: list[weakref.ref[nn.Module]] = []
        with contextlib.suppress(Exception):  # lazy parameters, or a module that is being built
            self._copies = [weakref.ref(copy) for copy in find_copies(model)]
        self._num_references = sys.getrefcount(type(model))
        self.num_steps = 0
        """Steps made so far."""
        self.idle: tuple[str, str] | None = None
        """Name of an average that is evaluated and never moves, and file:line of the evaluation."""
        self.stale: tuple[str, str] | None = None
        """The same for one whose weights move, and whose BatchNorm statistics do not."""

    def search(self, first: Mapping[str, Tensor], sample: Callable[[Tensor], Tensor]) -> None:
        """Find copies, and hear their calls; `first` are samples of the first weights, as `sample` takes them."""
        if self._has_searched or not first:
            return
        self._has_searched, self._first, self._sample = True, first, sample
        for copy in self._find_copies()[:MOST_COPIES]:
            if hear_calls(copy, self._listener):
                self._calls[copy] = _Calls(last=-APART)

    def _find_copies(self) -> list[nn.Module]:
        if sys.getrefcount(type(self._model)) > self._num_references:
            return find_copies(self._model)
        return [copy for copy in (one() for one in self._copies) if copy is not None]

    def close(self) -> None:
        """Stop listening."""
        for copy in list(self._calls):
            self._leave(copy)

    def _leave(self, copy: nn.Module) -> None:
        stop_hearing(copy, self._listener)
        self._calls.pop(copy, None)

    def _hear(self, copy: nn.Module, *_: Any) -> None:
        """A copy is about to be called."""
        calls, step = self._calls.get(copy), self.num_steps
        # In the same step: further batches of one evaluation.
        if calls is None or step == calls.last:
            return
        is_apart = step - calls.last >= APART
        calls.num_close += not is_apart
        calls.last = step
        if torch.is_grad_enabled() or calls.num_close > 1:
            self._leave(copy)
            return
        if is_apart and not self._is_first(copy):
            self._compare_statistics(copy, calls)
            return
        calls.num_apart += is_apart
        if calls.num_apart == NUM_EVALUATIONS:
            name = find_average_name(copy)
            if name:
                self.idle = name, find_caller()
            self._leave(copy)

    def _compare_statistics(self, copy: nn.Module, calls: _Calls) -> None:
        """Note whether the weights of a copy have moved since its last evaluation, and its statistics have not."""
        before, calls.seen = calls.seen, self._take_sample(copy)
        now = calls.seen
        if before is not None:
            has_moved = not _are_same(now.weights, before.weights) and not _are_same(now.own, before.own)
            calls.num_stale = calls.num_stale + 1 if has_moved and _are_same(now.statistics, before.statistics) else -1
        is_stale = calls.num_stale == NUM_EVALUATIONS - 1
        if is_stale:
            name = find_average_name(copy)
            if name:
                self.stale = name, find_caller()
        # In train mode, as in torch's `update_bn`, statistics are being measured.
        is_measured = any(norm.training for norm in _list_norms(copy))
        if is_stale or calls.num_stale < 0 or is_measured or not now.statistics:
            self._leave(copy)

    @torch.no_grad()
    def _take_sample(self, copy: nn.Module) -> _Sample:
        weights = dict(copy.named_parameters())
        return _Sample(
            weights=[self._sample(weights[name]).cpu() for name in self._first],
            statistics=[self._sample(one).cpu() for one in _list_statistics(copy)],
            own=[self._sample(one).cpu() for one in _list_statistics(self._model)],
        )

    @torch.no_grad()
    def _is_first(self, copy: nn.Module) -> bool:
        """Whether a copy holds the first weights and the model does not: reads a few numbers from the device."""
        copied, own = (dict(one.named_parameters()) for one in (copy, self._model))
        return all(_is_same(self._sample(copied[name]), first) for name, first in self._first.items()) and not all(
            _is_same(self._sample(own[name]), first) for name, first in self._first.items()
        )


def find_copies(model: nn.Module) -> list[nn.Module]:
    """Return live modules of the same type whose parameters have the same names and shapes and are others."""
    if not is_affordable():
        return []
    kind, own = type(model), {id(module) for module in model.modules()}
    shapes = _list_shapes(model)
    found = [thing for thing in list_live(kind, is_exact=True) if id(thing) not in own][:MOST_SEEN]
    return [module for module in found if _is_copy(module, shapes)]


def _is_copy(module: nn.Module, shapes: Mapping[str, tuple[torch.Size, int]]) -> bool:
    try:
        theirs = _list_shapes(module)
    except Exception:  # one that is being built
        return False
    is_alike = theirs.keys() == shapes.keys() and all(theirs[name][0] == shapes[name][0] for name in shapes)
    return is_alike and bool(shapes) and not {i for _, i in theirs.values()} & {i for _, i in shapes.values()}


def _list_shapes(module: nn.Module) -> dict[str, tuple[torch.Size, int]]:
    return {name: (p.shape, id(p)) for name, p in module.named_parameters() if is_readable(p)}


def find_average_name(module: nn.Module) -> str:
    """Return the name by which the calling code knows this module, if it says that it is an average; else ''."""
    for frame in _list_frames():
        # Copied before it is walked: another thread may add a global meanwhile.
        for name, thing in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if thing is module and _is_average(name):
                return str(name)
            for attribute, value in _list_attributes(thing):
                if value is module and any(map(_is_average, (name, attribute, type(thing).__name__))):
                    return f"{name}.{attribute}"
    return ""


def _list_attributes(thing: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, without running code of its own; nothing for classes and plain values."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    if type(held) is not dict:
        return []
    modules = held.get("_modules")
    return [*held.items(), *(modules.items() if type(modules) is dict else ())]


def _list_frames() -> Iterator[Any]:
    """Yield the frames of the program that called us, innermost first."""
    frame: Any = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(OUR_FOLDERS):
            yield frame
        frame = frame.f_back


def _is_average(name: str) -> bool:
    """Return whether a name has such a word in it: 'ema_model', 'ModelEma', not 'schema'."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return not AVERAGES.isdisjoint(re.split(r"[^a-z]+", words))


def _list_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]


def _list_statistics(module: nn.Module) -> list[Tensor]:
    """Return the means and variances that some BatchNorm layers keep."""
    norms = _list_norms(module)
    found = [tensor for norm in norms[:MOST_NORMS] for tensor in (norm.running_mean, norm.running_var)]
    return [tensor for tensor in found if tensor is not None and is_readable(tensor)]


def _are_same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(one, other) for one, other in zip(ones, others))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.cpu(), other.cpu().to(one.dtype)))
