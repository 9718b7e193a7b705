"""Non-finite tensors of a training -> which of them are faults, and which are intentional.

Moments, averaged weights and the statistics of norms must be finite, and so must parameters, unless they held the same
values before training and do no harm. Other buffers may hold an infinity by design (a mask of -inf, a running minimum),
and what a user passes as `extras` is the user's own. Each is noticed at the first save that contains it, reported once
and saved from then on. A NaN in a buffer is a fault unless it was there before training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from steadygrad.measure.states import count_bad, is_statistic
from steadygrad.state.finite import count_nonfinite

PLACES = ("model", "other_buffers", "accumulated.buffers")
"""Places in a state that hold buffers."""
EMA = "extras.ema."


class Infinities:
    """The non-finite values that one training may hold."""

    def __init__(self, model: nn.Module, own_extras: Collection[str], *, looks: bool) -> None:
        """`own_extras`: names that the user chose. `looks=False`: nothing will be saved, so nothing is read."""
        self._model = model
        self._own = tuple(f"extras.{name}." for name in own_extras)
        # Reads every buffer once, which waits for the device; only at construction
        self.buffers = set(count_nonfinite(dict(model.named_buffers()))) if looks else set()
        """Names of buffers, and of such parameters, that may be non-finite."""
        self._extras: set[str] = set()
        self.list_meant: Callable[[], Collection[str]] = frozenset
        """Returns the names of parameters that were not finite before training and do no harm."""

    def list_names(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names under which they are saved."""
        if not self.buffers:
            return set(self._extras)
        ema = state["extras"].get("ema")
        copies = {f"{EMA}{name}" for name in (ema if isinstance(ema, Mapping) else ()) if self._is_copy(str(name))}
        return self._extras | copies | {f"{place}.{name}" for place in PLACES for name in self.buffers}

    def accept(self, bad: Collection[str]) -> list[str]:
        """Return the names in `bad` if all of them may be non-finite; none if one is a fault."""
        live = dict(self._model.named_buffers())
        buffers = {name.removeprefix(f"{place}."): name for name in bad for place in PLACES if name.startswith(place)}
        free = {name for name in buffers if name in live and not is_statistic(name) and not count_bad(name, live[name])}
        free |= set(buffers).intersection(self.list_meant())
        extras = {name for name in bad if name.startswith(self._own)} if self._own else set()
        # Widened before the EMA is judged, since `_is_copy` compares with it; taken back if anything else is a fault
        known, self.buffers = self.buffers, self.buffers | free
        rest = set(bad) - extras - {buffers[name] for name in free}
        if any(not name.startswith(EMA) or not self._is_copy(name.removeprefix(EMA)) for name in rest):
            self.buffers = known
            return []
        self._extras |= extras
        return sorted(bad)

    def _is_copy(self, name: str) -> bool:
        """Whether a tensor of an EMA is a copy of such a buffer."""
        return any(name == buffer or name.endswith(f".{buffer}") for buffer in self.buffers)
