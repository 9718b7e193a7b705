"""Runs a script to its end in a separate process, quickly: torch and the frameworks are imported only once.

Python's fork server imports them; each run is a fork of it, and otherwise sees a fresh interpreter.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from preloading import preload

PRELOADED = [
    "torch._dynamo.convert_frame",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "steadygrad.adapters.scripts.session",
]
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Done:
    """A finished run."""

    code: int
    out: str
    err: str


class Running:
    """A run that may still be going."""

    def __init__(self, folder: Path, process: Any) -> None:
        self._folder, self._process = folder, process

    def wait(self) -> Done:
        self._process.join()
        return Done(
            self._process.exitcode, (self._folder / "out.txt").read_text(), (self._folder / "err.txt").read_text()
        )


def run_plainly(folder: Path, script: str, *arguments: str) -> Done:
    """Run like `python script`."""
    return start(folder, None, script, arguments).wait()


def run_guarded(folder: Path, script: str, *arguments: str, options: Sequence[str] = ()) -> Done:
    """Run like `steadygrad run`; the run directory is `run` in the folder."""
    return start(folder, ["run", "--run-dir", "run", *options], script, arguments).wait()


def start(
    folder: Path,
    command: list[str] | None,
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Running:
    return _fork(folder, command, [str(SCRIPTS / script), *arguments], environment or {})


def start_command(folder: Path, command: list[str]) -> Running:
    """Start the command line itself."""
    return _fork(folder, command, [], {})


def _fork(folder: Path, command: list[str] | None, target: list[str], environment: Mapping[str, str]) -> Running:
    folder.mkdir(parents=True, exist_ok=True)
    process = _server().Process(target=_become, args=(folder, command, target, dict(environment)))
    process.start()
    return Running(folder, process)


def _server() -> ForkServerContext:
    preload(*PRELOADED)
    return multiprocessing.get_context("forkserver")


def _become(folder: Path, command: list[str] | None, target: list[str], environment: dict[str, str]) -> None:
    """Run in the new process, then exit like an interpreter."""
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        code = _run(command, target)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 99
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: list[str] | None, target: list[str]) -> int:
    if command is None:
        from steadygrad.adapters.scripts.launch import launch

        launch(target[0], target[1:], as_module=False)
        return 0
    from steadygrad.cli import main

    return main([*command, *target])
