"""`steadygrad demo`: tells the story of the three trainings while they run, then compares them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from steadygrad.cli.console import Advance, Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.errors import UsageError
from steadygrad.facts import Incident
from steadygrad.recipes.demo import MAX_NORM, Comparison, DemoSettings, RunSummary, run_demo

NUM_LINES = 5
"""Progress lines of each training in plain text."""
TITLES = {
    "clean": "1. Clean: no faults, no guard.",
    "unguarded": "2. Unguarded: the same loop, with the faults.",
    "guarded": "3. Guarded: the same faults, under a Guard.",
}


def tell_demo(console: Console, *, run_dir: str | None, device: str | None, quick: bool) -> int:
    """Run the demo, tell it, and return the exit code."""
    device = _choose_device(device)
    settings = DemoSettings.quick(device) if quick else DemoSettings(device=device)
    folder = Path(run_dir) if run_dir is not None else _new_folder(Path("runs"))
    _tell_plan(console, settings)
    with _own_log(), Teller(console) as teller:
        comparison = run_demo(folder, settings, teller)
    _tell_end(console, comparison, folder)
    return DONE if comparison.unguarded_died and comparison.guarded_survived else FAILED


class Teller:
    """A Listener that says each thing once, as it happens."""

    def __init__(self, console: Console) -> None:
        self._console, self._bars = console, contextlib.ExitStack()
        self._explained: set[int] = set()
        self._advance: Advance | None = None
        self._num_steps = 1

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.close()

    def begin(self, name: str, num_steps: int) -> None:
        self._num_steps = num_steps
        self._console.say()
        self._console.say(TITLES[name], "bold")
        self._advance = self._bars.enter_context(self._console.track(f"  {name}", num_steps))

    def step(self, name: str, step: int, loss: float) -> None:  # noqa: ARG002
        assert self._advance is not None
        self._advance(step + 1, f"loss {loss:.4f}")
        if not self._console.is_terminal and step % max(1, self._num_steps // NUM_LINES) == 0:
            self._console.say(f"   step {step:3d}  loss {loss:.4f}")

    def lose(self, name: str, step: int, what: str) -> None:
        if what == "weights":
            self._console.say(f"   step {step:3d}  after this optimizer step a weight is NaN or Inf", "red")
        elif name != "guarded":  # under a guard it is an incident, told as such
            self._console.say(f"   step {step:3d}  the loss is NaN or Inf", "red")

    def incident(self, incident: Incident) -> None:
        self._console.say(f"   step {incident.step:3d}  {incident.finding.message}", "yellow")
        self._console.say(f"             {incident.outcome.message}", "green")
        cause = incident.cause
        is_clear = cause is not None and (
            cause.file is not None or cause.phase == "input"
        )  # a fault from a hook is not
        if cause is not None and is_clear and incident.step not in self._explained:
            self._explained.add(incident.step)
            for line in str(cause).splitlines()[1:]:
                self._console.say(f"           {line}", "dim")

    def end(self, summary: RunSummary) -> None:
        self._bars.close()
        took = f"{summary.num_steps} steps in {summary.seconds:.1f} s"
        self._console.say(f"   {took}, loss on unseen waves {summary.final_loss:.4f}", "dim")


def _tell_plan(console: Console, settings: DemoSettings) -> None:
    console.say(
        f"A small transformer learns to continue noisy waves: {settings.num_steps} steps on {settings.device}, three "
        f"times from the same weights, clipped at norm {MAX_NORM:g}."
    )
    console.say(
        f"Two faults: one gradient element is Inf at step {settings.gradient_fault_step}, one sample of the batch is "
        f"NaN at step {settings.batch_fault_step}."
    )


def _tell_end(console: Console, comparison: Comparison, folder: Path) -> None:
    runs = (comparison.clean, comparison.unguarded, comparison.guarded)
    rows = [
        (r.name, f"{r.final_loss:.4f}", "yes" if r.weights_are_finite else "no", f"{r.num_skipped} of {r.num_steps}")
        for r in runs
    ]
    console.say()
    header = ("run", "final loss", "finite weights", "skipped steps")
    console.show_table(header, rows, ["" if run.weights_are_finite else "red" for run in runs])
    console.say()
    console.say(f"(final loss: on waves that were in no batch; {comparison.initial_loss:.4f} before training)", "dim")
    for text, fine in _conclude(comparison):
        console.say(text, "green" if fine else "red")
    _tell_record(console, folder)


def _conclude(comparison: Comparison) -> list[tuple[str, bool]]:
    dead, guarded = comparison.unguarded, comparison.guarded
    if comparison.unguarded_died:
        first = f"Unguarded died: weights not finite since step {dead.first_bad_weight}, loss since step "
        lines = [(f"{first}{dead.first_bad_loss}.", True)]
    else:
        lines = [("Unguarded did not die, so this demo has shown nothing.", False)]
    if comparison.guarded_survived:
        share = f"{comparison.progress:.1%} of the clean run's progress"
        lines.append((f"Guarded survived: {guarded.num_skipped} bad steps skipped, {share}.", True))
    elif os.environ.get("STEADYGRAD", "").lower() == "off":
        lines.append(("Guarded was not guarded: STEADYGRAD=off is set in the environment. Unset it.", False))
    else:
        made = "" if math.isnan(comparison.progress) else f", {comparison.progress:.1%} of the clean run's progress"
        skipped = f"{guarded.num_skipped} steps skipped for {comparison.num_faults} faults"
        lines.append((f"Guarded did not survive: {skipped}{made}.", False))
    return lines


def _tell_record(console: Console, folder: Path) -> None:
    steps, incidents = (_count_lines(folder / name) for name in ("steps.jsonl", "incidents.jsonl"))
    console.say()
    if not steps:
        console.say(f"No record was written to {folder}.", "red")
        return
    console.say(f"The record of the guarded run ({steps} steps, {incidents} incidents) is in {folder}", "bold")
    console.say(f"Try: grep ERROR {folder / 'train.log'}")


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def _choose_device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot train on device {name!r}: {reason}. Use --device cpu, or leave it out.") from None
    return name


def _new_folder(parent: Path) -> Path:
    """runs/demo-20260131-101500, or with -2, -3, ... when somebody was there in the same second."""
    name = f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """The story tells the incidents; of the library's log only errors (a sink that broke) still show."""
    logger, handler = logging.getLogger("steadygrad"), logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
