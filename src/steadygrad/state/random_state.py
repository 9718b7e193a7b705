"""The state of every random generator that training may use: taken, and put back. Waits for nothing."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def capture_random(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the state of Python's, torch's and the CUDA devices' generators, and of numpy's if it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    state["cuda"] = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    return state


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
