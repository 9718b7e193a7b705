"""Running a script to its end in a process of its own, quickly: torch and the frameworks are imported once for all.

Python's fork server imports them; each run is a fork of it that sees a fresh interpreter otherwise.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

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
    """A run that has ended."""

    code: int
    out: str
    err: str


def run_plainly(folder: Path, script: str, *arguments: str) -> Done:
    """As `python script` would."""
    return _run(folder, None, [str(SCRIPTS / script), *arguments])


def run_guarded(folder: Path, script: str, *arguments: str, options: Sequence[str] = ()) -> Done:
    """As `steadygrad run` does; the run directory is `run` in the folder."""
    return _run(folder, ["run", "--run-dir", "run", *options], [str(SCRIPTS / script), *arguments])


def _run(folder: Path, command: list[str] | None, target: list[str]) -> Done:
    folder.mkdir(parents=True, exist_ok=True)
    process = _server().Process(target=_become, args=(folder, command, target))
    process.start()
    process.join()
    assert process.exitcode is not None
    return Done(process.exitcode, (folder / "out.txt").read_text(), (folder / "err.txt").read_text())


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _become(folder: Path, command: list[str] | None, target: list[str]) -> None:
    """In the new process: run, then leave as an interpreter does."""
    os.chdir(folder)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        if command is None:
            from steadygrad.adapters.scripts.launch import launch

            launch(target[0], target[1:], as_module=False)
            code = 0
        else:
            from steadygrad.cli import main

            code = main([*command, *target])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 99
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if os.environ.get("CPU"): print("CPU", __import__("time").process_time(), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
