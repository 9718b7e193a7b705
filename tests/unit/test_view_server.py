"""The live page's server: who gets access, what it never returns, that it only reads. All tests use real sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from view_runs import HOSTILE, make_step, open_directory, write_run

from steadygrad import UsageError

pytest.importorskip("uvicorn", reason="the live page needs uvicorn: pip install 'steadygrad[view]'")
pytest.importorskip("starlette", reason="the live page needs starlette: pip install 'steadygrad[view]'")

from steadygrad.record.encode import to_json
from steadygrad.view.serve import live
from steadygrad.view.serve.listen import PageServer, serve_in_thread
from steadygrad.view.serve.live import LiveRuns, resolve_inside
from steadygrad.view.serve.protect import is_loopback


def ask(address: str, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> Any:
    """Return a response and its body; the path is sent unchanged, including dots."""
    parts = urlsplit(address)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)) as connection:
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.text = answer.read().decode()  # type: ignore[attr-defined]
        return answer


def read_events(address: str, path: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    parts = urlsplit(address)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "first", 120)
    write_run(tmp_path / "runs" / "deep" / "second", 20)
    write_run(tmp_path / "secret", 10)
    return tmp_path / "runs"


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    with serve_in_thread(root) as address:
        yield address


# --- pages --------------------------------------------------------------------------------------------------------


def test_the_list_names_every_run(address: str) -> None:
    answer = ask(address, "/")
    assert answer.status == 200
    assert 'href="/runs/first"' in answer.text
    assert 'href="/runs/deep/second"' in answer.text
    assert "119" in answer.text


def test_a_run_has_its_page_and_its_assets(address: str) -> None:
    page = ask(address, "/runs/deep/second")
    assert page.status == 200
    assert "Healthy." in page.text
    for name, kind in (("chart.js", "text/javascript"), ("page.js", "text/javascript"), ("page.css", "text/css")):
        answer = ask(address, f"/assets/{name}")
        assert (answer.status, answer.getheader("content-type").partition(";")[0]) == (200, kind)


def test_new_steps_arrive_as_events_and_old_ones_are_not_repeated(root: Path, address: str) -> None:
    events = read_events(address, "/events/first")
    first = next(events)
    while first.get("chart:run0:last_step") != 119:
        first |= next(events)
    assert "Incidents" not in first["part:headline"]

    directory = open_directory(root / "first")
    for step in range(120, 200):
        directory.write_step(make_step(step))
    directory.close()

    later: dict[str, Any] = {}
    while later.get("chart:run0:last_step") != 199:
        later |= next(events)
    assert later["chart:run0:curves"]["loss"]["x"][-1] == 199
    assert "part:incidents" not in later
    assert "chart:run0:norms" not in later


def test_a_long_run_is_shown_before_it_is_fully_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = to_json(make_step(0)).removeprefix('{"step":0,')
    (tmp_path / "steps.jsonl").write_text("".join(f'{{"step":{step},{line}\n' for step in range(20_000)))
    monkeypatch.setattr(live, "SLICE_SECONDS", 1e-9)
    run = LiveRuns(tmp_path).find(".")
    assert run is not None
    first = run.look()
    assert 0 < float(first["progress"]) < 0.5
    assert 0 < int(first["chart:run0:last_step"]) < 10_000
    while float(run.look()["progress"]) < 1:
        pass
    assert run.look()["chart:run0:last_step"] == "19999"


def test_names_are_escaped_on_every_page(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "").replace("\u2028", "")
    write_run(tmp_path / name, 5, names=[HOSTILE])
    from urllib.parse import quote

    with serve_in_thread(tmp_path) as address:
        pages = [ask(address, "/").text, ask(address, f"/runs/{quote(name)}").text]
    for text in pages:
        assert "<img" not in text
        assert "&lt;img src=x" in text


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with serve_in_thread(tmp_path) as address:
        assert "No runs in this folder yet." in ask(address, "/").text


# --- what is never returned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../secret",
        "/runs/..%2fsecret",
        "/runs/%2e%2e/secret",
        "/runs/%252e%252e/secret",
        "/runs/first/../../../secret",
        "/runs//etc",
        "/runs/first%00",
        "/runs/nowhere",
        "/runs/link",
        "/events/../secret",
        "/events/..%2fsecret",
        "/events/link",
        "/assets/..%2fdocument.py",
        "/assets/document.py",
        "/runs/first/run.json",
    ],
)
def test_no_path_leaves_the_folder(root: Path, address: str, path: str) -> None:
    (root / "link").symlink_to(root.parent / "secret", target_is_directory=True)
    answer = ask(address, path)
    assert answer.status == 404
    assert "secret" not in answer.text


def test_a_run_cannot_be_requested_by_its_absolute_path(root: Path) -> None:
    runs = LiveRuns(root)
    assert runs.find(str(root.parent / "secret")) is None
    assert runs.find("first") is not None
    assert resolve_inside(root.resolve(), "first/../../secret") is None


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_write_requests_are_refused(address: str, method: str) -> None:
    for path in ("/", "/runs/first", "/events/first", "/assets/page.js"):
        assert ask(address, path, method=method).status == 405


def test_reading_changes_no_file(root: Path, address: str) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in root.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    ask(address, "/")
    ask(address, "/runs/first")
    next(read_events(address, "/events/first"))
    assert state() == before


def test_every_response_restricts_the_browser(address: str) -> None:
    for path in ("/", "/runs/first", "/runs/nowhere", "/assets/page.js"):
        answer = ask(address, path)
        assert "default-src 'none'" in answer.getheader("content-security-policy")
        assert "connect-src 'self'" in answer.getheader("content-security-policy")
        assert answer.getheader("x-content-type-options") == "nosniff"
        assert answer.getheader("x-frame-options") == "DENY"
        assert answer.getheader("access-control-allow-origin") is None


# --- who gets access ----------------------------------------------------------------------------------------------


def test_the_guards_of_one_training_are_together_in_the_list(tmp_path: Path) -> None:
    for age, name in enumerate(["gan", "between", "gan/guard-2"]):
        for file in write_run(tmp_path / name, 3).iterdir():
            if file.is_file():
                os.utime(file, (1e9 + age, 1e9 + age))
    assert [run.name for run in LiveRuns(tmp_path).list()] == ["gan", "gan/guard-2", "between"]


def test_by_default_it_listens_on_this_machine_only(root: Path) -> None:
    with serve_in_thread(root) as address:
        assert address.startswith("http://127.0.0.1:")
    server = PageServer(root, port=0)
    assert server.token is None
    server.close()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "10.0.0.1"])
def test_another_name_for_this_machine_is_refused(address: str, host: str) -> None:
    answer = ask(address, "/", headers={"Host": host})
    assert answer.status == 403
    assert "first" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8765", "[::1]:8765", "[::1]"])
def test_its_own_host_names_are_accepted(address: str, host: str) -> None:
    assert ask(address, "/", headers={"Host": host}).status == 200


def test_on_a_public_address_it_creates_and_requires_a_token(root: Path) -> None:
    server = PageServer(root, host="0.0.0.0", port=0)
    assert server.token is not None
    assert len(server.token) >= 24
    assert server.link.endswith(f"/?token={server.token}")
    server.close()


def test_without_the_token_every_request_is_refused(root: Path) -> None:
    with serve_in_thread(root, token="right") as address:
        for path in ("/", "/runs/first", "/events/first", "/assets/page.js", "/?token=wrong", "/?token="):
            answer = ask(address, path)
            assert answer.status == 401, path
            assert "first" not in answer.text
        assert ask(address, "/", headers={"Cookie": "steadygrad_token=wrong"}).status == 401
        assert ask(address, "/", headers={"Authorization": "Bearer "}).status == 401


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("//elsewhere.example/", "/elsewhere.example/"),
        ("/%5Celsewhere.example/", "/%5Celsewhere.example/"),  # a browser reads a backslash as a slash
        ("/runs/a%3Fb%23c", "/runs/a%3Fb%23c"),
        ("/runs/l%C3%B6ss", "/runs/l%C3%B6ss"),
    ],
)
def test_the_token_is_removed_from_the_address(root: Path, path: str, location: str) -> None:
    with serve_in_thread(root, token="right") as address:
        answer = ask(address, f"{path}?token=right")
    assert (answer.status, answer.headers["location"]) == (303, location)


def test_the_token_is_accepted_once_and_then_kept_in_a_cookie(root: Path) -> None:
    with serve_in_thread(root, token="right") as address:
        first = ask(address, "/runs/first?token=right&a=b")
        assert (first.status, first.getheader("location")) == (303, "/runs/first?a=b")
        cookie = first.getheader("set-cookie")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(address, "/runs/first", headers={"Cookie": cookie.partition(";")[0]}).status == 200
        assert ask(address, "/", headers={"Authorization": "Bearer right"}).status == 200


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example", False)]
)
def test_only_loopback_addresses_count_as_this_machine(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_a_used_port_and_a_missing_folder_are_reported(root: Path) -> None:
    with serve_in_thread(root) as address, pytest.raises(UsageError, match="Choose another --port"):
        PageServer(root, port=urlsplit(address).port or 0)
    with pytest.raises(UsageError, match="There is no folder"):
        PageServer(root / "nowhere")


def test_the_command_prints_its_address_and_exits_cleanly_on_ctrl_c(root: Path) -> None:
    command = [sys.executable, "-m", "steadygrad", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().removeprefix("Open ").strip()
        stream = read_events(address, "/events/first")
        assert "part:headline" in next(stream)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0
        assert process.stderr.read() == ""
        stream.close()


def test_a_page_that_does_not_read_is_disconnected_silently(tmp_path: Path) -> None:
    for number in range(2000):
        folder = tmp_path / f"{number:04}-{'x' * 150}"  # together larger than the socket buffers
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        (folder / "steps.jsonl").touch()
    command = [sys.executable, "-m", "steadygrad", "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().removeprefix("Open ").strip()
        host, port = str(urlsplit(address).hostname), urlsplit(address).port
        with socket.socket() as page:
            page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            page.connect((host, port))
            page.sendall(f"GET /events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            taken = 0
            while taken < 4096:  # the rest of the list is waiting
                taken += len(page.recv(64))
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=300)
        assert process.stderr.read() == ""
