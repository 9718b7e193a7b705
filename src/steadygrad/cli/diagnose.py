"""`steadygrad diagnose`: an incident of a run, its saved batch and a function of yours -> who did it, in this process.

The function is imported from the current directory as `python` would. Nothing else of the user's is run, and nothing
in the run directory is executed: the batch is tensors and a tree of plain values.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FOUND

if TYPE_CHECKING:
    from torch import nn

    from steadygrad.diagnose.quarantine import SavedBatch
    from steadygrad.facts import Cause


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN")
@click.option(
    "--incident", type=int, default=None, metavar="N", help="Which line of incidents.jsonl.  [default: the last]"
)
@click.option(
    "--entry", required=True, metavar="MODULE:FUNCTION", help="The training step, or what builds it; see above."
)
@click.option(
    "--weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A .safetensors file with the model's weights, when they were not saved with the batch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@click.pass_context
def diagnose(
    context: click.Context, run: Path, incident: int | None, entry: str, weights: Path | None, as_json: bool
) -> None:
    """Replay the batch of an incident and name the op, the line, the module and the samples.

    The entry is the function that guard.step was given, or one without arguments that builds it and returns
    (function, model). Weights that were saved with the batch are put into the model. Exit code 0: the replayed step is
    healthy; 1: a cause was found; 2: it could not be replayed.

    \b
    Example:
      steadygrad diagnose runs/a --incident 3 --entry train:build
    """
    from steadygrad.diagnose.quarantine import load_batch

    saved = load_batch(find_batch(run, incident))
    fn, model = load_entry(entry)
    cause = replay(fn, model, saved, weights)
    console = Console()
    if as_json:
        from steadygrad.record.encode import to_json

        console.say(json.dumps(json.loads(to_json({"healthy": cause is None, "cause": cause})), indent=1))
    else:
        console.say("The replayed step is healthy." if cause is None else str(cause))
    context.exit(DONE if cause is None else FOUND)


def find_batch(run: Path, incident: int | None) -> Path:
    """The file of the batch that belongs to an incident."""
    from steadygrad.diagnose.quarantine import FOLDER
    from steadygrad.errors import UsageError

    record = run / "incidents.jsonl"
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    if incident is None:
        incident = len(lines) - 1
    if not 0 <= incident < len(lines):
        raise UsageError(f"{run} has {len(lines)} incidents, numbered from 0; there is no {incident}.")
    told: dict[str, Any] = json.loads(lines[incident])
    path = run / FOLDER / f"step-{int(told['step']):08d}.json"
    if not path.exists():
        raise UsageError(
            f"incident {incident} of {run} is of step {told['step']}, whose batch was not kept ({path} is not there). "
            "Batches are kept for steps that fail, up to a bound."
        )
    return path


def load_entry(entry: str) -> tuple[Callable[..., Any], nn.Module | None]:
    """The step function, and the model when the entry builds one."""
    from steadygrad.errors import UsageError

    module_name, _, name = entry.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"--entry must be MODULE:FUNCTION, got {entry!r}. For a function step in train.py: train:step."
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"--entry: {module_name} cannot be imported from {Path.cwd()}: {error}.") from error
    fn = getattr(module, name, None)
    if not callable(fn):
        raise UsageError(f"--entry: {module_name} has no function {name}.")
    if not _needs_arguments(fn):
        built = fn()
        return built if isinstance(built, tuple) else (built, None)
    return fn, None


def _needs_arguments(fn: Callable[..., Any]) -> bool:
    return any(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in inspect.signature(fn).parameters.values())


def replay(fn: Callable[..., Any], model: nn.Module | None, saved: SavedBatch, weights: Path | None) -> Cause | None:
    """Diagnose the saved batch with the weights that belong to it."""
    import dataclasses

    import torch

    from steadygrad.diagnose.capture import Capture
    from steadygrad.diagnose.entry import diagnose_capture
    from steadygrad.diagnose.subject import find_model

    model = model if model is not None else find_model(fn, saved.args, saved.kwargs)
    args = tuple(model if _is_hole(saved, place) else value for place, value in enumerate(saved.args))
    loaded = _load_weights(model, saved, weights)
    with contextlib.ExitStack() as stack:
        for device, dtype in saved.autocast.items():
            stack.enter_context(torch.autocast(device, getattr(torch, dtype)))
        capture = Capture.take(fn, args, saved.kwargs, model=model)
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
    """Put the weights of the failing step into the model; whether there were any."""
    state = saved.weights
    if weights is not None:
        from safetensors.torch import load_file

        state = load_file(weights)
    if model is None or not state:
        return False
    model.load_state_dict(state)
    return True
