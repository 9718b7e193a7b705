"""An address -> a server on it. Loopback by default; on any other address a token is generated."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.view.serve.app import make_app
from steadygrad.view.serve.protect import is_loopback

HOST, PORT = "127.0.0.1", 8765


class PageServer:
    """A server for a folder of runs, bound and not yet running."""

    def __init__(self, root: Path, *, host: str = HOST, port: int = PORT, token: str | None = None) -> None:
        if not root.is_dir():
            raise UsageError(f"There is no folder {root}. Name the folder that holds your run directories.")
        uvicorn = import_extra("view", "uvicorn", what="the live page", error=UsageError)
        # A record shows source lines, paths and pictures: any other machine needs a token to see it
        self.token = token if token is not None or is_loopback(host) else secrets.token_urlsafe(24)
        # Bound before the server runs, so that a taken port is an error of ours and port 0 has a number to print
        self._socket = _bind(host, port)
        # The lambda is called only while a request is served, when `_server` exists
        app = make_app(root, token=self.token, is_ending=lambda: bool(self._server.should_exit))
        quiet = {"log_level": "warning", "access_log": False, "server_header": False}
        config = uvicorn.Config(app, timeout_graceful_shutdown=3, lifespan="off", **quiet)
        self._server: Any = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self.link = self.address if self.token is None else f"{self.address}/?token={self.token}"
        """The URL to open, including the token if there is one."""

    def run(self) -> None:
        """Serve until interrupted; Ctrl-C is the normal way to stop it."""
        with contextlib.closing(self._socket), contextlib.suppress(KeyboardInterrupt), self._quiet_at_end():
            self._server.run(sockets=[self._socket])

    @contextlib.contextmanager
    def _quiet_at_end(self) -> Iterator[None]:
        """Inside, nothing is logged once the server is stopping: open pages are cut off without a word."""

        def is_serving(_record: logging.LogRecord) -> bool:
            return not self._server.should_exit

        # uvicorn's logger of all messages, not only of errors
        log = logging.getLogger("uvicorn.error")
        log.addFilter(is_serving)
        try:
            yield
        finally:
            log.removeFilter(is_serving)

    def close(self) -> None:
        """Release the address of a server that never ran."""
        self._socket.close()

    def stop(self) -> None:
        """Ask the server to stop, from another thread."""
        self._server.should_exit = True


@contextlib.contextmanager
def serve_in_thread(root: Path, **settings: Any) -> Iterator[str]:
    """Run a server on a free port for the duration of the block; yield its address."""
    server = PageServer(root, port=0, **settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(timeout=10)  # the thread is a daemon: a stuck page does not keep the process alive


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # an unknown host name has -2
        why = os.strerror(error.errno or 0) if known else (error.strerror or str(error)).partition(" (while")[0]
        what = "--port, or --port 0 for any" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise UsageError(f"Cannot listen on {host}:{port}: {why}. Choose another {what}.") from error
