"""Runs programs in separate processes, quickly: torch and Guard are imported once, and each program is a fork.

A program runs at the top level of its interpreter, so exit codes, tracebacks, signals and exit handlers are those of
`python -c`. Two things differ: some modules are already imported, and modules are not torn down after a normal end or a
`SystemExit`. A test about imports, about startup, or about destructors that run after `atexit` needs a real
interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

SERVER = """
import atexit, gc, json, os, socket, sys
class Ending:  # known where the interpreter does with it what is certain
    code = None
def end(ending=Ending, gc=gc, os=os, sys=sys):  # the first to be registered is the last to be called
    if type(ending.code) is int:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code & 255)  # to take a thousand modules apart takes longer than most programs
    gc.unfreeze()  # the interpreter ends as ever
atexit.register(end)
import torch, torch._dynamo.convert_frame, torch.utils.data
import steadygrad.cli, steadygrad.guard
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a collector that walks through what is shared would copy it into each program
calls = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, files, _, _ = socket.recv_fds(calls, 1 << 20, 3)
    if not request:
        os._exit(0)
    if os.fork() == 0:
        child = os.fork()
        if child == 0:
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(files[2], str(code).encode())
        os._exit(0)
    for file in files:
        os.close(file)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
calls.close()
os.dup2(files[0], 1)
os.dup2(files[1], 2)
for file in files:
    os.close(file)
request = json.loads(request)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = ["-c", *request["arguments"]]
program = request["code"]
for name in ("atexit", "end", "gc", "json", "socket", "calls", "request", "files", "file", "child", "name", "_"):
    globals().pop(name, None)
try:
    exec(compile(program, "<string>", "exec"))
    Ending.code = 0
except SystemExit as leaving:
    Ending.code = 0 if leaving.code is None else leaving.code
    raise
"""


class Forked:
    """A program that may still be running."""

    def __init__(self, command: list[str], out: IO[str], err: IO[str], answer: int) -> None:
        self._command, self._out, self._err, self._answer = command, out, err, answer

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end and return the result."""
        with os.fdopen(self._answer) as answer:
            ended = answer.read()
        outputs = []
        for file in (self._out, self._err):
            file.seek(0)
            outputs.append(file.read())
            file.close()
        assert ended, "the server of the programs is gone"
        return subprocess.CompletedProcess(self._command, int(ended), *outputs)


def run_forked(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code like `python -W ignore -c code arguments`."""
    return start_forked(code, *arguments).wait()


def start_forked(
    code: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Forked:
    """Start code in a folder with extra environment variables, without waiting."""
    out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
    request = {
        "code": code,
        "arguments": arguments,
        "folder": str(folder or Path.cwd()),
        "environment": {**os.environ, **(environment or {})},
    }
    answer, writing = os.pipe()
    socket.send_fds(_start_server(), [json.dumps(request).encode()], [out.fileno(), err.fileno(), writing])
    os.close(writing)
    return Forked(["-c", code, *arguments], out, err, answer)


@functools.cache
def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = str(Path(__file__).parents[1] / "src")
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    atexit.register(_end, ours, server)
    return ours


def _end(ours: socket.socket, server: subprocess.Popen[bytes]) -> None:
    ours.close()
    server.wait()
