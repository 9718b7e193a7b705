"""Trace: every op of a replayed step -> an Event: what it read, what it wrote, where it was called from.

Forward, backward and recomputed segments alike. Ranges of what is written are measured on the device and read once at
the end (`ranges.py`); no tensor is kept. For an op that autograd's engine runs, the forward event is found by the
sequence number of the node, which the forward op used up just before it was dispatched. Changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadygrad.diagnose.calls import COLLECTIVES, WAIT, Signature, find_tensors, has_nonfinite_scalar, read_signature
from steadygrad.diagnose.frames import Place, StackReader
from steadygrad.diagnose.lineage import Lineage
from steadygrad.diagnose.ranges import NO_SLOT, RangeTable

TO_HOST = ("aten._local_scalar_dense", "aten.item")
FRESH = "aten.lift_fresh"
"""What `torch.tensor(...)` calls with the numbers that the program wrote down."""
MOST_LEVELS = 4
"""Transforms of torch.func inside one another, of which each makes a node for an op."""
GIVEN = "given"
"""The name of an event that stands for a tensor from outside the step."""


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor that an event took: who wrote it, and the slot of its range when it was measured as it was read."""

    key: int
    writers: tuple[int, ...]
    slot: int | None = None


@dataclass(slots=True)
class Event:
    """One op of the step, or one tensor that came from outside."""

    index: int
    name: str
    number: int = -1
    """Which call of the step it was; -1 for what came from outside."""
    reads: tuple[Read, ...] = ()
    written: dict[int, int] = field(default_factory=dict)
    """Storage -> slot of its range."""
    place: Place = field(default_factory=Place)
    forward: int | None = None
    """For an op of the engine: the event of the forward op that its node belongs to."""
    node: str | None = None
    """The autograd node that was running."""
    in_engine: bool = False
    constant: bool = False
    """One of the arguments is the number NaN or Inf."""
    is_uninitialised: bool = False
    is_scalar: bool = False
    """Its output has one element."""
    failed: bool = False
    """It raised an exception."""

    @property
    def is_given(self) -> bool:
        """Whether it stands for a tensor from outside."""
        return self.name == GIVEN

    @property
    def is_collective(self) -> bool:
        """Whether it exchanges values with other ranks."""
        return self.name.startswith(COLLECTIVES)


