"""One asynchronous copy per step: numbers on the device -> plain floats on the host, when requested.

On CUDA the copy goes into a ring of pinned buffers with an event each, so that sending waits for nothing and reading
waits for that copy alone, never for work queued after it. Numbers that were `mark`ed as complete before the optimizer
was queued are copied alongside it on a separate stream. On the CPU a ticket is ready at once.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 512
"""Numbers that a pinned buffer has room for at least: rows of other scans then need no other buffer."""


class Ticket:
    """A copy in flight. `wait()` returns the numbers; calling it again returns the same ones."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None) -> None:
        self._host, self._event = host, event
        self._values: Sequence[float] | None = None

    @property
    def ready(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._values is not None or self._event is None or self._event.query()

    def wait(self) -> Sequence[float]:
        """Wait for the copy, and return the numbers as float64."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = _read(self._host)
        return self._values


class Transfer:
    """Sends float64 vectors to the host; keeps `slots` pinned buffers, one for each copy that may be in flight."""

    def __init__(self, slots: int = 4) -> None:
        self._slots = slots
        self._ring: list[tuple[Tensor, torch.cuda.Event, Ticket | None]] = []
        self._next = 0
        self._mark: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def mark(self, device: torch.device) -> torch.cuda.Event | None:
        """Mark this point of the device's queue: what is complete here can be sent without waiting for later work."""
        if device.type != "cuda":
            return None
        # One event for all steps: a stream that waits already keeps to the record of that moment.
        event = self._mark = self._mark or torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def send(self, numbers: Tensor, *, after: torch.cuda.Event | None = None) -> Ticket:
        """Start copying `numbers`, a float64 vector; `after` the mark alone, if they were complete there.

        With a mark, the caller must keep `numbers` until the ticket is read, so that their memory is not reused.
        """
        if numbers.device.type == "cpu":
            return Ticket(numbers, None)  # not a copy: it is read by wait(), and must not change before
        if numbers.device.type != "cuda":
            return Ticket(numbers.cpu(), None)
        host, event = self._take_slot(numbers.numel())
        if after is None:
            host.copy_(numbers, non_blocking=True)
            # After the copy, on the same stream: waiting for the event is waiting for the copy.
            event.record(torch.cuda.current_stream(numbers.device))
        else:
            side = self._side_stream(numbers.device)
            side.wait_event(after)
            with torch.cuda.stream(side):
                host.copy_(numbers, non_blocking=True)
            event.record(side)
        ticket = Ticket(host, event)
        self._ring[self._next] = (self._ring[self._next][0], event, ticket)
        self._next = (self._next + 1) % self._slots
        return ticket

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _take_slot(self, length: int) -> tuple[Tensor, torch.cuda.Event]:
        if not self._ring or self._ring[self._next][0].numel() < length:
            # All slots at once: pinning makes the host wait for the device, and a larger row of a later scan would do
            # so once for each slot. Tickets hold the buffers and events that they still wait for.
            # Pinned: a copy into pageable memory makes the host wait at every step.
            buffers = torch.empty(
                self._slots, max(length, SMALLEST), dtype=torch.float64, pin_memory=True, device="cpu"
            )
            self._ring = [(buffer, torch.cuda.Event(), None) for buffer in buffers.unbind()]
        buffer, event, ticket = self._ring[self._next]
        # Waits only if more copies are in flight than there are slots.
        if ticket is not None:
            ticket.wait()  # an unread ticket must get its numbers before the slot is reused
        return buffer[:length], event


def _read(host: Tensor) -> Sequence[float]:
    """Copy a contiguous float64 CPU tensor to plain floats; 5 µs for 6000 numbers, without numpy."""
    numbers = array("d")
    if host.numel():
        # string_at copies, so the slot may be overwritten as soon as this returns.
        numbers.frombytes(ctypes.string_at(host.data_ptr(), host.numel() * 8))
    return numbers
