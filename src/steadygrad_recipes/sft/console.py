"""Training events -> what is shown meanwhile: a bar, a log line, the norms of each epoch.

Log lines are the Trainer's dictionaries with true numbers; one whose loss is 0 or not finite, or whose norm is not
finite, is followed by a warning. Nothing here changes the training.
"""

# ruff: noqa: ARG002 - the arguments of an event and of a sink are theirs
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

from steadygrad.extras import import_extra
from steadygrad.facts import StepRecord
from steadygrad.record import Sink
from steadygrad.trainer.pace import Pace
from steadygrad.words import spell_number, spell_seconds

_TrainerCallback: Any = import_extra("transformers", "transformers", what="the recipe sft").TrainerCallback

LINE = ("loss", "grad_norm", "learning_rate", "num_skipped_steps", "epoch", "seconds_left")
VALIDATION = ("eval_loss", "epoch")


class Console(Protocol):
    """Where a recipe prints."""

    def say(self, text: str = "", style: str = "") -> None:
        """Print one line."""
        ...

    def track(self, title: str, total: int) -> contextlib.AbstractContextManager[Callable[[int, str], None]]:
        """Return a progress bar."""
        ...


class NormKeeper(Sink):
    """A Sink that collects the norms of an epoch's steps, with skipped steps counted separately."""

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._num_skipped = 0
        self.last: StepRecord | None = None

    def write_step(self, record: StepRecord) -> None:
        """Add one judged step."""
        self.last = record
        self.add(record.grad_norm, skipped=record.skipped)

    def add(self, norm: float, *, skipped: bool = False) -> None:
        """Add the norm of a step. One that is not finite is kept, so that the average and the maximum show it."""
        self._num_skipped += skipped
        if not skipped:
            self._norms.append(norm)

    def take(self) -> str:
        """Format the epoch's norms and start the next one."""
        norms, num_skipped = self._norms, self._num_skipped
        self._norms, self._num_skipped = [], 0
        if not norms:
            return f"no step was applied, {num_skipped} skipped"
        skipped = f", {num_skipped} skipped" if num_skipped else ""
        # NaN counts as the largest: plain max() depends on where it stands
        average, largest = sum(norms) / len(norms), max(norms, key=lambda norm: (math.isnan(norm), norm))
        return f"gradient norm {spell_number(average)} on average, {spell_number(largest)} at most{skipped}"


class TrainingVoice(_TrainerCallback):  # type: ignore[misc]
    """Prints on the first process only. `norms` is fed by the guard, or from the log where there is none."""

    def __init__(self, console: Console, norms: NormKeeper, *, guarded: bool) -> None:
        self._console, self._norms, self._guarded = console, norms, guarded
        self._bar = contextlib.ExitStack()
        self._advance: Callable[[int, str], None] = lambda *_: None
        self._beside_bar = ""
        self._pace = Pace()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and show the bar, on a terminal."""
        self._pace.begin(state.global_step)
        if state.is_world_process_zero:
            self._advance = self._bar.enter_context(self._console.track("sft", state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        last = self._norms.last
        if last is not None:
            self._beside_bar = describe_step(last.loss, last.grad_norm, max(last.learning_rates, default=None))
        seconds = self._pace.estimate_seconds(state.global_step, state.max_steps)
        left = "" if seconds is None else f", {spell_seconds(seconds)} left"
        self._advance(state.global_step, self._beside_bar + left)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log line, and a warning if its numbers cannot be right."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            if not self._guarded:
                self._norms.add(float(logs["grad_norm"]))
                self._beside_bar = describe_step(logs["loss"], logs["grad_norm"], logs.get("learning_rate"))
            seconds = self._pace.estimate_seconds(state.global_step, state.max_steps)
            left = {} if seconds is None else {"seconds_left": round(seconds)}
            self._console.say(spell_logs({**logs, **left}, LINE))
            for warning in find_warnings(logs):
                self._console.say(warning, "yellow")
        elif "eval_loss" in logs:
            self._console.say(spell_logs(logs, VALIDATION))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the average and the maximum norm."""
        if state.is_world_process_zero:
            self._console.say(f"epoch {round(state.epoch)}: {self._norms.take()}", "bold")

    def close(self) -> None:
        """Remove the bar, even when the training ended in an error."""
        self._bar.close()


def describe_step(loss: float | None, norm: float, rate: float | None = None) -> str:
    """Format the text next to the bar: 'loss=2.37, grad=0.423, lr=0.0002'."""
    lr = "" if rate is None else f", lr={spell_number(rate, 3)}"
    return f"loss={spell_number(loss, 3)}, grad={spell_number(norm, 3)}{lr}"


def spell_logs(logs: dict[str, Any], names: tuple[str, ...]) -> str:
    """'{'loss': 2.27, 'grad_norm': 1.55, 'learning_rate': 0.0002, 'epoch': 0.31}'."""
    values = {name: logs[name] for name in names if name in logs}
    return str({name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in values.items()})


def find_warnings(logs: dict[str, Any]) -> list[str]:
    """Return what is wrong with the numbers of one line."""
    loss, norm = float(logs["loss"]), float(logs.get("grad_norm", 0.0))
    warnings = []
    if not math.isfinite(norm):
        warnings.append(f"WARNING: the gradient norm is {spell_number(norm)}.")
    if not math.isfinite(loss):
        warnings.append(f"WARNING: the loss is {spell_number(loss)}.")
    if loss == 0.0:
        warnings.append("WARNING: the loss is 0: NaN, which the Trainer leaves out of its mean, or no label at all.")
    return warnings
