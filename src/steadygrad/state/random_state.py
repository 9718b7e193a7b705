"""The state of every random generator that training may use: taken, and put back. Waits for nothing."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def capture_random(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the state of Python's, torch's and the CUDA devices' generators, and of numpy's if it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _numpy.capture(sys.modules["numpy"])
    state["cuda"] = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    return state


class _NumpyState:
    """Captures numpy's global generator, which takes 30 us, only when it has moved since the last capture.

    Comparing its raw words takes 1 us. A normal number held back does not show in them, so while there is one the
    state is always captured.
    """

    NUM_BYTES = 625 * 4
    """The 624 words of a Mersenne twister and its position."""

    def __init__(self) -> None:
        self._words = b""
        self._state: Any = ()

    def capture(self, numpy: Any) -> Any:
        find: Any = getattr(numpy.random, "get_bit_generator", lambda: None)  # new in numpy 1.24
        generator = find()
        if type(generator) is not numpy.random.MT19937:
            return numpy.random.get_state()
        words = ctypes.string_at(generator.ctypes.state_address, self.NUM_BYTES)
        if words != self._words or self._state[3]:
            self._words, self._state = words, numpy.random.get_state()
        return self._state


_numpy = _NumpyState()


def restore_random(state: Mapping[str, Any]) -> None:
    """Put back what `capture_random` took."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for device, generator in state["cuda"].items():
        torch.cuda.set_rng_state(generator, device)


@contextlib.contextmanager
def unchanged_random(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators afterwards, as if nothing had been drawn inside this context."""
    state = capture_random(devices)
    try:
        yield
    finally:
        restore_random(state)
