"""`steadygrad demo`: narrates the two trainings while they run, compares them, and writes their report."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from steadygrad.cli.console import Advance, Console
from steadygrad.cli.exit_codes import DONE, FAILED
from steadygrad.cli.recipe_folder import name_folder
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import SteadygradError, UsageError
from steadygrad.facts import Action, Incident
from steadygrad.words import spell_number
from steadygrad_recipes.demo import Comparison, DemoSettings, Fault, RunSummary, run_demo
from steadygrad_recipes.demo.own_file import NAME as MODEL
from steadygrad_recipes.demo.story import GUARDED, MAX_NORM, PROMPT, UNGUARDED
from steadygrad_recipes.demo.words import CURVE_WIDTH, LEFT, WIDTH, describe_cause, describe_step, draw_losses, shorten

NUM_LINES = 6
"""Number of progress lines for each training."""
TITLES = {
    UNGUARDED: "1. Unguarded: the usual loop of forward, backward, clip, step.",
    GUARDED: "2. Guarded: the same loop, with guard.step(model, ...) instead of backward, clip and step.",
}
REPORT = "report.html"


def narrate_demo(console: Console, *, run_dir: str | None, device: str | None, quick: bool) -> int:
    """Run the demo, narrate it, and return the exit code."""
    device = _choose_device(device)
    settings = DemoSettings.quick(device) if quick else DemoSettings(device=device)
    folder = Path(run_dir) if run_dir is not None else name_folder(Path("runs"), "demo")
    _print_plan(console, settings)
    with _own_log(), Narrator(console) as narrator:
        comparison = run_demo(folder, settings, narrator)
    _print_end(console, comparison)
    _print_report(console, folder)
    _print_where_next(console, folder, comparison)
    return DONE if comparison.unguarded_died and comparison.guarded_survived else FAILED


class Narrator:
    """A Listener that prints each event once, as it happens."""

    def __init__(self, console: Console) -> None:
        self._console, self._bars = console, contextlib.ExitStack()
        self._width = min(WIDTH, console.width or WIDTH)
        self._told: set[int] = set()
        self._advance: Advance | None = None
        self._num_steps = 1
        self._last_loss = math.nan
        self._faulty, self._is_lost = -1, False

    def __enter__(self) -> Narrator:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.close()

    def begin(self, name: str, num_steps: int) -> None:
        self._num_steps, self._is_lost = num_steps, False
        self._console.say()
        self._console.say(TITLES[name], "bold", hang=3)
        self._advance = self._bars.enter_context(self._console.track(f"   {name}", num_steps))

    def fault(self, name: str, fault: Fault) -> None:  # noqa: ARG002
        self._faulty = fault.step
        self._say(f"fault: {fault.what}", "bold magenta", step=fault.step)

    def step(self, name: str, step: int, loss: float) -> None:  # noqa: ARG002
        assert self._advance is not None
        self._advance(step + 1, f"loss {spell_number(loss)}")
        self._last_loss = loss
        if step % max(1, self._num_steps // NUM_LINES) == 0 and step != self._faulty and not self._is_lost:
            self._say(f"loss {spell_number(loss, 3)}", "dim", step=step)

    def lose(self, name: str, step: int, what: str) -> None:
        if what == "weights":
            self._is_lost = True
            loss = f"the loss was {spell_number(self._last_loss, 3)}, still finite"
            self._say(f"{loss}; this optimizer step made weights NaN", "bold red", step=step)
        elif name == UNGUARDED:  # with a guard this is an incident, and printed as one
            self._say("the loss is NaN, and stays NaN", "bold red", step=step)

    def incident(self, incident: Incident) -> None:
        finding, outcome = incident.finding, incident.outcome
        if outcome.action is Action.SKIP and incident.step in self._told:  # loss, gradient and input of one bad step
            self._say(shorten(f"also: {finding.kind}: {finding.message}", self._width), "dim")
            return
        self._say(f"{finding.kind}: {finding.message}", "yellow", step=finding.step)
        if outcome.action not in (Action.NONE, Action.CLIP):
            self._say(f"done:  {outcome.message}", "bold green")
        if incident.cause is not None:
            for line, style in describe_cause(incident.cause, self._width):
                self._console.say(line, style, hang=len(LEFT) + 7)
        if outcome.action is Action.SKIP:
            self._told.add(incident.step)

    def end(self, summary: RunSummary) -> None:
        self._bars.close()
        took = f"   {len(summary.losses)} steps in {summary.seconds:.0f} s"
        if summary.first_bad_weight is not None:
            took += f", the last {len(summary.losses) - summary.first_bad_weight - 1} of them wasted"
        self._console.say(f"{took}.")

    def _say(self, text: str, style: str, *, step: int | None = None) -> None:
        """Print a line next to the left column, which holds the step or nothing."""
        self._console.say((LEFT if step is None else describe_step(step)) + text, style, hang=len(LEFT))


def _print_plan(console: Console, settings: DemoSettings) -> None:
    console.say("A small transformer learns to write. Twice: same weights, same text, same three faults.", "bold")
    console.say(
        f"{settings.num_layers} {'block' if settings.num_layers == 1 else 'blocks'} of width {settings.width}, AdamW, "
        f"gradients clipped at norm {MAX_NORM:g}, {settings.num_steps} steps on {settings.device}. Nothing is "
        "downloaded: the text is generated."
    )
    console.say()
    faults = settings.faults.list()
    width = max(len(fault.what) for fault in faults)
    for fault in faults:
        line = f"{describe_step(fault.step)}{fault.what:<{width}}   ({fault.origin})"
        if console.width is not None and len(line) > console.width:
            line = f"{describe_step(fault.step)}{fault.what}\n{LEFT}({fault.origin})"
        console.say(line, "magenta", hang=len(LEFT))


def _print_end(console: Console, comparison: Comparison) -> None:
    runs = (comparison.unguarded, comparison.guarded)
    width = min(CURVE_WIDTH, (console.width or WIDTH) - len(LEFT))
    console.say()
    console.say("The loss from the first step to the last; × is NaN", "bold")
    for run, rows in zip(runs, draw_losses([run.losses for run in runs], width)):
        for title, row in zip(["", run.name], rows):
            console.say(f"   {title:<9}  {row}", "green" if run.weights_are_finite else "red")
        console.say()
    console.say(f'The loss on unseen text, and how each model continues "{PROMPT.strip()}"', "bold")
    for run in runs:
        said = run.written or "nothing: all its probabilities are NaN"
        loss = spell_number(run.final_loss, 3)
        console.say(f"   {run.name:<9}  {loss:<6}  {said}", "green" if run.written else "red", hang=22)
    console.say()
    for text, fine in _conclude(comparison):
        console.say(text, "green" if fine else "red")


def _conclude(comparison: Comparison) -> Iterator[tuple[str, bool]]:
    dead, guarded = comparison.unguarded, comparison.guarded
    if comparison.unguarded_died:
        yield f"Unguarded died at step {dead.first_bad_weight}: one NaN gradient reached the weights.", True
    else:
        yield "Unguarded did not die, so the demo shows nothing.", False
    done = f"{_count(guarded.num_skipped, 'step')} skipped, {_count(guarded.num_rollbacks, 'rollback')}"
    if guarded.num_left_out:
        done += f" (which left out {_count(guarded.num_left_out, 'batch', 'batches')})"
    if comparison.guarded_survived:
        yield f"Guarded survived: {done}, and it kept learning after each fault.", True
    elif is_switched_off():
        yield "The guarded run was not guarded: STEADYGRAD=off is set in the environment. Unset it.", False
    else:
        loss = f"from {spell_number(comparison.loss_before_faults)} to {spell_number(guarded.final_loss)}"
        yield f"Guarded did not survive: {done}, loss {loss}.", False


def _print_report(console: Console, folder: Path) -> None:
    runs = [folder / UNGUARDED, folder / GUARDED]
    written = [run for run in runs if (run / "run.json").is_file()]
    console.say()
    if len(written) < len(runs):
        console.say(f"No record of the guarded run was written to {folder}.", "red")
        return
    try:
        from steadygrad.view.render.report import write_report

        write_report(runs, folder / REPORT)
    except SteadygradError as error:  # the charting library is an optional extra: the demo is complete without it
        console.say(f"No report: {error}", "yellow")
    else:
        console.say(f"Report      {folder / REPORT}  (open it in a browser; it needs no network)", "bold", 12)


def _print_where_next(console: Console, folder: Path, comparison: Comparison) -> None:
    lines = [one.cause.line for one in comparison.incidents if one.cause is not None and one.cause.phase == "backward"]
    if lines:
        console.say(f"The line    {folder / MODEL}:{lines[0]}  (its 1e-6 belongs inside the root)", hang=12)
    if (folder / GUARDED / "run.json").is_file():
        console.say(f"Try         steadygrad watch {folder / GUARDED}")
        console.say(f"            grep ERROR {folder / GUARDED / 'train.log'}")


def _count(number: int, noun: str, many: str = "") -> str:
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def _choose_device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot train on device {name!r}: {reason}. Use --device cpu, or leave it out.") from None
    return name


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """Silence the library's log except for errors (a sink that broke): the demo prints the incidents itself."""
    logger, handler = logging.getLogger("steadygrad"), logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
