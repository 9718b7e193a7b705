"""Saver: checkpoints of a whole training, including the state of its guard (`state.py`).

A save is due every few steps, and one last time after a signal (`shutdown.py`). A resume restores the parts in the
order of their dependencies. What cannot be saved is reported, and never ends a training.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import torch
from torch import Tensor

from steadygrad.checkpoint.resumed import Resumed, describe_unsaved
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.checkpoint.save import Save
from steadygrad.facts import Finding, Severity
from steadygrad.guard.moment import Moment
from steadygrad.guard.preflight import foresee_unsaved
from steadygrad.guard.run_start import RunStart
from steadygrad.guard.state import GuardState
from steadygrad.guard.training import Training
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement


class Saver:
    """Saves the state of a training, and restores it."""

    def __init__(
        self,
        training: Training,
        *,
        moment: Moment,
        state: GuardState,
        watched: Watched,
        judgement: Judgement,
        checkpoints: RunCheckpoints,
        start: RunStart | None,
    ) -> None:
        """`start`: decides which run this is; None without a run directory."""
        self._training, self._moment, self._watched, self._judgement = training, moment, watched, judgement
        self._start = start
        self.state, self.checkpoints = state, checkpoints
        self._is_due = False
        self._has_foreseen = False
        self._joint: tuple[set[tuple[int, int, int]], Save | None] | None = None
        """The position that was saved together with other guards, and this guard's save."""
        if start is not None:
            start.sign_in(self)

    def begin(self) -> None:
        """Settle which run this is, before a step or a save."""
        found = None if self._start is None else self._start.begin(self._moment.next_step)
        if found is not None and not self._training.off:
            self._judgement.note(found, write=True)

    def save(self, *, is_between: bool = False) -> Save | None:
        """Save the whole training, with the other guards in the same directory; report and return None on failure.

        `is_between`: the present gradients belong to a step that will not be made.
        """
        company = self._find_company()
        moment = {(id(one), one._moment.next_step, one._moment.batches.num) for one in (self, *company)}
        if self._joint is not None and moment <= self._joint[0]:
            return self._joint[1]  # another guard's save included this one, at the same position
        if not company:
            return self._save("", is_between=is_between)
        token = secrets.token_hex(4)
        for saver in (self, *company):
            saver._joint = moment, saver._save(token, is_between=is_between)
        assert self._joint is not None
        return self._joint[1]

    def give_up(self) -> None:
        """Finish the save under way and write nothing more: another guard continues this run."""
        self.checkpoints.wait()
        if self._start is not None:
            self._start.give_up_record()

    def _find_company(self) -> list[Saver]:
        """Return the savers of other guards in the same directory, which save with this one."""
        return [] if self._start is None else self._start.find_company()

    def _save(self, together: str, *, is_between: bool) -> Save | None:
        self.begin()
        # Judges the pending step. Its lines are flushed next: a checkpoint must never be ahead of the record.
        state, moment = self.state.state_dict(), self._moment
        self._judgement.flush_record()
        saved = self.checkpoints.save(
            moment.next_step,
            state,
            accumulated=moment.batches,
            validation_loss=moment.validation_loss if moment.validated_at == moment.next_step else None,
            used_gradients=is_between or self._watched.used.is_there,
            together=together,
        )
        self.report_unsaved()
        return saved

    def save_if_due(self, *, ends_round: bool) -> None:
        """Save every few steps; guards that step in turn save when all have made their step."""
        self._foresee_unsaved()
        self._is_due |= self.checkpoints.is_due(self._moment.next_step)
        company = self._find_company()
        if (ends_round or not company) and any(saver._is_due for saver in (self, *company)):
            self.save()
            for saver in (self, *company):
                saver._is_due = False
        self.report_unsaved()

    def _foresee_unsaved(self) -> None:
        """Report state that cannot be saved; optimizers create theirs in the first step, so not earlier."""
        training = self._training
        if self._has_foreseen or training.off or not any(optimizer.state for optimizer in training.optimizers):
            return
        self._has_foreseen = True
        if all(map(_is_simple, training.optimizers)):  # the rest was looked at before the first step
            return
        for finding in foresee_unsaved(self.checkpoints, self._moment.next_step - 1):
            self._judgement.note(finding)

    def report_unsaved(self) -> None:
        """Report what could not be saved since the last call."""
        for failure in self.checkpoints.take_failures():
            self._judgement.note(describe_unsaved(self._moment.next_step, failure))
        for note in self.checkpoints.take_notes():
            self._judgement.note(report_infinite(self._moment.next_step, note), write=True)
        for problem in () if self._start is None else self._start.take_problems():
            self._judgement.note(report_lost_directory(self._moment.next_step, problem))

    def resume(self, path: str | Path | None, *, strict: bool) -> int | None:
        """Restore the training from a checkpoint; return the next step, None without a checkpoint.

        All steps must be judged.
        """
        if self._start is not None:
            self._start.find_place()
        resumed = self.checkpoints.resume(path, strict=strict)
        if self._start is not None:
            self._take_up(self._start, resumed)
        if resumed is None:
            return None
        # Before state.load(): it resets the count of steps that the state restores.
        self._watched.periodic_scans.forget()
        self.state.load(resumed.guard)
        self._moment.batches = resumed.accumulated
        if self._moment.batches.num:  # inside a step, which has already begun
            self._watched.periodic_scans.begin()
        self._judgement.note(resumed.describe())
        self.checkpoints.finish_resume()
        return resumed.step

    def _take_up(self, start: RunStart, resumed: Resumed | None) -> None:
        """Continue the run that was resumed; with a checkpoint from elsewhere, it is a new run here."""
        if resumed is None:
            start.go_on("", 0)
        elif self.checkpoints.is_own(resumed.info):
            start.go_on(resumed.info.run, resumed.step)
        else:
            self.begin()

    def close(self) -> None:
        """Wait for the disk, then close the record."""
        self.checkpoints.close()
        self.report_unsaved()  # the last save may have failed, and the record is still open
        self._judgement.close()
        if self._start is not None:
            self._start.close()


def report_infinite(step: int, note: str) -> Finding:
    """Report that intended infinities were saved."""
    return Finding(
        kind="infinite_state",
        severity=Severity.INFO,
        step=step,
        message=note,
        advice="There is nothing to do if that is intended: a mask, a best value so far.",
    )


def report_lost_directory(step: int, problem: str) -> Finding:
    """Report that the run directory was deleted during the training."""
    return Finding(
        kind="run_directory_lost",
        severity=Severity.ERROR,
        step=step,
        message=problem,
        advice="Check that disk, and look for a program that cleans it.",
    )


def _is_simple(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, with a state of tensors and numbers alone: all of that can be saved."""
    return type(optimizer).__module__.startswith("torch.optim.") and all(
        isinstance(value, Tensor) or type(value) in (int, float, bool)
        for state in optimizer.state.values()
        for value in state.values()
    )
