"""What Python's fork server has imported: a file of tests names what its processes would each import anew."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from steadygrad.testing import ranks

RANKS = (*ranks.PRELOADED, "pytest")
"""What every file with ranks needs: files that name nothing else share one server."""
BEFORE = "PRELOADING_PYTHONPATH"

_running: tuple[tuple[str, ...], int | None] | None = None
"""What the server was given to import, and its process: somebody else may have started another since."""


def preload(*modules: str) -> None:
    """Fork the processes of `multiprocessing` from a server that has imported these; one with others is replaced."""
    global _running
    if _running == (modules, forkserver._forkserver._forkserver_pid):  # type: ignore[attr-defined]
        return
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload([*modules, Path(__file__).stem])
    paths = os.pathsep.join(filter(None, sys.path))  # it is told of them only by this
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, BEFORE: os.environ.get("PYTHONPATH", "")}):
        forkserver.ensure_running()
    _running = modules, forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _settle() -> None:
    """In the server, when all is imported: what is shared is collected no more, which would copy it into each fork."""
    paths = os.environ.pop(BEFORE)
    os.environ["PYTHONPATH"] = paths
    if not paths:
        del os.environ["PYTHONPATH"]
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries count at the end what the collector has left


if BEFORE in os.environ:
    _settle()
