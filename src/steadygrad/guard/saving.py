"""Saver: what a Guard remembers, and the checkpoints that hold it with the whole training.

A save is due every so many steps, and after a signal a last time (`shutdown.py`). A resume puts back every part in the
order in which they lean on each other. What cannot be saved is told, and never ends a training.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.checkpoint.run import Resumed, tell_unsaved
from steadygrad.checkpoint.save import Save
from steadygrad.errors import UsageError
from steadygrad.facts import Finding, Severity
from steadygrad.guard.judging import Judging
from steadygrad.guard.parts import Moment, Parts, foresee_unsaved
from steadygrad.guard.run_start import RunStart


class Saver:
    """Takes down where a training is, and puts it back there."""

    def __init__(self, parts: Parts, moment: Moment, judging: Judging) -> None:
        self._parts, self._moment, self._judging = parts, moment, judging
        self._is_due = False
        self._has_foreseen = False
        self._joint: tuple[set[tuple[int, int, int]], Save | None] | None = None
        """Which moment was saved together with other guards, and this one's save."""
        if parts.folder is not None:
            parts.folder.owner = weakref.ref(self)

    def state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers; all steps are judged first."""
        self._judging.judge_pending()
        return {
            "version": 1,
            "step": self._moment.next_step,
            "epoch": self._moment.epoch,
            "validation_loss": self._moment.validation_loss,
            "clip": {} if self._parts.clipper is None else self._parts.clipper.state_dict(),
            "judgement": self._parts.judgement.state_dict(),
            "actor": self._parts.actor.state_dict(),
            "num_since_start": self._parts.periodic_scans.num_since,
            "num_skipped_batches": self._moment.num_skipped_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Model and optimizer are loaded already: the buffers are copied from now."""
        self._load(state)
        self._parts.buffers.forget()

    def _load(self, state: Mapping[str, Any]) -> None:
        self._judging.judge_pending()
        if not isinstance(state, Mapping) or state.get("version") != 1:
            found = f"version {state.get('version')!r}" if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(f"this is no state of a Guard that is known here: {found}. Give what state_dict() gave.")
        self._moment.next_step, self._moment.epoch = int(state["step"]), int(state["epoch"])
        self._moment.validation_loss, self._moment.validated_at = state["validation_loss"], None
        if self._parts.clipper is not None:
            self._parts.clipper.load_state_dict(state["clip"])
        self._parts.judgement.load_state_dict(state["judgement"])
        self._parts.actor.load_state_dict(state["actor"])
        self._parts.periodic_scans.num_since = int(state["num_since_start"])
        self._moment.num_skipped_batches = int(state["num_skipped_batches"])

    def begin(self) -> None:
        """Before a step or a save: by now it is known which run this is."""
        start = self._parts.start
        found = None if start is None else start.begin(self._moment.next_step)
        if found is not None and not self._parts.off:
            self._parts.judgement.note(found)

    def save(self, *, is_between: bool = False) -> Save | None:
        """Save the whole training, and that of guards in the same directory; None, and reported, when that cannot be.

        `is_between`: gradients that are there now belong to a step that will not be made.
        """
        company = self._find_company()
        moment = {(id(one), one._moment.next_step, one._moment.batches.num) for one in (self, *company)}
        if self._joint is not None and moment <= self._joint[0]:
            return self._joint[1]  # another guard's save has saved this one at the same moment
        if not company:
            return self._save("", is_between=is_between)
        token = secrets.token_hex(4)
        for saver in (self, *company):
            saver._joint = moment, saver._save(token, is_between=is_between)
        assert self._joint is not None
        return self._joint[1]

    def give_up(self) -> None:
        """Another guard goes on with this run: what is under way is finished, and nothing more is written down."""
        self._parts.checkpoints.wait()
        if self._parts.record is not None:
            with contextlib.suppress(OSError):
                self._parts.record.close()

    def _find_company(self) -> list[Saver]:
        """The keepers of other guards in the same directory: they are saved with this one."""
        folders = [] if self._parts.folder is None else self._parts.folder.siblings
        return [saver for folder in folders if folder.owner is not None and (saver := folder.owner()) is not None]

    def _save(self, together: str, *, is_between: bool) -> Save | None:
        self.begin()
        state = self.state_dict()
        self._parts.judgement.flush_record()
        step = self._moment.next_step
        metrics = {}
        if self._moment.validated_at == step and self._moment.validation_loss is not None:
            metrics[self._parts.config.checkpoint.best_by] = self._moment.validation_loss
        saved = self._parts.checkpoints.save(
            step,
            state,
            accumulated=self._moment.batches,
            buffers=self._parts.buffers,
            metrics=metrics,
            used_gradients=is_between or self._parts.used.is_there,
            together=together,
        )
        self.tell_unsaved()
        return saved

    def save_if_due(self, *, ends_round: bool) -> None:
        """A save every so many steps; guards that step in turn save when all have made theirs."""
        self._foresee_unsaved()
        self._is_due |= self._parts.checkpoints.is_due(self._moment.next_step) and not self._parts.ranks.is_joining
        company = self._find_company()
        if (ends_round or not company) and any(saver._is_due for saver in (self, *company)):
            self.save()
            for saver in (self, *company):
                saver._is_due = False
        self.tell_unsaved()

    def _foresee_unsaved(self) -> None:
        """Optimizers make their state in their first step: by now it is known whether it can be saved."""
        if self._has_foreseen or self._parts.off or not any(optimizer.state for optimizer in self._parts.optimizers):
            return
        self._has_foreseen = True
        for finding in foresee_unsaved(self._parts, self._moment.next_step - 1):
            self._parts.judgement.note(finding)

    def tell_unsaved(self) -> None:
        """Note what could not be saved since this was last asked."""
        for failure in self._parts.checkpoints.take_failures():
            self._parts.judgement.note(tell_unsaved(self._moment.next_step, failure))
        for note in self._parts.checkpoints.take_notes():
            self._parts.judgement.note(report_infinite(self._moment.next_step, note), write=True)
        for problem in () if self._parts.start is None else self._parts.start.take_problems():
            self._parts.judgement.note(report_lost_directory(self._moment.next_step, problem))

    def resume(self, path: str | Path | None, *, strict: bool) -> int | None:
        """Put back the training as a checkpoint has it; the step that comes next, None without a checkpoint."""
        self._judging.judge_pending()
        start = self._parts.start
        if start is not None:
            start.find_place()
        resumed = self._parts.checkpoints.resume(path, strict=strict, buffers=self._parts.buffers)
        if start is not None:
            self._take_up(start, resumed)
        if resumed is None:
            return None
        self._parts.periodic_scans.forget()
        self._load(resumed.guard)
        self._moment.batches = resumed.accumulated
        if self._moment.batches.num:  # inside a step: its beginning is over
            self._parts.periodic_scans.begin()
        self._parts.judgement.note(resumed.tell())
        self._parts.checkpoints.finish_resume()
        return resumed.step

    def _take_up(self, start: RunStart, resumed: Resumed | None) -> None:
        """Go on with the run that was resumed; one whose checkpoint lies elsewhere is a new run here."""
        if resumed is None:
            start.go_on("", 0)
        elif self._parts.checkpoints.is_own(resumed.info):
            start.go_on(resumed.info.run, resumed.step)
        else:
            self.begin()


def report_infinite(step: int, note: str) -> Finding:
    """Infinities by design were saved."""
    return Finding(
        kind="infinite_state",
        severity=Severity.INFO,
        step=step,
        message=note,
        advice="Nothing to do where that is meant: a mask, a best value so far.",
    )


def report_lost_directory(step: int, problem: str) -> Finding:
    """The run directory was deleted under the training."""
    return Finding(
        kind="run_directory_lost",
        severity=Severity.ERROR,
        step=step,
        message=problem,
        advice="Look at that disk, and for what cleans it.",
    )
