"""A script or module and its arguments -> that program, run as `python` would run it, in this process.

`sys.argv`, `sys.path[0]`, `__main__`, the exit code and the traceback of an exception are those of a plain run. torch
is not imported here: a script may set environment variables that only count before that.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import itertools
import os
import runpy
import shutil
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from steadygrad.adapters.scripts.own_path import give_way, note_path
from steadygrad.errors import UsageError

WRAPPERS = ("steadygrad.adapters.scripts.", "steadygrad.measure.torch_calls", "steadygrad.measure.loads")
"""Modules whose functions stand in for those of torch."""


def launch(target: str, arguments: Sequence[str], *, as_module: bool) -> None:
    """Run the program. Raises SystemExit where a plain run would exit with a code."""
    if not as_module and not Path(target).exists():
        target = _find_command(target)
    # In place: other modules may hold the list.
    sys.argv[:] = [target, *arguments]
    if not sys.flags.safe_path:
        note_path(sys.path[1:])
        sys.path[0] = str(Path.cwd()) if as_module else str(Path(target).resolve().parent)
        give_way(Path(sys.path[0]))
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_file(target)
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, ImportError) and _find_own_part(error.__traceback__) is None:  # runpy found nothing to run
            what = f"the module {target}" if as_module else target
            raise UsageError(f"{what} cannot be run: {error}. Check the name, or give the path of a script.") from None
        error = error.with_traceback(_drop_wrappers(_find_own_part(error.__traceback__)))
        # Printed first, as a plain run does: the explanation may take long, or fail.
        sys.excepthook(type(error), error, error.__traceback__)
        _explain(error)
        if isinstance(error, KeyboardInterrupt):
            _die_of_interrupt()
        raise SystemExit(1) from None


def _explain(error: BaseException) -> None:
    """Have the guard look for a bad number behind an error of the script."""
    session = sys.modules.get("steadygrad.adapters.scripts.session")  # there once the script has imported torch
    if session is not None:
        session.explain_in_all(error)


def _find_command(name: str) -> str:
    """Return the file of a command that is written in Python, such as accelerate or torchrun."""
    # An environment that is not activated has its commands beside its interpreter.
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is not None:
        with open(found, "rb") as file:
            first, second = file.readline(200), file.readline(200)
        # A path of the interpreter that is long or has a space is named in the second line, for a shell.
        if first.startswith(b"#!") and (b"python" in first or second.startswith(b"'''exec'")):
            return found
    raise UsageError(
        f"there is no script {name} in {Path.cwd()}, and no command of that name written in Python. Give the path of a "
        "script, or -m and the name of a module."
    )


def _die_of_interrupt() -> None:
    """Die as the interpreter does, by the signal itself, so that a shell sees the reason."""
    # A process that a signal ends runs no exit handlers, and the records are closed by one.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _run_file(target: str) -> None:
    path = Path(target)
    if path.is_dir() or path.suffix not in ("", ".py", ".pyw"):
        runpy.run_path(str(path), run_name="__main__")  # a folder or zip file with a __main__.py, or bytecode
        return
    place = os.path.join(Path.cwd(), target)  # not normalised, as `python ./train.py` has it
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=place,
        __cached__=None,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", place),
    )
    sys.modules["__main__"] = main  # not restored: threads, exit handlers and workers look there after the last line
    # dont_inherit: this file's own `from __future__ import annotations` would change the script's annotations.
    exec(compile(path.read_bytes(), place, "exec", dont_inherit=True), main.__dict__)


def _drop_wrappers(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without the functions by which some of torch's were replaced."""
    kept: list[types.TracebackType] = []
    while trace is not None:
        # The last one stays: an error that began in our own code must say so.
        if trace.tb_next is None or not str(trace.tb_frame.f_globals.get("__name__")).startswith(WRAPPERS):
            kept.append(trace)
        trace = trace.tb_next
    for one, following in itertools.pairwise([*kept, None]):
        assert one is not None
        one.tb_next = following
    return kept[0] if kept else None


def _find_own_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the program's first frame on."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
