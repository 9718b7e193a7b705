"""`steadygrad diagnose`: an incident of a run, its saved batch and your function -> the cause, in this process.

The function is imported from the current directory as `python` would; what it prints goes to standard error. Nothing
else of the user's is run, and nothing in the run directory is executed: the batch is tensors and a tree of plain
values. Any failure is an error that says what to change, never a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED, FOUND

if TYPE_CHECKING:
    from torch import Tensor, nn

    from steadygrad.diagnose.quarantine import SavedBatch
    from steadygrad.facts import Cause


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN")
@click.option(
    "--incident",
    type=int,
    default=None,
    metavar="N",
    help="Which line of incidents.jsonl, from 0.  [default: the last one whose batch was saved]",
)
@click.option("--entry", metavar="MODULE:FUNCTION", help="The training step, or a function that builds it.  [required]")
@click.option(
    "--weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A .safetensors file with the model's weights, if they were not saved with the batch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.pass_context
def diagnose(
    context: click.Context, run: Path, incident: int | None, entry: str | None, weights: Path | None, as_json: bool
) -> None:
    """Replay the batch of an incident and name the op, the line, the module and the samples.

    The entry is the function passed to guard.step, or a function without arguments that builds it and returns
    (function, model). Its module is imported: a training loop in it belongs under `if __name__ == "__main__":`. Weights
    saved with the batch are loaded into the model. Exit code 0: the replayed step is healthy; 1: a cause was found; 2:
    it could not be replayed.

    \b
    Example:
      steadygrad diagnose runs/a --incident 3 --entry train:build
    """
    from steadygrad.diagnose.quarantine import load_batch

    if entry is None:
        raise click.UsageError(
            "--entry is missing: name the function that returns the loss. For a function step in train.py: "
            "--entry train:step."
        )
    saved = load_batch(find_batch(run, incident))
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result
        fn, model = load_entry(entry)
        cause = replay(fn, model, saved, weights)
    console = Console()
    if as_json:
        from steadygrad.record.encode import to_json

        console.say(json.dumps(json.loads(to_json({"healthy": cause is None, "cause": cause})), indent=1))
    else:
        console.say("The replayed step is healthy." if cause is None else str(cause))
    context.exit(DONE if cause is None else FAILED if cause.phase == "unknown" else FOUND)


def find_batch(run: Path, incident: int | None) -> Path:
    """Return the batch file of an incident; of the last incident that has one if none is named."""
    from steadygrad.errors import UsageError

    record = run / "incidents.jsonl"
    lines = record.read_bytes().splitlines() if record.is_file() else []
    if not lines:
        raise UsageError(f"{run} has no incident, so there is nothing to replay. Name a run directory that has one.")
    if incident is not None:
        return _find_named(record, lines, incident)
    steps = [step for line in reversed(lines) if (step := _read_step(line)) is not None]
    kept = [batch for step in steps if (batch := _name_batch(run, step)).exists()]
    if not kept:
        raise UsageError(
            f"of the incidents in {record} ({len(lines)}) none has a batch in {run}/batches. Batches are kept for "
            "steps that fail, up to a bound (DiagnoseConfig). Replay yours in Python: steadygrad.diagnose(step, batch)."
        )
    return kept[0]


def _find_named(record: Path, lines: list[bytes], incident: int) -> Path:
    from steadygrad.errors import UsageError

    if not 0 <= incident < len(lines):
        raise UsageError(f"there is no incident {incident} in {record}. Use --incident 0 to {len(lines) - 1}.")
    step = _read_step(lines[incident])
    if step is None:
        raise UsageError(f"line {incident} of {record} is truncated or corrupt. Use another --incident.")
    path = _name_batch(record.parent, step)
    if not path.exists():
        raise UsageError(
            f"incident {incident} in {record} is of step {step}, whose batch was not kept ({path} is not there). "
            "Batches are kept for steps that fail, up to a bound. Use another --incident."
        )
    return path


def _read_step(line: bytes) -> int | None:
    """Return the step of an incident; None if the line is not one."""
    try:
        line_value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = line_value.get("step") if isinstance(line_value, dict) else None
    return step if type(step) is int and step >= 0 else None


def _name_batch(run: Path, step: int) -> Path:
    from steadygrad.diagnose.quarantine import FOLDER

    return run / FOLDER / f"step-{step:08d}.json"


def load_entry(entry: str) -> tuple[Callable[..., Any], nn.Module | None]:
    """Return the step function, and the model if the entry builds one."""
    from steadygrad.errors import UsageError

    module_name, _, name = entry.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"--entry must be MODULE:FUNCTION, got {entry!r}. For a function step in train.py: train:step."
        )
    # A console script has its own folder there, not the current one
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _naming_errors(f"{module_name} cannot be imported from {Path.cwd()}"):
        module = importlib.import_module(module_name)
    fn = getattr(module, name, None)
    if not callable(fn):
        found = "" if fn is None else f", it is of type {type(fn).__name__}"
        raise UsageError(
            f"--entry: {module_name}:{name} is not a function{found}. Name one that {module_name} defines."
        )
    if _needs_arguments(fn):
        return fn, None
    with _naming_errors(f"{entry}() cannot be called"):
        built = fn()
    return built if isinstance(built, tuple) else (built, None)


@contextlib.contextmanager
def _naming_errors(what: str) -> Iterator[None]:
    """Turn the user code's exception into an error with its location; SystemExit too, which would set the code."""
    from steadygrad.errors import UsageError

    try:
        yield
    # Broad: whatever user code raises is an error about --entry, never our defect
    except (Exception, SystemExit) as error:
        ours = __file__, importlib.__file__
        own = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own[-1].filename not in ours else ""
        line_value = f"{type(error).__name__}: {error}"
        raise UsageError(f"--entry: {what}: {line_value}{place}. Fix it, or name another function.") from error


