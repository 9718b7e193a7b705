"""A search by Optuna: trials from one state, ended in the step in which they break, shared by all who use the storage.

A worker asks for settings, tries them and tells what came of them; several commands, machines or ranks on one storage
do so together. Nothing but Optuna's storage is shared, and no process group is made.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.tune.settings import Settings
from steadygrad.tune.space import Space
from steadygrad.tune.trial import Report, TrialResult, from_plain_result, to_plain_result

STUDY = "steadygrad"
NUM_MARKS = 10
"""Places of a trial at which it is compared with the others."""
RESULT, WORKER = "result", "worker"
RunTrial = Callable[[Settings, Report], TrialResult]


class Search:
    """One worker's part of a study."""

    def __init__(self, storage: str | None, run_dir: Path, space: Space, *, seed: int | None) -> None:
        self._optuna = import_extra("tune", "optuna", what="a search", error=UsageError)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._space = space
        url = storage if storage is not None else f"sqlite:///{run_dir / 'tune.db'}"
        self._study = self._open(url, seed)

    def _open(self, url: str, seed: int | None) -> Any:
        optuna = self._optuna
        settings = {
            "study_name": STUDY,
            "storage": url,
            "sampler": optuna.samplers.TPESampler(seed=seed, n_startup_trials=6),
            "pruner": optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
            "load_if_exists": True,
        }
        failure: Exception | None = None
        for _ in range(5):  # workers that make the tables at the same moment get in each other's way once
            try:
                return optuna.create_study(**settings)
            except Exception as error:
                failure = error
        raise UsageError(
            f"the storage {url} cannot be used: {str(failure).splitlines()[0]}. Give one such as sqlite:///tune.db."
        ) from failure

    def suggest(self, settings: Settings) -> None:
        """Have these tried first, by whoever comes first."""
        self._study.enqueue_trial(self._space.place(settings), skip_if_exists=True)

    def run(self, num_trials: int, run_trial: RunTrial, tell: Callable[[int, TrialResult], None]) -> None:
        """Try until all workers together have tried `num_trials`."""
        self._free_abandoned()
        while self._count() < num_trials:
            trial = self._study.ask()
            trial.set_user_attr(WORKER, f"{socket.gethostname()}:{os.getpid()}")
            result = run_trial(self._space.draw(trial), self._make_report(trial))
            trial.set_user_attr(RESULT, json.dumps(to_plain_result(result)))
            if result.is_good:
                self._study.tell(trial, result.score)
            else:
                self._study.tell(trial, state=self._states.PRUNED)
            tell(trial.number, result)

    def _make_report(self, trial: Any) -> Report:
        last = 0

        def report(share: float, loss: float) -> bool:
            nonlocal last
            mark = int(share * NUM_MARKS)
            if mark == last or mark >= NUM_MARKS or loss != loss:
                return False
            last = mark
            trial.report(loss, mark)
            return bool(trial.should_prune())

        return report

    @property
    def results(self) -> list[TrialResult]:
        """All that is finished, whoever has tried it, in the order in which it began."""
        done = self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE, self._states.PRUNED))
        return [from_plain_result(json.loads(one.user_attrs[RESULT])) for one in done if RESULT in one.user_attrs]

    def _count(self) -> int:
        states = (self._states.COMPLETE, self._states.PRUNED, self._states.RUNNING)
        return len(self._study.get_trials(deepcopy=False, states=states))

    def _free_abandoned(self) -> None:
        """Trials of workers that were killed on this machine are tried again."""
        for one in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            host, _, number = str(one.user_attrs.get(WORKER, "")).rpartition(":")
            if host == socket.gethostname() and not _is_alive(int(number)):
                self._study.tell(one.number, state=self._states.FAIL)

    @property
    def _states(self) -> Any:
        return self._optuna.trial.TrialState


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
