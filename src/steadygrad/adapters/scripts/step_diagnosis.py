"""StepDiagnosis: a bad step of a script -> its Cause.

The calls of a step are noted while it runs, by reference. After a bad step the loss is replayed as the script computes
it; where that explains nothing, the model's forward alone; where that does not either, the next steps are watched op by
op while they run. Weights and buffers are left as they are. With shards, all ranks enter each replay at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.adapters.scripts.callers import Callers
from steadygrad.adapters.scripts.together import Together
from steadygrad.config import DiagnoseConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.diagnosis import unknown
from steadygrad.diagnose.investigator import MOST_CAPTURES, Investigator
from steadygrad.diagnose.live import LiveTrace
from steadygrad.diagnose.unrepeated import OUTSIDE
from steadygrad.facts import Cause, Reading
from steadygrad.judgement.raised import is_explained_by, make_unfinished
from steadygrad.measure.graph import may_enter

LIVE_STEPS = 32
"""Steps that are watched op by op after a bad one whose replay explained nothing; each takes several times as long."""
LIVE_CAUSES = 3
"""Causes found in this way after which no further step is watched."""
NO_LOSS = "the code that computes the loss could not be run again."
NOT_SEEN = (
    "Nothing could be replayed: no call of the model was seen in this step. A model that is compiled as a whole shows "
    "none (TORCH_COMPILE_DISABLE=1 in the environment runs it eagerly), nor does one inside vmap, or one called "
    "with another model's output."
)
WATCHES_ON = (
    "The model's forward is healthy when it is replayed, so the cause is in the loss or around it. The next steps "
    "are watched op by op, slowly: if one of them is bad, its line is named."
)


class StepDiagnosis:
    """Diagnoses the steps of one optimizer."""

    def __init__(
        self,
        settings: DiagnoseConfig,
        owner: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        buffers: BufferKeeper,
        together: Together,
        run_dir: Path | None,
    ) -> None:
        self._is_on, self._buffers, self._together = settings.enabled, buffers, together
        self.owner = owner
        """The module that holds the optimizer's parameters."""
        self._investigator = Investigator(settings, model=owner, optimizers=[optimizer], run_dir=run_dir)
        self._investigator.close()  # its own hook would end up in what the script saves; `note_call` hears the calls
        self._callers = Callers()
        self._losses: list[Capture] = []
        self._live: LiveTrace | None = None
        self._num_live_steps = 0
        """Steps that are still to be watched while they run, after a failure without a cause."""
        self._num_live_causes = 0

    def use_folder(self, folder: Path) -> None:
        """Keep the batches of bad steps in this run directory."""
        self._investigator.use_folder(folder)

    # --- while a step runs ------------------------------------------------------------------------------------------

    def note_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model, or a part of it, is called for training."""
        if self._is_on:
            self._investigator.hear(module, args, kwargs)
            if self._investigator.newest is not None:
                self._callers.note_call(self._investigator.newest)
            self.watch_live()

    def note_backward(self) -> None:
        """Called when the script calls backward, in the script's own stack."""
        capture = self._callers.note_backward(self.owner)
        if capture is not None:
            self._losses = [*self._losses[-MOST_CAPTURES + 1 :], capture]

    def watch_live(self) -> None:
        """Watch this step while it runs, if the last bad one had no cause; not ops on shards, which talk to ranks."""
        if self._num_live_steps and self._live is None and self._together.ranks is None and may_enter(self.owner):
            self._num_live_steps -= 1
            self._live = LiveTrace(self.owner)
            self._live.start()

    def pause_live(self) -> None:
        """Stop watching ops: those that follow are our own."""
        if self._live is not None:
            self._live.stop()

    def end_step(self) -> None:
        """Release what was noted, the batches above all."""
        self._investigator.take()
        self._callers.forget()
        self._losses = []
        # Kept where the script has its own mode open: ours cannot be left before that one.
        if self._live is not None and self._live.stop():
            self._live = None

    # --- after a bad one --------------------------------------------------------------------------------------------

    def find_cause(
        self,
        reading: Reading,
        named: Iterable[tuple[str, Tensor]],
        *,
        loss: Tensor | None,
        has_many_ranks: bool,
        began_on: tuple[int, ...],
    ) -> Cause | None:
        """Return the cause of a bad step that is not taken yet; `began_on`: the ranks on which it began."""
        if not self._is_on:
            return None
        cause = self._find_live(reading, named, loss, has_many_ranks=has_many_ranks)
        # A live trace has seen the step itself; a replay costs several steps, so it comes second.
        if cause is None and self._investigator.claim(reading, ()):
            with self._buffers.unchanged():
                cause = self._replay(reading, began_on)
        is_known = cause is not None and cause.phase != "unknown"
        self._num_live_steps = 0 if is_known or self._num_live_causes >= LIVE_CAUSES else LIVE_STEPS
        return cause

    def explain_raised(self, step: int) -> Cause | None:
        """Return what explains an error raised in this step, if a replay of its calls finds a bad number."""
        if not self._investigator.claim_error(step):
            return None
        with self._buffers.unchanged():
            cause = self._investigator.investigate(self._investigator.take(), make_unfinished(step), ())
        return _word_for_script(cause) if cause is not None and is_explained_by(cause) else None

    def _replay(self, reading: Reading, began_on: tuple[int, ...]) -> Cause | None:
        """Replay the loss as the script computes it; where that explains nothing, the model's forward alone."""
        calls = self._investigator.take()
        if not calls and not self._losses and self._together.ranks is None:
            return unknown(NOT_SEEN)
        # With shards, all ranks enter each replay at once: the cause is the same on each, so they take the same branch.
        cause = self._replay_once(self._losses, reading, began_on)
        if cause is None or cause.phase == "unknown" or cause.kind == "error":
            cause = self._replay_once(calls, reading, began_on)
        return None if cause is None or cause.kind == "error" else _word_for_script(cause)

    def _replay_once(self, captures: Sequence[Capture], reading: Reading, began_on: tuple[int, ...]) -> Cause | None:
        if self._together.shares_numbers:
            return self._together.replay(self._investigator, captures, reading, began_on)
        return self._investigator.investigate(captures, reading, ())

    def _find_live(
        self, reading: Reading, named: Iterable[tuple[str, Tensor]], loss: Tensor | None, *, has_many_ranks: bool
    ) -> Cause | None:
        if self._live is None or self._live.is_running:
            return None
        bad = set(reading.gradients.nonfinite())
        gradients = {name: p.grad for name, p in named if name in bad and p.grad is not None}
        cause = self._live.find_cause(loss, gradients, self._investigator.newest)
        if cause is None or (has_many_ranks and (cause.file is None or cause.phase == "input")):
            return None  # with several ranks, a gradient may come bad from another one
        self._num_live_causes += 1
        return dataclasses.replace(cause, step=reading.step)


def _word_for_script(cause: Cause) -> Cause:
    """Rephrase the cause for a script; omit lines that belong to the replay and not to the model."""
    note = cause.note.replace("give guard.step the function, not its loss.", NO_LOSS).replace(OUTSIDE, WATCHES_ON)
    if cause.file is not None and Path(cause.file).name == "contextlib.py":
        cause = dataclasses.replace(cause, file=None, line=None, source=None, caller=None)
    return dataclasses.replace(cause, note=note)