def _needs_arguments(fn: Callable[..., Any]) -> bool:
    return any(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in inspect.signature(fn).parameters.values())


def replay(fn: Callable[..., Any], model: nn.Module | None, saved: SavedBatch, weights: Path | None) -> Cause | None:
    """Diagnose the saved batch with the weights that belong to it."""
    import dataclasses

    import torch

    from steadygrad.diagnose.capture import Capture
    from steadygrad.diagnose.entry import diagnose_capture
    from steadygrad.diagnose.step_arguments import find_model

    model = model if model is not None else find_model(fn, saved.args, saved.kwargs)
    args = tuple(model if _is_hole(saved, place) else value for place, value in enumerate(saved.args))
    loaded = _load_weights(model, saved, weights)
    with contextlib.ExitStack() as stack:
        for device, dtype in saved.autocast.items():
            stack.enter_context(torch.autocast(device, getattr(torch, dtype)))
        capture = Capture.take(fn, args, saved.kwargs, model=model)  # notes the autocasts that are open here
    # The random state of the failing step, not of this process: dropout must draw the same mask
    capture = dataclasses.replace(capture, random=saved.random or capture.random)
    cause = diagnose_capture(capture, scale=saved.scale)
    if cause is None:
        return None
    note = cause.note if loaded else f"The weights are not those of the failing step. {cause.note}"
    return dataclasses.replace(cause, step=saved.step, note=note.strip())


def _is_hole(saved: SavedBatch, place: int) -> bool:
    """Whether the argument was the model itself, which is not stored."""
    return place in saved.modules


def _load_weights(model: nn.Module | None, saved: SavedBatch, weights: Path | None) -> bool:
    """Load the weights of the failing step into the model; return whether there were any."""
    state = saved.weights if weights is None else _read_weights(weights)
    if model is None or not state:
        return False
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        from steadygrad.errors import UsageError

        whose = "saved with the batch" if weights is None else f"in {weights}"
        names = " ".join(str(error).split())
        raise UsageError(
            f"the weights {whose} do not fit the {type(model).__name__} of --entry: {names} Name the function that "
            "uses the model of this run, or what builds it."
        ) from error
    return True


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from steadygrad.errors import UsageError

    try:
        return load_file(path)  # safetensors only: a pickle would run code
    except SafetensorError as error:
        raise UsageError(
            f"--weights {path} is not a safetensors file: {error}. Give one that holds the weights."
        ) from error
