"""Processes that the script starts -> guarded too, by what they inherit: the environment.

`PYTHONPATH` gets a folder whose `sitecustomize` every new interpreter runs at its start, and a variable holds the
options. So launchers that start Python themselves (Lightning's, accelerate's, torchrun) pass the guard on. A process
that makes no optimizer notices nothing. One that is started with another environment is out of reach: whether it trains
cannot be known, so it is counted and reported. torch is not imported here.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from steadygrad.adapters.scripts.arrival import when_torch_arrives
from steadygrad.adapters.scripts.options import Options
from steadygrad.adapters.scripts.own_path import note_path, own_path
from steadygrad.config.switch import is_switched_off

VARIABLE = "STEADYGRAD_RUN"
"""Holds the options of `steadygrad run` as JSON, for processes that the script starts."""
FOLDER = str(Path(__file__).parent / "child")
_unguarded: list[str] = []
"""Commands of Python processes that the script has started without the variable."""


def guard_children(options: Options) -> None:
    """Put into the environment what processes need that are started from now on."""
    held = {
        "config": options.config.to_dict(),
        "observe": options.observe,
        "run_dir": None if options.run_dir is None else str(options.run_dir),
        "started_in": str(options.started_in),
    }
    os.environ[VARIABLE] = json.dumps(held)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    # In front: of several files called sitecustomize, Python runs only the first on the path.
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])
    _note_starts()


def describe_unguarded() -> str:
    """Return a sentence about Python processes that were started without the guard; empty if there was none."""
    if not _unguarded:
        return ""
    many = len(_unguarded) > 1
    return (
        f"{len(_unguarded)} Python process{'es were' if many else ' was'} started without the variable {VARIABLE} "
        f"({_unguarded[0]}{', ...' if many else ''}): training in {'them' if many else 'it'} is NOT guarded. "
        "Pass env={**os.environ, ...}"
    )


def _note_starts() -> None:
    """Look at each process that the script starts with `subprocess`, from now on."""
    _unguarded.clear()
    start = subprocess.Popen.__init__
    if hasattr(start, "__wrapped__"):  # an earlier run of this process has done it
        return
    signature = inspect.signature(start)

    @functools.wraps(start)
    def note_and_start(*args: Any, **kwargs: Any) -> None:
        # First: an error of the script's own call must be what it was, and no process was started then.
        start(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if VARIABLE not in (os.environ if given.get("env") is None else given["env"]):
            _note_start(given["args"])

    subprocess.Popen.__init__ = note_and_start  # type: ignore[method-assign]


def _note_start(command: Any) -> None:
    words = command.split() if isinstance(command, str) else [command] if isinstance(command, bytes) else list(command)
    text = [os.fsdecode(word) for word in words[:3]]
    if text and Path(text[0]).name.startswith("python"):
        _unguarded.append(" ".join([Path(text[0]).name, *text[1:]])[:60])


def arm() -> None:
    """Called in a new process: guard it from the moment that it imports torch."""
    text = os.environ.get(VARIABLE)
    if text is None or is_switched_off():
        return

    note_path(sys.path)  # Python adds the script's folder later

    def begin() -> None:
        with own_path():
            from steadygrad.adapters.scripts.session import Session

        Session(_read(text), is_child=True).begin()

    when_torch_arrives(begin)


def _read(text: str) -> Options:
    from steadygrad.config import GuardConfig

    held = json.loads(text)
    folder = held["run_dir"]
    return Options(
        config=GuardConfig.from_dict(held["config"]),
        observe=held["observe"],
        run_dir=None if folder is None else Path(folder),
        started_in=Path(held["started_in"]),
    )
