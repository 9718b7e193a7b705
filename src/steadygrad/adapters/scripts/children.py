"""Processes that the script starts -> guarded too, by what they inherit: the environment.

`PYTHONPATH` gets a folder whose `sitecustomize` every new interpreter runs at its start, and a variable holds the
options. So launchers that start Python themselves (Lightning's, accelerate's, torchrun) pass the guard on. A process
that makes no optimizer notices nothing. torch is not imported here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from steadygrad.adapters.scripts.arrival import when_torch_arrives
from steadygrad.adapters.scripts.options import Options
from steadygrad.config.switch import is_switched_off

VARIABLE = "STEADYGRAD_RUN"
"""Holds the options of `steadygrad run` as JSON, for processes that the script starts."""
FOLDER = str(Path(__file__).parent / "child")


def guard_children(options: Options) -> None:
    """Put into the environment what processes need that are started from now on."""
    held = {
        "config": options.config.to_dict(),
        "observe": options.observe,
        "run_dir": None if options.run_dir is None else str(options.run_dir),
    }
    os.environ[VARIABLE] = json.dumps(held)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])


def arm() -> None:
    """Called in a new process: guard it from the moment that it imports torch."""
    text = os.environ.get(VARIABLE)
    if text is None or is_switched_off():
        return

    def begin() -> None:
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
    )
