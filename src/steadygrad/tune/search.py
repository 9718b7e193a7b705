"""A search by Optuna: trials from one state, ended at the step where they break down, shared through a storage.

A worker asks for settings, tries them and reports the result; several commands, machines or ranks on one storage work
together. They share only Optuna's storage, which also holds the range test; no process group is created. One worker
leads: it waits for the others' last trials, and repeats those that killed workers left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from steadygrad.disk.write import is_alive
from steadygrad.extras import import_extra
from steadygrad.guard.rate_curve import RateCurve, restore_curve
from steadygrad.tune.settings import Settings
from steadygrad.tune.space import Space
from steadygrad.tune.trial import Report, TrialResult, from_plain_result, to_plain_result

NUM_MARKS = 10
"""Number of points in a trial at which it is compared with the others."""
RESULT, WORKER, CURVE = "result", "worker", "range"
POLL_SECONDS = 0.2
PATIENCE, LEAST_PATIENCE_SECONDS = 3.0, 60.0
"""A trial on another machine counts as abandoned when it takes PATIENCE times as long as the longest finished one."""
FINISHED = (RuntimeError, ValueError)
"""What Optuna raises for a trial that has already ended: the first from its storages, the second from `tell`."""
RunTrial = Callable[[Settings, Report], TrialResult]
TellTrial = Callable[[int, TrialResult], None]


class Search:
    """One worker's part of a study."""

    def __init__(self, study: Any, names: tuple[str, ...]) -> None:
        """`names`: the settings to search."""
        self.names = names
        self._optuna = import_extra("tune", "optuna", what="a search")
        self._study = study
        self._first_seen: dict[int, float] = {}

    # --- the range test, which decides where all workers look -------------------------------------------------------

    @property
    def curve(self) -> RateCurve | None:
        """The range test of the leading worker, once it is made."""
        held = self._study.user_attrs.get(CURVE)
        return None if held is None else restore_curve(json.loads(held))

    def keep_curve(self, curve: RateCurve) -> None:
        """Share the range test with the other workers."""
        if CURVE not in self._study.user_attrs:
            self._study.set_user_attr(CURVE, json.dumps(curve.to_dict()))

    def wait_for_curve(self) -> RateCurve:
        """Wait for another worker's range test, without a time limit: torchrun ends all workers if one fails."""
        while (curve := self.curve) is None:
            time.sleep(POLL_SECONDS)
        return curve

    # --- trials -----------------------------------------------------------------------------------------------------

    def suggest(self, space: Space, settings: Settings) -> None:
        """Queue these settings to be tried first, by any worker."""
        self._study.enqueue_trial(space.place(settings), skip_if_exists=True)

    def run(self, space: Space, num_trials: int, run_trial: RunTrial, tell: TellTrial, *, leads: bool) -> None:
        """Try settings until all workers together have made `num_trials`; the leader stays until the last is done."""
        while True:
            # First: what it frees no longer counts, and is tried again
            self._free_abandoned()
            if self._count() < num_trials:
                self._try_next(space, run_trial, tell)
            elif leads and self._list(self._states.RUNNING):
                time.sleep(POLL_SECONDS)
            else:
                return

    def _try_next(self, space: Space, run_trial: RunTrial, tell: TellTrial) -> None:
        trial = self._study.ask()
        trial.set_user_attr(WORKER, f"{socket.gethostname()}:{os.getpid()}")
        result = run_trial(space.draw(trial), self._make_report(trial))
        state = self._states.COMPLETE if result.is_good else self._states.PRUNED
        try:
            # Before `tell`: a finished trial takes no attributes
            trial.set_user_attr(RESULT, json.dumps(to_plain_result(result)))
            self._study.tell(trial, result.score if result.is_good else None, state=state)
        except FINISHED:
            return  # another worker took it for abandoned, and queued it again
        tell(trial.number, result)

    def _make_report(self, trial: Any) -> Report:
        last = 0

        def report(share: float, loss: float) -> bool:
            nonlocal last
            mark = int(share * NUM_MARKS)
            if mark == last or mark >= NUM_MARKS or loss != loss:  # NaN: no loss is known yet
                return False
            last = mark
            try:
                trial.report(loss, mark)
            except FINISHED:
                # Another worker has freed this trial: going on would be wasted
                return True
            return bool(trial.should_prune())

        return report

    @property
    def results(self) -> list[TrialResult]:
        """Finished trials of all workers, in the order in which they began."""
        done = self._list(self._states.COMPLETE, self._states.PRUNED)
        return [from_plain_result(json.loads(one.user_attrs[RESULT])) for one in done if RESULT in one.user_attrs]

    def _count(self) -> int:
        return len(self._list(self._states.COMPLETE, self._states.PRUNED, self._states.RUNNING))

    def _list(self, *states: Any) -> list[Any]:
        trials: list[Any] = self._study.get_trials(deepcopy=False, states=states)
        return trials

    # --- workers that were killed -----------------------------------------------------------------------------------

    def _free_abandoned(self) -> None:
        """Queue the trials of killed workers again."""
        for one in self._list(self._states.RUNNING):
            if self._is_abandoned(one):
                with contextlib.suppress(*FINISHED):  # another worker was quicker
                    self._study.tell(one.number, state=self._states.FAIL)

    def _is_abandoned(self, trial: Any) -> bool:
        """Return whether its process is gone or, on another machine, it took too long by this worker's clock."""
        # Without a worker (killed between `ask` and the note) it counts as one on another machine
        host, _, process = str(trial.user_attrs.get(WORKER, "")).rpartition(":")
        if host == socket.gethostname():
            return not is_alive(int(process))
        seen = self._first_seen.setdefault(trial.number, time.monotonic())
        return time.monotonic() - seen > self._measure_patience()

    def _measure_patience(self) -> float:
        done = self._list(self._states.COMPLETE, self._states.PRUNED)
        longest = max((one.duration.total_seconds() for one in done if one.duration is not None), default=0.0)
        return max(LEAST_PATIENCE_SECONDS, PATIENCE * longest)

    @property
    def _states(self) -> Any:
        return self._optuna.trial.TrialState
