"""A browser page that records its errors and requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Watched:
    """A page that records every error and every requested address."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self._folder = page, folder
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._listeners = {
            "console": lambda message: self.complaints.append(f"{message.type}: {message.text}"),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def open(self, address: str) -> Any:
        """Open the address and wait for the first chart."""
        self.page.goto(address)
        self.page.wait_for_selector("figure.chart:not([hidden]) .plot > svg")
        return self.page

    def leave(self) -> None:
        """Leave the page and everything of it: listeners, cookies, storage."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        if self.page.url != "about:blank":
            self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.context.clear_cookies()
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def keep_picture(self, name: str, *, full_page: bool = False) -> Path:
        path = self._folder / f"{name}.png"
        self.page.screenshot(path=path, full_page=full_page)
        return path

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression holds. The page's policy forbids Playwright's own polling."""
        deadline = time.monotonic() + 120
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            self.page.wait_for_timeout(50)
