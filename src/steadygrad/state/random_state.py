"""The state of every random generator that training may use: taken, and put back. Waits for nothing."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def capture_random(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the state of Python's, torch's and the CUDA devices' generators, and of numpy's if it is imported."""
    state: dict[str, Any] = {"python": _python.capture(), "torch": torch.default_generator.get_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _numpy.capture(sys.modules["numpy"])
    # Seed and offset of a CUDA generator live in host memory: no wait.
    state["cuda"] = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    return state


class _PythonState:
    """Captures Python's global generator, which takes 8 us, only when it has moved since the last capture.

    CPython keeps 624 words behind the head of the object, after their position. Where they do not read as the state
    that `random` itself returns (another Python), the state is always captured. A normal number held back shows as an
    attribute.
    """

    NUM_BYTES = 625 * 4

    def __init__(self) -> None:
        self._generator: Any = getattr(random, "_inst", None)
        self._words, self._gauss = b"", None
        self._state: Any = None
        self._is_readable = type(self._generator) is random.Random
        if self._is_readable:
            # A window onto live memory; `_inst` lives as long as the module `random`, so the address stays valid.
            self._memory = (ctypes.c_char * self.NUM_BYTES).from_address(id(self._generator) + object.__basicsize__)

    def capture(self) -> Any:
        if not self._is_readable:
            return random.getstate()
        words = self._memory.raw
        gauss = self._generator.gauss_next
        if words != self._words or gauss != self._gauss or self._state is None:
            self._words, self._gauss, self._state = words, gauss, self._generator.getstate()
            position, *rest = memoryview(words).cast("I")
            # Checked at each new state, the first included: on another layout no remembered state is ever returned.
            self._is_readable = (*rest, position) == self._state[1]
        return self._state


class _NumpyState:
    """Captures numpy's global generator, which takes 30 us, only when it has moved since the last capture.

    Comparing its raw words takes 1 us. A normal number held back lies in the object that numpy draws from, whose bytes
    are compared too, wherever in it that number is.
    """

    NUM_BYTES = 625 * 4
    """The 624 words of a Mersenne twister and its position."""

    def __init__(self) -> None:
        self._bytes = b""
        self._state: Any = ()
        self._generator: Any = None
        self._memory: tuple[Any, Any] | None = None

    def capture(self, numpy: Any) -> Any:
        generator = numpy.random.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._memory, self._bytes = generator, None, b""
            if type(generator) is numpy.random.MT19937:
                # Valid while the generator lives, and self._generator holds it; `_rand` lives as long as numpy.
                words = (ctypes.c_char * self.NUM_BYTES).from_address(generator.ctypes.state_address)
                drawn_from = numpy.random.mtrand._rand
                head = object.__basicsize__  # holds the reference count, which changes all the time
                num_bytes = type(drawn_from).__basicsize__ - head
                self._memory = words, (ctypes.c_char * num_bytes).from_address(id(drawn_from) + head)
        if self._memory is None:
            return numpy.random.get_state()
        now = self._memory[0].raw + self._memory[1].raw
        if now != self._bytes:
            self._bytes, self._state = now, numpy.random.get_state()
            *_, has_gauss, gauss = self._state
            # Checked whenever one is held back: where it lies elsewhere no remembered state is returned any more.
            if has_gauss and struct.pack("d", gauss) not in now:
                self._memory = None
        return self._state


_numpy = _NumpyState()
_python = _PythonState()
_put_back: list[Mapping[str, Any]] = []
"""What each `unchanged_random` that is open will restore, the outermost first."""


def restore_random(state: Mapping[str, Any]) -> None:
    """Put back what `capture_random` took."""
    random.setstate(state["python"])
    torch.default_generator.set_state(state["torch"])  # as torch.set_rng_state, whose calls are those of the program
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for device, generator in state["cuda"].items():
        torch.cuda.set_rng_state(generator, device)


@contextlib.contextmanager
def unchanged_random(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators afterwards, as if nothing had been drawn inside this context."""
    state = capture_random(devices)
    _put_back.append(state)
    try:
        yield
    finally:
        _put_back[:] = [one for one in _put_back if one is not state]  # another thread may have opened one since
        restore_random(state)


def capture_lasting_random(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the state to continue with: inside `unchanged_random`, the one that it will put back.

    A signal may be answered, and the training saved, in the middle of an evaluation; a resume makes all of it again.
    """
    state = capture_random(devices)
    if not _put_back:
        return state
    outer = _put_back[0]
    by_index = {_find_index(device): value for device, value in outer["cuda"].items()}
    cuda = {device: by_index.get(_find_index(device), value) for device, value in state["cuda"].items()}
    return {**state, **outer, "cuda": cuda}


def _find_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
