"""SeedWatch: calls of `torch.manual_seed` during training -> a RepeatedSeed: the same random numbers in every step.

A seed that is set again in each step makes dropout, noise and augmentation the same each time. Heard are the seed and
the state of torch's generator before it is set: if the same few states come back step after step, what was drawn in
between was the same. A program that sets other seeds, or puts states back (`fork_rng`, checkpoints), knows what it does
and is left alone. Worker processes and generators of the program's own are not heard.

A program may also set a seed to draw one fixed tensor again, which looks the same. So `repeats` names what stays the
same although the seed was probably not set for it: samples of a DataLoader, dropout, or numbers drawn in a part of the
step in which no seed was set (`note` is called where one part ends). Cost: 20 us a call of either, in the first steps
only, and nothing for programs that set no seed there.
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.utils.data._utils.fetch as loader_code
from torch import nn

from steadygrad.facts.program import RepeatedSeed
from steadygrad.measure.modes import DROPOUTS
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.measure.torch_calls import listen_to_seeds, stop_listening_to_seeds

NUM_STEPS = 64
"""Steps that are watched."""
NUM_REPEATED = 16
"""Steps without a new state after which the random numbers repeat."""
MOST_STATES = 8
"""States that may come back: before the first sample of a batch, before the others, at the start of an epoch."""


class SeedWatch:
    """Call `begin` before the first step and `end_step` after each; the latter returns what was found."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seed: int | None = None
        self._last = b""
        self._is_in_loader = self._is_drawn_apart = self._is_set_here = False
        self._fresh, self._where, self._thread = b"", "", 0
        self._states: set[bytes] = set()
        self._num_steps = self._num_repeated = 0
        self._is_on = self._was_set = self._is_new = False

    @property
    def is_on(self) -> bool:
        """Whether seeds are still listened to."""
        return self._is_on

    def begin(self) -> None:
        """Listen from now on, to this thread."""
        self._is_on, self._thread = True, threading.get_ident()
        listen_to_seeds(self)

    def close(self) -> None:
        """Stop listening."""
        self._is_on = False
        stop_listening_to_seeds(self)

    def before_seed(self, seed: int) -> None:
        """The program is about to set this seed."""
        if threading.get_ident() != self._thread:
            return
        if self._seed is None:
            self._seed, self._where, self._is_in_loader = seed, find_caller(), _is_in_loader()
            self._fresh = _read(torch.Generator().manual_seed(seed))
        elif seed != self._seed:
            self.close()
            return
        self._is_set_here = True
        state = _read(torch.default_generator)
        if state == self._fresh:  # nothing was drawn since it was set
            return
        self._was_set = True
        self._is_new |= state not in self._states
        self._states.add(state)

    def before_restore(self) -> None:
        """The program is about to put a state back."""
        self.close()

    def note(self) -> None:
        """A part of the step ends here, such as the forward: remember whether it drew numbers and set no seed."""
        if not self._is_on or self._seed is None:
            return
        state = _read(torch.default_generator)
        self._is_drawn_apart |= not self._is_set_here and bool(self._last) and state != self._last
        self._last, self._is_set_here = state, False

    def end_step(self, step: int) -> RepeatedSeed | None:
        """Return the seed once it has made enough steps alike."""
        self.note()
        is_repeated = self._was_set and not self._is_new
        self._num_repeated = self._num_repeated + 1 if is_repeated else 0
        self._was_set = self._is_new = False
        self._num_steps += 1
        if len(self._states) > MOST_STATES or self._num_steps > NUM_STEPS:
            self.close()
        elif self._num_repeated == NUM_REPEATED and self._seed is not None:
            self.close()
            repeats = self._name_repeated()
            return RepeatedSeed(step=step, seed=self._seed, num_steps=NUM_REPEATED, where=self._where, repeats=repeats)
        return None

    def _name_repeated(self) -> str:
        if self._is_in_loader:
            return "what the samples draw"
        if any(isinstance(one, DROPOUTS) and one.training and one.p > 0 for one in self._model.modules()):
            return "the masks of dropout"
        return "noise or other numbers that the step draws" if self._is_drawn_apart else ""


def _read(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _is_in_loader() -> bool:
    """Return whether a DataLoader of this process is reading samples."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != loader_code.__file__:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True
