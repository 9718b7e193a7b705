"""Imports modules once in Python's fork server: a test file names what each of its processes would import."""

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
"""Modules that every file with ranks needs: files without PRELOADED share one server."""
BEFORE = "PRELOADING_PYTHONPATH"

_running: tuple[tuple[str, ...], int | None] | None = None
"""The modules given to the server, and its process, since other code may have started another one."""


def preload(*modules: str) -> None:
    """Fork the processes of `multiprocessing` from a server that has imported these modules, and from no other."""
    global _running
    if _running == (modules, forkserver._forkserver._forkserver_pid):  # type: ignore[attr-defined]
        return
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload([*modules, Path(__file__).stem])
    paths = os.pathsep.join(filter(None, sys.path))  # the server has no other way to learn the paths
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, BEFORE: os.environ.get("PYTHONPATH", "")}):
        forkserver.ensure_running()
    _running = modules, forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _settle() -> None:
    """Freeze the server's objects after importing: collecting shared objects would copy them into each fork."""
    paths = os.environ.pop(BEFORE)
    os.environ["PYTHONPATH"] = paths
    if not paths:
        del os.environ["PYTHONPATH"]
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries count what the collector has left at exit


if BEFORE in os.environ:
    _settle()
