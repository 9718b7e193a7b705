"""Every request -> accepted or refused; every response -> with headers that restrict what the browser may do.

On the loopback address no token is needed, but the Host header must name that address: a foreign page that points its
own name at 127.0.0.1 (DNS rebinding) is refused. Bound anywhere else, nothing is answered without the token.
"""

from __future__ import annotations

import http.cookies
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "steadygrad_token"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; font-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Gate:
    """Wraps an application: decides which requests pass, and adds headers to every response."""

    def __init__(self, app: App, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        # Before any answer, so that refusals carry the headers too
        guarded = _add_headers(send)
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(guarded, 405, "This page is read-only: it accepts only GET.", {"allow": "GET, HEAD"})
        elif self._token is not None:
            await self._let_in_by_token(scope, receive, guarded)
        # A missing Host is refused as well: every browser sends one
        elif not _is_own_name(_read_header(scope, b"host")):
            await _answer(guarded, 403, "Refused: the Host header names another machine. Open http://127.0.0.1.")
        else:
            await self._app(scope, receive, guarded)

    async def _let_in_by_token(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._token is not None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._is_right(query.pop("token", "")):  # keep it out of the address bar, the history and screenshots
            # Not Secure: the server speaks plain HTTP. Strict: another site's link or form does not carry the token
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            # One slash: two would name another host. Quoted, because the path has been decoded
            target = quote("/" + scope["path"].lstrip("/")) + (f"?{urlencode(query)}" if query else "")
            await _answer(send, 303, "", {"location": target, "set-cookie": cookie})
        elif self._is_right(_read_cookie(scope)) or self._is_right(_read_bearer(scope)):
            await self._app(scope, receive, send)
        else:
            await _answer(send, 401, "Refused: open the address with ?token=... that steadygrad view has printed.")

    def _is_right(self, given: str) -> bool:
        # In constant time: `==` would show by its timing how many characters are right
        return self._token is not None and secrets.compare_digest(given.encode(), self._token.encode())


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_own_name(host: str) -> bool:
    # [::1] has colons and no port
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name)


def _read_header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _read_cookie(scope: Scope) -> str:
    try:
        cookies = http.cookies.SimpleCookie(_read_header(scope, b"cookie"))
    except http.cookies.CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


def _read_bearer(scope: Scope) -> str:
    scheme, _, token = _read_header(scope, b"authorization").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _add_headers(send: Send) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {key.decode().lower() for key, _ in message.get("headers", [])}
            more = [(key.encode(), value.encode()) for key, value in HEADERS.items() if key not in own]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return guarded


async def _answer(send: Send, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    lines = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(text.encode())), **(headers or {})}
    encoded = [(key.encode(), value.encode("latin-1")) for key, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
