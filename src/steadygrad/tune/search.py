"""A search by Optuna: trials from one state, ended in the step in which they break, shared by all who use the storage.

A worker asks for settings, tries them and tells what came of them; several commands, machines or ranks on one storage
do so together. Nothing but Optuna's storage is shared, the range test included, and no process group is made. One
worker leads: it waits for the others' last trials, and tries again what workers that were killed have left.
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
"""Places of a trial at which it is compared with the others."""
RESULT, WORKER, CURVE = "result", "worker", "range"
POLL_SECONDS = 0.2
PATIENCE, LEAST_PATIENCE_SECONDS = 3.0, 60.0
"""A trial on another machine is given up when it takes so many times as long as the longest one that was finished."""
FINISHED = (RuntimeError, ValueError)
"""What Optuna raises for a trial that has ended already: the first from its storages, the second from `tell`."""
RunTrial = Callable[[Settings, Report], TrialResult]
TellTrial = Callable[[int, TrialResult], None]


class Search:
    """One worker's part of a study."""

    def __init__(self, study: Any, names: tuple[str, ...]) -> None:
        """`names` of the settings that are searched."""
        self.names = names
        self._optuna = import_extra("tune", "optuna", what="a search")
        self._study = study
        self._first_seen: dict[int, float] = {}

    # --- the range test, which decides where all workers look -------------------------------------------------------

    @property
    def curve(self) -> RateCurve | None:
        """The range test of the worker that leads, when it is made."""
        held = self._study.user_attrs.get(CURVE)
        return None if held is None else restore_curve(json.loads(held))

    def keep_curve(self, curve: RateCurve) -> None:
        """Let the other workers have it."""
        if CURVE not in self._study.user_attrs:
            self._study.set_user_attr(CURVE, json.dumps(curve.to_dict()))

    def wait_for_curve(self) -> RateCurve:
        """Another worker's range test. Without an end: torchrun ends all workers when one fails."""
        while (curve := self.curve) is None:
            time.sleep(POLL_SECONDS)
        return curve

    # --- trials -----------------------------------------------------------------------------------------------------

    def suggest(self, space: Space, settings: Settings) -> None:
        """Have these tried first, by whoever comes first."""
        self._study.enqueue_trial(space.place(settings), skip_if_exists=True)

    def run(self, space: Space, num_trials: int, run_trial: RunTrial, tell: TellTrial, *, leads: bool) -> None:
        """Try until all workers together have tried `num_trials`; who leads stays until the last of them is done."""
        while True:
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
            trial.set_user_attr(RESULT, json.dumps(to_plain_result(result)))
            self._study.tell(trial, result.score if result.is_good else None, state=state)
        except FINISHED:
            return  # another worker has taken it for abandoned, and has it tried again
        tell(trial.number, result)

    def _make_report(self, trial: Any) -> Report:
        last = 0

        def report(share: float, loss: float) -> bool:
            nonlocal last
            mark = int(share * NUM_MARKS)
            if mark == last or mark >= NUM_MARKS or loss != loss:
                return False
            last = mark
            try:
                trial.report(loss, mark)
            except FINISHED:
                return True
            return bool(trial.should_prune())

        return report

    @property
    def results(self) -> list[TrialResult]:
        """All that is finished, whoever has tried it, in the order in which it began."""
        done = self._list(self._states.COMPLETE, self._states.PRUNED)
        return [from_plain_result(json.loads(one.user_attrs[RESULT])) for one in done if RESULT in one.user_attrs]

    def _count(self) -> int:
        return len(self._list(self._states.COMPLETE, self._states.PRUNED, self._states.RUNNING))

    def _list(self, *states: Any) -> list[Any]:
        trials: list[Any] = self._study.get_trials(deepcopy=False, states=states)
        return trials

    # --- workers that were killed -----------------------------------------------------------------------------------

    def _free_abandoned(self) -> None:
        """Trials of workers that were killed are tried again."""
        for one in self._list(self._states.RUNNING):
            if self._is_abandoned(one):
                with contextlib.suppress(*FINISHED):  # another worker was quicker
                    self._study.tell(one.number, state=self._states.FAIL)

    def _is_abandoned(self, trial: Any) -> bool:
        """On this machine: its process is gone. Elsewhere: watched for too long, by this worker's own clock."""
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