class Trace:
    """Sees each call before and after it is made."""

    def __init__(self, stack: StackReader) -> None:
        self.events: list[Event] = []
        self.ranges = RangeTable()
        self.lineage = Lineage()
        self._stack = stack
        self._by_sequence: dict[int, list[tuple[int, int]]] = {}
        self._partial: dict[tuple[Any, ...], int] = {}
        self._to_host: list[int] = []
        self._next = 0
        self.trouble = ""
        """The first failure to note a call."""
        self._lock = threading.RLock()  # each device runs backward in its own thread

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the call, and note it."""
        signature = read_signature(func)
        if signature.name == WAIT:  # writes nothing, and what it is given is not there yet
            self._next += 1
            return func(*args, **kwargs)
        # Before the call: an in-place op overwrites what it has read.
        event = self._try(self._begin, signature, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if event is not None:
                event.failed = True
            raise
        if event is not None:
            self._try(self._end, event, signature, args, kwargs, result)
        return result

    def _try(self, note: Callable[..., Event | None], *call: Any) -> Event | None:
        """Note a call without ever ending the step: a kind of tensor that cannot be read is reported later."""
        try:
            with self._lock:
                return note(*call)
        except Exception as error:
            self.trouble = self.trouble or f"{call[0].name if hasattr(call[0], 'name') else call[0]}: {error!r:.200}"
            return None

    @property
    def num_calls(self) -> int:
        """How many calls were noted; the next one gets this number."""
        return self._next

    def find_read(self, tensor: Tensor) -> Read | None:
        """Return how `tensor` would be read now: for what the step left behind."""
        keys = self.lineage.find_keys(tensor)
        return self._read(keys[0], tensor) if keys else None

    def _begin(self, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Event:
        self._next += 1
        reads: list[Read] = []
        for argument, value in signature.name_arguments(args, kwargs):
            if argument.is_out or (argument.is_written and signature.overwrites):
                continue
            found = [(self.lineage.find_keys(tensor)[:1], tensor) for tensor in find_tensors(value)]
            reads += [self._read(key, tensor) for keys, tensor in found for key in keys]
        event = self._new_event(signature.name, tuple(reads), self._stack.read())
        event.is_uninitialised = signature.is_uninitialised
        if has_nonfinite_scalar(args, kwargs):
            event.constant = True
            # The program may have read the number from a tensor before, with item(): what it read then is a parent too.
            event.reads += tuple(read for index in self._to_host for read in self.events[index].reads)
        if signature.name == FRESH:
            self._mark_constants(reads, event.place)
        if signature.name in TO_HOST:
            self._to_host.append(event.index)
        return event

    def _mark_constants(self, reads: Sequence[Read], place: Place) -> None:
        """Numbers that the program has just written down: the line is that of `torch.tensor(...)`."""
        for read in reads:
            source = self.events[read.writers[-1]]
            if source.is_given:
                source.constant, source.place = True, place

    def _new_event(self, name: str, reads: tuple[Read, ...], place: Place) -> Event:
        event = Event(len(self.events), name, self._next - 1, reads, place=place)
        self.events.append(event)
        # Private to torch, and only valid inside a node that the engine runs.
        node = torch._C._current_autograd_node() if place.by_engine or place.in_backward else None
        if node is not None:
            event.in_engine, event.node = place.by_engine, node.name().rpartition("::")[2]
            event.forward = self._find_forward(node._sequence_nr(), event.node)
        # The node of this op was made just before its dispatch, so it has the last number given out in this thread.
        thread, number = threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1
        known = self._by_sequence.setdefault(number, [])
        if not any(other == thread for other, _ in known):  # ops without a node of their own come later
            known.append((thread, event.index))
        return event

    def _find_forward(self, number: int, node: str) -> int | None:
        """Return the event of the forward op of a node; threads count for themselves, so names decide between them."""
        candidates = [index for _, index in self._by_sequence.get(number, ())]
        fitting = [index for index in candidates if fits_node(self.events[index].name, node)]
        if not candidates:
            return self._find_forward_of_transform(number, node)
        found = (fitting or candidates)[-1]
        outer = self.events[found].forward if self.events[found].in_engine else None
        return found if outer is None else outer  # a graph of a graph: the first forward op

    def _find_forward_of_transform(self, number: int, node: str) -> int | None:
        """Inside `torch.func.grad` an op makes a node for each level, the transform's first: its number comes before.

        The op itself is dispatched after the last of them, so it is looked for at the next numbers, by its name.
        """
        for next_number in range(number + 1, number + 1 + MOST_LEVELS):
            for _, index in self._by_sequence.get(next_number, ()):
                if not self.events[index].in_engine and fits_node(self.events[index].name, node):
                    return index
        return None

    def _read(self, key: int, tensor: Tensor) -> Read:
        writers = self.lineage.writers(key)
        if not writers:
            writers = (self._add_given(key),)
        first = self.events[writers[-1]]
        # Read as it was written: the writer's range holds. A part of it, or of several writes, is measured on its own.
        if len(writers) == 1 and self.lineage.covers(key, tensor) and not first.is_uninitialised:
            # At its first use: an op may change it in place later.
            if first.is_given and key not in first.written:
                first.written[key] = self.ranges.add(tensor)
            return Read(key, writers)
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            return Read(key, writers, None if first.written else NO_SLOT)
        cut = (key, writers, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        # The same view of the same writes, as a loop over time steps reads it, is measured once.
        if cut not in self._partial:
            self._partial[cut] = self.ranges.add(tensor)
        return Read(key, writers, self._partial[cut])

    def _add_given(self, key: int) -> int:
        event = Event(len(self.events), GIVEN)
        self.events.append(event)
        self.lineage.write(key, event.index, everything=True)
        return event.index

    def _end(
        self, event: Event, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        changed = []
        if signature.filled_part is not None:
            self._write(event, result[signature.filled_part])
        elif signature.is_mutable:
            for argument, value in signature.name_arguments(args, kwargs):
                if argument.is_written:
                    changed += list(find_tensors(value))
            for tensor in changed:
                self._write(event, tensor)
        read_keys = {read.key for read in event.reads} | set(event.written)
        outputs = list(find_tensors(result))
        for tensor in outputs:
            if not any(key in read_keys for key in self.lineage.find_keys(tensor)):  # else a view, or written above
                self._write(event, tensor)
        event.is_scalar = bool(outputs) and outputs[0].numel() == 1

    def _write(self, event: Event, tensor: Tensor) -> None:
        keys = self.lineage.find_keys(tensor)
        for key in keys:
            covers = self.lineage.covers(key, tensor)
            # The rest still holds what was there before the step.
            if not covers and not self.lineage.writers(key):
                self._add_given(key)
            self.lineage.write(key, event.index, everything=covers)
        if keys:
            event.written[keys[0]] = NO_SLOT if event.is_uninitialised else self.ranges.add(tensor)


def fits_node(op: str, node: str) -> bool:
    """Whether a node's name is made from the op's: 'aten._softmax' and 'SoftmaxBackward0'."""
    plain = op.rpartition(".")[2].strip("_").replace("_", "").removesuffix("forward")
    return node.lower().partition("backward")[0].startswith((plain, plain.removeprefix("native")))
