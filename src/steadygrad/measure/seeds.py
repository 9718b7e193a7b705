"""SeedWatch: calls of `torch.manual_seed` during training -> a RepeatedSeed: the same random numbers in every step.

A seed that is set again in each step makes dropout, noise and augmentation the same each time. Heard are the seed and
the state of torch's generator before it is set: if the same few states come back step after step, what was drawn in
between was the same. A program that sets other seeds, or puts states back (`fork_rng`, checkpoints), knows what it does
and is left alone. Worker processes and generators of the program's own are not heard. Cost: 20 us a call, in the first
steps only, and nothing for programs that set no seed there.
"""

from __future__ import annotations

import threading

import torch

from steadygrad.facts.program import RepeatedSeed
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

    def __init__(self) -> None:
        self._seed: int | None = None
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
            self._seed, self._where = seed, find_caller()
            self._fresh = _read(torch.Generator().manual_seed(seed))
        elif seed != self._seed:
            self.close()
            return
        state = _read(torch.default_generator)
        if state == self._fresh:  # nothing was drawn since it was set
            return
        self._was_set = True
        self._is_new |= state not in self._states
        self._states.add(state)

    def before_restore(self) -> None:
        """The program is about to put a state back."""
        self.close()

    def end_step(self, step: int) -> RepeatedSeed | None:
        """Return the seed once it has made enough steps alike."""
        is_repeated = self._was_set and not self._is_new
        self._num_repeated = self._num_repeated + 1 if is_repeated else 0
        self._was_set = self._is_new = False
        self._num_steps += 1
        if len(self._states) > MOST_STATES or self._num_steps > NUM_STEPS:
            self.close()
        elif self._num_repeated == NUM_REPEATED and self._seed is not None:
            self.close()
            return RepeatedSeed(step=step, seed=self._seed, num_steps=NUM_REPEATED, where=self._where)
        return None


def _read(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()
